"""Which workers hang, by what they said last: the rules alone."""

from typing import Any

import pytest

from elastic.beats import BEAT, BEAT_AT, HEAD, MAGIC, PLACE, PLACE_AT, PULSE, PULSE_AT, SIZE, Pulse
from elastic.hanging import Seen, find_hung
from elastic.stacks import frames_of, in_collective, where_of


def worker(rank: int = 0, idle: float = 0.0, **more: Any) -> Seen:
    data = bytearray(SIZE)
    HEAD.pack_into(data, 0, MAGIC, 1, 2, rank, rank, 7, 0, 0.0, b"")
    BEAT.pack_into(data, BEAT_AT, more.get("step", 5), 0.0)
    PULSE.pack_into(
        data, PULSE_AT, more.get("number", 1), more.get("bound", 10.0), more.get("wait", 0.0), 0
    )
    PLACE.pack_into(data, PLACE_AT, 0, int(more.get("whole", True)))
    seen = Seen(Pulse("slot", bytes(data)))
    seen.idle_s, seen.state, seen.excused = idle, more.get("state", ""), more.get("excused", False)
    return seen


@pytest.mark.parametrize(
    ("workers", "ranks"),
    [
        ([worker(0, 9), worker(1, 9)], []),
        ([worker(0, 11), worker(1, 9)], [0]),
        ([worker(0, 11), worker(1, 12)], [1, 0]),
        ([worker(0, 99, bound=0.0)], []),
        ([worker(0, 11, state="traced")], []),
        # Who waits is not accused while another is stuck, or while nobody knows why.
        ([worker(0, 99, wait=60.0), worker(1, 11)], [1]),
        ([worker(0, 99, wait=60.0), worker(1, 9)], []),
        ([worker(0, 99, excused=True), worker(1, 11)], [1]),
        ([worker(0, 99, wait=60.0, state="T"), worker(1, 99, wait=60.0)], [0]),
        # All of the world waits: those who are behind, or all.
        ([worker(0, 11, wait=60.0), worker(1, 11, wait=60.0)], [0, 1]),
        ([worker(0, 11, wait=60.0), worker(1, 9, wait=60.0)], []),
        ([worker(0, 11, wait=60.0, step=6), worker(1, 11, wait=60.0)], [1]),
        ([worker(0, 11, wait=60.0), worker(1, 11, bound=0.0)], []),
        # Elsewhere is more of the world: only a wait that has outlasted its own time-out.
        ([worker(0, 119, wait=60.0, whole=False), worker(1, 99, wait=60.0, whole=False)], []),
        ([worker(0, 121, wait=60.0, whole=False), worker(1, 99, wait=60.0, whole=False)], [0]),
        ([worker(0, 11, whole=False), worker(1, 99, wait=60.0, whole=False)], [0]),
    ],
)
def test_who_hangs(workers: list[Seen], ranks: list[int]) -> None:
    assert [seen.pulse.rank for seen in find_hung(workers)] == ranks


def test_idle_time_is_what_the_watcher_saw_pass_since_the_last_beat() -> None:
    seen = worker(number=1)
    for _ in range(3):
        seen.look(worker(number=1).pulse, 0.5)
    assert seen.idle_s == 1.5
    seen.state, seen.excused = "T", True
    seen.look(worker(number=2).pulse, 0.5)
    assert (seen.idle_s, seen.state, seen.excused) == (0.0, "", False)


DUMP = """Thread 0x00007f1 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 982 in run

Current thread 0x00007f2 (most recent call first):
  File "/env/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 4 in barrier
  File "/usr/lib/python3.11/contextlib.py", line 7 in inner
  File "/home/me/job.py", line 12 in loss
"""


def test_a_stack_tells_the_users_line_and_whether_it_waits_in_a_collective() -> None:
    frames = frames_of(DUMP)
    assert [line for _, line, _ in frames] == [4, 7, 12]
    assert in_collective(frames)
    assert not in_collective(frames[2:])
    assert where_of(frames, ("/usr/lib/python3.11",)) == "/home/me/job.py:12"
    assert where_of(frames[:2], ("/usr/lib",)).endswith("distributed_c10d.py:4")
    assert where_of([], ()) == ""
    # One that waits for its loader worker is where that one is.
    assert where_of(frames[:2], ("/usr/lib",), frames) == "/home/me/job.py:12"
