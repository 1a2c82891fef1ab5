"""The commands on checkpoints: `ls`, `show`, `verify`, `prune`, `sweep`, `export` and `copy`.

Promises: they show no credentials; what takes long shows a bar, on a terminal only. Exit codes: 0 where all
is well, 1 where a damaged checkpoint was found, 2 with one line on stderr where what was asked cannot be
done. torch is needed to export in torch's own format alone.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from typing import TYPE_CHECKING, Final, NoReturn

from checkpoints.catalog import split_address
from checkpoints.copying import copy
from checkpoints.errors import CheckpointError, DamagedError, NoCheckpointError
from checkpoints.exporting import FORMATS, export
from checkpoints.housekeeping import prune, sweep
from checkpoints.inspection import list_checkpoints, show, verify
from checkpoints.question import Question, ask, read_options, shown
from checkpoints.redaction import redact, secret_values
from checkpoints.terminal import PIPE_CLOSED, open_output

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_COMMANDS: Final[dict[str, Callable[[Question], int]]] = {
    "ls": list_checkpoints,
    "show": show,
    "verify": verify,
    "prune": prune,
    "sweep": sweep,
    "export": export,
    "copy": copy,
}
_TEXTS: Final = {
    "ls": "the checkpoints: steps, ages, sizes, and whether their files are there",
    "show": "one checkpoint: its files, its tensors, and what is told of it",
    "verify": "read every byte; exit 1 where a checkpoint is damaged",
    "prune": "delete old checkpoints; one that stays is read back first",
    "sweep": "take away what killed writers left, in the store and in this machine's memory",
    "export": "one file of weights, for safetensors or torch",
    "copy": "a checkpoint or a whole run to another URL, read back there; goes on where it stopped",
}
_DELETING: Final = ("prune", "sweep")
_SENDING: Final = ("export", "copy")


def main(argv: Sequence[str], *, clock: Callable[[], float] = time.time) -> int:
    """Run one command; the exit code."""
    open_output()
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    arguments = _parser().parse_args(argv)
    secrets = secret_values(arguments.url, {})
    try:
        options = read_options(arguments.option)
        secrets |= secret_values(arguments.url, options)
        if arguments.command in _SENDING:
            arguments.to_options = read_options(arguments.to_option, "--to-option")
            secrets |= secret_values(arguments.target, arguments.to_options)
        question = ask(arguments.url, options, arguments, clock())
        code = int(_COMMANDS[arguments.command](question))
    except BrokenPipeError:  # whoever read it, `head` for instance, has seen enough
        return PIPE_CLOSED
    except (CheckpointError, OSError) as error:
        hint = _hint(arguments.url) if isinstance(error, NoCheckpointError) else ""
        line = shown(" ".join(redact(f"{error}{hint}", secrets).split()))
        sys.stderr.write(f"checkpoints {arguments.command}: {line}\n")
        return 1 if isinstance(error, DamagedError) else 2
    except KeyboardInterrupt:
        sys.stderr.write(f"checkpoints {arguments.command}: interrupted\n")
        return 130
    return code


def _hint(address: str) -> str:
    """What may have been meant by an address that names no run."""
    url, which = split_address(address)
    _, mark, last = url.rpartition("/")[2].rpartition("@")
    is_meant = mark and which is None and "://" not in last
    return f"; URL@latest, URL@best and URL@STEP name one, not @{last}" if is_meant else ""


class _Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; --help tells more\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="checkpoints", description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, text in _TEXTS.items():
        command = commands.add_parser(name, help=text, description=text)
        is_whole = name in _DELETING
        command.add_argument(
            "url",
            metavar="URL",
            help="the run" if is_whole else "the run, or URL@latest|@best|@STEP",
        )
        if name in _SENDING:
            _add_target(command, name)
        if is_whole:
            _add_deleting(command, name)
        command.add_argument("--json", action="store_true", help="for programs")
        command.add_argument(
            "--option",
            action="append",
            default=[],
            metavar="KEY=VALUE",
            help="an option of the file system, e.g. endpoint_url=http://…; a.b=c for a nested one",
        )
    return parser


def _add_target(command: argparse.ArgumentParser, name: str) -> None:
    where = "the file to write, a path or URL" if name == "export" else "the run's new URL"
    command.add_argument("target", metavar="TARGET", help=where)
    command.add_argument(
        "--to-option",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="an option of the target's file system; without any, those of the source are used",
    )
    if name == "export":
        command.add_argument("--format", choices=FORMATS, default=FORMATS[0])
        command.add_argument("--key", default="model", help="which tensors (default: model)")
        command.add_argument(
            "--strip", default="", metavar="PREFIX", help="taken off the front of each name"
        )
        command.add_argument("--force", action="store_true", help="replace a file that is there")


def _add_deleting(command: argparse.ArgumentParser, name: str) -> None:
    if name == "prune":
        command.add_argument(
            "--keep", type=int, required=True, metavar="N", help="the newest N stay"
        )
        command.add_argument(
            "--keep-every", type=int, metavar="N", help="of every N steps one stays"
        )
    command.add_argument("--dry-run", action="store_true", help="say what would go, delete nothing")
    command.add_argument(
        "--force", action="store_true", help="also beside a run that may be at work"
    )
