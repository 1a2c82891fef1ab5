"""Real torchrun agents and their workers, started, watched, killed and cleaned up by a test.

Promises: what a test started is ended with it, workers in sessions of their own and orphans included;
each wait is bounded, and one that runs out shows the ends of the outputs and the stacks of the workers.
It knows the project only by its command line and its files (`tests.support.records`).
"""

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self, TypeVar

from tests.support import processes, records
from tests.support.distribution import ROOT, python_path
from tests.support.ports import free_port

T = TypeVar("T")

RUN = ROOT / "elastic" / "run.py"
MARK = "ELASTIC_TEST_CLUSTER"  # in the environment of all that a cluster started
POLL_S = 0.02
HOST_S = 60.0
# What a launcher above the test may have set must not reach the agents.
FOREIGN = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "PYTHONPATH",
    "PYTEST_CURRENT_TEST",
)
FOREIGN_PREFIXES = (
    "PET_",
    "TORCHELASTIC_",
    "TORCH_DISABLE_SHARE",
    "OMPI_",
    "PMI_",
    "SLURM_",
    "COV_CORE_",
)


class ClusterError(AssertionError):
    """Raised when a run did not do in time what a test waits for; the text shows the outputs' ends."""


def is_served(port: int) -> bool:
    """Whether somebody on this machine listens at a port; it is not touched."""
    for table in (Path("/proc/net/tcp"), Path("/proc/net/tcp6")):
        for line in table.read_text(encoding="ascii").splitlines()[1:]:
            _, local, _, state, *_ = line.split()
            if state == "0A" and local.endswith(f":{port:04X}"):
                return True
    return False


@dataclass(kw_only=True)
class Agent:
    """One started command: an agent with its workers, or a single process that is its own worker."""

    process: "subprocess.Popen[bytes]"
    log: Path
    seen: set[int] = field(default_factory=set)

    @property
    def pid(self) -> int:
        """The agent's pid."""
        return self.process.pid

    @property
    def code(self) -> int | None:
        """The exit code, None while it runs."""
        return self.process.poll()

    def output(self) -> str:
        """What it and its workers printed so far."""
        return self.log.read_text(encoding="utf-8", errors="replace")

    def tail(self, lines: int = 40) -> str:
        """The end of the output."""
        return "\n".join(self.output().splitlines()[-lines:])

    def workers(self) -> dict[int, int]:
        """The pids of the living workers by rank."""
        found: dict[int, int] = {}
        for pid in processes.children(self.pid):
            rank = processes.environment(pid).get("RANK", "")
            if rank.isdigit() and processes.is_alive(pid):
                found[int(rank)] = pid
        self.seen.update(found.values())
        return found

    def restart_count(self) -> int:
        """The restarts that this agent has counted, as its living workers were told."""
        name = "TORCHELASTIC_RESTART_COUNT"
        counts = (processes.environment(pid).get(name, "0") for pid in self.workers().values())
        return max((int(count) for count in counts), default=0)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the agent alone."""
        processes.send([self.pid], number)

    def wait(self, timeout_s: float = 120) -> int:
        """Wait for the end of the agent and return its exit code.

        A torchrun that has failed ends with 1, or by SIGABRT where the threads of its stores outlive its interpreter.
        """
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            text = f"still running after {timeout_s} s: {self.process.args!r}"
            raise ClusterError(_report(text, [self])) from None
        is_abort = code == -signal.SIGABRT and "terminate called without" in self.output()
        return 1 if is_abort else code


class Cluster:
    """Agents of one rendezvous and one run URL, as a context manager.

    Attributes:
        url: The local run URL, given to each start unless the overrides name another.
        port: The rendezvous port, free when the cluster was made.
    """

    def __init__(self, folder: Path, *, installed: bool = True) -> None:
        self.folder = folder
        self.url = folder / "run"
        self.port = free_port()
        self.rdzv_id = secrets.token_hex(4)
        self.agents: list[Agent] = []
        self._host: Agent | None = None
        self._token = secrets.token_hex(8)
        # Short, since sockets live in it and their paths are bounded.
        self._temporary = Path(tempfile.mkdtemp(prefix="ec-"))
        self._python_path = python_path(folder / "site", installed=installed)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End every process that was started, and remove the temporary files."""
        processes.end_all(MARK, self._token)
        for agent in self.agents:
            agent.process.wait(10)
        shutil.rmtree(self._temporary, ignore_errors=True)

    def environment(self, extra: Mapping[str, str] | None = None) -> dict[str, str]:
        """The environment of a started command."""
        kept = {
            name: value
            for name, value in os.environ.items()
            if name not in FOREIGN and not name.startswith(FOREIGN_PREFIXES)
        }
        ours = {
            MARK: self._token,
            "PYTHONPATH": self._python_path,
            "PYTHONFAULTHANDLER": "1",  # SIGABRT then shows the stacks
            "TMPDIR": str(self._temporary),
        }
        return {**kept, **ours, **(extra or {})}

    def run_arguments(self, job: str | Path | None, overrides: Sequence[str]) -> list[str]:
        """The runner's own arguments: the job, this cluster's URL, audit, then the overrides."""
        named = {override.partition("=")[0].removeprefix("--") for override in overrides}
        defaults = {"checkpoint.url": str(self.url), "audit.samples": "true"}
        given = [f"{key}={value}" for key, value in defaults.items() if key not in named]
        return [*([str(job)] if job is not None else []), *given, *overrides]

    def start(
        self,
        job: str | Path | None,
        *overrides: str,
        nproc: int = 2,
        nnodes: str = "1",
        max_restarts: int = 0,
        launcher: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        run: Sequence[str] = (str(RUN),),
    ) -> Agent:
        """Start a torchrun agent with the runner.

        Args:
            job: The JOB argument; None leaves it out.
            overrides: key=value arguments.
            nproc: Workers of this agent.
            nnodes: Number or range of nodes.
            max_restarts: Given to torchrun.
            launcher: Further torchrun options; a later one wins over ours.
            env: Additional environment of the agent.
            run: What torchrun starts: the path of run.py, or `-m elastic.run`.
        """
        command = [
            *torchrun_command(),
            f"--nproc_per_node={nproc}",
            f"--nnodes={nnodes}",
            f"--max_restarts={max_restarts}",
            "--rdzv_backend=c10d",
            f"--rdzv_endpoint=localhost:{self.port}",
            f"--rdzv_id={self.rdzv_id}",
            *launcher,
            *run,
            *self.run_arguments(job, overrides),
        ]
        if any(option.startswith("--rdzv_endpoint") for option in launcher):
            return self.spawn(command, env=env)
        self._await_host()
        self._host = self.spawn(command, env=env)
        return self._host

    def _await_host(self) -> None:
        """The first of several agents is to hold the rendezvous: the next come when it does."""
        deadline = time.monotonic() + HOST_S
        while self._host is not None and self._host.code is None and not is_served(self.port):
            if time.monotonic() > deadline:
                raise ClusterError(_report(f"nobody listens at {self.port}", self.agents))
            time.sleep(POLL_S)

    def spawn(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> Agent:
        """Start any command as an agent of this cluster."""
        log = self.folder / f"agent-{len(self.agents) + 1}.log"
        with log.open("wb") as out:
            process = subprocess.Popen(
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=self.environment(env),
                cwd=cwd or self.folder,
            )
        agent = Agent(process=process, log=log)
        self.agents.append(agent)
        return agent

    def until(
        self,
        what: Callable[[], T | None],
        telling: str,
        *,
        timeout_s: float = 120,
        idle: bool = False,
    ) -> T:
        """Wait until a condition gives something true, and return it.

        Args:
            what: The condition.
            telling: What is waited for, for the error.
            timeout_s: The bound.
            idle: Whether the condition can still come true when all agents have ended.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            ended = all(agent.code is not None for agent in self.agents)
            if found := what():
                return found
            if ended and not idle:
                raise ClusterError(_report(f"all agents ended before {telling}", self.agents))
            if time.monotonic() > deadline:
                text = f"waited {timeout_s} s for {telling}"
                raise ClusterError(_report(text, self.agents, stacks=True))
            time.sleep(POLL_S)

    def until_step(self, step: int, *, generation: int = 0, timeout_s: float = 120) -> int:
        """Wait until a step (of a generation, or a later one) has begun on some rank; return the step."""

        def begun() -> int | None:
            lines = (line for line in records.audit(self.url) if line["generation"] >= generation)
            last = max((int(line["step"]) for line in lines), default=0)
            return last if last >= step else None

        return self.until(begun, f"step {step} of generation {generation}", timeout_s=timeout_s)

    def until_committed(self, step: int, *, timeout_s: float = 120) -> tuple[int, int]:
        """Wait until a checkpoint of a step or a later one is committed; return its name."""

        def committed() -> tuple[int, int] | None:
            names = [name for name in records.checkpoints(self.url) if name[1] >= step]
            return names[-1] if names else None

        return self.until(committed, f"a checkpoint of step {step}", timeout_s=timeout_s)

    def until_started(self, generation: int, *, timeout_s: float = 120) -> int:
        """Wait until a generation (or a later one) has restored and started; return its number."""

        def there() -> int | None:
            newest = max(records.started(self.url), default=0)
            return newest if newest >= generation else None

        return self.until(there, f"the start of generation {generation}", timeout_s=timeout_s)

    def workers(self) -> dict[int, int]:
        """The pids of all living workers by rank."""
        return {rank: pid for agent in self.agents for rank, pid in agent.workers().items()}

    def kill(self, rank: int, number: signal.Signals = signal.SIGKILL) -> int:
        """Send a signal to the worker of a rank, once it is there; return its pid."""

        def there() -> int | None:
            return self.workers().get(rank)

        pid = self.until(there, f"a worker of rank {rank}", timeout_s=30)
        processes.send([pid], number)
        return pid

    def finish(self, timeout_s: float = 90) -> list[int]:
        """Wait for the end of all agents; return their exit codes."""
        deadline = time.monotonic() + timeout_s
        for agent in self.agents:
            with contextlib.suppress(subprocess.TimeoutExpired):
                agent.process.wait(max(deadline - time.monotonic(), 0.1))
        if any(agent.code is None for agent in self.agents):
            text = f"not all agents ended within {timeout_s} s"
            raise ClusterError(_report(text, self.agents, stacks=True))
        return [agent.process.returncode for agent in self.agents]

    def complete(self, timeout_s: float = 90) -> records.Record:
        """Wait for the end of all agents, check that all is well, and return the summary."""
        codes = self.finish(timeout_s)
        status = records.status(self.url)
        if codes[-1] != 0 or status != "complete":
            raise ClusterError(_report(f"exit codes {codes}, status {status}", self.agents))
        return records.summary(self.url)

    def leftovers(self) -> list[str]:
        """One line on each process of this cluster that is alive."""
        return [processes.describe(pid) for pid in processes.carrying(MARK, self._token)]


def torchrun_command() -> list[str]:
    """The torchrun of this environment; its module where there is no such script."""
    script = Path(sys.executable).with_name("torchrun")
    return [str(script)] if script.exists() else [sys.executable, "-m", "torch.distributed.run"]


def _report(text: str, agents: Sequence[Agent], *, stacks: bool = False) -> str:
    """The text of a failure: processes, stacks where asked for, and the outputs' ends."""
    lines = [text]
    for agent in agents:
        pids = [agent.pid, *processes.children(agent.pid)]
        lines += [f"  {processes.describe(pid)}" for pid in pids if agent.code is None]
    if stacks:
        for agent in agents:
            processes.send(agent.workers().values(), signal.SIGABRT)
        time.sleep(1)
    for agent in agents:
        lines += [f"--- {agent.log.name} (exit code {agent.code})", agent.tail(60)]
    return "\n".join(lines)
