"""What a process that a worker starts beside itself may inherit: its three streams, and what is named."""

import os

__all__ = ["close_inherited"]


def close_inherited(*kept: int) -> list[tuple[int, int]]:
    """What closes the descriptors that a child would inherit: a peer would take it for a worker by its sockets."""
    found = []
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - names alone
        number = int(name)
        try:
            inherited = os.get_inheritable(number)
        except OSError:
            continue  # the listing's own
        if number > 2 and number not in kept and inherited:
            found.append((os.POSIX_SPAWN_CLOSE, number))
    return found
