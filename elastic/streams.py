"""Standard streams that nobody gave us, in place before anything else is opened.

A process that was started with stdout closed (`>&-`) would get a file or a connection of its own as descriptor 1, and
whatever is printed would go into that. Imports what costs nothing.
"""

import os
import sys

__all__ = ["hold_streams"]


def hold_streams() -> None:
    """Open /dev/null for each standard stream that is closed. As early as can be; main thread."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free descriptor: this one
            os.set_inheritable(number, True)
        if getattr(sys, name) is None:
            # Not by its number, which may be a file's since.
            mode = "w" if number else "r"
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 - for good
