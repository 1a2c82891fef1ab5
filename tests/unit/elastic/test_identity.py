"""What makes two starts the same run, and how a difference is told."""

import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset

from elastic.errors import StartError
from elastic.identity import compare_identity, compare_ranks, fingerprint_dataset


class Items(Dataset[Any]):
    """Items made by a function of the index."""

    def __init__(self, make: Callable[[int], Any], n: int = 100) -> None:
        self.make, self.n = make, n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> Any:
        return self.make(index)


@dataclass
class Record:
    """An item of a class of its own, with a field that is not part of its value."""

    words: set[int]
    turn: complex
    made: float = field(default_factory=random.SystemRandom().random, compare=False)


def prints(make: Callable[[int], Any], n: int = 100) -> dict[str, Any]:
    return fingerprint_dataset(Items(make, n), n, None)


def objects(*values: object) -> Any:
    array = np.empty(len(values), dtype=object)
    array[:] = values
    return array


KINDS: dict[str, tuple[Callable[[int], Any], Callable[[int], Any]]] = {
    "tensor": (lambda i: torch.full((3,), float(i)), lambda i: torch.full((3,), i + 1e-6 * (i > 9))),
    "its type": (lambda _: torch.zeros(2), lambda _: torch.zeros(2, dtype=torch.float64)),
    "its shape": (lambda _: torch.zeros(2, 3), lambda _: torch.zeros(3, 2)),
    "bfloat16": (lambda i: torch.tensor(i).bfloat16(), lambda i: torch.tensor(i + 1).bfloat16()),
    "sparse": (lambda i: torch.eye(3).to_sparse() * i, lambda i: torch.eye(3).to_sparse() * (i + 1)),
    "numpy": (lambda i: np.arange(3) + i, lambda i: np.arange(3) - i),
    "objects": (lambda i: objects("a", i), lambda i: objects("a", i + 1)),
    "numpy scalar": (np.float32, lambda i: np.float32(i + 1)),
    "float": (lambda i: (float(i), i), lambda i: (i + 1e-12, i)),
    "text": (lambda i: f"text {i}", lambda i: f"text  {i}"),
    "bool": (lambda _: True, lambda _: 1),
    "dict": (lambda i: {"x": torch.tensor(i), "y": 1}, lambda i: {"x": torch.tensor(i), "y": 2}),
    "keys": (lambda i: {"x": i}, lambda i: {"z": i}),
    "nesting": (lambda _: [[1], 2], lambda _: [[1, 2]]),
    "dataclass": (lambda i: Record({1, i}, 2j), lambda i: Record({1, i + 1}, 2j)),
    "by its text": (lambda i: Record({1, i}, 2j), lambda i: Record({1, i}, 3j)),
    "none": (lambda _: (1, None), lambda _: (1, 0)),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_other_content_gives_another_fingerprint_and_the_same_content_the_same(kind: str) -> None:
    one, other = KINDS[kind]
    assert prints(one) == prints(one)
    assert prints(one) != prints(other)


def test_order_of_a_set_does_not_matter() -> None:
    one, other = {0, 8}, {8, 0}
    assert list(one) != list(other)  # they share a place in the table
    assert prints(lambda _: one) == prints(lambda _: other)


def test_order_of_a_dicts_keys_does_not_matter() -> None:
    assert prints(lambda i: {"a": i, "b": 2}) == prints(lambda i: {"b": 2, "a": i})


@pytest.mark.parametrize(
    ("n", "probed"), [(1, [0]), (3, [0, 1, 2]), (100, [0, 14, 28, 42, 56, 70, 84, 99])]
)
def test_items_are_probed_evenly_from_the_first_to_the_last(n: int, probed: list[int]) -> None:
    found = prints(lambda i: i, n)
    assert found["length"] == n
    assert [int(index) for index in found["items"]] == probed


def augmented(index: int) -> tuple[Tensor, float, Any]:
    return torch.rand(3) + index, random.random(), np.random.random_sample(2)


def test_random_augmentation_does_not_change_the_fingerprint() -> None:
    torch.manual_seed(1)
    one = prints(augmented)
    torch.rand(7), random.random(), np.random.random_sample()
    assert prints(augmented) == one
    assert "random" not in one["items"].values()


def test_items_with_a_generator_of_their_own_are_not_compared() -> None:
    generator = np.random.default_rng()

    def item(index: int) -> Any:
        return generator.random(3) if index else 0

    found = prints(item)
    assert found["items"]["99"] == "random"
    assert found["items"]["0"] != "random"
    assert prints(item) == found


def test_probing_leaves_the_random_streams_as_they_were() -> None:
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    expected = torch.rand(1).item(), random.random(), np.random.random_sample()
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    prints(augmented)
    assert (torch.rand(1).item(), random.random(), np.random.random_sample()) == expected


def test_jobs_own_fingerprint_is_taken_and_no_item_is_read() -> None:
    def fail(index: int) -> Any:
        raise AssertionError(index)

    found = fingerprint_dataset(Items(fail), 100, "v3")
    assert found == {"length": 100, "fingerprint": "v3"}


# ------------------------------------------------------------------------------------ between ranks
def told(**changes: Any) -> dict[str, Any]:
    return {
        "dataset": {"length": 4, "items": {"0": "aa", "3": "bb"}},
        "model": [["w", "float32", [4, 2]], ["b", "float32", [4]]],
        **changes,
    }


def test_ranks_that_agree_pass() -> None:
    compare_ranks([told(), told(), told()])


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (
            told(dataset={"length": 5, "items": {}}),
            "dataset: ranks 0 and 2 see different data, its length is 4 and 5; make the job's "
            "dataset() the same on every rank (sort file lists, seed shuffles), or give the job a "
            "fingerprint()",
        ),
        (
            told(dataset={"length": 4, "items": {"0": "aa", "3": "cc"}}),
            "dataset: ranks 0 and 2 see different data, the content of item 3 differs; make the "
            "job's dataset() the same on every rank (sort file lists, seed shuffles), or give the "
            "job a fingerprint()",
        ),
        (
            told(model=[["w", "float32", [8, 2]], ["b", "float32", [8]]]),
            "model: ranks 0 and 2 built different models, tensor w is float32 of shape (4, 2) and "
            "float32 of shape (8, 2) (and 1 more)",
        ),
    ],
)
def test_rank_that_differs_is_named_with_what_differs(second: Any, message: str) -> None:
    with pytest.raises(StartError, match=f"^{re.escape(message)}$"):
        compare_ranks([told(), told(), second])


# ----------------------------------------------------------------------------------- between starts
def identity(**changes: Any) -> dict[str, Any]:
    return {"job": "Tracer", "train.seed": 0, **told(), **changes}


def test_same_run_has_nothing_to_tell() -> None:
    assert compare_identity(identity(), identity(), []) == []


WAY_OUT = "restore it, take a new checkpoint.url, or say run.accept=[{}]"
NEW_MODEL = (
    "start a new checkpoint.url, with checkpoint.init_from to begin from part of the weights"
)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"train.seed": 1},
            "train.seed: this run is another one, it was 0, this start has 1; "
            + WAY_OUT.format("train.seed"),
        ),
        (
            {"job": "Other"},
            "job: this run is another one, it was 'Tracer', this start has 'Other'; "
            + WAY_OUT.format("job"),
        ),
        (
            {"dataset": {"length": 5, "items": {}}},
            "dataset: this run is another one, its length is 4 and 5; " + WAY_OUT.format("dataset"),
        ),
        (
            {"dataset": {"length": 4, "items": {"0": "xx", "3": "bb"}}},
            "dataset: this run is another one, the content of item 0 differs; "
            + WAY_OUT.format("dataset"),
        ),
        (
            {"dataset": {"length": 4, "fingerprint": "v2"}},
            "dataset: this run is another one, its fingerprint is None and 'v2'; "
            + WAY_OUT.format("dataset"),
        ),
        (
            {"model": [["w", "float32", [4, 2]]]},
            "model: this run is another one, tensor b is float32 of shape (4,) and missing; "
            + NEW_MODEL,
        ),
        (
            {"model": [["w", "bfloat16", [4, 2]], ["b", "float32", [4]], ["c", "float32", []]]},
            "model: this run is another one, tensor w is float32 of shape (4, 2) and bfloat16 of "
            "shape (4, 2) (and 1 more); " + NEW_MODEL,
        ),
        (
            {"model": [["b", "float32", [4]], ["w", "float32", [4, 2]]]},
            "model: this run is another one, its tensors come in another order; " + NEW_MODEL,
        ),
    ],
)
def test_other_run_is_refused_in_one_line_with_old_new_and_the_way_out(
    change: dict[str, Any], message: str
) -> None:
    with pytest.raises(StartError, match=f"^{re.escape(message)}$"):
        compare_identity(identity(), identity(**change), ["something else"])


def test_accepted_difference_is_a_note() -> None:
    notes = compare_identity(identity(), identity(**{"train.seed": 1}), ["train.seed"])
    assert notes == ["train.seed: it was 0, this start has 1 (accepted by run.accept)"]


def test_other_model_is_never_accepted() -> None:
    with pytest.raises(StartError, match="model: this run is another one"):
        compare_identity(identity(), identity(model=[]), ["model"])


def test_key_that_this_version_alone_knows_is_a_difference() -> None:
    with pytest.raises(StartError, match="new: this run is another one, it was None"):
        compare_identity(identity(), identity(new=3), [])
