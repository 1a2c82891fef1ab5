"""Calls that block in native code, run beside the main thread so that signals and a bound still count.

A Python signal handler runs only when the main thread is in Python code; a native wait on a peer that is gone would
outlast the 30 seconds that torchrun gives a worker to leave.
"""

import threading
import time
from collections.abc import Callable
from typing import TypeVar

__all__ = ["run_bounded"]

T = TypeVar("T")

_TICK_S = 0.1


def run_bounded(call: Callable[[], T], limit_s: float | None = None) -> T:
    """Run a call in a thread of its own and wait for it in Python code; its errors are raised here.

    A call that outlasts the limit is left behind in its thread, which does not hold up the end of the process.

    Raises:
        TimeoutError: Raised when the limit is over.
    """
    outcome: list[T] = []
    trouble: list[BaseException] = []

    def run() -> None:
        try:
            outcome.append(call())
        except BaseException as error:  # noqa: BLE001 - handed to the caller's thread
            trouble.append(error)

    thread = threading.Thread(target=run, name="bounded", daemon=True)
    thread.start()
    deadline = None if limit_s is None else time.monotonic() + limit_s
    while thread.is_alive():
        left_s = _TICK_S if deadline is None else min(_TICK_S, deadline - time.monotonic())
        if left_s <= 0:
            raise TimeoutError(f"no answer within {limit_s:.0f} s")
        thread.join(left_s)
    if trouble:
        raise trouble[0]
    return outcome[0]
