"""When a node's warm process is started, and with what: a worker's side of `elastic.warm`, after its first step.

Guarantees: none is started where nothing would ever be forked from it (switched off, no restart to come); the start
costs the training some milliseconds; it inherits no descriptor, so that no peer takes it for a worker. A worker that
a warm process forked tells it that it has come to work, so that a process from which none does is given up.
"""

import json
import logging
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Final

from checkpoints.layout import AgentId
from elastic.hook import LAUNCHERS, node_range
from elastic.ranks import Place
from elastic.relay import is_off
from elastic.sources import files_of
from elastic.spawning import close_inherited

__all__ = ["LINK", "STEPPED", "Plan", "first_step", "is_own_to_start", "spawn"]

logger = logging.getLogger(__name__)

LINK: Final = "ELASTIC_WARM_LINK"
"""In the environment that a forked worker's `main` is given: where it tells that it has come to work."""
STEPPED: Final = b"S"
LOCK: Final = "warm.lock"
LOG: Final = "warm.log"
UNFIT: Final = "warm.unfit"
"""In the agent's folder: why nothing can be forked from a process that has imported what the job needs."""
_START: Final = (
    "import sys; sys.path[:0] = [sys.argv[1]]; from elastic.warm import main; main(sys.argv[2:])"
)
_ROOT: Final = Path(__file__).resolve().parent.parent
_OF_A_START: Final = frozenset({
    "RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE",
    "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "CUDA_VISIBLE_DEVICES",
})  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What a warm process needs to know: whom it serves and what a worker looks like."""

    agent: AgentId
    folder: str
    """The agent's private folder."""
    argv: list[str]
    cwd: str
    environ: dict[str, str]
    """As torchrun gave it to the worker that tells."""
    path: list[str]
    """sys.path of that worker."""
    modules: list[str]
    """What it has imported by its first step, in order."""
    files: list[str]
    """Where they came from."""
    script: str
    """The file of `__main__`."""
    module: str | None
    """Its name where it was started as a module."""

    def to_json(self) -> bytes:
        """Return the plan as bytes."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, data: bytes) -> "Plan":
        """Read what to_json gave."""
        found = json.loads(data)
        return cls(**{**found, "agent": AgentId(**found["agent"])})


def is_of_a_start(name: str) -> bool:
    """Tell whether a variable is another one at each start and rank, as torchrun sets it."""
    return name in _OF_A_START or name.startswith("TORCHELASTIC_")


def first_step(environ: Mapping[str, str], agent: AgentId, folder: Path) -> None:
    """This worker has taken its first step: tell its warm process, or start one for the next time."""
    link = environ.get(LINK, "")
    if link.isdigit():
        try:
            os.write(int(link), STEPPED)
            os.close(int(link))
        except OSError as error:
            logger.debug("the warm process cannot be told: %s", error)
        return
    unfit = folder / UNFIT
    try:
        if unfit.exists():
            logger.info("no warm start: %s", unfit.read_text(encoding="utf-8"))
            return
        flags = interpreter_flags(sys.orig_argv, sys.argv)
        if flags is not None:
            spawn(_plan(agent, folder), flags)
    except (OSError, ValueError) as error:
        logger.warning("no warm process could be started: %s", error)


def is_own_to_start(place: Place, environ: Mapping[str, str], *, wanted: bool) -> bool:
    """Tell whether this worker is the one that sees to the node's warm process, and there is use for one."""
    if not wanted or is_off(environ) or place.launcher != "torchrun":
        return False
    if LINK in environ:
        return True
    return place.local_rank == 0 and _may_restart(environ, _command_of(os.getppid()))


def _may_restart(environ: Mapping[str, str], command: list[str]) -> bool:
    """Tell whether workers may be started again under this agent: restarts are left, or nodes may come and go."""
    given = environ.get("TORCHELASTIC_MAX_RESTARTS", "0")
    used = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    left = int(given) - int(used) if given.isdigit() and used.isdigit() else 0
    if left > 0:
        return True
    least, _, most = node_range(_launcher(command), environ).partition(":")
    return most not in ("", least)


def _launcher(command: list[str]) -> list[str]:
    """Cut the interpreter off a launcher's command line."""
    names = (*LAUNCHERS, "torch.distributed.run", "torch.distributed.launch", "launch")
    found = (i for i, word in enumerate(command) if os.path.basename(word) in names)  # noqa: PTH119 - a text
    return command[next(found, len(command)) :]


def _command_of(pid: int) -> list[str]:
    try:
        data = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return []
    return os.fsdecode(data).split("\0")


def interpreter_flags(command: list[str], argv: list[str]) -> list[str] | None:
    """Return the interpreter's own options in a command line; None where it starts neither script nor module."""
    flags = command[1 : len(command) - len(argv)]
    if flags[-1:] == ["-m"]:
        flags = flags[:-1]
    else:
        started = command[len(command) - len(argv) :][:1]
        if started != argv[:1]:
            return None
    return flags


def _plan(agent: AgentId, folder: Path) -> Plan:
    raw = Path("/proc/self/environ").read_bytes()  # what the job has changed since is its own
    pairs = (os.fsdecode(item).partition("=") for item in raw.split(b"\0") if item)
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    return Plan(
        agent=agent,
        folder=str(folder),
        argv=list(sys.argv),
        cwd=os.getcwd(),  # noqa: PTH109 - a text
        environ={name: value for name, _, value in pairs},
        path=list(sys.path),
        modules=_names(sys.modules),
        files=files_of(sys.modules),
        script=os.path.abspath(getattr(main, "__file__", None) or sys.argv[0]),  # noqa: PTH100 - a text
        module=None if spec is None else spec.name,
    )


def _names(modules: Mapping[str, ModuleType]) -> list[str]:
    """Name what was imported the ordinary way, so that importing it by name does the same."""
    return [
        name
        for name, module in list(modules.items())
        if name != "__main__" and getattr(getattr(module, "__spec__", None), "name", None) == name
    ]


def spawn(plan: Plan, flags: list[str]) -> int:
    """Start the warm process in a session of its own, without an environment of rank and world; returns its pid."""
    told = os.memfd_create("warm start", 0)  # inherited, so not close-on-exec
    try:
        with open(told, "wb", closefd=False) as file:
            file.write(plan.to_json())
        title = f"elastic: holds what the workers of torchrun {plan.agent.pid} import"
        command = [sys.executable, *flags, "-c", _START, str(_ROOT), str(told), title]
        log = os.path.join(plan.folder, LOG)  # noqa: PTH118 - a text
        opened = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        environ = {name: text for name, text in plan.environ.items() if not is_of_a_start(name)}
        # Not subprocess: it would wait for a child that is to outlive us.
        return os.posix_spawn(
            sys.executable,
            command,
            environ,
            file_actions=[
                *close_inherited(told),
                (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0),
                (os.POSIX_SPAWN_OPEN, 1, log, opened, 0o600),
                (os.POSIX_SPAWN_DUP2, 1, 2),
            ],
            setsid=True,
        )
    finally:
        os.close(told)
