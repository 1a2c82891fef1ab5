"""A real Slurm cluster of one node on loopback: munged, slurmctld and slurmd, with folders, ports and a configuration of their own.

Promises: no service and no file of the system's own Slurm is used or touched; jobs, steps and daemons are gone afterwards.
"""

import contextlib
import getpass
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Self

import pytest

from tests.support.cluster import Cluster
from tests.support.ports import LOOPBACK, free_port
from tests.support.servers import Server
from tests.support.tools import missing, need_tool

PROGRAMS = (
    "munged",
    "munge",
    "slurmctld",
    "slurmd",
    "sbatch",
    "srun",
    "scontrol",
    "scancel",
    "sinfo",
)
NODE = socket.gethostname().partition(".")[0]
GRACE_S = 30
ENDED = frozenset(
    {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "PREEMPTED", "NODE_FAIL", "OUT_OF_MEMORY"}
)
POLL_S = 0.1

# cred_expire: a job that was queued again starts after so many seconds, by default 120.
CONFIGURATION = """
ClusterName=test
SlurmctldHost={node}({loopback})
SlurmctldPort={port}
SlurmdPort={node_port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.sock,cred_expire=5
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_interval=1,bf_interval=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
ReturnToService=2
KillWait=30
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmdParameters=config_overrides
NodeName={node} NodeAddr={loopback} CPUs=2 State=UNKNOWN
PartitionName=low Nodes={node} Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime={grace_s}
PartitionName=high Nodes={node} PriorityTier=10 PreemptMode=OFF
"""


class SlurmServer(Server):
    """One of the daemons; they share a folder, and differ in their program and in how one sees that they are ready."""

    ending = signal.SIGTERM

    def __init__(
        self,
        folder: Path,
        command: list[str],
        environment: Mapping[str, str],
        ready: Callable[[], bool],
    ) -> None:
        super().__init__(folder)
        self._command, self._environment, self._ready = command, environment, ready

    def command(self) -> list[str]:
        """The daemon in the foreground."""
        return self._command

    def environment(self) -> Mapping[str, str]:
        """With the mark by which all that it starts is found again."""
        return self._environment

    def answers(self) -> bool:
        """Whether it does its work."""
        return self._ready()


class Slurm:
    """The cluster, as a context manager; its jobs see the project as the agents of `cluster` do."""

    def __init__(self, cluster: Cluster) -> None:
        # Short, since sockets live in it and their paths are bounded.
        self.folder = Path(tempfile.mkdtemp(prefix="slurm-"))
        self._jobs = cluster.folder
        self._conf = self.folder / "slurm.conf"
        self._environment = cluster.environment(
            {"SLURM_CONF": str(self._conf), "PYTHON": sys.executable}
        )
        self._daemons = contextlib.ExitStack()

    def __enter__(self) -> Self:
        try:
            self._configure()
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _configure(self) -> None:
        for name in ("state", "spool"):
            (self.folder / name).mkdir()
        key = self.folder / "munge.key"
        key.touch(0o600)
        key.write_bytes(secrets.token_bytes(128))
        text = CONFIGURATION.format(
            node=NODE, loopback=LOOPBACK, port=free_port(), node_port=free_port(), folder=self.folder,
            user=getpass.getuser(), grace_s=GRACE_S,
        )  # fmt: skip
        self._conf.write_text(text, encoding="utf-8")

    def _start(self) -> None:
        at = str(self.folder)
        # --force: this folder is closed to others, on purpose.
        munged = [
            need_tool("munged"), "--foreground", "--force", f"--socket={at}/munge.sock", f"--key-file={at}/munge.key",
            f"--log-file={at}/munged.log", f"--pid-file={at}/munged.pid", f"--seed-file={at}/munged.seed",
        ]  # fmt: skip
        daemons: tuple[tuple[list[str], Callable[[], bool]], ...] = (
            (munged, lambda: self._says("", "munge", "-n", f"--socket={at}/munge.sock")),
            ([need_tool("slurmctld"), "-D", "-f", str(self._conf)], lambda: self._says("is UP", "scontrol", "ping")),
            ([need_tool("slurmd"), "-D", "-f", str(self._conf)], lambda: self._says("idle", "sinfo", "-h", "-o", "%T")),
        )  # fmt: skip
        for command, ready in daemons:
            folder = self.folder / Path(command[0]).name
            server = SlurmServer(folder, command, self._environment, ready)
            self._daemons.enter_context(server.running())

    def close(self) -> None:
        """End the jobs, then the daemons."""
        with contextlib.suppress(subprocess.TimeoutExpired, OSError):
            self._run("scancel", "--full", "--signal=KILL", f"--user={getpass.getuser()}")
            self._run("scancel", f"--user={getpass.getuser()}")
        self._daemons.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _run(self, *command: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            command, check=False, capture_output=True, text=True, timeout=60, env=self._environment, cwd=self._jobs
        )  # fmt: skip

    def _says(self, text: str, *command: str) -> bool:
        done = self._run(*command)
        return done.returncode == 0 and text in done.stdout

    def ask(self, *command: str) -> str:
        """Run one of Slurm's commands, which must succeed; return what it prints."""
        done = self._run(*command)
        assert done.returncode == 0, f"{' '.join(command)}: {done.stdout}{done.stderr}"
        return done.stdout

    # --------------------------------------------------------------------------------- jobs
    def submit(self, *words: str) -> int:
        """Queue a job: options, script and arguments of sbatch; return its number."""
        text = self.ask("sbatch", "--parsable", f"--output={self._jobs}/job-%j.log", *words)
        return int(text.strip())

    def job(self, number: int) -> dict[str, str]:
        """What Slurm knows of a job, as `scontrol show job` names it."""
        return dict(
            re.findall(
                r"(\S+?)=(\S*)", self.ask("scontrol", "--oneliner", "show", "job", str(number))
            )
        )

    def log(self, number: int) -> str:
        """What a job printed."""
        path = self._jobs / f"job-{number}.log"
        return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""

    def until(
        self, number: int, what: Callable[[], bool], telling: str, timeout_s: float = 120
    ) -> None:
        """Wait for something about a job."""
        deadline = time.monotonic() + timeout_s
        while not what():
            job = self.job(number)
            assert time.monotonic() < deadline, (
                f"no {telling} in {timeout_s} s: {job}\n{self.log(number)[-4000:]}"
            )
            time.sleep(POLL_S)

    def until_waiting(self, number: int, restarts: int) -> None:
        """Wait until a job is queued for its n-th restart."""

        def waits() -> bool:
            job = self.job(number)
            return job["JobState"] == "PENDING" and job["Restarts"] == str(restarts)

        self.until(number, waits, f"restart {restarts}")

    def until_ended(self, number: int) -> dict[str, str]:
        """Wait until a job is over for good; return what is known of it."""
        self.until(number, lambda: self.job(number)["JobState"] in ENDED, "end")
        return self.job(number)


@pytest.fixture
def slurm(cluster: Cluster) -> Iterator[Slurm]:
    """A cluster of one node with two processors, and two partitions: jobs of `high` preempt those of `low`."""
    for name in PROGRAMS:
        need_tool(name)
    if os.uname().sysname != "Linux":
        missing("needs Linux")
    with Slurm(cluster) as made:
        yield made
