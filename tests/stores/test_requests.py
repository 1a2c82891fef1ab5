"""What a checkpoint costs where requests are paid for."""

from collections import Counter

from checkpoints.manager import CheckpointManager
from checkpoints.store import open_store
from tests.support.fault_proxy import FaultProxy
from tests.support.object_stores import S3Server, s3_options
from tests.support.saving_worker import save
from tests.support.states import name


def test_a_checkpoint_takes_as_many_requests_as_the_docs_say(s3_server: S3Server) -> None:
    with FaultProxy(s3_server.port) as proxy:
        store = open_store(s3_server.url(), s3_options(proxy.endpoint))
        manager = CheckpointManager(store, keep=2)
        for step in range(1, 6):
            proxy.requests.clear()
            save(manager, step)
        asked = [
            (method, target.partition("?")[0].rpartition("/")[2])
            for method, target in proxy.requests
        ]
        files = [file.rpartition("/")[2] for file in store.list(name(5).folder)]
        commit = asked[: asked.index(("PUT", "manifest.json")) + 1]
        # The name is free; each file is written and its size asked for; the manifest is created.
        data = [file for file in files if file != "manifest.json"]
        wanted = [*(("PUT", file) for file in data), *(("HEAD", file) for file in data)]
        assert sorted(commit) == sorted([*wanted, *((m, "manifest.json") for m in ("GET", "PUT"))])
        # Retention: listings, what goes in bulk, and a new one read back before the last good one goes.
        kinds = Counter(method for method, _ in asked[len(commit) :])
        assert kinds["PUT"] == 0
        assert kinds["DELETE"] + kinds["POST"] <= 2
        assert kinds["GET"] + kinds["HEAD"] <= 12 + 5 * len(data)
        manager.close()
        store.close()
