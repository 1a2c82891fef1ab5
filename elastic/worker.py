"""One worker's life under the project's own loop: from settings to an exit code.

Where torch begins: everything before (arguments, settings, place) is told without it.
"""

import inspect
import logging
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from elastic.config import settings_json
from elastic.core import Run
from elastic.ending import end_worker
from elastic.errors import ExitCode, StartError
from elastic.launching import LAUNCHED
from elastic.loop import Training
from elastic.opening import Setup, code_hash, open_session
from elastic.options import Settings
from elastic.relapse import give_up_relapse
from elastic.uncompiled import postpone_compiler
from elastic.verdict import write_verdict
from elastic.warming import first_step, is_own_to_start
from elastic.watching import Standing
from jobs.errors import JobError
from jobs.job import Job
from jobs.loading import load_job

__all__ = ["work"]

logger = logging.getLogger(__name__)


def work(settings: Settings, environ: Mapping[str, str], standing: Standing) -> int:
    """Train; returns the exit code of section 10, or ends the agent with it."""
    postpone_compiler()
    session = open_session(environ, settings.signals, standing)
    run: Run | None = None
    try:
        give_up_relapse(session, settings.checkpoint)
        job = _load(settings)
        setup = setup_of(settings)
        run = Run(session, setup, code=code_hash(_sources(job)), prepare=job.prepare)
        if is_own_to_start(session.place, environ, wanted=settings.train.warm_start == "auto"):
            run.at_first_step = partial(first_step, environ, session.agent, session.folder)
        if not _is_over(run, settings):
            training = Training(job, settings, run)
            if LAUNCHED not in environ and session.place.launcher == "torchrun":
                _tell_of_torchrun(run)
            training.train()
        run.close()
    except BaseException as error:  # noqa: BLE001  # the top of the process: every end gets its code
        return end_worker(error, session, run)
    session.slot.end(None)
    write_verdict(session.folder, session.place.local_rank, ExitCode.DONE)
    return ExitCode.DONE


def setup_of(settings: Settings) -> Setup:
    """What the run needs of the settings."""
    return Setup(
        checkpoint=settings.checkpoint,
        backend=settings.backend,
        init_method=settings.init_method,
        timeout_s=settings.timeout,
        audit=settings.audit.samples,
        accept=settings.run.accept,
        step_delay_s=settings.train.step_delay,
        stop_before=settings.train.stop_before,
        notices=settings.notices,
        config=settings_json(settings),
    )


def _tell_of_torchrun(run: Run) -> None:
    """Say once what this launcher cannot do."""
    if run.generation == 1:
        run.tell([
            "torchrun makes 1 of every exit code but 0; python -m elastic launch, with the same arguments, gives the run's"
        ])  # fmt: skip


def _load(settings: Settings) -> Job:
    try:
        return load_job(settings.job, settings.args)
    except JobError as error:
        raise StartError(str(error)) from error


def _sources(job: Job) -> list[Path]:
    """The file that the job's class stands in, to be the same on all nodes."""
    try:
        return [Path(inspect.getfile(type(job)))]
    except (OSError, TypeError):
        return []


def _is_over(run: Run, settings: Settings) -> bool:
    """Say so where the run has come to its end already and these settings ask for no more."""
    found = run.already_over()
    if found is None:
        return False
    train = settings.train
    done = found["epochs"] >= train.epochs or (
        train.max_steps is not None and found["steps"] >= train.max_steps
    )
    if found["status"] == "complete" and not done:
        return False
    if run.is_primary:
        sys.stdout.write(_told(found, run.store.display_url, train.epochs))
        sys.stdout.flush()
    return True


def _told(found: Mapping[str, Any], url: str, epochs: int) -> str:
    figures = "".join(f", {k} {v:.4g}" for k, v in found["metrics"].items() if v is not None)
    done = f"{found['epochs']} epochs, {found['steps']} steps{figures}"
    if found["status"] == "stopped":
        return (
            f"the run at {url} was stopped on purpose ({found.get('stopped')}): {done}; to go on from its "
            f"weights: a new checkpoint.url with checkpoint.init_from={url}\n"
        )
    more = max(epochs, int(found["epochs"])) + 1
    return (
        f"the run at {url} is complete: {done}; to go on: train.epochs={more} or more; to train anew: "
        "another checkpoint.url\n"
    )
