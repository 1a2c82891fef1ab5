"""jobs/launch/slurm/train.sbatch under a real Slurm: preempted, near its time limit, wrongly configured, cancelled."""

from pathlib import Path

from tests.support import records
from tests.support.cases import assert_each_sample_once, tracer
from tests.support.cluster import Cluster
from tests.support.distribution import ROOT
from tests.support.slurm import Slurm

SCRIPT = str(ROOT / "jobs" / "launch" / "slurm" / "train.sbatch")
N, EPOCHS = 400, 2
YAML = """
job: {job}
args: {{n: {n}}}
train: {{epochs: {epochs}, global_batch_size: 4, step_delay: {delay}}}
checkpoint: {{every: 1000 steps}}  # only what the notices save
audit: {{samples: true}}
"""


def write_job(cluster: Cluster, *, delay: float) -> Path:
    """The job's settings, which each start reads anew."""
    path = cluster.folder / "job.yaml"
    path.write_text(YAML.format(job=tracer(), n=N, epochs=EPOCHS, delay=delay))
    return path


def until_step(slurm: Slurm, number: int, url: Path, step: int) -> None:
    """Wait until a step has begun."""
    slurm.until(
        number, lambda: any(line["step"] >= step for line in records.audit(url)), f"step {step}"
    )


def test_c21_c22_a_job_is_preempted_and_warned_and_finishes(slurm: Slurm, cluster: Cluster) -> None:
    job = write_job(cluster, delay=0.5)
    number = slurm.submit(
        "--exclusive", "--time=60", "--signal=B:USR1@300", SCRIPT, str(job), f"checkpoint.url={cluster.url}"
    )  # fmt: skip
    until_step(slurm, number, cluster.url, 3)

    # A job that goes before takes both processors: SIGTERM to all processes of the step, then GraceTime.
    slurm.submit("--partition=high", "--ntasks=2", "--wrap=true")
    slurm.until_waiting(number, 1)
    first = records.newest_step(cluster.url)
    assert first >= 3
    assert records.status(cluster.url) == "preempted"

    until_step(slurm, number, cluster.url, first + 1)
    # Now less is left than --signal says; Slurm looks twice a minute.
    slurm.ask("scontrol", "update", f"JobId={number}", "TimeLimit=5")
    slurm.until_waiting(number, 2)
    assert records.newest_step(cluster.url) > first
    assert records.status(cluster.url) == "preempted"

    slurm.ask("scontrol", "update", f"JobId={number}", "TimeLimit=60")
    write_job(cluster, delay=0)
    ended = slurm.until_ended(number)
    assert (ended["JobState"], ended["ExitCode"], ended["Restarts"]) == ("COMPLETED", "0:0", "2")
    summary = records.summary(cluster.url)
    assert summary["status"] == "complete"
    assert (summary["restarts"], summary["lost_steps"]) == (2, 0)
    assert_each_sample_once(cluster.url, N, EPOCHS)
    assert slurm.log(number).count("queued again") == 2
    assert slurm.log(number).count("SIGUSR1") == 1


def test_a_wrong_setting_fails_with_2_and_is_not_queued_again(
    slurm: Slurm, cluster: Cluster
) -> None:
    job = write_job(cluster, delay=0)
    number = slurm.submit(SCRIPT, str(job), f"checkpoint.url={cluster.url}", "train.epoch=3")
    ended = slurm.until_ended(number)
    assert (ended["JobState"], ended["ExitCode"], ended["Restarts"]) == ("FAILED", "2:0", "0")
    assert slurm.log(number).count("train.epochs") == 1
