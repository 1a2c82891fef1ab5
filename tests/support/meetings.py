"""Outside services through which torchrun's own back ends meet: etcd, and a c10d store in a process of its own."""

import importlib.util
import re
import sys
from pathlib import Path
from typing import ClassVar

from tests.support.distribution import ROOT
from tests.support.ports import LOOPBACK, free_port
from tests.support.servers import Server
from tests.support.tools import missing, need_tool


class EtcdServer(Server):
    """An etcd of one node that speaks version 2 of its protocol."""

    backend = "etcd-v2"
    conf: ClassVar[dict[str, str]] = {}

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        if importlib.util.find_spec("etcd") is None:
            missing("needs the package 'python-etcd': pip install python-etcd")
        self._program = need_tool("etcd")
        self._peers = f"http://{LOOPBACK}:{free_port()}"

    def command(self) -> list[str]:
        """As the docs start it, on ports of its own."""
        return [
            self._program, "--enable-v2", "--data-dir", str(self.folder / "data"),
            "--listen-client-urls", self.endpoint, "--advertise-client-urls", self.endpoint,
            "--listen-peer-urls", self._peers, "--initial-advertise-peer-urls", self._peers,
            "--initial-cluster", f"default={self._peers}",
        ]  # fmt: skip


class StoreServer(Server):
    """The store of docs/rendezvous.md, word for word, on a port of its own."""

    backend = "c10d"
    conf: ClassVar[dict[str, str]] = {"is_host": "false"}

    def command(self) -> list[str]:
        """The program that the docs give."""
        page = (ROOT / "docs" / "rendezvous.md").read_text(encoding="utf-8")
        found = re.search(r'python -c "(from torch.distributed import TCPStore.*?)"\n', page)
        assert found, "docs/rendezvous.md does not give the store's command any more"
        return [sys.executable, "-c", found[1].replace("29400", str(self.port))]

    def answers(self) -> bool:
        """Whether somebody listens; a stranger's request would say nothing more."""
        from tests.support.cluster import is_served

        return is_served(self.port)


def options(server: EtcdServer | StoreServer, *, rdzv_id: str | None) -> list[str]:
    """A node's rendezvous options."""
    # A busy machine keeps an agent from the processor for longer than the seconds that we set.
    conf = {"last_call_timeout": "1", "keep_alive_interval": "1", "keep_alive_max_attempt": "8"}
    words = ",".join(f"{key}={value}" for key, value in (conf | server.conf).items())
    given = [
        "--nnodes=1:2",
        f"--rdzv_backend={server.backend}",
        f"--rdzv_endpoint={LOOPBACK}:{server.port}",
        f"--rdzv_conf={words}",
    ]
    return [*given, *([] if rdzv_id is None else [f"--rdzv_id={rdzv_id}"])]
