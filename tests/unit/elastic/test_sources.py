import os
import sys
from pathlib import Path
from types import ModuleType

from elastic.sources import changed_file, files_of, stamps_of


def test_a_file_that_changed_appeared_or_went_is_named(tmp_path: Path) -> None:
    kept, changed, late, gone = (tmp_path / name for name in ("kept", "changed", "late", "gone"))
    for path in (kept, changed, gone):
        path.write_text("1")
    stamps = stamps_of(map(str, (kept, changed, late, gone)))
    assert changed_file(stamps) is None
    gone.unlink()
    assert changed_file(stamps) == str(gone)
    gone.write_text("1")
    os.utime(gone, ns=(0, stamps[str(gone)][1]))  # type: ignore[index]  # it was there
    late.write_text("1")
    assert changed_file(stamps) == str(late)
    late.unlink()
    changed.write_text("22")
    assert changed_file(stamps) == str(changed)


def test_a_change_that_keeps_the_size_is_seen_by_its_time(tmp_path: Path) -> None:
    path = tmp_path / "job.py"
    path.write_text("a = 1")
    os.utime(path, ns=(0, 10**18))
    stamps = stamps_of([str(path)])
    path.write_text("a = 2")
    assert changed_file(stamps) == str(path)


def test_files_of_modules_of_every_kind() -> None:
    odd = ModuleType("odd")
    odd.__file__ = None
    modules = {"os": os, "again": os, "sys": sys, "odd": odd}
    assert files_of(modules) == [os.__file__]
