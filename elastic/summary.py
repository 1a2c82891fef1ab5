"""summary.json: what a run has done so far, computed from its records and told to people and scripts.

The truth is in generations/ and the checkpoints; this is a view of it, written at the start and at
every orderly end by the newest generation. What earlier generations did is read from their journals
once and carried along in `journal/GENERATION.history.json`, so that the work does not grow with them.
"""

import json
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from typing import Any, Final, Literal

from checkpoints.errors import ObjectMissingError, RecordError
from checkpoints.generations import read_claim, read_record
from checkpoints.layout import (
    GENERATIONS,
    SUMMARY,
    CheckpointName,
    Claim,
    Started,
    generation_of,
    journal_prefix,
    started_name,
)
from checkpoints.store import Store
from elastic.progress import Progress

__all__ = ["Row", "Status", "build", "catch_up", "past_rows", "read", "write"]

logger = logging.getLogger(__name__)

Status = Literal["running", "complete", "preempted", "stopped", "failed"]
_TAIL_BYTES: Final = 64 << 10


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One started generation: what it began from, how far it came, where its time went."""

    generation: int
    world_size: int
    nodes: int
    parent: str | None
    source: str
    start_step: int
    end_step: int
    cause: str
    began: float
    """Unix time at which its first process started."""
    ready: float
    """Unix time at which its loop began."""
    ended: float
    """Unix time of the last thing known of it."""
    steps_s: float = 0.0
    checkpoint_s: float = 0.0
    eval_s: float = 0.0

    def public(self) -> dict[str, Any]:
        """The columns that summary.json shows."""
        keys = (
            "generation",
            "world_size",
            "nodes",
            "parent",
            "source",
            "start_step",
            "end_step",
            "cause",
        )
        return {key: getattr(self, key) for key in keys}


def past_rows(store: Store, before: int) -> list[Row]:
    """The rows of all started generations older than `before`, ascending."""
    known = _newest_history(store, before)
    newest_known = known[-1].generation if known else 0
    rows = list(known)
    for claim, started in _started_between(store, newest_known, before):
        tail = _journal_tail(store, claim.generation)
        created = datetime.fromisoformat(started.created_at).timestamp()
        spent = tail.get("spent", {})
        rows.append(
            Row(
                generation=claim.generation,
                world_size=claim.world_size,
                nodes=claim.nodes,
                parent=started.parent,
                source=started.source,
                start_step=started.start_step,
                end_step=max(started.start_step, int(tail.get("step", started.start_step))),
                cause=claim.cause,
                began=float(tail.get("began", created)),
                ready=float(tail.get("ready", created)),
                ended=float(tail.get("time", created)),
                steps_s=float(spent.get("steps", 0.0)),
                checkpoint_s=float(spent.get("checkpoint", 0.0)),
                eval_s=float(spent.get("eval", 0.0)),
            )
        )
    return sorted(rows, key=lambda row: row.generation)


def _started_between(store: Store, after: int, before: int) -> Iterator[tuple[Claim, Started]]:
    """Claim and started record of the generations in between that have both."""
    found = {n for c in store.children(GENERATIONS) if (n := generation_of(f"{GENERATIONS}/{c}"))}
    for generation in sorted(found):
        if not after < generation < before:
            continue
        name = started_name(generation)
        try:
            started = Started.from_json(read_record(store, name), name)
            yield read_claim(store, generation), started
        except ObjectMissingError:
            continue  # claimed, never started
        except RecordError as error:
            logger.warning("generation %d is left out of the summary: %s", generation, error)


def write_history(store: Store, generation: int, rows: Sequence[Row]) -> None:
    """Keep the rows of the generations before `generation`, for its successors to read."""
    data = json.dumps({"rows": [asdict(row) for row in rows]}).encode()
    store.put(f"{journal_prefix(generation)}.history.json", data)


def _newest_history(store: Store, before: int) -> list[Row]:
    names = [n for n in store.children("journal") if n.endswith(".history.json")]
    numbers = sorted(
        (int(n.split(".")[0]) for n in names if n.split(".")[0].isdigit()), reverse=True
    )
    for number in numbers:
        if number < before:
            try:
                text = store.get(f"{journal_prefix(number)}.history.json")
                return [Row(**row) for row in json.loads(text)["rows"]]
            except (ObjectMissingError, ValueError, TypeError, KeyError, RecursionError) as error:
                logger.warning("the history of generation %d cannot be read (%s)", number, error)
    return []


def _journal_tail(store: Store, generation: int) -> dict[str, Any]:
    """Of the primary's journal: the last line that tells a step, with began and ready of the start."""
    prefix = journal_prefix(generation)
    names = [n for n in store.list(prefix) if n.endswith(".jsonl") and ".rank" not in n]
    start: dict[str, Any] = {}
    last: dict[str, Any] = {}
    told: list[dict[str, Any]] = []
    metrics: dict[str, Any] = {}
    for name in names[:1]:
        events = _events(store.get_range(name, 0, min(_TAIL_BYTES, store.size(name))))
        start = next((event for event in events if event.get("event") == "start"), {})
    for name in reversed(names):
        size = store.size(name)
        begin = max(0, size - _TAIL_BYTES)
        events = _events(store.get_range(name, begin, size - begin))
        last = last or (events[-1] if events else {})
        told = [*(event for event in events if "spent" in event), *told]
        evaluated = [event["metrics"] for event in events if "metrics" in event]
        metrics = metrics or {"metrics": (evaluated or [{}])[-1]}
        # A checkpoint is told after the steps that were done beside it.
        if any(event.get("event") != "checkpoint" for event in told):
            break
    if told:
        last = {**told[-1], "step": max(int(event.get("step", 0)) for event in told)}
    return {**{key: start[key] for key in ("began", "ready") if key in start}, **metrics, **last}


def _events(data: bytes) -> list[dict[str, Any]]:
    """The whole lines of a piece of a journal; it may begin and end in the middle of one."""
    found = (_parse(line) for line in data.splitlines())
    return [event for event in found if event is not None]


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return event if isinstance(event, dict) else None


def build(
    rows: Sequence[Row],
    progress: Progress,
    *,
    status: Status,
    run_id: str,
    now: float,
    weights_sha256: str | None = None,
    faults: Sequence[Mapping[str, Any]] = (),
    bits_until: int | None = None,
) -> dict[str, Any]:
    """The content of summary.json; `rows` ends with the generation that writes it."""
    rows = _reached(rows)
    done = sum(row.end_step - row.start_step for row in rows)
    seconds = _seconds(rows, _kept(rows, progress.step), now)
    best = progress.best
    return {
        "status": status,
        "run_id": run_id,
        "generation": rows[-1].generation,
        "steps": progress.step,
        "samples": progress.samples,
        "epochs": progress.epoch,
        "skipped_steps": progress.skipped_steps,
        "generations": [row.public() for row in rows],
        "restarts": len(rows) - 1,
        "lost_steps": max(0, done - progress.step),
        "metrics": {name: _number(value) for name, value in progress.metrics.items()},
        "best": None
        if best is None
        else {
            "metric": best.metric,
            "value": _number(best.value),
            "step": best.step,
            "checkpoint": best.checkpoint,
        },
        "stopped": progress.stopped,
        "bits_until": bits_until,
        "weights_sha256": weights_sha256,
        "goodput": goodput(rows, progress.step, now),
        "seconds": {use: round(spent, 3) for use, spent in seconds.items()},
        "faults": [dict(fault) for fault in faults],
    }


def _reached(rows: Sequence[Row]) -> list[Row]:
    """A generation came at least as far as what a later one began from: the journal's last part may have died with it."""
    steps: dict[int, int] = {}
    for parent in (CheckpointName.parse(row.parent) for row in rows if row.parent is not None):
        steps[parent.generation] = max(parent.step, steps.get(parent.generation, 0))
    return [replace(row, end_step=max(row.end_step, steps.get(row.generation, 0))) for row in rows]


def goodput(rows: Sequence[Row], step: int, now: float) -> float:
    """The share of the wall time since the first start that went into steps of the lineage."""
    seconds = _seconds(rows, _kept(rows, step), now)
    wall = sum(seconds.values())
    return round(seconds["steps"] / wall, 4) if wall > 0 else 0.0


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _kept(rows: Sequence[Row], step: int) -> dict[int, int]:
    """Of each generation: how many of its steps are in the lineage of the newest one's `step`."""
    by_number = {row.generation: row for row in rows}
    kept: dict[int, int] = {}
    row: Row | None = rows[-1]
    until = step
    while row is not None and row.generation not in kept:
        kept[row.generation] = max(0, until - row.start_step)
        if row.parent is None:
            break
        parent = CheckpointName.parse(row.parent)
        until, row = parent.step, by_number.get(parent.generation)
    return kept


def _seconds(rows: Sequence[Row], kept: Mapping[int, int], now: float) -> dict[str, float]:
    """Wall time since the first start, by use; adds up by the making of `other`."""
    used = dict.fromkeys(("steps", "checkpoint", "restart", "lost", "eval", "down", "other"), 0.0)
    for number, row in enumerate(rows):
        done = row.end_step - row.start_step
        share = kept.get(row.generation, 0) / done if done else 0.0
        used["steps"] += row.steps_s * share
        used["lost"] += row.steps_s * (1 - share)
        used["checkpoint"] += row.checkpoint_s
        used["eval"] += row.eval_s
        if number:
            used["restart"] += max(0.0, row.ready - row.began)
            used["down"] += max(0.0, row.began - rows[number - 1].ended)
    used["other"] = max(0.0, now - rows[0].began - sum(used.values()))
    return used


def write(store: Store, content: Mapping[str, Any]) -> None:
    """Replace summary.json."""
    store.put(SUMMARY, json.dumps(content, indent=1, allow_nan=False).encode())


def read(store: Store) -> dict[str, Any] | None:
    """The present summary.json, or None where there is none or it is none: the records of the generations are the truth."""
    try:
        found = _parse(store.get(SUMMARY))
    except ObjectMissingError:
        return None
    match found:
        case {"status": str(), "generation": int(), "steps": int(), "epochs": int()}:
            return found
    logger.warning("%s/%s: is no run's summary; left out", store.display_url, SUMMARY)
    return None


def catch_up(store: Store, found: Mapping[str, Any]) -> dict[str, Any]:
    """A running run's summary, of its generation's start, with what the journal tells since; `heard` is when, in Unix time.

    Steps, epochs, metrics, lost steps, goodput and the generations are brought up to date, the rest stays.
    """
    number = int(found["generation"])
    rows = past_rows(store, number + 1)
    if not rows or rows[-1].generation != number:
        return dict(found)
    rows = _reached(rows)
    step, heard = rows[-1].end_step, rows[-1].ended
    tail = _journal_tail(store, number)
    return {
        **found,
        "steps": step,
        "epochs": tail.get("epoch", found["epochs"]),
        "metrics": tail.get("metrics") or found["metrics"],
        "lost_steps": max(0, sum(row.end_step - row.start_step for row in rows) - step),
        "goodput": goodput(rows, step, heard),
        "generations": [row.public() for row in rows],
        "heard": heard,
    }


def finish_row(row: Row, *, step: int, now: float, spent: Mapping[str, float]) -> Row:
    """The writing generation's row, brought up to date."""
    return replace(
        row,
        end_step=step,
        ended=now,
        steps_s=spent["steps"],
        checkpoint_s=spent["checkpoint"],
        eval_s=spent["eval"],
    )


def now_s() -> float:
    """Unix time, for what is written for people."""
    return datetime.now(UTC).timestamp()
