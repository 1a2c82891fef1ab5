import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from checkpoints.errors import PermanentStoreError, StoreFullError
from checkpoints.store import open_store
from tests.stores.contract import CompareAndSetContract, Opener

RACER = """
import sys, time
from pathlib import Path
from checkpoints.store import open_store
store = open_store(sys.argv[1])
while not Path(sys.argv[3]).exists():
    pass
print(sum(store.put_new(f"race/{n}", f"{sys.argv[2]} {n}".encode()) for n in range(50)))
"""


class TestLocalStore(CompareAndSetContract):
    large_bytes = 64 << 20

    @pytest.fixture
    def open_one(self, tmp_path: Path) -> Opener:
        return lambda: open_store(str(tmp_path / "some" / "run"))

    def test_racing_processes_have_exactly_one_winner_each(self, tmp_path: Path) -> None:
        gate = tmp_path / "gate"
        racers = [
            subprocess.Popen(
                [sys.executable, "-c", RACER, str(tmp_path / "run"), str(number), str(gate)],
                stdout=subprocess.PIPE,
            )
            for number in range(6)
        ]
        time.sleep(1.0)
        gate.touch()
        wins = [int(racer.communicate(timeout=60)[0]) for racer in racers]
        assert sum(wins) == 50
        names = open_store(str(tmp_path / "run")).list()
        assert len(names) == 50

    def test_a_writer_killed_at_any_moment_leaves_the_old_or_the_new(self, tmp_path: Path) -> None:
        script = (
            "import sys; from checkpoints.store import open_store; s = open_store(sys.argv[1])\n"
            "n = 0\n"
            "while True:\n"
            "    n += 1; s.put('x', [bytes([n % 251]) * 300_000] * 10); print(n, flush=True)\n"
        )
        store = open_store(str(tmp_path))
        for number in range(5):
            writer = subprocess.Popen(
                [sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE
            )
            assert writer.stdout is not None
            writer.stdout.readline()
            time.sleep(0.01 * number)
            writer.send_signal(signal.SIGKILL)
            writer.communicate()
            data = store.get("x")
            assert len(data) == 3_000_000
            assert data == data[:1] * 3_000_000
        assert store.list() == ["x"]

    def test_a_torch_free_start_needs_no_fsspec(self, tmp_path: Path) -> None:
        script = (
            "import sys, checkpoints.generations, checkpoints.journal, checkpoints.options\n"
            "from checkpoints.store import open_store\n"
            "open_store(sys.argv[1]).put('x', b'1')\n"
            "print(sorted({'torch', 'fsspec', 's3fs', 'numpy', 'asyncio.events'} & set(sys.modules)))\n"
        )
        run = [sys.executable, "-c", script, str(tmp_path)]
        loaded = subprocess.run(run, capture_output=True, text=True, check=True).stdout
        assert "torch" not in loaded
        assert "fs" not in loaded
        assert "numpy" not in loaded

    def test_file_urls_and_paths_are_the_same_store(self, tmp_path: Path) -> None:
        open_store(f"file://{tmp_path}").put("x", b"1")
        assert open_store(str(tmp_path)).get("x") == b"1"

    def test_a_relative_path_stays_where_it_was_when_the_job_changes_its_folder(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        store = open_store("runs/digits")
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir(tmp_path / "elsewhere")
        store.put("x", b"1")
        assert (tmp_path / "runs" / "digits" / "x").read_bytes() == b"1"

    def test_a_file_where_the_folder_should_be_is_told(self, tmp_path: Path) -> None:
        (tmp_path / "run").write_text("not a folder")
        with pytest.raises(PermanentStoreError, match=r"run: check failed: .*folder"):
            open_store(str(tmp_path / "run")).check()

    def test_a_folder_that_cannot_be_read_is_not_taken_for_empty(self, tmp_path: Path) -> None:
        (tmp_path / "checkpoints").write_text("not a folder")
        store = open_store(str(tmp_path))
        with pytest.raises(PermanentStoreError):
            store.children("checkpoints")
        with pytest.raises(PermanentStoreError):
            store.list("checkpoints/")

    def test_lines_appended_by_two_writers_stay_whole(self, tmp_path: Path) -> None:
        store = open_store(str(tmp_path))
        assert store.can_append
        first, second = store.appender("j/x.jsonl"), store.appender("j/x.jsonl")
        for number in range(100):
            (first, second)[number % 2].write(f"{number}\n".encode())
        first.sync()
        first.close()
        first.close()
        second.close()
        store.append("j/x.jsonl", b"100\n")
        assert [int(line) for line in store.get("j/x.jsonl").splitlines()] == list(range(101))

    def test_c31_a_full_disk_leaves_the_old_object_and_no_part_files(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store = open_store(str(tmp_path))
        store.put("x", b"old")

        def full(*_: object) -> int:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "writev", full)
        with pytest.raises(StoreFullError, match="full"):
            store.put("x", b"new")
        monkeypatch.undo()
        assert store.get("x") == b"old"
        assert [path.name for path in tmp_path.iterdir()] == ["x"]

    def test_short_writes_are_continued(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store = open_store(str(tmp_path))
        real = os.writev

        def seven_bytes(fd: int, buffers: list[memoryview]) -> int:
            return real(fd, [buffers[0][:7]])

        monkeypatch.setattr(os, "writev", seven_bytes)
        store.put("x", [b"0123456789", b"", b"abc", b"defghijklmnopq"])
        assert store.get("x") == b"0123456789abcdefghijklmnopq"

    def test_without_hard_links_creation_is_exclusive_all_the_same(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def no_links(*_: object) -> None:
            raise OSError(95, "Operation not supported")

        monkeypatch.setattr(Path, "hardlink_to", no_links)
        store = open_store(str(tmp_path))
        assert store.put_new("x", b"one")
        assert not store.put_new("x", b"two")
        assert store.get("x") == b"one"
        assert [path.name for path in tmp_path.iterdir()] == ["x"]
