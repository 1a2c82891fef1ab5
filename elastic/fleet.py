"""The agents of one run on this machine: real torchruns, started, watched, hit by signals, and ended with all they began.

Promises: each agent is in a session of its own, so that a Ctrl-C reaches the owner of the fleet alone; it dies with the
owner, however that ends; `close` leaves neither a process, nor a snapshot in /dev/shm, nor a temporary file behind. Whatever
an agent starts is known by a variable of its environment, writers and warm processes included.
"""

import contextlib
import ctypes
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Final

from checkpoints.layout import AgentId
from checkpoints.processes import boot_id, process_start
from checkpoints.segments import segments_of
from elastic import kin
from elastic.errors import ElasticError, StartError
from elastic.namespaces import Bridge

__all__ = ["MARK", "Agent", "Fleet", "Worker", "serves_nodes"]

MARK: Final = "ELASTIC_DRILL"
"""In the environment of all that a fleet started: its token and the number of the agent."""
RUN: Final = Path(__file__).resolve().with_name("run.py")
_PR_SET_PDEATHSIG: Final = 1
_LIBC: Final = ctypes.CDLL(None)
_POLL_S: Final = 0.05
_FOREIGN: Final = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_FOREIGN_PREFIXES: Final = ("PET_", "TORCHELASTIC_", "OMPI_", "PMI_", "SLURM_")
"""What a launcher above may have set must not reach the agents."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Worker:
    """A living worker, as its agent sees it: under a warm start that is the stub."""

    rank: int
    pid: int
    node: int


class Agent:
    """One started torchrun."""

    def __init__(self, process: "subprocess.Popen[bytes]", *, node: int, log: Path) -> None:
        """Know it by its start too: a pid alone is given out again."""
        self.process, self.node, self.log = process, node, log
        self.identity = AgentId(
            host="", boot_id=boot_id(), pid=process.pid, start=process_start(process.pid) or 0
        )
        self.was_hit = False
        """Whether a fault has ended it, so that its exit code tells nothing of the run."""

    @property
    def is_running(self) -> bool:
        """Whether it has not ended."""
        return self.process.poll() is None

    def workers(self) -> list[Worker]:
        """Its living workers by rank."""
        found = []
        for pid in kin.children(self.process.pid):
            rank = kin.environment(pid).get("RANK", "")
            if rank.isdigit():
                found.append(Worker(rank=int(rank), pid=pid, node=self.node))
        return sorted(found, key=lambda worker: worker.rank)

    def restarts(self) -> int:
        """The restarts that it has counted, as its living workers were told."""
        told = (
            kin.environment(worker.pid).get("TORCHELASTIC_RESTART_COUNT", "")
            for worker in self.workers()
        )
        return max((int(count) for count in told if count.isdigit()), default=0)

    def tail(self, lines: int = 12) -> str:
        """The end of what it and its workers printed."""
        try:
            text = self.log.read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""
        return "\n".join(text.splitlines()[-lines:])


class Fleet:
    """The agents of one run, one for each node."""

    def __init__(
        self,
        logs: Path,
        arguments: Sequence[str],
        *,
        nodes: int,
        nproc: int,
        max_restarts: int,
        bridge: Bridge | None = None,
    ) -> None:
        """Start nothing yet.

        Args:
            logs: A folder for what the agents print.
            arguments: The runner's own: JOB and settings.
            nodes: How many agents there are.
            nproc: Workers of each.
            max_restarts: Given to torchrun.
            bridge: Where nodes are namespaces; None: all are on the loopback.
        """
        self.logs, self.nodes, self.nproc = logs, nodes, nproc
        self.agents: dict[int, Agent] = {}
        """The newest agent of each node."""
        self.all: list[Agent] = []
        """Every agent that was ever started."""
        self._arguments, self._max_restarts, self.bridge = list(arguments), max_restarts, bridge
        self._token = secrets.token_hex(8)
        # Short, since sockets live in it and their paths are bounded.
        self._temporary = Path(tempfile.mkdtemp(prefix="ed-"))
        logs.mkdir(parents=True, exist_ok=True)

    # ------------------------------------------------------------------------------------ starting
    def start(self, node: int) -> Agent:
        """Start the agent of a node."""
        words = [*_torchrun(), f"--nproc_per_node={self.nproc}", *self._meeting(node)]
        words += [f"--max_restarts={self._max_restarts}", str(RUN), *self._arguments]
        if self.bridge is not None:
            words = self.bridge.command(node, words)
        log = self.logs / f"agent-{len(self.all) + 1}.log"
        with log.open("wb") as out:
            process = subprocess.Popen(  # noqa: S603 - torchrun itself, without a shell
                words,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=self._environment(),
                start_new_session=True,
                preexec_fn=_die_with_parent,  # noqa: PLW1509 - no threads here, and one system call
            )
        agent = Agent(process, node=node, log=log)
        self.agents[node] = agent
        self.all.append(agent)
        return agent

    def _meeting(self, node: int) -> list[str]:
        """Where the agents meet: of several any may die, so none of them holds it."""
        if self.nodes == 1:
            return ["--nnodes=1", "--rdzv_backend=c10d", "--rdzv_endpoint=localhost:0"]
        address = "127.0.0.1" if self.bridge is None else self.bridge.address(node)
        return [
            f"--nnodes=1:{self.nodes}",
            "--rdzv_backend=fsspec",
            f"--rdzv_endpoint={self._temporary / 'rdzv'}",
            f"--rdzv_id={self._token}",
            f"--local_addr={address}",
        ]

    def _environment(self) -> dict[str, str]:
        kept = {
            name: value
            for name, value in os.environ.items()
            if name not in _FOREIGN and not name.startswith(_FOREIGN_PREFIXES)
        }
        link = "lo" if self.bridge is None else "eth0"
        kept.setdefault("GLOO_SOCKET_IFNAME", link)
        mark = f"{self._token}-{len(self.all) + 1}"
        return {**kept, MARK: mark, "TMPDIR": str(self._temporary)}

    # ------------------------------------------------------------------------------------ looking
    def running(self) -> list[Agent]:
        """The agents that have not ended, by node."""
        return [agent for _, agent in sorted(self.agents.items()) if agent.is_running]

    def workers(self) -> list[Worker]:
        """All living workers, by rank."""
        found = [worker for agent in self.running() for worker in agent.workers()]
        return sorted(found, key=lambda worker: worker.rank)

    def kill(self, agent: Agent) -> None:
        """SIGKILL to an agent and its workers at once, as when a node's processes are ended."""
        agent.was_hit = True
        kin.send([agent.process.pid, *(w.pid for w in agent.workers())], signal.SIGKILL)
        agent.process.wait(10)

    def leftovers(self, *, limit_s: float) -> list[str]:
        """A line on each process and snapshot that is still there after the run; waits for their end."""
        deadline = time.monotonic() + limit_s
        while True:
            pids = kin.carrying(MARK, self._token)
            files = [path for agent in self.all for path in segments_of(agent.identity)]
            if not (pids or files) or time.monotonic() > deadline:
                return [*(f"process {kin.describe(pid)}" for pid in pids), *map(str, files)]
            time.sleep(_POLL_S)

    # ------------------------------------------------------------------------------------ ending
    def close(self) -> None:
        """End every process that was started, and remove what they left.

        Raises:
            ElasticError: A process does not die.
        """
        left = kin.end_all(MARK, self._token)
        for agent in self.all:
            with contextlib.suppress(subprocess.TimeoutExpired):
                agent.process.wait(5)
            for path in segments_of(agent.identity):
                path.unlink(missing_ok=True)
        shutil.rmtree(self._temporary, ignore_errors=True)
        if left:
            raise ElasticError(f"still there after SIGKILL: {'; '.join(map(kin.describe, left))}")


def serves_nodes() -> bool:
    """Whether torchrun finds the rendezvous of several nodes: it is an entry point of the installed package."""
    return bool(metadata.entry_points(group="torchrun.handlers", name="fsspec"))


def _torchrun() -> list[str]:
    """The torchrun of this environment; its module where there is no such script."""
    script = Path(sys.executable).with_name("torchrun")
    return [str(script)] if script.exists() else [sys.executable, "-m", "torch.distributed.run"]


def _die_with_parent() -> None:
    """In the child, before it becomes torchrun: the kernel ends it when its owner ends."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)


def check_folder(folder: Path) -> None:
    """Make a folder, or say why that cannot be done.

    Raises:
        StartError: It cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StartError(f"--url: {folder} cannot be made: {error.strerror}") from error
