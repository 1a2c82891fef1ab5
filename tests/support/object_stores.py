"""A real S3 server for the tests: SeaweedFS on loopback, in a folder of its own, ended by its pid."""

import json
import os
import secrets
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.ports import LOOPBACK
from tests.support.servers import READY_S, Server
from tests.support.tools import need_tool

KEY = "testkey"
FRESH_KEY = "freshkey"
FRESH_SECRET = "Tq20secretFresh"  # noqa: S105  # the server knows both
SECRET = "Zf83secretQ71"  # noqa: S105  # of a server that lives as long as the tests, on loopback
_GRPC = 10_000  # the server listens there, too, counted from each of its ports
_PORTS = 4


def s3_options(endpoint: str, **more: object) -> dict[str, object]:
    """The storage options that reach a server of this room at `endpoint`."""
    return {
        "key": KEY,
        "secret": SECRET,
        "endpoint_url": endpoint,
        "client_kwargs": {"region_name": "us-east-1"},
        "config_kwargs": {"s3": {"addressing_style": "path"}, "read_timeout": 20},
        **more,
    }


class S3Server(Server):
    """One SeaweedFS; what it has acknowledged survives `kill` and a new `start`."""

    bucket = "bucket"

    def __init__(self, folder: Path, program: str) -> None:
        super().__init__(folder, port=_free_ports())
        self._program = program

    @property
    def options(self) -> dict[str, object]:
        """The storage options that reach it."""
        return s3_options(self.endpoint)

    def url(self) -> str:
        """A URL in its bucket that nobody has used."""
        return f"s3://{self.bucket}/run-{secrets.token_hex(6)}"

    def command(self) -> list[str]:
        """A server with all its parts in one process."""
        (self.folder / "volume").mkdir(parents=True, exist_ok=True)
        identities = self.folder / "s3.json"
        pairs = ((KEY, SECRET), (FRESH_KEY, FRESH_SECRET))
        credentials = [{"accessKey": key, "secretKey": secret} for key, secret in pairs]
        actions = ["Admin", "Read", "Write", "List", "Tagging"]
        owner = {"name": "t", "credentials": credentials, "actions": actions}
        identities.write_text(json.dumps({"identities": [owner]}))
        values: Mapping[str, object] = {
            "dir": self.folder / "volume",
            "ip": LOOPBACK,
            "ip.bind": LOOPBACK,
            "master.port": self.port + 1,
            "master.electionTimeout": "1s",
            "master.heartbeatInterval": "100ms",
            "master.telemetry": "false",
            "master.volumeSizeLimitMB": 1024,
            "volume.port": self.port + 2,
            "volume.max": 64,
            "volume.preStopSeconds": 0,
            "filer": "true",
            "filer.port": self.port + 3,
            "filer.localSocket": self.folder / "filer.sock",
            "s3": "true",
            "s3.port": self.port,
            "s3.config": identities,
            "s3.autoCreateBucket": "false",
            "s3.localSocket": self.folder / "s3.sock",
            "s3.port.iceberg": 0,
            "s3.port.lance": 0,
        }
        flags = [f"-{name}={value}" for name, value in values.items()]
        return [self._program, "-logtostderr=true", "server", *flags]

    def make_bucket(self) -> None:
        """Make the bucket, which a server that has only just come up may refuse for a moment."""
        import s3fs

        fs = s3fs.S3FileSystem(**self.options, skip_instance_cache=True, use_listings_cache=False)
        deadline = time.monotonic() + READY_S
        while True:
            try:
                fs.call_s3("create_bucket", Bucket=self.bucket)
                # The first write waits for a volume to be assigned.
                fs.pipe_file(f"{self.bucket}/ready", b"1")
                break
            except FileExistsError:
                break
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)
        fs.close_session(fs.loop, fs.s3)


def _free_ports() -> int:
    """The first of four neighbours that are free, here and 10,000 above."""
    while True:
        with ExitStack() as stack:
            probe = stack.enter_context(socket.socket())
            probe.bind((LOOPBACK, 0))
            base = 11_000 + int(probe.getsockname()[1]) % 5_000
            try:
                for port in range(base, base + _PORTS):
                    for one in (port, port + _GRPC):
                        bound = stack.enter_context(socket.socket())
                        bound.bind((LOOPBACK, one))
            except OSError:
                continue
            return base


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """A running server with an empty bucket; skipped where `weed` is not installed."""
    pytest.importorskip("s3fs", reason="needs s3fs: pip install s3fs")
    server = S3Server(tmp_path_factory.mktemp("seaweedfs"), need_tool("weed"))
    # The machine's own credentials and endpoints have no part in this.
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        del os.environ[name]
    with server.running():
        yield server
