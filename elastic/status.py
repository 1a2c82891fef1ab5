"""`python -m elastic status URL`: where a run stands, from its records alone; imports no torch."""

import json
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

from checkpoints.errors import CheckpointError, ObjectMissingError
from checkpoints.generations import newest_generation
from checkpoints.layout import SUMMARY
from checkpoints.question import shown
from checkpoints.store import Store, open_store
from checkpoints.terminal import age_text, put_out
from elastic.errors import ExitCode
from elastic.summary import catch_up

__all__ = ["code_at", "code_of", "status"]

logger = logging.getLogger(__name__)

_CODES: Final[Mapping[str, ExitCode]] = {
    "complete": ExitCode.DONE,
    "stopped": ExitCode.DONE,
    "preempted": ExitCode.PREEMPTED,
    "failed": ExitCode.ATTENTION,
    "running": ExitCode.RETRY,
}


def code_of(summary: Mapping[str, Any] | None) -> ExitCode:
    """The exit code of section 10 that a run's summary stands for; a run without one is wrong."""
    if summary is None:
        return ExitCode.WRONG
    return _CODES.get(str(summary.get("status")), ExitCode.RETRY)


def status(url: str, options: Mapping[str, object], *, as_json: bool) -> ExitCode:
    """Print where the run at `url` stands; returns its exit code.

    Raises:
        CheckpointError: The URL cannot be read.
    """
    store = open_store(url, options)
    found = _read(store)
    if found is None:
        claimed = newest_generation(store)
        what = f"generation {claimed} is starting" if claimed else "there is no run"
        put_out(f"{store.display_url}: {what}\n")
    elif as_json:
        put_out(json.dumps(found, indent=1) + "\n")
    else:
        try:
            lines = _lines(store.display_url, _up_to_date(store, found))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"{store.display_url}/{SUMMARY}: found something else or an older kind, expected a run's summary"
            ) from error
        put_out("\n".join(map(shown, lines)) + "\n")
    return code_of(found)


def code_at(url: str, options: Mapping[str, object]) -> ExitCode:
    """Return the exit code that the run at a URL stands for.

    Raises:
        CheckpointError: The URL cannot be read.
    """
    return code_of(_read(open_store(url, options)))


def _read(store: Store) -> dict[str, Any] | None:
    try:
        found = json.loads(store.get(SUMMARY))
    except ObjectMissingError:
        return None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{store.display_url}/{SUMMARY}: not JSON ({error})") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{store.display_url}/{SUMMARY}: found no object, expected a summary")
    return found


def _up_to_date(store: Store, found: dict[str, Any]) -> dict[str, Any]:
    if found["status"] != "running":
        return found
    try:
        return catch_up(store, found)
    except CheckpointError as error:
        logger.warning("the journal cannot be read, so this is the last start: %s", error)
        return found


def _lines(url: str, found: Mapping[str, Any]) -> Sequence[str]:
    figures = "  ".join(f"{k} {v:.4g}" for k, v in found["metrics"].items() if v is not None)
    best = found["best"]
    lines = [
        f"{url}: {found['status']}, generation {found['generation']}, epoch {found['epochs']}, step "
        f"{found['steps']}{_heard(found.get('heard'))}",
        f"restarts {found['restarts']}, lost steps {found['lost_steps']}, goodput {found['goodput']:.3f}",
    ]
    if figures:
        lines.append(figures)
    if best is not None:
        lines.append(
            f"best {best['metric']} {best['value']} at step {best['step']}: {best['checkpoint']}"
            + (" (when this generation began)" if "heard" in found else "")
        )
    lines += [
        f"generation {row['generation']}: W={row['world_size']}, steps {row['start_step']} to "
        f"{row['end_step']}, {row['source']} ({row['cause']})"
        for row in found["generations"][-10:]
    ]
    return lines


def _heard(at: float | None) -> str:
    return "" if at is None else f", as of {age_text(max(0.0, time.time() - at))} ago"
