"""The reader of settings: every error one line with key, file and line, and all of it before torch is loaded."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from checkpoints.options import Interval
from elastic.config import (
    Arguments,
    describe_settings,
    list_settings,
    parse_arguments,
    read_section,
    read_settings,
    settings_json,
)
from elastic.errors import ConfigError
from elastic.options import Settings
from elastic.written import read_yaml

ROOT = Path(__file__).parents[3]
YAML = """\
job: jobs.digits:Digits
args: {lr: 1e-4, country: no}
train:
  grad_clip: 1e0
  seed: 010
  epochs: 1e1
checkpoint:
  url: runs/digits
  every: off
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a job's file."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "digits.yaml").write_text(YAML)
    return tmp_path


def read(*argv: str, root: Path = ROOT) -> Settings:
    return read_settings(parse_arguments(argv), root=root)


def error_of(*argv: str, root: Path = ROOT) -> str:
    with pytest.raises(ConfigError) as caught:
        read(*argv, root=root)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def error_in(old: str, new: str) -> str:
    """The error where one piece of the file is another."""
    assert old in YAML
    Path("digits.yaml").write_text(YAML.replace(old, new))
    return error_of("digits.yaml")


# ------------------------------------------------------------------------------------------- command line
def test_a_command_line_is_one_job_and_any_number_of_overrides() -> None:
    argv = ["a.yaml", "train.epochs=3", "--train.seed=4", "checkpoint.url=s3://b/x=y"]
    assert parse_arguments(argv) == Arguments(
        job="a.yaml", overrides=("train.epochs=3", "--train.seed=4", "checkpoint.url=s3://b/x=y")
    )


def test_a_path_with_an_equals_sign_is_a_job() -> None:
    assert parse_arguments(["runs/a=b/job.yaml"]).job == "runs/a=b/job.yaml"


@pytest.mark.parametrize("argv", [["--local-rank=1"], ["--local_rank", "1"], ["--local-rank", "1"]])
def test_the_older_launchers_local_rank_is_dropped(argv: list[str]) -> None:
    assert parse_arguments([*argv, "a.yaml"]) == Arguments(job="a.yaml")


@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_help_is_asked_for_in_both_ways(flag: str) -> None:
    assert parse_arguments(["a.yaml", flag]).help


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (
            ["--train.epochs", "3"],
            "command line: found --train.epochs without a value, expected --train.epochs=value",
        ),
        (
            ["a.yaml", "b.yaml"],
            "command line: found a second job 'b.yaml' after 'a.yaml', expected one",
        ),
    ],
)
def test_a_command_line_that_cannot_be_meant_is_one_line(argv: list[str], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_arguments(argv)
    assert str(caught.value) == text


# ------------------------------------------------------------------------------------------- values
def test_c49_numbers_and_texts_are_what_they_look_like() -> None:
    settings = read("digits.yaml", "train.grad_clip=1e-2")
    assert settings.args == {"lr": 0.0001, "country": "no"}
    assert settings.train.grad_clip == 0.01
    assert (settings.train.seed, settings.train.epochs) == (10, 10)
    assert isinstance(settings.train.epochs, int)
    assert settings.checkpoint.every.is_off


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        ("epochs: 1e1", "epochs: 0", "train.epochs: found 0, expected at least 1 (digits.yaml:6)"),
        ("epochs: 1e1", "epochs: 1.5", "train.epochs: found 1.5, expected a whole number (digits.yaml:6)"),
        ("epochs: 1e1", "epochs: no", "train.epochs: found no, expected a whole number (digits.yaml:6)"),
        ("epochs: 1e1", "epochs: '5'", "train.epochs: found the text '5', expected a whole number (digits.yaml:6)"),
        ("epochs: 1e1", "epochs:", "train.epochs: found nothing, expected a whole number (digits.yaml:6)"),
        ("epochs: 1e1", "epochs: [5]", "train.epochs: found a list, expected a whole number (digits.yaml:6)"),
        ("grad_clip: 1e0", "grad_clip: on", "train.grad_clip: found on, expected a number or null (digits.yaml:4)"),
        ("epochs: 1e1", "epoch: 3", "train.epoch: unknown key, did you mean train.epochs? (digits.yaml:6)"),
        ("job: jobs", "epochs: 3\njob: jobs", "epochs: unknown key, did you mean train.epochs? (digits.yaml:1)"),
        ("epochs: 1e1", "step_dela: 3", "train.step_dela: unknown key, expected one of epochs, "),
        ("epochs: 1e1", "drop_last: 1", "train.drop_last: found 1, expected true or false (digits.yaml:6)"),
        ("epochs: 1e1", "precision: fp8", "train.precision: found fp8, expected one of fp32, bf16, fp16 (digits.yaml:6)"),
        ("every: off", "every: 3 weeks", "checkpoint.every: found '3 weeks', expected 500 steps, 10 min, 1 epoch or off"),
        ("every: off", "max_unsaved: soon", "checkpoint.max_unsaved: found 'soon', expected a duration such as 30 s, 10 min or 2 h (digits.yaml:9)"),
        ("every: off", "keep: 0", "checkpoint.keep: found 0, expected a whole number of at least 1 (digits.yaml:9)"),
        ("  url: runs/digits\n", "", "checkpoint.url: missing, expected text (digits.yaml:7)"),
        ("checkpoint:\n  url: runs/digits\n  every: off\n", "", "checkpoint.url: missing, expected text (digits.yaml)"),
        ("job: jobs.digits:Digits\n", "", "job: missing, expected text (digits.yaml)"),
        ("args: {lr: 1e-4, country: no}", "args: 5", "args: found 5, expected a mapping (digits.yaml:2)"),
        ("args: {lr: 1e-4, country: no}", "train: [1]", "train: found twice, expected once (digits.yaml:3)"),
        ("args: {lr: 1e-4, country: no}", "eval: 5", "eval: found 5, expected a section of settings (digits.yaml:2)"),
        ("args: {lr: 1e-4, country: no}", "eval: {patience: 3}", "eval.patience: found 3 without eval.monitor, expected a metric named there too (digits.yaml:2)"),
        ("args: {lr: 1e-4, country: no}", "signals: {a: b}", "signals: found a mapping, expected a list of text (digits.yaml:2)"),
        ("args: {lr: 1e-4, country: no}", "timeout: -1", "timeout: found -1.0, expected a duration such as 30 s, 10 min or 2 h (digits.yaml:2)"),
        ("args: {lr: 1e-4, country: no}", "hang_after: 3 steps", "hang_after: found '3 steps', expected a duration such as 30 s, 10 min or 2 h, or off (digits.yaml:2)"),
    ],
)  # fmt: skip
def test_a_wrong_setting_is_one_line_with_key_file_and_line(old: str, new: str, text: str) -> None:
    assert error_in(old, new).startswith(text)


def test_a_wrong_override_names_the_command_line() -> None:
    text = "train.epochs: found 0, expected at least 1 (command line)"
    assert error_of("digits.yaml", "train.epochs=0") == text
    text = "train.epoch: unknown key, did you mean train.epochs? (command line)"
    assert error_of("digits.yaml", "--train.epoch=3") == text


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("train.grad_clip=null", None),
        ("train.grad_clip=", None),
        ("train.grad_clip=2", 2.0),
        ("train.grad_clip=0x10", 16.0),
    ],
)
def test_a_setting_that_may_be_null_can_be_unset(override: str, value: float | None) -> None:
    assert read("digits.yaml", override).train.grad_clip == value


def test_a_text_is_what_is_written() -> None:
    settings = read("digits.yaml", "eval.monitor=no", "job=on.py:Off")
    assert (settings.eval.monitor, settings.job) == ("no", "on.py:Off")


@pytest.mark.parametrize("word", ["off", "no", "false", "Off", "False"])
def test_c49_a_bare_off_is_off_wherever_the_key_knows_it(word: str) -> None:
    Path("digits.yaml").write_text(YAML.replace("every: off", f"every: {word}"))
    settings = read(
        "digits.yaml",
        f"eval.every={word}",
        f"train.reproducible={word}",
        f"checkpoint.tier.memory={word}",
    )
    assert settings.checkpoint.every.is_off
    assert settings.eval.every.is_off
    assert settings.checkpoint.tier.memory.is_off
    assert settings.train.reproducible == "off"


def test_intervals_and_durations_are_read_in_every_spelling() -> None:
    settings = read(
        "digits.yaml",
        "eval.every=1e3",
        "checkpoint.every=10min",
        "timeout=1e2",
        "checkpoint.max_unsaved=3 h",
    )
    assert settings.eval.every == Interval("steps", 1000)
    assert settings.checkpoint.every == Interval("seconds", 600)
    assert (settings.timeout, settings.checkpoint.max_unsaved) == (100.0, 10800.0)


def test_a_list_may_be_one_text_or_many() -> None:
    assert read("digits.yaml", "run.accept=train.seed").run.accept == ("train.seed",)
    assert read("digits.yaml", "run.accept=[job, dataset]").run.accept == ("job", "dataset")
    assert error_of("digits.yaml", "run.accept=train.sed").startswith(
        "run.accept: found train.sed, expected one of job, dataset, sampling, train.seed, "
    )
    assert error_of("digits.yaml", "run.accept=").startswith("run.accept: found nothing")
    assert error_of("digits.yaml", "run.accept=[[a]]").startswith(
        "run.accept: found a list, expected text"
    )


def test_an_empty_section_is_all_defaults() -> None:
    Path("digits.yaml").write_text(YAML + "loader:\naudit: ~\nargs:\n".replace("args:\n", ""))
    assert read("digits.yaml", "args=").args == {}


def test_overrides_reach_into_free_mappings() -> None:
    settings = read(
        "digits.yaml", "args.lr=1e-2", "args.deep.er=no", "checkpoint.storage_options.anon=true"
    )
    assert settings.args == {"lr": 0.01, "country": "no", "deep": {"er": "no"}}
    assert settings.checkpoint.storage_options == {"anon": True}


def test_the_reader_knows_no_sections_meaning() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Mine:
        size: int
        name: str | None = None

    assert read_section(Mine, read_yaml("size: 3", "f")) == Mine(size=3)
    with pytest.raises(ConfigError, match=r"^my\.size: missing, expected a whole number \(f\)$"):
        read_section(Mine, read_yaml("", "f"), "my.")


def test_an_error_about_a_key_that_was_left_out_has_its_sections_place() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Pair:
        low: int = 5
        high: int = 9

        def __post_init__(self) -> None:
            if self.low > self.high:
                raise ConfigError(f"high: found {self.high}, expected at least low")

    with pytest.raises(ConfigError, match=r"^pair\.high: found 9, expected at least low \(f\)$"):
        read_section(Pair, read_yaml("low: 10", "f"), "pair.")


# ------------------------------------------------------------------------------------------- JOB
@pytest.mark.parametrize("job", ["my.py:Job", "package.module:Job"])
def test_a_class_can_be_the_job(job: str) -> None:
    assert read(job, "checkpoint.url=runs/x").job == job
    assert read(f"job={job}", "checkpoint.url=runs/x").job == job


def test_a_job_that_is_neither_file_nor_class_is_one_line() -> None:
    expected = "a YAML file, path/to/file.py:Class or package.module:Class"
    assert error_of("digits") == f"JOB: found 'digits', expected {expected}"


def test_c48_a_job_file_that_does_not_exist_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "own.yaml").write_text("")
    text = (
        f"JOB: found no file nope.yaml, expected one here or in {tmp_path} (there: jobs/own.yaml)"
    )
    assert error_of("nope.yaml", root=tmp_path) == text


def test_a_job_is_looked_for_here_and_then_under_the_root(tmp_path: Path) -> None:
    root = tmp_path / "root"
    (root / "jobs").mkdir(parents=True)
    (root / "jobs" / "digits.yaml").write_text(YAML.replace("Digits", "FromRoot"))
    assert read("jobs/digits.yaml", root=root).job == "jobs.digits:FromRoot"
    assert read(root=root).job == "jobs.digits:FromRoot"
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "digits.yaml").write_text(YAML.replace("Digits", "FromHere"))
    assert read("jobs/digits.yaml", root=root).job == "jobs.digits:FromHere"


def test_a_jobs_file_may_lie_beside_its_yaml_file(tmp_path: Path) -> None:
    away = tmp_path / "away"
    away.mkdir()
    (away / "mine.py").write_text("")
    (away / "job.yaml").write_text(YAML.replace("jobs.digits:Digits", "mine.py:Mine"))
    assert read("away/job.yaml").job == f"away{os.sep}mine.py:Mine"
    (tmp_path / "mine.py").write_text("")
    assert read("away/job.yaml").job == "mine.py:Mine"


def test_a_file_that_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "latin.yaml").write_bytes(b"job: \xe4")
    assert (
        error_of("latin.yaml")
        == "JOB: cannot read latin.yaml: it is not UTF-8, expected a YAML file"
    )


# ------------------------------------------------------------------------------------------- told
def test_settings_are_told_without_credentials() -> None:
    secrets = ("s3cret", "pa55")
    settings = read(
        "digits.yaml",
        f"checkpoint.storage_options.secret={secrets[0]}",
        f"checkpoint.url=sftp://user:{secrets[1]}@host/x",
        f"args.api_key={secrets[0]}",
    )
    told = settings_json(settings)
    text = json.dumps(told)
    assert not any(secret in text for secret in secrets)
    assert told["train"] == json.loads(text)["train"]
    assert told["checkpoint"] == json.loads(text)["checkpoint"]
    assert '"every": "off"' in text


def test_c53_an_error_in_a_section_of_credentials_does_not_show_them() -> None:
    text = error_of("digits.yaml", "checkpoint.storage_options=[s3cret]")
    assert text == "checkpoint.storage_options: found a list, expected a mapping (command line)"


def test_every_key_has_a_text_in_help_and_hidden_ones_are_left_out() -> None:
    shown = describe_settings()
    for setting in list_settings():
        assert setting.doc, setting.key
        assert (f"  {setting.key}: " in shown) is not setting.hidden
    assert "train.step_delay" not in shown
    assert "  train.epochs: a whole number; default 10\n      Passes over the dataset.\n" in shown
    assert "  checkpoint.url: text; must be given\n" in shown
    assert "  signals: a list of text; default [SIGTERM]\n" in shown
    assert "  checkpoint.tier.memory: an interval; default auto\n" in shown


def test_the_keys_that_scripts_rely_on_are_there() -> None:
    fixed = """job args train.epochs train.max_steps train.global_batch_size train.micro_batch_size train.seed train.order
    train.drop_last train.precision train.grad_clip train.ema train.logical_shards train.reproducible train.on_nonfinite
    train.stop_before train.step_delay eval.every eval.batch_size eval.monitor eval.mode eval.keep_best eval.patience
    loader.workers loader.prefetch checkpoint.url checkpoint.every checkpoint.keep checkpoint.keep_every
    checkpoint.storage_options checkpoint.init_from checkpoint.budget checkpoint.max_unsaved checkpoint.tier.memory
    audit.samples run.accept backend init_method timeout hang_after signals"""
    assert set(fixed.split()) <= {setting.key for setting in list_settings()}


def test_c48_a_config_error_is_told_before_torch_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text(YAML.replace("epochs: 1e1", "epoch: 3"))
    code = """
import sys
from pathlib import Path
from elastic.config import parse_arguments, read_settings
from elastic.errors import ConfigError
try:
    read_settings(parse_arguments(["bad.yaml"]), root=Path("."))
except ConfigError as error:
    print(error)
heavy = {"torch", "numpy", "fsspec", "s3fs"} & sys.modules.keys()
print("heavy:", sorted(heavy))
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.stdout.splitlines() == [
        "train.epoch: unknown key, did you mean train.epochs? (bad.yaml:6)",
        "heavy: []",
    ]
    assert done.stderr == ""
