"""`python -m elastic COMMAND`: launch, doctor, status, rollback and drill; `report` is not yet served."""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from checkpoints.errors import CheckpointError
from checkpoints.question import read_options
from checkpoints.terminal import PIPE_CLOSED, open_output
from elastic.drill import add_arguments, drill
from elastic.errors import ElasticError, ExitCode
from elastic.rollback import rollback
from elastic.status import status
from elastic.streams import hold_streams

_NOT_YET: Final = ("report",)


def _launch(argv: Sequence[str]) -> int:
    from elastic.faults import leave
    from elastic.launch import launch

    # Threads of torch's stores may abort an ordinary exit, and the code would be that of a SIGABRT.
    leave(launch(argv), tidy=True)


def _doctor(argv: Sequence[str]) -> int:
    from elastic.doctor import doctor

    return doctor(argv)


_OWN_ARGUMENTS: Final[Mapping[str, Callable[[Sequence[str]], int]]] = {
    "launch": _launch,
    "doctor": _doctor,
    "drill": drill,
}
"""Commands that read their arguments themselves."""


def main(argv: Sequence[str]) -> int:
    """Run one command; returns its exit code."""
    hold_streams()
    open_output()
    try:
        if argv and argv[0] in _OWN_ARGUMENTS:
            return _OWN_ARGUMENTS[argv[0]](argv[1:])
        return _ask(argv)
    except BrokenPipeError:  # whoever read it has seen enough
        return PIPE_CLOSED


def _ask(argv: Sequence[str]) -> int:
    if argv and argv[0] in _NOT_YET:
        sys.stderr.write(
            f"error: python -m elastic {argv[0]}: not yet served by this version; served: launch, doctor, "
            "status, rollback, drill\n"
        )
        return ExitCode.WRONG
    found = _parser().parse_args(argv)
    try:
        options = read_options(found.option)
        if found.command == "rollback":
            return rollback(found.url, options, to=found.to, force=found.force)
        code = status(found.url, options, as_json=found.json)
    except (CheckpointError, ElasticError, ValueError) as error:
        sys.stderr.write(f"error: {error}\n")
        return ExitCode.WRONG
    return code if found.exit_code else ExitCode.DONE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m elastic")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser(
        "launch", help="torchrun with our settings and the run's exit codes (launch --help)"
    )
    commands.add_parser(
        "doctor",
        help="look at this node as launch would use it, and start nothing (doctor --help)",
    )
    told = commands.add_parser("status", help="where the run at a URL stands")
    told.add_argument("--json", action="store_true", help="the whole summary as JSON")
    told.add_argument(
        "--exit-code",
        action="store_true",
        help="exit with the run's code: 0 complete or stopped, 1 running, 75 preempted, 76 failed, 2 no run",
    )
    add_arguments(
        commands.add_parser("drill", help="train a job under faults, and judge the outcome")
    )
    back = commands.add_parser("rollback", help="let a run go on from an older checkpoint")
    back.add_argument(
        "--to",
        required=True,
        metavar="NAME",
        help="000007-000000001200, a step, best or latest",
    )
    back.add_argument(
        "--force", action="store_true", help="although the run may be at work: it ends with 77"
    )
    for command in (told, back):
        command.add_argument("url", metavar="URL", help="the run's URL")
        command.add_argument(
            "--option",
            action="append",
            default=[],
            metavar="KEY=VALUE",
            help="an argument of the fsspec file system; a.b=value for one inside another, JSON for anything but text",
        )
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
