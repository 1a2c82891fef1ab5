"""What an installed elastic-trainer does inside torchrun: settings that let nodes join, and errors of one line.

torchrun loads the entry points of the group `torchrun.handlers` in every agent before it reads its arguments.
This one acts only where the command line says that this torchrun starts our run.py; every other torchrun is left
as it is. What the user has set, in the environment or on the command line, always wins.

Runs in every torchrun of the environment: for those of others it imports nothing that Python has not loaded already.
"""

import logging
import os
import sys
from types import TracebackType

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, MutableMapping, Sequence
    from typing import Any, NoReturn

__all__ = ["failures", "handlers", "node_range", "prepare", "starts_our_runner"]

LAUNCHERS = ("torchrun", "torchrun.py", "run.py", "launch.py")
"""Names under which torchrun runs: its script, `-m torch.distributed.run` and `-m torch.distributed.launch`."""
FLAGS = frozenset({
    "-m", "--module", "--standalone", "--no-python", "--run-path", "--use-env", "--virtual-local-rank"
})  # fmt: skip
"""torchrun's options that take no value; `_` for `-` is the same."""
RENDEZVOUS = "last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=3"
"""A round closes after 1 s in place of 30, a dead node is seen after 3 s in place of 15."""
SHARED = ("c10d", "etcd-v2")
"""torchrun's back ends whose rounds need these settings, and whose ids are closed for good once a run has ended."""
UNSHARE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"


def handlers() -> "Callable[[Any], NoReturn]":
    """Prepare this torchrun if it starts our runner; return the creator that torchrun wants of an entry point."""
    prepare(sys.argv, os.environ)
    return _no_rendezvous


def _no_rendezvous(params: object) -> "NoReturn":
    """Refuse `--rdzv-backend=elastic`: the name is there for the settings alone."""
    raise ValueError(
        f"rdzv_backend: found {getattr(params, 'backend', 'elastic')!r}, which elastic-trainer does not serve;"
        " use --rdzv_backend=fsspec, or c10d"
    )


def prepare(argv: "Sequence[str]", environ: "MutableMapping[str, str]") -> None:
    """Set what a torchrun over our runner needs, and nothing for any other."""
    if not starts_our_runner(argv):
        return
    sys.excepthook = _tell
    options, _ = _parse(argv)
    backend = options.get("rdzv-backend", environ.get("PET_RDZV_BACKEND", "static"))
    nodes = node_range(argv, environ)
    if backend not in SHARED or "standalone" in options:
        return
    if nodes.rpartition(":")[2] == "1":
        # One node alone: a free port, where torchrun would take 29400 and meet another run there.
        takes_port = backend == "c10d" and "rdzv-endpoint" not in options
        given = {"PET_RDZV_ENDPOINT": "localhost:0"} if takes_port else {}
    else:
        # Without it a node that joins ends every agent: rank 0 never tells it the workers' store.
        given = {UNSHARE: "1", "PET_RDZV_CONF": RENDEZVOUS}
    endpoint = options.get("rdzv-endpoint", environ.get("PET_RDZV_ENDPOINT", ""))
    if backend == "c10d" and endpoint:
        from elastic.addresses import holds_store

        holds = holds_store(endpoint)
        if holds is not None:
            given["PET_RDZV_CONF"] = f"{given.get('PET_RDZV_CONF', '')},is_host={holds}".lstrip(",")
    new = {name: value for name, value in given.items() if name not in environ}
    environ.update(new)
    logging.getLogger(__name__).info("set for this torchrun: %s", new)


def node_range(argv: "Sequence[str]", environ: "Mapping[str, str]") -> str:
    """Return the number or range of nodes that a torchrun command line asks for."""
    options, _ = _parse(argv)
    return options.get("nnodes", environ.get("PET_NNODES", "1:1"))


def starts_our_runner(argv: "Sequence[str]") -> bool:
    """Tell whether a torchrun command line starts elastic/run.py, by path or as a module."""
    if not argv or os.path.basename(argv[0]) not in LAUNCHERS:  # noqa: PTH119 - no pathlib here
        return False
    options, program = _parse(argv)
    if "module" in options:
        return program == "elastic.run"
    folder, name = os.path.split(os.path.realpath(program))
    return name == "run.py" and os.path.isfile(f"{folder}/hook.py")  # noqa: PTH113 - no pathlib here


def _parse(argv: "Sequence[str]") -> "tuple[dict[str, str], str]":
    """Split a torchrun command line into its options (without dashes in front) and the program it starts."""
    options: dict[str, str] = {}
    rest = iter(argv[1:])
    for word in rest:
        if word == "--":
            return options, next(rest, "")
        if not word.startswith("-"):
            return options, word
        name, equals, value = word.partition("=")
        name = name.replace("_", "-")
        if name not in FLAGS and not equals:
            value = next(rest, "")
        options["module" if name == "-m" else name.lstrip("-")] = value
    return options, ""


def _given(name: str, default: str) -> str:
    options, _ = _parse(sys.argv)
    variable = f"PET_{name.replace('-', '_').upper()}"
    return options.get(name, os.environ.get(variable, default))


def _backend() -> str:
    return _given("rdzv-backend", "static")


def _endpoint() -> str:
    return _given("rdzv-endpoint", "localhost:29400")


def _tell(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Tell torchrun's own ends in a line each: the workers have told theirs above. All else as ever."""
    if kind.__name__ == "ChildFailedError":
        line = "; ".join(failures(error))
    elif kind.__name__ == "SignalException":
        line = f"ended by signal {getattr(getattr(error, 'sigval', None), 'name', 'unknown')}"
    elif kind.__module__ == "elastic.errors" or (
        kind.__name__.startswith("Rendezvous") and _backend() == "fsspec"
    ):
        line = str(error).partition("\n")[0]
    elif kind.__name__ == "RendezvousClosedError":
        line = (
            f"the rendezvous {_given('rdzv-id', 'none')} at {_endpoint()} is closed: a launch has ended there; give all"
            " nodes another --rdzv_id and start again: the run goes on"
        )
    elif kind.__name__ == "RendezvousConnectionError":
        reason = (str(error.__cause__ or error).splitlines() or [""])[0]
        line = (
            f"no rendezvous at {_endpoint()}: {reason}; where the port is taken or its host is"
            " gone, give all nodes another --rdzv_endpoint=HOST:PORT and start again: the run goes on"
        )
    elif kind.__name__ == "EtcdStubError":
        line = "--rdzv_backend=etcd-v2: found no module etcd; pip install python-etcd"
    else:
        sys.__excepthook__(kind, error, trace)
        return
    sys.stderr.write(f"torchrun: {line}\n")


def failures(error: BaseException) -> list[str]:
    """Name each failed worker: the first failure is the cause, those that torchrun itself ended are left out."""
    failures = sorted(
        getattr(error, "failures", {}).items(),
        key=lambda item: (item[1].exitcode == -15, item[1].timestamp),
    )
    if not failures:
        return ["a worker failed"]
    lines = []
    for number, (rank, failure) in enumerate(failures):
        if number and failure.exitcode == -15:
            continue
        how = f"exit code {failure.exitcode}" if failure.exitcode >= 0 else failure.signal_name()
        lines.append(f"rank {rank} failed ({how}, pid {failure.pid})")
    return lines
