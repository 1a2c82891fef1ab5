"""`python -m elastic launch`: torchrun in this process, with our settings, the run's own exit codes, and errors of one line.

Promises: the exit code is that of the workers (see Operations), whatever torchrun makes of them; a wrong setting ends with 2
before anything starts; workers are told of each signal that should reach them, and nothing is left behind; where the host of a
c10d rendezvous dies, a new agent in this process takes part in the next. What a command line means is `elastic.launching`'s.
"""

import contextlib
import copy
import functools
import importlib.util
import io
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from checkpoints.errors import CheckpointError
from elastic.agent import agent_of, node_folder
from elastic.config import describe_settings, parse_arguments, read_settings
from elastic.entry import set_up_logging
from elastic.errors import ConfigError, ElasticError, ExitCode, StartError
from elastic.hearing import Hearing, say, workers
from elastic.hook import SHARED, failures
from elastic.launching import MAX_RESTARTS, MONITOR_INTERVAL_S, Launch, complete, split
from elastic.monitor import present_faults
from elastic.notices import leave_mark
from elastic.options import Settings
from elastic.prewarm import Prewarm, is_wanted, plan_of
from elastic.status import code_at
from elastic.verdict import UNSAVED, judge, read_verdicts

if TYPE_CHECKING:
    import argparse

__all__ = ["launch"]

logger = logging.getLogger(__name__)

_ROOT: Final = Path(__file__).resolve().parent.parent
_AGAIN_S: Final = 1.0
_HOST_GONE_S: Final = 600.0
"""How long a new agent looks for the rendezvous whose host has died."""
_USAGE: Final = f"""usage: python -m elastic launch [torchrun's options] [elastic/run.py] [JOB] [key=value ...]

torchrun in this process, over elastic/run.py, with the same options (torchrun --help has them all; PET_* variables count)
and what a careful person adds where you say nothing:

  --rdzv_backend      c10d; fsspec where checkpoint.url is remote and --nnodes is a range, or the endpoint is a URL
  --rdzv_endpoint     fsspec: checkpoint.url + /rdzv; c10d on one node: a free port
  --rdzv_id           made from checkpoint.url
  --rdzv_conf         for c10d and several nodes: rounds of 1 s, a dead node is seen after 3 s
  --max_restarts      {MAX_RESTARTS}
  --monitor_interval  {MONITOR_INTERVAL_S}

Exit codes: 0 complete; 1 start again; 2 the config, the job or the start is wrong; 75 preempted, the state is saved: start
again; 76 a person must look; 77 a newer launch owns the run. SIGTERM, SIGINT: save, 75 (the third SIGINT: at once). SIGUSR1,
SIGUSR2, where `signals` names them: this node saves and leaves with 75, the others go on.

"""


def launch(argv: Sequence[str]) -> int:
    """Run the agent of this node; returns the exit code of the run on it."""
    hearing = Hearing()
    try:
        command = split(argv)
        arguments = parse_arguments(command.arguments)
        if command.help or arguments.help:
            sys.stdout.write(_USAGE + describe_settings() + "\n")
            return ExitCode.DONE
        settings = read_settings(arguments, root=_ROOT)
        asked = complete(command, settings, os.environ)
        set_up_logging(primary=True)
        for name in ("elastic", "checkpoints"):  # of an agent, as under torchrun: what is wrong
            logging.getLogger(name).setLevel(logging.WARNING)
        os.environ.update(asked.environ)
        folder = node_folder(agent_of(os.getpid()))
        launcher = Launcher(settings, asked, folder, hearing)
        return launcher.run(command.script, command.arguments)
    except StartError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.code
    finally:
        hearing.settle()


class Launcher:
    """One agent, or several one after another, in this process. Main thread."""

    def __init__(self, settings: Settings, asked: Launch, folder: Path, hearing: Hearing) -> None:
        """Launch what was asked; `folder` is the private one of this process."""
        self._settings, self._asked, self._folder = settings, asked, folder
        self._hearing = hearing
        hearing.notice = self._note
        self._gone_at: float | None = None

    def run(self, script: str, arguments: Sequence[str]) -> ExitCode:
        """Start workers until they are done; returns the exit code.

        Raises:
            ConfigError: torchrun does not take the arguments.
        """
        ready = self._warm(script, arguments)
        options = self._read_options()
        ready()
        return self._run_agents(options)

    def _note(self, name: str) -> bool:
        """This node is to leave, if the run knows the signal; a worker that does not would die of it."""
        if name in self._settings.signals:
            leave_mark(self._folder, name)
            return not workers()  # they see it; without any it is this process that waits
        known = ", ".join(self._settings.signals)
        say(f'{name}: nothing is done; with signals="[{known}, {name}]" it is a notice')
        return False

    # --------------------------------------------------------------------------------- before
    def _warm(self, script: str, arguments: Sequence[str]) -> Callable[[], None]:
        """Begin to import what workers will; returns what waits for it."""
        wanted = functools.partial(
            is_wanted,
            self._settings,
            os.environ,
            restarts=self._asked.max_restarts,
            nnodes=self._asked.nnodes,
        )
        if not wanted() or not self._asked.nproc.isdigit():
            return lambda: None
        plan = plan_of(
            self._settings,
            agent=agent_of(os.getpid()),
            folder=self._folder,
            script=script,
            arguments=arguments,
            environ=os.environ,
        )
        try:
            return Prewarm(plan).wait
        except (OSError, ValueError) as error:
            logger.warning("no warm process could be started: %s", error)
            return lambda: None

    def _read_options(self) -> "argparse.Namespace":
        """Have torchrun read its options, and try what it makes of them.

        Raises:
            ConfigError: It does not take them.
        """
        from torch.distributed import run as torchrun

        if self._asked.backend == "etcd-v2" and importlib.util.find_spec("etcd") is None:
            raise ConfigError(
                "launch: --rdzv_backend=etcd-v2: found no module etcd, expected python-etcd; pip install python-etcd"
            )
        _silence_torch()
        said = io.StringIO()
        try:
            with contextlib.redirect_stderr(said):
                options = torchrun.get_args_parser().parse_args(list(self._asked.argv))
            options.module = options.no_python = options.run_path = False
            torchrun.config_from_args(copy.copy(options))
        except SystemExit as error:
            last = (said.getvalue().strip().splitlines() or ["torchrun refuses its options"])[-1]
            raise ConfigError(f"launch: {last.partition('error: ')[2] or last}") from error
        except (ValueError, AssertionError, RuntimeError) as error:
            raise ConfigError(f"launch: {error}") from error
        return options

    # --------------------------------------------------------------------------------- the agents
    def _run_agents(self, options: "argparse.Namespace") -> ExitCode:
        """Run an agent, and another one where the host of the rendezvous was lost."""
        from torch.distributed.elastic.multiprocessing.api import SignalException

        self._hearing.exception = lambda: SignalException("told to end", signal.SIGTERM)
        self._register()
        try:
            while True:
                code = self._run_agent(options)
                if code is not None:
                    return code
                time.sleep(_AGAIN_S)
        except SignalException:
            self._hearing.settle()
            return self._tell_signal()

    def _run_agent(self, options: "argparse.Namespace") -> ExitCode | None:
        """Run an agent to its end; None where there is to be another one."""
        from torch.distributed import DistError
        from torch.distributed import run as torchrun
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousError

        before = self._newest_worker()
        try:
            torchrun.run(copy.copy(options))
        except ChildFailedError as error:
            return self._tell_failures(error)
        except RendezvousClosedError as error:
            return None if self._takes_next_id(options) else self._tell_closed(error, options)
        except (RendezvousError, DistError) as error:
            return self._tell_lost(error, options, before)
        except ElasticError as error:
            sys.stderr.write(f"error: {error}\n")
            return error.code
        if self._newest_worker() and not read_verdicts(self._folder):
            say(
                "the workers ended with 0 and the run is not over: something in the job ended the process (os._exit); start again"
            )
            return ExitCode.RETRY
        return ExitCode.DONE

    def _takes_next_id(self, options: "argparse.Namespace") -> bool:
        """Whether this is a new launch, which does not end because an earlier one has closed its id for good."""
        if not self._asked.names_id or self._newest_worker() or options.rdzv_backend not in SHARED:
            return False
        name, _, number = options.rdzv_id.partition(".")
        options.rdzv_id = f"{name}.{int(number or 1) + 1}"
        return True

    def _tell_lost(
        self, error: BaseException, options: "argparse.Namespace", before: float
    ) -> ExitCode | None:
        """The rendezvous has failed; None where it was there, so that it may come back."""
        from torch.distributed.elastic.rendezvous import RendezvousTimeoutError

        newest = self._newest_worker()
        line = _first_line(error)
        if options.rdzv_backend in SHARED:
            where = options.rdzv_endpoint or "localhost:29400"
            may_come = newest and not isinstance(error, RendezvousTimeoutError)
            if may_come and (self._gone_at is None or newest != before):
                self._gone_at = time.monotonic()
                limit = f"{_HOST_GONE_S / 60:g} min"
                say(
                    f"the rendezvous at {where} is gone ({line}); a new agent looks for it for {limit}"
                )
            if may_come and time.monotonic() - (self._gone_at or 0.0) < _HOST_GONE_S:
                return None
            line = (
                f"no rendezvous at {where}: {line}; where the port is taken or its host is gone, give all nodes another"
                " --rdzv_endpoint=HOST:PORT and start again: the run goes on"
            )
        say(line)
        return ExitCode.RETRY

    def _register(self) -> None:
        """Serve `--rdzv_backend=fsspec` here, with the credentials that the checkpoints have."""
        if self._asked.backend != "fsspec":
            return
        from torch.distributed.elastic.rendezvous import rendezvous_handler_registry

        from elastic.rendezvous import create

        url = self._settings.checkpoint.url.rstrip("/")
        under = self._asked.endpoint.startswith(f"{url}/")
        create_here = functools.partial(
            create, options=self._settings.checkpoint.storage_options if under else None
        )
        rendezvous_handler_registry._registry["fsspec"] = create_here  # noqa: SLF001 - it refuses another

    def _newest_worker(self) -> float:
        """When a worker of this node last came up; 0.0 where none has."""
        with contextlib.suppress(OSError):
            found = [path.stat().st_mtime for path in self._folder.glob("slot-*")]
            return max(found, default=0.0)
        return 0.0

    # --------------------------------------------------------------------------------- the end
    def _tell_signal(self) -> ExitCode:
        """Workers ended the agent, or somebody ended us."""
        codes = read_verdicts(self._folder)
        left = present_faults(self._folder)
        if not codes and all(fault.kind == "ended" and not fault.step for fault in left):
            say(UNSAVED)
            return ExitCode.PREEMPTED
        code = judge(codes)
        if code is ExitCode.PREEMPTED and UNSAVED in [fault.message for fault in left]:
            say(UNSAVED)  # in the middle of anything, a worker can't say it itself
        if code is ExitCode.RETRY:
            say("told to end, and nothing could be saved for that; the last checkpoint stays")
        return code

    def _tell_closed(self, error: BaseException, options: "argparse.Namespace") -> ExitCode:
        """The launch has ended elsewhere: as the run did."""
        if not self._newest_worker() and options.rdzv_backend in SHARED:
            say(
                f"the rendezvous {options.rdzv_id} at {options.rdzv_endpoint} is closed: a launch has ended there; give"
                " all nodes another --rdzv_id and start again: the run goes on"
            )
            return ExitCode.RETRY
        checkpoint = self._settings.checkpoint
        code = ExitCode.RETRY
        with contextlib.suppress(CheckpointError):
            code = code_at(checkpoint.url, checkpoint.storage_options)
        say(_first_line(error))
        return ExitCode.DONE if code is ExitCode.DONE else ExitCode.RETRY

    def _tell_failures(self, error: BaseException) -> ExitCode:
        """All restarts are used up."""
        found = getattr(error, "failures", {}).values()
        codes = [failure.exitcode for failure in found if failure.exitcode != -signal.SIGTERM]
        code = judge(codes)
        say("; ".join(failures(error)))
        return code


def _silence_torch() -> None:
    """Pages of what we tell in a line; LOGLEVEL brings them back."""
    if "LOGLEVEL" in os.environ:
        return
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed."):
            logging.getLogger(name).setLevel(logging.CRITICAL)


def _first_line(error: BaseException) -> str:
    cause = error.__cause__ or error
    return (str(cause).strip() or type(cause).__name__).partition("\n")[0][:300]
