"""Loading a job: every mistake is one clear line, told before anything is built."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from jobs import Job, JobError, load_job
from jobs.digits import Digits

ROOT = Path(__file__).parents[3]

GOOD = """
from jobs import Job


class Whole(Job):
    def __init__(self, size, rate=0.1, *, name="x"):
        self.size, self.rate, self.name = size, rate, name

    def dataset(self): ...
    def model(self): ...
    def optimizer(self, model): ...
    def loss(self, model, batch): ...


class Open(Whole):
    def __init__(self, **anything):
        self.anything = anything


class Typed(Whole):
    def __init__(
        self, rate: float = 0.1, size: int | float | None = 1, sizes: list[int] = [], name: str = ""
    ):
        pass


class Phases(Job):
    def dataset(self): ...
    def model(self): ...
    def optimizer(self, model): ...
    def losses(self): ...


class Lacking(Job):
    def data_set(self): ...
    def model(self): ...
    def loss(self, model, batch): ...


class Lossless(Job):
    def dataset(self): ...
    def model(self): ...
    def optimizer(self, model): ...


class Other: ...


def function(): ...
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that is the working directory; what is imported from it is forgotten again."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    known = set(sys.modules)
    (tmp_path / "my_training.py").write_text(GOOD)
    yield tmp_path
    for name in set(sys.modules) - known:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def refusal(spec: str, **args: object) -> str:
    """The one line that a mistake gives."""
    with pytest.raises(JobError) as caught:
        load_job(spec, args)
    line = str(caught.value)
    assert "\n" not in line
    return line


@pytest.mark.parametrize(
    "form", ["my_training.py:Whole", "./my_training.py:Whole", "my_training:Whole"]
)
def test_a_job_is_loaded_from_a_file_and_from_a_module(folder: Path, form: str) -> None:
    job = load_job(form, {"size": 3, "name": "y"})
    assert isinstance(job, Job)
    assert (job.size, job.rate, job.name) == (3, 0.1, "y")  # type: ignore[attr-defined]  # made above
    assert type(job).__module__ == "my_training"
    assert sys.path[-1] == str(folder)


def test_shipped_jobs_are_loaded_by_their_dotted_names() -> None:
    job = load_job("jobs.digits:Digits", {"width": 8})
    assert isinstance(job, Digits)
    assert job.width == 8


def test_a_package_in_the_working_directory_is_found(folder: Path) -> None:
    (folder / "mypackage").mkdir()
    (folder / "mypackage" / "train.py").write_text(GOOD)
    assert isinstance(load_job("mypackage.train:Whole", {"size": 1}), Job)


def test_a_file_may_import_what_lies_beside_it(folder: Path) -> None:
    (folder / "deep").mkdir()
    (folder / "deep" / "my_settings.py").write_text("SIZE = 7\n")
    (folder / "deep" / "my_other.py").write_text(f"from my_settings import SIZE\n{GOOD}")
    assert isinstance(load_job("deep/my_other.py:Whole", {"size": 1}), Job)


def test_a_folder_is_appended_so_that_nothing_known_is_hidden(folder: Path) -> None:
    (folder / "json.py").write_text("raise ValueError('hidden')\n")
    load_job("my_training.py:Whole", {"size": 1})
    before = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys; sys.path.pop(0); from jobs import load_job\n"
            "load_job('my_training.py:Whole', {'size': 1}); import json; print(json.__file__)",
        ],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=True,
        capture_output=True,
        text=True,
    )
    assert str(folder) not in before.stdout


@pytest.mark.usefixtures("folder")
def test_a_job_with_losses_needs_no_loss_and_one_with_open_arguments_takes_all() -> None:
    assert load_job("my_training.py:Phases")
    job = load_job("my_training.py:Open", {"a": 1})
    assert job.anything == {"a": 1}  # type: ignore[attr-defined]  # made above


@pytest.mark.parametrize("spec", ["", "Whole", "my_training.py", ":Whole", "a:b c", "my_training:"])
@pytest.mark.usefixtures("folder")
def test_what_is_no_spec_is_refused(spec: str) -> None:
    assert refusal(spec) == (
        f"job: found {spec!r}, expected package.module:Class or path/to/file.py:Class"
    )


def test_c48_a_missing_file_is_one_line_with_the_nearest(folder: Path) -> None:
    line = refusal("my_trainig.py:Whole")
    assert line == (
        f"job: my_trainig.py:Whole: no file {folder}/my_trainig.py; did you mean 'my_training.py'?"
    )
    assert refusal("no/where/x.py:Whole").endswith(f"(there is no folder {folder}/no/where)")


def test_a_file_that_python_cannot_import_by_name_is_refused(folder: Path) -> None:
    (folder / "my-job.py").write_text(GOOD)
    assert "found the file name 'my-job.py'" in refusal("my-job.py:Whole")
    (folder / "job.txt").write_text(GOOD)
    assert "expected a .py file" in refusal("./job.txt:Whole")


def test_a_file_whose_name_is_taken_is_refused(folder: Path) -> None:
    (folder / "json.py").write_text(GOOD)
    line = refusal("json.py:Whole")
    assert re.search(r"the name 'json' is taken by .*json.*; give the file another name$", line)
    (folder / "sys.py").write_text(GOOD)
    assert "taken by a built-in module" in refusal("sys.py:Whole")


def test_a_missing_class_is_one_line_with_the_nearest_or_all(folder: Path) -> None:
    assert refusal("my_training.py:Whol").endswith("my_training.py; did you mean 'Whole'?")
    assert refusal("my_training.py:Xyz").endswith(
        "; its jobs are Lacking, Lossless, Open, Phases, Typed, Whole"
    )
    (folder / "my_empty.py").touch()
    assert refusal("my_empty.py:Xyz").endswith("my_empty.py; it holds no job")


@pytest.mark.usefixtures("folder")
def test_what_is_no_job_is_refused() -> None:
    assert "Other is a class that is not a Job; write `class Other(Job)`" in refusal(
        "my_training.py:Other"
    )
    assert "function is a function that is not a Job" in refusal("my_training.py:function")


@pytest.mark.usefixtures("folder")
def test_a_missing_method_is_one_line_with_what_was_written_instead() -> None:
    assert refusal("my_training.py:Lacking") == (
        "job: my_training.py:Lacking: Lacking lacks dataset(), optimizer()"
        " ('data_set' is close to 'dataset')"
    )
    assert refusal("my_training.py:Lossless").endswith("Lossless lacks loss()")
    assert "Job lacks dataset(), model(), optimizer(), loss()" in refusal("jobs.job:Job")


@pytest.mark.usefixtures("folder")
def test_an_unknown_argument_is_one_line_with_the_nearest_or_all() -> None:
    assert refusal("my_training.py:Whole", size=1, rat=2) == (
        "args.rat: Whole (my_training.py:Whole) has no such argument; did you mean 'rate'?"
    )
    assert refusal("my_training.py:Whole", size=1, xyz=2).endswith("; it knows size, rate, name")
    assert refusal("my_training.py:Phases", xyz=2).endswith("; it takes no arguments")


@pytest.mark.usefixtures("folder")
def test_text_where_a_number_is_meant_is_one_line() -> None:
    assert refusal("my_training.py:Typed", rate="abc") == (
        "args.rate: found 'abc', expected a number for Typed (my_training.py:Typed)"
    )
    assert refusal("my_training.py:Typed", size=[1]).startswith(
        "args.size: found [1], expected a number or an integer for"
    )
    assert isinstance(
        load_job("my_training.py:Typed", {"rate": 1, "size": None, "sizes": [1], "name": "abc"}),
        Job,
    )


@pytest.mark.usefixtures("folder")
def test_a_missing_argument_is_one_line() -> None:
    assert refusal("my_training.py:Whole") == (
        "args.size: not set, but Whole (my_training.py:Whole) needs size; add it under args"
    )


@pytest.mark.usefixtures("folder")
def test_a_missing_package_is_one_line_that_offers_the_file_form() -> None:
    assert refusal("nosuch.train:Whole") == (
        "job: nosuch.train:Whole: no package 'nosuch' on the path; for a file say nosuch/train.py:Whole"
    )
    assert "'my_training' is a module, not a package" in refusal("my_training.more:Whole")


def test_a_jobs_folder_of_the_users_own_is_told_that_ours_hides_it(folder: Path) -> None:
    (folder / "jobs").mkdir()
    (folder / "jobs" / "mine.py").write_text(GOOD)
    assert refusal("jobs.mine:Whole") == (
        f"job: jobs.mine:Whole: no module 'mine' in 'jobs', which is {ROOT}/jobs; "
        "for a file of your own say jobs/mine.py:Whole"
    )
    assert isinstance(load_job("jobs/mine.py:Whole", {"size": 1}), Job)
    assert "did you mean 'digits'?" in refusal("jobs.digit:Digits")


def test_the_users_own_exceptions_pass_with_their_tracebacks(folder: Path) -> None:
    (folder / "my_broken.py").write_text("1 / 0\n")
    with pytest.raises(ZeroDivisionError):
        load_job("my_broken.py:Whole")
    (folder / "my_importer.py").write_text("import nosuchlibrary\n")
    for spec in ("my_importer.py:Whole", "my_importer:Whole"):
        with pytest.raises(ModuleNotFoundError, match="nosuchlibrary"):
            load_job(spec)


@pytest.mark.usefixtures("folder")
def test_a_missing_file_is_told_without_the_cost_of_torch() -> None:
    code = (
        "import sys; from jobs import JobError, load_job\n"
        "try: load_job('none.py:Whole')\n"
        "except JobError: print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=True,
        capture_output=True,
        text=True,
    )
    assert done.stdout == "False\n"
