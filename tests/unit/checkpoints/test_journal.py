import json
import logging
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import pytest

from checkpoints.backend_memory import MemoryBackend
from checkpoints.errors import StoreFullError, TransientStoreError
from checkpoints.journal import Journal, read_audit, read_events
from checkpoints.layout import new_token
from checkpoints.store import Store, open_store


@pytest.fixture(params=["local", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return open_store(str(tmp_path) if request.param == "local" else f"memory://{new_token()}/run")


class Broken(MemoryBackend):
    """A store that cannot be written while it is broken."""

    broken = True
    attempts = 0
    asking: ClassVar[set[int]] = set()

    def write(self, name: str, chunks: Sequence[memoryview]) -> None:
        self.attempts += 1
        self.asking.add(threading.get_ident())
        if self.broken:
            raise ConnectionResetError("down")
        super().write(name, chunks)


def broken_store() -> tuple[Store, Broken]:
    url = f"memory://{new_token()}/run"
    backend = Broken(url, {})
    return Store(url, backend, retry_s=0.01), backend


def test_events_are_read_back_in_order_with_time_and_generation(store: Store) -> None:
    with Journal(store, 7, clock=lambda: 1234.56789) as journal:
        journal.event("start", world_size=4)
        journal.event("step", step=1, loss=0.5)
    assert list(read_events(store)) == [
        {"event": "start", "time": 1234.568, "generation": 7, "world_size": 4},
        {"event": "step", "time": 1234.568, "generation": 7, "step": 1, "loss": 0.5},
    ]
    assert list(read_events(store, 7)) == list(read_events(store))
    assert list(read_events(store, 8)) == []


def test_audit_lines_are_written_as_given(store: Store) -> None:
    line = {"generation": 3, "epoch": 0, "step": 117, "rank": 1, "indices": [5, 2]}
    skipped = {**line, "indices": [], "skipped": True}
    with Journal(store, 3, rank=1) as journal:
        journal.audit(line)
        journal.audit(skipped)
    assert list(read_audit(store)) == [line, skipped]
    assert list(read_audit(store, 4)) == []
    (name,) = store.list("audit/")
    assert name.startswith("audit/000003.rank1")
    assert name.endswith(".jsonl")
    assert json.loads(store.get(name).splitlines()[0]) == line


def test_names_are_those_of_the_design(tmp_path: Path) -> None:
    local, remote = open_store(str(tmp_path)), open_store(f"memory://{new_token()}/run")
    for store in (local, remote):
        for rank in (None, 3):
            with Journal(store, 7, rank=rank) as journal:
                journal.event("x")
                journal.audit({})
    assert local.list() == [
        "audit/000007.jsonl",
        "audit/000007.rank3.jsonl",
        "journal/000007.jsonl",
        "journal/000007.rank3.jsonl",
    ]
    assert remote.list() == [
        "audit/000007-000001.jsonl",
        "audit/000007.rank3-000001.jsonl",
        "journal/000007-000001.jsonl",
        "journal/000007.rank3-000001.jsonl",
    ]


def test_generations_ranks_and_parts_are_read_in_the_order_of_numbers(store: Store) -> None:
    order = [
        "journal/000009.jsonl",
        "journal/000010-000002.jsonl",
        "journal/000010-000010.jsonl",
        "journal/000010-1000000.jsonl",
        "journal/000010.rank2.jsonl",
        "journal/000010.rank10.jsonl",
        "journal/999999.jsonl",
        "journal/1000000.jsonl",
    ]
    for number, name in enumerate(order):
        store.put(name, b'{"n": %d}\n' % number)
    store.put("journal/notes.txt", b'{"n": 99}\n')
    assert [event["n"] for event in read_events(store)] == list(range(len(order)))
    assert [event["n"] for event in read_events(store, 10)] == [1, 2, 3, 4, 5]


def test_what_json_cannot_say_is_written_readably(store: Store) -> None:
    with Journal(store, 1) as journal:
        journal.event("step", loss=math.nan, limit=math.inf, path=Path("x"), text="ü\udc80")
    (event,) = read_events(store)
    assert (event["loss"], event["limit"], event["path"], event["text"]) == (
        "nan",
        "inf",
        "x",
        "ü\udc80",
    )


def test_torn_and_foreign_lines_are_left_out(store: Store) -> None:
    store.put("journal/000001.jsonl", b'{"n": 1}\n\xff\xfe\n[1]\n{"n": 2}\n{"n": 3, "te')
    assert [event["n"] for event in read_events(store)] == [1, 2]
    store.put("journal/000002.jsonl", b'{"n": 4}\n{"n": 5}')
    assert [event["n"] for event in read_events(store, 2)] == [4, 5]


def test_long_files_are_read_piece_by_piece(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("checkpoints.journal._READ_BYTES", 7)
    store.put("journal/000001.jsonl", b"".join(b'{"n": %d}\n' % n for n in range(50)))
    assert [event["n"] for event in read_events(store)] == list(range(50))


def test_after_close_lines_are_left_out_and_nothing_is_raised(store: Store) -> None:
    journal = Journal(store, 1)
    journal.event("x")
    journal.close()
    journal.close()
    journal.event("y")
    assert [event["event"] for event in read_events(store)] == ["x"]


def test_lines_of_many_threads_stay_whole(store: Store) -> None:
    with Journal(store, 1) as journal:

        def write(number: int) -> None:
            for step in range(100):
                journal.event("step", thread=number, step=step, filler="x" * step)

        threads = [threading.Thread(target=write, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    found = {(event["thread"], event["step"]) for event in read_events(store)}
    assert len(found) == 800


# --------------------------------------------------------------------------- files that can grow
def test_a_line_is_in_the_file_before_the_call_returns_and_survives_a_kill(tmp_path: Path) -> None:
    script = (
        "import os, signal, sys\n"
        "from checkpoints.journal import Journal\n"
        "from checkpoints.store import open_store\n"
        "journal = Journal(open_store(sys.argv[1]), 1, rank=0)\n"
        "for step in range(1000): journal.audit({'step': step})\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    ended = subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=False)
    assert ended.returncode == -signal.SIGKILL
    lines = list(read_audit(open_store(str(tmp_path))))
    assert [line["step"] for line in lines] == list(range(1000))


def test_a_line_costs_one_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, writes = os.write, []

    def counted(fd: int, data: bytes) -> int:
        writes.append(len(data))
        return real(fd, data)

    journal = Journal(open_store(str(tmp_path)), 1)
    journal.event("first")
    monkeypatch.setattr(os, "write", counted)
    journal.event("second")
    journal.event("third")
    monkeypatch.undo()
    assert len(writes) == 2
    journal.close()


def test_a_full_disk_costs_no_line_and_does_not_stop_the_caller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_store(str(tmp_path))
    journal = Journal(store, 1)
    journal.event("before")
    real = os.write
    room = 30

    def nearly_full(fd: int, data: bytes | memoryview) -> int:
        nonlocal room
        if not room:
            raise OSError(28, "No space left on device")
        done = real(fd, data[:room])
        room -= done
        return done

    monkeypatch.setattr(os, "write", nearly_full)
    with caplog.at_level(logging.WARNING):
        journal.event("torn", filler="x" * 50)
        journal.event("waiting")
        with pytest.raises(StoreFullError, match=r"journal/000001\.jsonl: lines wait"):
            journal.flush()
    assert len(caplog.records) == 1
    monkeypatch.undo()
    journal.event("after")
    journal.flush(durable=True)
    assert [event["event"] for event in read_events(store)] == [
        "before",
        "torn",
        "waiting",
        "after",
    ]
    journal.close()


# --------------------------------------------------------------------------------- numbered parts
def test_flush_sends_a_part_and_nothing_sends_none() -> None:
    store = open_store(f"memory://{new_token()}/run")
    with Journal(store, 1, flush_s=1000) as journal:
        journal.event("a")
        journal.event("b")
        assert store.list() == []
        journal.flush(durable=True)
        journal.flush()
        assert store.list() == ["journal/000001-000001.jsonl"]
        journal.event("c")
    assert store.list() == ["journal/000001-000001.jsonl", "journal/000001-000002.jsonl"]
    assert [event["event"] for event in read_events(store)] == ["a", "b", "c"]


def wait_for_names(store: Store, count: int) -> None:
    deadline = time.monotonic() + 20
    while len(store.list()) < count:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_old_lines_are_sent_in_the_background() -> None:
    store = open_store(f"memory://{new_token()}/run")
    journal = Journal(store, 1, flush_s=0.05)
    journal.event("a")
    wait_for_names(store, 1)
    journal.event("b")
    wait_for_names(store, 2)
    assert [event["event"] for event in read_events(store)] == ["a", "b"]
    journal.close()


def test_many_lines_are_sent_in_the_background() -> None:
    store = open_store(f"memory://{new_token()}/run")
    journal = Journal(store, 1, flush_s=1000)
    journal.event("small")
    journal.event("large", filler="x" * (1 << 20))
    wait_for_names(store, 1)
    journal.close()


def test_a_broken_store_costs_no_line_and_never_stops_the_caller() -> None:
    store, backend = broken_store()
    journal = Journal(store, 1, flush_s=0.05)
    journal.event("a")
    deadline = time.monotonic() + 20
    while not backend.attempts:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    journal.event("b")
    assert threading.get_ident() not in backend.asking  # whoever tells something waits for no store
    with pytest.raises(TransientStoreError):
        journal.flush()
    backend.broken = False
    journal.event("c")
    journal.flush()
    assert [event["event"] for event in read_events(store)] == ["a", "b", "c"]
    journal.close()


def test_closing_before_a_broken_store_ends_in_bounded_time_and_is_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store, _ = broken_store()
    journal = Journal(store, 1, flush_s=1000)
    journal.event("a")
    with caplog.at_level(logging.WARNING, logger="checkpoints.journal"):
        journal.close()
    assert "lines wait" in caplog.text
