"""Entry point of every worker: `torchrun … elastic/run.py [JOB] [key=value …]` or `-m elastic.run`.

Started as a script, Python puts this folder first on sys.path, where its rooms would hide other
modules: the first act, with os and sys alone, is to put the project's root there in its place.
"""

import os
import sys


def fix_path() -> None:
    """Take this folder off sys.path; make the project's packages importable from wherever it lies."""
    here = os.path.dirname(os.path.realpath(__file__))  # noqa: PTH120  # pathlib would search `here` first
    root = os.path.dirname(here)  # noqa: PTH120
    sys.path[:] = [path for path in sys.path if os.path.realpath(path or ".") != here]
    if root not in [os.path.realpath(path or ".") for path in sys.path]:
        sys.path.insert(0, root)


if __name__ == "__main__":
    fix_path()
    from elastic.relay import hand_over
    from elastic.streams import hold_streams

    hold_streams()
    hand_over(os.environ)  # ends with the worker that a warm process runs in our place, or returns
    from elastic.entry import main
    from elastic.faults import leave

    leave(main(sys.argv[1:], os.environ))
