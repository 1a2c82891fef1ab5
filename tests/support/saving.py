"""Starts and kills trainers that only save (`alone_worker`), their agent and their writer."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Self

from checkpoints import reader
from checkpoints.layout import AgentId, CheckpointName
from checkpoints.manager import CheckpointManager
from checkpoints.processes import is_alive, process_start, this_process
from checkpoints.segments import segments_of
from checkpoints.store import Store, open_store
from tests.support.distribution import ROOT

WORKER = ROOT / "tests" / "support" / "alone_worker.py"
POLL_S = 0.02


class Node:
    """An agent (a process that only lives), its private folder, and trainers one after the other."""

    def __init__(self, url: str, options: Mapping[str, object] | None = None) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="es-"))
        self.url, self.options = url, dict(options or {})
        self._agent = subprocess.Popen(["/bin/sleep", "1000"])
        start = process_start(self._agent.pid)
        assert start is not None
        self.agent: AgentId = replace(this_process(), pid=self._agent.pid, start=start)
        self.trainers: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for trainer in self.trainers:
            trainer.kill()
            trainer.wait()
        self.end_agent()
        for pid in self.writers():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for path in segments_of(self.agent):
            path.unlink(missing_ok=True)
        shutil.rmtree(self.folder, ignore_errors=True)

    def end_agent(self) -> None:
        """End the agent, and nothing else."""
        self._agent.kill()
        self._agent.wait()

    def start(
        self, steps: int = 10**9, megabytes: int = 8, *, memory: bool = True
    ) -> "subprocess.Popen[bytes]":
        """Start a trainer."""
        url = json.dumps({"url": self.url, "options": self.options})
        command = [sys.executable, "-u", str(WORKER), str(self.folder), url]
        command += [json.dumps(asdict(self.agent)), str(steps), str(megabytes)]
        command += ["memory" if memory else "none"]
        log = (self.folder / "trainer.log").open("ab")
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        trainer = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        log.close()
        self.trainers.append(trainer)
        return trainer

    def log(self) -> str:
        """What the trainers printed."""
        path = self.folder / "trainer.log"
        return path.read_text() if path.exists() else ""

    def steps(self) -> list[int]:
        """The steps that were printed so far."""
        lines = [line.split(" ", 1)[0] for line in self.log().splitlines()]
        return [int(word) for word in lines if word.isdigit()]

    def writers(self) -> list[int]:
        """The writers that live."""
        found = []
        for path in self.folder.glob("writer-*.sock.owner"):
            with contextlib.suppress(ValueError):
                pid = int(json.loads(path.read_text())["pid"])
                command = Path(f"/proc/{pid}/cmdline")
                start = process_start(pid)
                if start is not None and is_alive(pid, start):
                    with contextlib.suppress(OSError):
                        if str(self.folder).encode() in command.read_bytes():
                            found.append(pid)
        return found

    def store(self) -> Store:
        """The store, by the way that is not disturbed."""
        return open_store(self.url, self.options)

    def committed(self) -> list[CheckpointName]:
        """The committed checkpoints, newest first."""
        return CheckpointManager(self.store()).names()

    def check_newest(self) -> CheckpointName | None:
        """Verify the newest committed checkpoint, every byte, and that all of it is of its step."""
        manager = CheckpointManager(self.store())
        for _ in range(20):
            name = manager.latest()
            if name is None:
                return None
            try:
                reader.verify(manager.store, manager.catalog.manifest(name))
                tree = manager.restore(name)
            except Exception:
                if manager.latest() == name:  # else retention was faster
                    raise
                continue
            model, optimizer = tree["model"], tree["optimizer"]
            assert isinstance(model, dict)
            assert isinstance(optimizer, dict)
            assert optimizer["step"] == name.step
            assert bool((model["w"] == float(name.step)).all()), name
            assert bool((optimizer["m"] == float(name.step)).all()), name
            return name
        raise AssertionError("the newest checkpoint is deleted faster than it can be read")

    def until(self, what: Callable[[], object], telling: str, timeout_s: float = 60) -> None:
        """Wait until a condition holds."""
        deadline = time.monotonic() + timeout_s
        while not what():
            if time.monotonic() > deadline:
                log = self.folder / "writer.log"
                said = log.read_text()[-3000:] if log.exists() else ""
                raise AssertionError(
                    f"waited {timeout_s} s for {telling}\n{self.log()[-3000:]}\n--- writer\n{said}"
                )
            time.sleep(POLL_S)

    def until_step(self, count: int, timeout_s: float = 60) -> None:
        """Wait until so many more steps were printed."""
        before = len(self.steps())
        self.until(lambda: len(self.steps()) >= before + count, f"{count} steps", timeout_s)
