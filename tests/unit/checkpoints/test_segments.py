"""Shared memory: all its pages are there or it is an error; names tell whose it is; the dead are swept."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from checkpoints import segments
from checkpoints.processes import process_start, this_process
from checkpoints.segments import Segment, check_room, segment_path, segments_of, sweep


def test_what_one_process_writes_another_reads() -> None:
    segment = Segment.make(10_000)
    segment.view(4096, 5)[:] = b"hello"
    read = "import mmap, sys; print(mmap.mmap(int(sys.argv[1]), 0)[4096:4101])"
    os.set_inheritable(segment.fd, True)
    done = subprocess.run(
        [sys.executable, "-c", read, str(segment.fd)],
        pass_fds=[segment.fd],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "b'hello'"
    assert segment.size_bytes == 12288
    segment.close()


def test_a_named_segment_is_found_by_its_owner_and_run() -> None:
    me = this_process()
    path = segment_path(me, "RUN-1", 3)
    segment = Segment.make(4096, path)
    try:
        assert segments_of(me) == [path]
        assert segments_of(me, "run1") == [path]
        assert segments_of(me, "run2") == []
        assert Segment.open(path).size_bytes == 4096
        assert path.stat().st_mode & 0o777 == 0o600
        with pytest.raises(FileExistsError):
            Segment.make(4096, path)
    finally:
        segment.unlink()
        segment.close()


def test_only_what_the_dead_left_is_swept() -> None:
    child = subprocess.Popen(["/bin/sleep", "100"])
    start = process_start(child.pid)
    assert start is not None
    other = replace(this_process(), pid=child.pid, start=start)
    path = segment_path(other, "run", 1)
    mine = Segment.make(4096, segment_path(this_process(), "run", 1))
    Segment.make(4096, path).close()
    try:
        assert path not in sweep()
        child.kill()
        child.wait()
        assert path in sweep()
        assert not path.exists()
        assert mine.path is not None
        assert mine.path.exists()
    finally:
        mine.unlink()
        mine.close()
        path.unlink(missing_ok=True)


def test_more_than_there_is_room_for_is_an_error_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(segments, "_mount_room", lambda: 1 << 20)
    path = segment_path(this_process(), "large", 1)
    with pytest.raises(OSError, match=r"shm has room for 1 MiB .* expected 2 MiB"):
        Segment.make(2 << 20, path)
    assert not path.exists()
    check_room(2 << 20, named=False)


def test_a_full_mount_is_no_sigbus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mount = tmp_path / "small"
    mount.mkdir()
    made = subprocess.run(
        ["/bin/mount", "-t", "tmpfs", "-o", "size=1m", "small", str(mount)], check=False
    )
    if made.returncode:
        pytest.skip("a file system cannot be mounted here")
    try:
        monkeypatch.setattr(segments, "check_room", lambda *_args, **_kwargs: None)
        with pytest.raises(OSError, match="No space left"):
            Segment.make(4 << 20, mount / "segment")
        assert list(mount.iterdir()) == []
    finally:
        subprocess.run(["/bin/umount", str(mount)], check=True)


def test_the_limit_of_a_container_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text(str(200 << 20))
    (tmp_path / "memory.current").write_text(str(100 << 20))
    (tmp_path / "memory.stat").write_text(f"anon 5\ninactive_file {10 << 20}\n")
    monkeypatch.setattr(segments, "_cgroups", lambda: iter([tmp_path]))
    check_room(45 << 20, named=False)
    with pytest.raises(OSError, match=r"memory limit of this container has room for 46 MiB"):
        check_room(60 << 20, named=False)
