"""Whether a drill was passed: each question with its answer, from the records of two runs and the list of faults.

Promises: only what lies at the URLs is believed, every byte of the checkpoints is read, and what cannot be compared is
said and never counted as equal. Changes nothing.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from checkpoints import reader
from checkpoints.catalog import Catalog
from checkpoints.errors import CheckpointError
from checkpoints.generations import lineage, read_started
from checkpoints.journal import read_audit, read_events
from checkpoints.layout import RUN, CheckpointName, Manifest, RunRecord
from checkpoints.store import Store
from elastic import summary
from elastic.accounting import Account, account, differences, problems
from elastic.strikes import Struck
from elastic.trial import Outcome

__all__ = ["Verdict", "judge", "judge_faults", "judge_samples", "judge_weights"]

_JOINED: Final = "node joined"
_RESTARTS: Final[Mapping[str, int]] = {"stop": 0, "storage": 0}
"""Restarts that a fault costs, where it is not one."""
_AWAY: Final = frozenset({"agent", "preempt", "partition"})
"""Faults after which a node comes back, which among several costs a second, planned restart."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """The answer to one question."""

    name: str
    passed: bool | None
    """None: it could not be compared, which fails nothing."""
    told: str


def judge(
    run: Store, reference: Store, outcome: Outcome, *, nodes: int, bits: str | None
) -> list[Verdict]:
    """All verdicts on one drill.

    Args:
        run: The run under faults.
        reference: The undisturbed one.
        outcome: What happened.
        nodes: How many agents there were.
        bits: Why bits are not compared; None where they are.
    """
    verdicts = [judge_end(run, outcome), *judge_faults(outcome, nodes=nodes)]
    questions: tuple[tuple[str, Callable[[], Verdict]], ...] = (
        ("weights", lambda: judge_weights(run, reference, bits=bits)),
        ("samples", lambda: judge_samples(run, reference)),
        ("checkpoints", lambda: judge_checkpoints(run, outcome.struck)),
    )
    for name, question in questions:
        try:
            verdicts.append(question())
        except (CheckpointError, KeyError, TypeError, ValueError) as error:
            told = f"cannot be judged ({type(error).__name__}: {error})"
            verdicts.append(Verdict(name=name, passed=False, told=told))
    left = outcome.leftovers
    verdicts.append(
        Verdict(
            name="clean",
            passed=not left,
            told="; ".join(left[:5]) if left else "no process and no memory is left behind",
        )
    )
    return verdicts


def judge_end(run: Store, outcome: Outcome) -> Verdict:
    """Whether the run came to its end."""
    status = (summary.read(run) or {}).get("status")
    wrong = []
    if outcome.problem is not None:
        wrong.append(outcome.problem)
    if status not in {"complete", "stopped"}:
        wrong.append(f"found status {status}, expected complete")
    if any(outcome.codes):
        wrong.append(f"found exit codes {outcome.codes} of agents that no fault ended")
    return Verdict(
        name="end", passed=not wrong, told="; ".join(wrong) or f"the run is {status}, exit code 0"
    )


# ------------------------------------------------------------------------------------ (a) the state
def judge_weights(run: Store, reference: Store, *, bits: str | None) -> Verdict:
    """Whether the final state is that of the undisturbed run, to the last bit of model and optimizer."""
    ours, theirs = summary.read(run) or {}, summary.read(reference) or {}
    if ours.get("steps") != theirs.get("steps"):
        told = f"found {ours.get('steps')} steps, expected {theirs.get('steps')}"
        return Verdict(name="weights", passed=False, told=told)
    if bits is not None:
        told = f"not compared: {bits}; metrics {_metrics(ours)}, undisturbed {_metrics(theirs)}"
        return Verdict(name="weights", passed=None, told=told)
    wrong = []
    mine, other = ours.get("weights_sha256"), theirs.get("weights_sha256")
    if mine is None or mine != other:
        wrong.append(f"found weights_sha256 {_short(mine)}, undisturbed {_short(other)}")
    if ours.get("bits_until") is not None:
        wrong.append(f"equal bits are promised up to step {ours['bits_until']} only")
    if ours.get("metrics") != theirs.get("metrics"):
        wrong.append(f"found metrics {_metrics(ours)}, undisturbed {_metrics(theirs)}")
    sums, expected = _tensor_sums(_final(run)), _tensor_sums(_final(reference))
    other_files = sorted(
        name for name in sums.keys() | expected.keys() if sums.get(name) != expected.get(name)
    )
    if other_files:
        wrong.append(f"other bytes than undisturbed in {', '.join(other_files)}")
    told = "; ".join(wrong) or f"the bits of the undisturbed run ({_short(mine)})"
    return Verdict(name="weights", passed=not wrong, told=told)


def _final(store: Store) -> Manifest:
    """The manifest of the newest checkpoint, after every byte of it was verified."""
    catalog = Catalog(store)
    manifest = catalog.manifest(catalog.resolve("latest"))
    reader.verify(store, manifest)
    return manifest


def _tensor_sums(manifest: Manifest) -> dict[str, list[tuple[int, str]]]:
    return {
        entry.name: [(part.size, part.xxh3_128) for part in entry.parts]
        for entry in manifest.files
        if entry.name.endswith(".safetensors")
    }


def _metrics(found: Mapping[str, Any]) -> str:
    pairs = found.get("metrics") or {}
    return ", ".join(f"{name} {value!r}" for name, value in sorted(pairs.items())) or "none"


def _short(text: object) -> str:
    return str(text)[:12]


# ------------------------------------------------------------------------------------ (b) the samples
def judge_samples(run: Store, reference: Store) -> Verdict:
    """Whether each sample of an epoch is in exactly one step of the lineage, the one it was in undisturbed."""
    found, expected = read_account(run), read_account(reference)
    identity = RunRecord.from_json(run.get(RUN), RUN).identity
    dataset = identity.get("dataset")
    drawn = "sampling" in identity or not isinstance(dataset, Mapping)
    length = int(str(dataset["length"])) if isinstance(dataset, Mapping) and not drawn else None
    told = summary.read(run) or {}
    epochs = int(told.get("epochs") or 0)
    whole = not identity.get("train.drop_last")
    wrong = problems(found, length=length, epochs=epochs, whole=whole)
    wrong += differences(found, expected)
    used = sum(len(step.samples) for step in found.steps.values())
    skipped = sum(step.skipped for step in found.steps.values())
    if not wrong and skipped != told.get("skipped_steps", 0):
        wrong.append(f"found {skipped} skipped steps, the summary tells {told['skipped_steps']}")
    how = "as drawn" if length is None else "each once an epoch"
    right = f"{used} samples in {len(found.steps)} steps, {how}, {skipped} steps skipped"
    return Verdict(name="samples", passed=not wrong, told="; ".join(wrong) or right)


def read_account(store: Store) -> Account:
    """The samples of a run's lineage.

    Raises:
        CheckpointError: Its records cannot be read.
    """
    told = summary.read(store) or {}
    generation, step = int(told.get("generation") or 0), int(told.get("steps") or 0)
    end = CheckpointName(generation=generation, step=step)
    return account(lineage(read_started(store), end), read_audit(store))


# ------------------------------------------------------------------------------------ (c) the faults
def judge_faults(outcome: Outcome, *, nodes: int) -> list[Verdict]:
    """Whether there were faults, each was recovered from, and each cost the restarts that it has to."""
    struck = outcome.struck
    count, planned = len(struck), outcome.planned
    told = f"{count} of {planned} faults struck"
    if count < planned:
        told += ": the run ended before the others (train.step_delay makes it longer)"
    verdicts = [Verdict(name="faults", passed=count > 0, told=told)]
    away = [one for one in struck if one.recovery_s is None and not one.ended]
    verdicts.append(
        Verdict(
            name="recovery",
            passed=not away,
            told="; ".join(f"fault {one.number} ({one.kind}): no new step" for one in away)
            or "a new step after each of them",
        )
    )
    wrong = [text for one in struck if (text := _wrong_restarts(one, nodes=nodes))]
    restarts = sum(len(one.claims) for one in struck)
    verdicts.append(
        Verdict(
            name="restarts",
            passed=not wrong,
            told="; ".join(wrong) or f"{restarts} in all, as many as each fault has to cost",
        )
    )
    return verdicts


def _wrong_restarts(one: Struck, *, nodes: int) -> str | None:
    """What is wrong with the generations that came of a fault; None where nothing is."""
    joins = sum(_JOINED in cause for cause in one.claims)
    others = len(one.claims) - joins
    expected = _RESTARTS.get(one.kind, 1)
    back = nodes > 1 and one.kind in _AWAY
    wrong = others > expected or joins > back or one.restarts > expected
    if not one.ended:
        wrong = wrong or len(one.claims) < expected
    if not wrong:
        return None
    causes = ", ".join(one.claims) or "none"
    more = " and one more when the node came back" if back else ""
    return (
        f"fault {one.number} ({one.kind}): found {len(one.claims)} restarts ({causes}; an agent counted "
        f"{one.restarts}), expected {expected}{more}"
    )


def judge_checkpoints(run: Store, struck: Sequence[Struck]) -> Verdict:
    """Whether all that is in the store verifies, and no generation began from less than was committed."""
    catalog = Catalog(run)
    wrong: list[str] = []
    inventory = catalog.inventory()
    for name, manifest in sorted(inventory.committed.items()):
        try:
            reader.verify(run, catalog.manifest(name) if manifest is None else manifest)
        except CheckpointError as error:
            wrong.append(f"{name}: {error}")
    started = read_started(run)
    for one in struck:
        record = next((r for r in started if r.generation > one.generation), None)
        if record is not None and one.committed and record.start_step < one.committed.step:
            wrong.append(
                f"fault {one.number}: generation {record.generation} began at step {record.start_step}, "
                f"although {one.committed} was committed"
            )
    wrong += [f"damaged: {e.get('what')}" for e in read_events(run) if e.get("event") == "damaged"]
    right = f"{len(inventory.committed)} in the store verify, none was lost"
    return Verdict(name="checkpoints", passed=not wrong, told="; ".join(wrong) or right)
