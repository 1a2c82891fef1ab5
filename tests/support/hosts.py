"""Hosts as network namespaces: agents on each, a bridge between them, links that can be cut without a reset.

Promises: names are unique to a test run, so that several may go on at once; namespaces, links and processes are gone
afterwards, also after a failure. All traffic stays on the bridge.
"""

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Self

import pytest

from tests.support import processes
from tests.support.cluster import RUN, Agent, Cluster, torchrun_command
from tests.support.object_stores import KEY, SECRET, S3Server
from tests.support.tools import find_tool, missing, need_tool

IP = find_tool("ip") or "ip"
NETWORK = "10.77.0"
GATEWAY = f"{NETWORK}.254"


class Hosts:
    """Three hosts and more on a bridge, and a cluster whose agents run on them."""

    def __init__(self, cluster: Cluster, count: int = 3) -> None:
        self.cluster = cluster
        self.agents: dict[int, Agent] = {}
        self._token = secrets.token_hex(3)
        self._count = count
        self._made: list[str] = []

    def __enter__(self) -> Self:
        try:
            self._namespace("sw")
            self._in("sw", "ip", "link", "add", "br0", "type", "bridge")
            self._in("sw", "ip", "addr", "add", f"{GATEWAY}/24", "dev", "br0")
            self._in("sw", "ip", "link", "set", "br0", "up")
            for number in range(1, self._count + 1):
                self._host(number)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End what runs, and remove what was made."""
        self.cluster.close()
        for name in reversed(self._made):
            subprocess.run([IP, "netns", "del", name], check=False, capture_output=True)

    def name(self, host: int | str) -> str:
        """The namespace of a host."""
        return f"et{self._token}-{host}"

    @staticmethod
    def address(host: int) -> str:
        """A host's address."""
        return f"{NETWORK}.{host}"

    def _namespace(self, host: int | str) -> None:
        name = self.name(host)
        subprocess.run([IP, "netns", "add", name], check=True, capture_output=True)
        self._made.append(name)
        self._in(host, "ip", "link", "set", "lo", "up")

    def _host(self, number: int) -> None:
        self._namespace(number)
        link = f"v{number}"
        self._in(
            "sw", "ip", "link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", self.name(number)
        )  # fmt: skip
        self._in("sw", "ip", "link", "set", link, "master", "br0", "up")
        self._in(number, "ip", "addr", "add", f"{self.address(number)}/24", "dev", "eth0")
        self._in(number, "ip", "link", "set", "eth0", "up")

    def command(self, host: int | str, command: Sequence[str]) -> list[str]:
        """A command on a host, under that host's name; one process from ip to the command."""
        renamed = ["unshare", "-u", "sh", "-c", f'hostname h{host}; exec "$@"', "sh"]
        return [IP, "netns", "exec", self.name(host), *renamed, *command]

    def _in(self, host: int | str, *command: str) -> None:
        done = subprocess.run(
            [IP, "netns", "exec", self.name(host), *command], check=False, capture_output=True, text=True
        )  # fmt: skip
        assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"

    # --------------------------------------------------------------------------------- faults
    def cut(self, host: int) -> None:
        """Cut a host's link: what is sent is lost, and nobody is told."""
        self._in("sw", "ip", "link", "set", f"v{host}", "down")

    def heal(self, host: int) -> None:
        """Mend it."""
        self._in("sw", "ip", "link", "set", f"v{host}", "up")

    def kill(self, host: int) -> None:
        """End all processes of a host at once, as a power cut would end them; the link goes too, without a word."""
        self.cut(host)
        self.signal(host, signal.SIGKILL)
        self.agents.pop(host).process.wait(10)
        self.heal(host)

    def signal(self, host: int, number: signal.Signals) -> None:
        """Send a signal to all processes of a host."""
        done = subprocess.run(
            [IP, "netns", "pids", self.name(host)], check=True, capture_output=True, text=True
        )
        processes.send(map(int, done.stdout.split()), number)

    def kill_processes(self, host: int) -> None:
        """SIGKILL all processes of a host; the kernel lives and closes their connections."""
        self.signal(host, signal.SIGKILL)
        self.agents.pop(host).process.wait(10)

    # --------------------------------------------------------------------------------- agents
    def start(
        self, host: int, job: str | None, *overrides: str, rdzv: Sequence[str], run: Sequence[str] = (),
        env: Mapping[str, str] | None = None, nnodes: str = "1:3", by_launch: bool = False,
    ) -> Agent:  # fmt: skip
        """Start an agent with one worker on a host.

        Args:
            host: Its number.
            job: The JOB argument.
            overrides: key=value arguments.
            rdzv: The rendezvous options.
            run: What torchrun starts, in place of our runner and its arguments.
            env: Additional environment.
            nnodes: Number or range of nodes.
            by_launch: By `python -m elastic launch` in place of torchrun.
        """
        arguments = self.cluster.run_arguments(job, overrides)
        ours = arguments if by_launch else [str(RUN), *arguments]
        launcher = [sys.executable, "-m", "elastic", "launch"] if by_launch else torchrun_command()
        words = [
            *launcher, f"--nnodes={nnodes}", "--nproc_per_node=1", "--max_restarts=20",
            f"--local_addr={self.address(host)}", f"--rdzv_id={self.cluster.rdzv_id}", *rdzv, *(run or ours),
        ]  # fmt: skip
        environ = {"GLOO_SOCKET_IFNAME": "eth0", **(env or {})}
        agent = self.cluster.spawn(self.command(host, words), env=environ)
        self.agents[host] = agent
        return agent

    def world(self, size: int, *, after: int = 0, timeout_s: float = 90) -> int:
        """Wait until a generation of a size, later than one, has done a step; return the generation."""
        from tests.support import records

        url = self.cluster.url

        def formed() -> int | None:
            stepped = {int(line["generation"]) for line in records.audit(url)}
            claims = records.claims(url)
            found = [n for n, claim in claims.items() if n > after and claim["world_size"] == size]
            return max((n for n in found if n in stepped), default=None)

        return self.cluster.until(formed, f"a world of {size}", timeout_s=timeout_s)


class BridgeS3(S3Server):
    """A real S3 server on the bridge, which hosts reach by their links alone."""

    def __init__(self, folder: Path, hosts: Hosts) -> None:
        super().__init__(folder, need_tool("weed"))
        self._hosts = hosts

    @property
    def endpoint(self) -> str:
        """Where the hosts reach it."""
        return f"http://{GATEWAY}:{self.port}"

    @property
    def env(self) -> dict[str, str]:
        """The variables that an agent needs to reach it."""
        given = {"key": KEY, "secret": SECRET, "endpoint_url": self.endpoint}
        return {
            "FSSPEC_S3": json.dumps(given),
            "AWS_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def command(self) -> list[str]:
        """The server, in the bridge's namespace, on all its addresses."""
        words = [
            word.replace("-ip.bind=127.0.0.1", "-ip.bind=0.0.0.0") for word in super().command()
        ]
        return [IP, "netns", "exec", self._hosts.name("sw"), *words]

    def answers(self) -> bool:
        """Ask from where it runs."""
        return self._python(
            f"import socket; socket.create_connection(('{GATEWAY}', {self.port}), 2)"
        )

    def make_bucket(self) -> None:
        """Make the bucket from where it runs."""
        made = (
            f"import s3fs; fs = s3fs.S3FileSystem(key={KEY!r}, secret={SECRET!r}, endpoint_url={self.endpoint!r});"
            f" fs.exists({self.bucket!r}) or fs.call_s3('create_bucket', Bucket={self.bucket!r});"
            f" fs.pipe_file('{self.bucket}/ready', b'1')"
        )
        deadline = time.monotonic() + 60
        while not self._python(made):
            assert time.monotonic() < deadline, "the bucket could not be made"
            time.sleep(0.3)

    def _python(self, code: str) -> bool:
        command = [IP, "netns", "exec", self._hosts.name("sw"), sys.executable, "-c", code]
        with contextlib.suppress(subprocess.TimeoutExpired):
            return (
                subprocess.run(command, check=False, capture_output=True, timeout=30).returncode
                == 0
            )
        return False


def need_hosts() -> None:
    """Skip the calling test where network namespaces cannot be made."""
    need_tool("ip")
    name = f"et{secrets.token_hex(3)}-probe"
    made = subprocess.run([IP, "netns", "add", name], check=False, capture_output=True, text=True)
    if made.returncode != 0:
        missing(f"needs network namespaces (root, or CAP_SYS_ADMIN): {made.stderr.strip()}")
    subprocess.run([IP, "netns", "del", name], check=False, capture_output=True)
    if os.uname().sysname != "Linux":
        missing("needs Linux")


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    """Three hosts on a bridge."""
    need_hosts()
    with Cluster(tmp_path, installed=True) as cluster, Hosts(cluster) as made:
        yield made


@pytest.fixture
def bridge_s3(hosts: Hosts, tmp_path: Path) -> Iterator[BridgeS3]:
    """An S3 server that the hosts reach over their links."""
    pytest.importorskip("s3fs", reason="needs s3fs: pip install s3fs")
    server = BridgeS3(tmp_path / "s3", hosts)
    server.start()
    try:
        server.make_bucket()
        yield server
    finally:
        server.stop()
