"""A node's word that its world is broken: its agent knows that a node is gone, and its workers cannot.

A link that is cut resets no connection, so that workers would wait in a collective for as long as it may last. The agent,
whose rendezvous has seen the node go silent, leaves word in its folder; the node's watcher reads it. Imports what costs
next to nothing: the watcher is a small process.
"""

import os
import time

__all__ = ["broken_at", "note_broken"]

_NAME = "broken"


def note_broken(folder: str) -> None:
    """Leave word, in an agent's folder, that the world of its workers has lost a node just now.

    Raises:
        OSError: The folder cannot be written to.
    """
    with open(f"{folder}/{_NAME}.new", "w", encoding="ascii") as file:
        file.write(repr(time.monotonic()))
    os.replace(f"{folder}/{_NAME}.new", f"{folder}/{_NAME}")  # noqa: PTH105 - no pathlib here


def broken_at(folder: str) -> float:
    """When word was left, by the machine's monotonic clock; 0 where none was."""
    try:
        with open(f"{folder}/{_NAME}", encoding="ascii") as file:
            return float(file.read())
    except (OSError, ValueError):
        return 0.0
