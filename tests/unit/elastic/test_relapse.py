"""When a node gives up: what repeats without progress, and what does not count."""

from pathlib import Path
from typing import Any

import pytest

from elastic.fault import Fault
from elastic.relapse import find_relapse, remember


def fault(
    step: int = 5, kind: Any = "killed", signal: str | None = "SIGSEGV", **more: Any
) -> Fault:
    return Fault(
        rank=1, local_rank=1, host="here", step=step, phase="step", kind=kind, signal=signal, **more
    )


HUNG = fault(kind="hung", signal="SIGKILL", message="no sign of life for 9 s")
KILLED = fault(signal="SIGKILL")
AT_START = fault(0, signal="SIGKILL")
NO_MEMORY = fault(0, signal="SIGKILL", message="out of memory: the kernel ended a process")
RAISED = fault(kind="exception", signal=None, type="ValueError")


@pytest.mark.parametrize(
    ("history", "told"),
    [
        ([fault()] * 2, None),
        (
            [fault()] * 3,
            "3 times in a row at step 5, phase 'step', on here: worker killed (SIGSEGV",
        ),
        ([fault(), fault(6), fault()], None),
        ([fault(), fault(signal="SIGBUS"), fault()], None),
        (
            [HUNG] * 3,
            "3 times in a row at step 5, phase 'step', on here: worker hung (rank 1, step 5",
        ),
        ([KILLED] * 4, None),
        ([KILLED] * 5, "5 times in a row at step 5"),
        ([AT_START] * 20, None),
        ([NO_MEMORY] * 3, "3 times in a row at step 0"),
        ([fault(), AT_START, fault(), AT_START, fault()], "3 times in a row at step 5"),
        ([fault(), fault(), fault(), AT_START], None),
        ([RAISED] * 3, None),
        (
            [fault(9), *[fault(s) for s in (7, 8, 9, 7, 8, 9, 7, 8, 6)]],
            "10 faults in a row on here",
        ),
        ([fault(9), *[fault(s) for s in (7, 8, 9, 7, 8, 9, 7, 8, 10)]], None),
    ],
)
def test_only_what_repeats_without_progress_ends_a_node(
    history: list[Fault], told: str | None
) -> None:
    found = find_relapse(history)
    if told is None:
        assert found is None
    else:
        assert found is not None
        assert told in found
        assert found.startswith("no progress: ")
        assert found.endswith("; mend it and start again")


def test_what_ended_workers_is_known_as_long_as_their_agent_lives(tmp_path: Path) -> None:
    echo = fault(kind="collective", signal=None)
    assert remember(tmp_path, [fault(1), fault(1, signal="SIGBUS"), echo]) == [fault(1)]
    assert remember(tmp_path, [echo]) == [fault(1)]
    for step in range(2, 30):
        known = remember(tmp_path, [fault(step)])
    assert [one.step for one in known] == list(range(10, 30))
    (tmp_path / "faults.jsonl").write_text("torn")
    assert remember(tmp_path, [fault(3)]) == [fault(3)]
