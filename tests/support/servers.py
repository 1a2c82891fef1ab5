"""Servers on loopback that a test starts and ends by their pids: how they get ready, die and come back."""

import contextlib
import http.client
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Self

from tests.support.ports import LOOPBACK, free_port

READY_S = 60.0


class Server:
    """One server process with a folder and a port of its own; it comes back on both."""

    ending = signal.SIGKILL
    """How it is ended when the tests are done with it."""

    def __init__(self, folder: Path, *, port: int | None = None) -> None:
        self.folder = folder
        self.port = free_port(for_server=True) if port is None else port
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def endpoint(self) -> str:
        """Where it answers."""
        return f"http://{LOOPBACK}:{self.port}"

    def command(self) -> list[str]:
        """The program and its arguments; makes the files that they name."""
        raise NotImplementedError

    def environment(self) -> Mapping[str, str] | None:
        """The variables that it sees; None: ours."""
        return None

    def start(self) -> None:
        """Start it and return when it answers."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                self.command(),
                cwd=self.folder,
                env=self.environment(),
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        deadline = time.monotonic() + READY_S
        while not self.answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                tail = (self.folder / "log").read_text(errors="replace")[-2000:]
                self.kill()
                raise TimeoutError(
                    f"{type(self).__name__} on port {self.port} did not get ready:\n{tail}"
                )
            time.sleep(0.05)

    def answers(self) -> bool:
        """Whether it takes requests: any reply will do that is no trouble of its own."""
        connection = http.client.HTTPConnection(LOOPBACK, self.port, timeout=2)
        try:
            connection.request("GET", "/")
            return connection.getresponse().status < 500
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def make_bucket(self) -> None:
        """Make what its URLs lie in; nothing where they need nothing."""

    @contextlib.contextmanager
    def running(self) -> Iterator[Self]:
        """Have it ready, with its bucket, and end it afterwards."""
        self.start()
        try:
            self.make_bucket()
            yield self
        finally:
            self.stop()

    def kill(self) -> None:
        """End it at once, as a power cut would end the process."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """End it in the way that it likes best."""
        self._end(self.ending)

    def _end(self, number: signal.Signals) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.send_signal(number)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
