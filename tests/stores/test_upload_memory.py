import hashlib
import json
import subprocess
import sys
from typing import Any

import pytest

from checkpoints.store import open_store
from tests.support.soaking import soaked
from tests.support.tools import ROOT

MOST_BYTES = 64 << 20
SIZE_MB = 256


@pytest.mark.parametrize(
    ("kind", "chunks"),
    [("s3", 1), ("s3", 37), ("azure", 1), *soaked(("gcs", 1))],
)
def test_an_upload_of_any_size_adds_little_memory(
    request: pytest.FixtureRequest, kind: str, chunks: int
) -> None:
    server: Any = request.getfixturevalue(f"{kind}_server")
    url = server.url()
    options = server.options if kind == "s3" else server.options()
    arguments = [url, json.dumps(options), str(SIZE_MB), str(chunks)]
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.upload_worker", *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        check=True,
    )
    told: Any = json.loads(done.stdout)
    print(
        f"{kind}: {SIZE_MB} MB, {chunks} chunks: +{told['added'] / 2**20:.0f} MiB, {told['seconds']:.1f} s"
    )
    assert told["added"] < MOST_BYTES
    store = open_store(url, options)
    found = hashlib.sha256()
    for at in range(0, SIZE_MB, 32):
        found.update(store.get_range("large", at << 20, 32 << 20))
    assert found.hexdigest() == told["sha256"]
    store.delete("large")
    store.close()
