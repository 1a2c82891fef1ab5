"""Which samples a run used in which step, from its audit alone, and what is wrong with that.

Pure: it takes lines and stretches of the lineage. A step counts once, as the generation of the lineage did it; a step whose
update was skipped is reported as such and used its samples all the same. Nothing here asks how the runner came to its order.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from checkpoints.generations import Stretch

__all__ = ["Account", "Step", "account", "differences", "problems"]

_SHOWN: Final = 5


@dataclass(kw_only=True, slots=True)
class Step:
    """One step of the lineage."""

    epoch: int
    parts: dict[int, list[int]] = field(default_factory=dict)
    """The samples of each rank."""
    skipped: bool = False

    @property
    def samples(self) -> list[int]:
        """All of them, in no order that tells of ranks."""
        return sorted(index for part in self.parts.values() for index in part)


@dataclass(frozen=True, kw_only=True, slots=True)
class Account:
    """The steps of a lineage, and what could not be accounted for."""

    steps: Mapping[int, Step]
    wrong: Sequence[str]


def account(stretches: Sequence[Stretch], lines: Iterable[Mapping[str, Any]]) -> Account:
    """Put the audit's lines of the lineage together by step."""
    steps: dict[int, Step] = {}
    wrong: list[str] = []
    spans = {s.generation: (s.start_step, s.end_step) for s in stretches}
    for line in lines:
        number, generation, rank = int(line["step"]), int(line["generation"]), int(line["rank"])
        start, end = spans.get(generation, (0, 0))
        if not start < number <= end:
            continue
        step = steps.setdefault(number, Step(epoch=int(line["epoch"])))
        if line.get("skipped"):
            step.skipped = True
        elif rank in step.parts:
            wrong.append(f"step {number}: rank {rank} of generation {generation} told it twice")
        else:
            step.parts[rank] = [int(index) for index in line["indices"]]
    last = stretches[-1].end_step if stretches else 0
    missing = [number for number in range(1, last + 1) if number not in steps]
    if missing:
        wrong.append(f"{len(missing)} steps are not in the audit: {_some(missing)}")
    return Account(steps=dict(sorted(steps.items())), wrong=tuple(wrong))


def problems(found: Account, *, length: int | None, epochs: int, whole: bool) -> list[str]:
    """What is wrong with samples that are to come once in each epoch.

    Args:
        found: The steps.
        length: The number of samples in the dataset; None where samples are drawn, and may come again.
        epochs: How many epochs are done.
        whole: Whether an epoch uses every sample (no drop_last).
    """
    told = list(found.wrong)
    if length is None:
        return told
    used: dict[int, Counter[int]] = {}
    for step in found.steps.values():
        used.setdefault(step.epoch, Counter()).update(step.samples)
    for epoch, counts in sorted(used.items()):
        twice = sorted(index for index, times in counts.items() if times > 1)
        if twice:
            told.append(
                f"epoch {epoch}: {len(twice)} samples in more than one step: {_some(twice)}"
            )
        strange = sorted(index for index in counts if not 0 <= index < length)
        if strange:
            told.append(
                f"epoch {epoch}: found samples {_some(strange)}, expected 0 to {length - 1}"
            )
        missing = sorted(set(range(length)) - counts.keys()) if whole and epoch < epochs else []
        if missing:
            told.append(f"epoch {epoch}: {len(missing)} samples in no step: {_some(missing)}")
    return told


def differences(found: Account, expected: Account) -> list[str]:
    """In which steps two runs used other samples, or of which one skipped the update."""
    told: list[str] = []
    steps = sorted(found.steps.keys() | expected.steps.keys())
    other = [
        number
        for number in steps
        if _content(found.steps.get(number)) != _content(expected.steps.get(number))
    ]
    if other:
        told.append(f"{len(other)} steps with other samples than undisturbed: {_some(other)}")
    skipped = [
        number
        for number in steps
        if number not in other and found.steps[number].skipped != expected.steps[number].skipped
    ]
    if skipped:
        told.append(f"{len(skipped)} steps skipped in one run alone: {_some(skipped)}")
    return told


def _content(step: Step | None) -> tuple[int, list[int]] | None:
    return None if step is None else (step.epoch, step.samples)


def _some(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:_SHOWN]))
    return f"{shown}, …" if len(numbers) > _SHOWN else shown
