"""From arguments to an exit code: what torchrun's workers run.

Promises: what is wrong with the config or the start is one line, once, and code 2 on every rank,
without using up restarts; a user's exception is their own traceback, once; every other end is the code
of the design's section 10. Imports torch only when the settings have been read.
"""

import logging
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from elastic.agent import current_agent, end_agent, has_agent, node_folder
from elastic.config import describe_settings, parse_arguments, read_settings
from elastic.errors import ExitCode, StartError
from elastic.faults import say_once
from elastic.ranks import read_place
from elastic.verdict import write_verdict
from elastic.watching import stand, watch

__all__ = ["end_early", "main", "set_up_logging"]

logger = logging.getLogger(__name__)

_ROOT = Path(__file__).resolve().parent.parent
_USAGE = """usage: torchrun [torchrun's options] elastic/run.py [JOB] [key=value ...]

Trains JOB: a YAML file, path/to/file.py:Class or package.module:Class (default: jobs/digits.yaml).
Settings, with their defaults (key=value changes one):

"""


def main(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Train what the arguments say; returns the exit code, or ends the agent with it."""
    try:
        arguments = parse_arguments(argv)
        if arguments.help:
            sys.stdout.write(_USAGE + describe_settings() + "\n")
            return ExitCode.DONE
        place = read_place(environ)
        settings = read_settings(arguments, root=_ROOT)
        # From here on it is seen where this worker is, while it imports too.
        standing = stand(environ)
    except StartError as error:
        return end_early(error, environ)
    set_up_logging(primary=place.rank == 0)
    # A peer's death is told in one line of ours; torch's own C++ log would add its stack to it.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    watch(
        standing,
        environ,
        hang_after=settings.hang_after,
        long_s=settings.hang_after_long,
        timeout_s=settings.timeout,
    )
    from elastic.worker import work

    return work(settings, environ, standing)


def set_up_logging(*, primary: bool) -> None:
    """Send the project's own log lines to stderr; the root logger stays the user's."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
    for name in ("elastic", "checkpoints", "jobs"):
        own = logging.getLogger(name)
        own.handlers[:] = [handler]
        own.propagate = False
        own.setLevel(logging.INFO if primary else logging.ERROR)


def end_early(error: StartError, environ: Mapping[str, str]) -> int:
    """Say the error once on this node, and end the agent: no restart would help."""
    try:
        place = read_place(environ)
        agent = current_agent(place, environ)
        alone = not has_agent(place)
        if not alone:
            # All workers of the node find the same; the first one says it, for torchrun ends the rest.
            say_once(node_folder(agent), f"error: {error}")
            write_verdict(node_folder(agent), place.local_rank, error.code)
            end_agent(agent, error.code)
    except StartError:
        place = None  # the error itself may be that the place makes no sense
    if place is None or place.local_rank == 0:
        sys.stderr.write(f"error: {error}\n")
    return error.code
