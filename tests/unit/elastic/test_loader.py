"""What a rank reads in each step, for any number of loader workers, and how the workers end."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from elastic.draws import draws_of
from elastic.errors import StartError
from elastic.loader import Loader, StepBatch, count_samples
from elastic.options import LoaderOptions
from elastic.sampler import Plan
from jobs.sampling import Weighted

ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")


class Drawing(Dataset[tuple[int, float, float, float]]):
    """Item i is i and a draw from each library."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> tuple[int, float, float, float]:
        return index, np.random.rand(), torch.rand(()).item(), random.random()


class Pids(Drawing):
    """Item i is i and the process that read it."""

    def __getitem__(self, index: int) -> tuple[int, int]:  # type: ignore[override]
        return index, os.getpid()


def loader(
    n: int, batch: int, *, shards: int = 1, rank: int = 0, workers: int = 0, **more: Any
) -> Loader:
    plan = Plan(
        n=n, global_batch_size=batch, shards=shards, micro_batch_size=more.pop("micro", None)
    )
    options = LoaderOptions(
        workers=workers,
        persistent=more.pop("persistent", True),
        prefetch=more.pop("prefetch", None),
    )
    dataset = more.pop("dataset", None) or Drawing(n)
    return Loader(dataset, plan, rank=rank, options=options, **more)


def rows(batches: Iterator[StepBatch]) -> list[tuple[float, ...]]:
    """Every sample that counts, in order."""
    found: list[tuple[float, ...]] = []
    for batch in batches:
        for micro in batch.micro_batches:
            columns = [column.tolist() for column in micro.data]
            assert micro.indices == columns[0][: micro.samples]
            found += list(zip(*columns, strict=True))[: micro.samples]
    return found


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until_gone(pids: set[int], within_s: float = 10) -> None:
    end = time.monotonic() + within_s
    while any(alive(pid) for pid in pids):
        assert time.monotonic() < end, f"still alive: {[pid for pid in pids if alive(pid)]}"
        time.sleep(0.05)


# ------------------------------------------------------------------------------------------- what is read
@pytest.fixture(scope="module")
def undisturbed() -> list[list[tuple[float, ...]]]:
    """C08: the draws of two epochs of 16 samples, read by one process."""
    one = loader(16, 4)
    return [rows(one.epoch(epoch)) for epoch in range(2)]


def test_c08_all_draws_differ(undisturbed: list[list[tuple[float, ...]]]) -> None:
    for column in list(zip(*undisturbed[0], *undisturbed[1], strict=True))[1:]:
        assert len(set(column)) == 32
    columns = list(zip(*(undisturbed[0] + undisturbed[1]), strict=True))
    assert [len(set(column)) for column in columns] == [16, 32, 32, 32]


@pytest.mark.parametrize("workers", [0, 2, 4])
@pytest.mark.parametrize("shards", [1, 2])
def test_c08_draws_are_equal_for_any_workers_ranks_and_restarts(
    workers: int, shards: int, undisturbed: list[list[tuple[float, ...]]]
) -> None:
    for epoch in range(2):
        for position in (0, 12):
            left = undisturbed[epoch][position:]
            found = []
            for rank in range(shards):
                reader = loader(16, 4, shards=shards, rank=rank, workers=workers)
                found += rows(reader.epoch(epoch, position))
                reader.close()
            assert sorted(found) == sorted(left)


@pytest.mark.parametrize("workers", [0, 2])
def test_c03_a_resume_in_a_later_epoch_has_that_epochs_order(workers: int) -> None:
    reader = loader(8, 4, workers=workers)
    assert [row[0] for row in rows(reader.epoch(1, 4))] == [7, 3, 1, 0]
    assert [row[0] for row in rows(reader.epoch(2))] == [0, 4, 7, 2, 6, 5, 1, 3]
    reader.close()


def test_c04_what_the_loader_has_fetched_does_not_count(tmp_path: Path) -> None:
    class Noting(Drawing):
        """Leaves a file for each sample that was read."""

        def __getitem__(self, index: int) -> tuple[int, float, float, float]:
            (tmp_path / str(index)).touch()
            return super().__getitem__(index)

    reader = loader(64, 8, shards=2, workers=2, prefetch=8, dataset=Noting(64))
    batches = reader.epoch(0)
    trained = 0
    for _ in range(3):
        trained += next(batches).size
    end = time.monotonic() + 20
    while len(list(tmp_path.iterdir())) < 32:
        assert time.monotonic() < end
        time.sleep(0.02)
    assert trained == 24
    again = [loader(64, 8, shards=2, rank=rank, workers=2, prefetch=8) for rank in range(2)]
    first = [next(one.epoch(0, trained)) for one in again]
    assert {i for batch in first for i in batch.micro_batches[0].indices} == {
        48,
        60,
        55,
        16,
        61,
        54,
        9,
        1,
    }
    assert [batch.step_in_epoch for batch in first] == [3, 3]
    for one in (reader, *again):
        one.close()


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("shards", [1, 2, 3, 4])
def test_c05_every_rank_has_as_many_steps_and_an_empty_part_weighs_nothing(
    shards: int, workers: int
) -> None:
    readers = [loader(10, 4, shards=shards, rank=rank, workers=workers) for rank in range(shards)]
    steps = list(zip(*(reader.epoch(0) for reader in readers), strict=True))
    assert len(steps) == 3
    taken = []
    for step, batches in enumerate(steps):
        assert {batch.size for batch in batches} == {4 if step < 2 else 2}
        assert [batch.step_in_epoch for batch in batches] == [step] * shards
        assert (
            sum(micro.samples for batch in batches for micro in batch.micro_batches)
            == batches[0].size
        )
        for rank, batch in enumerate(batches):
            assert [(micro.shard, micro.number) for micro in batch.micro_batches] == [(rank, 0)]
            taken += batch.micro_batches[0].indices
    assert sorted(taken) == list(range(10))
    if shards == 4:
        (empty,) = steps[2][3].micro_batches
        assert (empty.indices, empty.samples, len(empty.data[0])) == ([], 0, 1)
        assert empty.data[0].tolist() == [readers[0].plan.first(0, 2)]
    for reader in readers:
        reader.close()


@pytest.mark.parametrize("n", [8, 9])
def test_c06_nothing_is_left_at_an_epochs_end(n: int) -> None:
    reader = loader(n, 4)
    assert list(reader.epoch(0, n)) == []
    if n == 8:
        assert set(next(reader.epoch(1)).micro_batches[0].indices) == {5, 4, 2, 6}


def test_a_position_at_which_no_step_begins_is_refused_at_once() -> None:
    with pytest.raises(StartError, match=r"^position: found 3 samples into the epoch"):
        loader(8, 4).epoch(0, 3)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_part_comes_in_micro_batches_or_as_one(workers: int) -> None:
    reader = loader(12, 10, shards=2, rank=1, workers=workers, micro=2)
    steps = list(reader.epoch(0))
    sizes = [[(m.number, m.samples) for m in batch.micro_batches] for batch in steps]
    assert sizes == [[(0, 2), (1, 2), (2, 1)], [(0, 1)]]
    whole = list(reader.parts(0))
    assert [[m.samples for m in batch.micro_batches] for batch in whole] == [[5], [1]]
    assert whole[0].micro_batches[0].indices == [
        i for m in steps[0].micro_batches for i in m.indices
    ]
    assert rows(reader.parts(0)) == rows(reader.epoch(0))
    reader.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_collate_of_ones_own_draws_by_address_too(workers: int) -> None:
    found = []
    for _ in range(2):
        reader = loader(8, 4, workers=workers, collate=_mixed)
        found.append([batch.micro_batches[0].data for batch in reader.epoch(0)])
        reader.close()
    assert (
        found[0]
        == found[1]
        == [b.micro_batches[0].data for b in loader(8, 4, collate=_mixed).epoch(0)]
    )
    assert found[0][0][1] != found[0][1][1]


def _mixed(samples: list[tuple[Any, ...]]) -> tuple[list[int], float]:
    return [sample[0] for sample in samples], random.random()


@pytest.mark.parametrize("workers", [0, 2])
def test_what_is_drawn_twice_is_audited_as_it_is_and_drawn_for_anew(workers: int) -> None:
    found: list[list[tuple[float, ...]]] = []
    draws = draws_of(6, Weighted([1, 2, 3, 4, 5, 0], 40))
    for shards in (1, 2):
        found.append([])
        for rank in range(shards):
            plan = Plan(n=6, global_batch_size=8, shards=shards, draws=draws)
            reader = Loader(Drawing(6), plan, rank=rank, options=LoaderOptions(workers=workers))
            found[-1] += rows(reader.epoch(0))
            reader.close()
    assert sorted(found[0]) == sorted(found[1])
    assert len(set(found[0])) == 40
    assert {row[0] for row in found[0]} == {0, 1, 2, 3, 4}


# ------------------------------------------------------------------------------------------- the main process
@pytest.mark.parametrize("workers", [0, 2])
def test_the_main_random_state_stays_as_it_was(workers: int) -> None:
    def draw() -> tuple[float, ...]:
        return torch.rand(()).item(), random.random(), np.random.rand()

    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    expected = [draw() for _ in range(9)]
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    reader = loader(16, 4, workers=workers)
    found = [draw()]
    for epoch in range(2):
        found += [draw() for _ in reader.epoch(epoch)]
    reader.close()
    assert found == expected


def test_who_seeds_before_each_forward_need_not_pay_for_that(
    undisturbed: list[list[tuple[float, ...]]],
) -> None:
    assert rows(loader(16, 4, keep_random_state=False).epoch(0)) == undisturbed[0]


def test_a_second_epoch_beside_a_running_one_is_refused() -> None:
    reader = loader(8, 4)
    first = reader.epoch(0)
    next(first)
    next(reader.epoch(1))
    with pytest.raises(
        StartError, match=r"^loader: found a second epoch begun while this one goes on"
    ):
        next(first)


# ------------------------------------------------------------------------------------------- loader workers
def readers_of(batches: Iterator[StepBatch]) -> set[int]:
    return {int(pid) for batch in batches for micro in batch.micro_batches for pid in micro.data[1]}


def test_loader_workers_stay_from_epoch_to_epoch() -> None:
    reader = loader(32, 4, workers=2, dataset=Pids(32))
    first = readers_of(reader.epoch(0))
    assert len(first) == 2
    assert readers_of(reader.epoch(1)) == first
    reader.close()
    wait_until_gone(first)
    assert readers_of(reader.epoch(2)).isdisjoint(first | {os.getpid()})
    reader.close()


def test_loader_workers_end_with_the_epoch_where_asked() -> None:
    reader = loader(32, 4, workers=2, persistent=False, dataset=Pids(32))
    first = readers_of(reader.epoch(0))
    wait_until_gone(first)
    assert readers_of(reader.epoch(1)).isdisjoint(first)


@pytest.mark.parametrize("persistent", [True, False])
def test_an_epoch_left_early_leaves_nobody_stuck(persistent: bool) -> None:
    reader = loader(64, 4, workers=2, prefetch=4, persistent=persistent, dataset=Pids(64))
    pids: set[int] = set()
    for epoch in range(3):
        for batch in reader.epoch(epoch):
            pids |= {int(pid) for pid in batch.micro_batches[0].data[1]}
            break
    assert [row[0] for row in rows(reader.epoch(3))] == reader.plan.order_of(3).tolist()
    reader.close()
    wait_until_gone(pids)


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_other_ways_of_starting_workers_do_too(method: Any) -> None:
    data = TensorDataset(torch.arange(8))
    options = LoaderOptions(workers=1, start_method=method)
    reader = Loader(data, Plan(n=8, global_batch_size=4), rank=0, options=options)
    assert [b.micro_batches[0].data[0].tolist() for b in reader.epoch(0)] == [
        [4, 0, 7, 3],
        [2, 5, 1, 6],
    ]
    reader.close()


def test_an_error_in_a_worker_comes_with_the_users_own_lines() -> None:
    class Broken(Drawing):
        """Has no sample 3."""

        def __getitem__(self, index: int) -> tuple[int, float, float, float]:
            if index == 3:
                raise KeyError("sample 3 is broken")
            return super().__getitem__(index)

    reader = loader(8, 4, workers=1, dataset=Broken(8))
    with pytest.raises(KeyError, match="sample 3 is broken"):
        list(reader.epoch(0))
    reader.close()


SCRIPT = """
import os, sys, time, torch
from torch.utils.data import Dataset
from elastic.loader import Loader
from elastic.options import LoaderOptions
from elastic.sampler import Plan

class Slow(Dataset):
    def __len__(self):
        return 4000
    def __getitem__(self, index):
        time.sleep(0.01)
        return index, os.getpid()

def main():
    loader = Loader(Slow(), Plan(n=4000, global_batch_size=4), rank=0, options=LoaderOptions(workers=2))
    for number, batch in enumerate(loader.epoch(0)):
        if number < 6:
            sys.stdout.write(" ".join(str(int(pid)) for pid in batch.micro_batches[0].data[1]) + chr(10))
        if number == 6:
            sys.stdout.write("ready" + chr(10))
        sys.stdout.flush()
main()
"""


@pytest.fixture
def trainer() -> Iterator[tuple[subprocess.Popen[str], set[int]]]:
    """A process that reads with two workers, and the workers' pids."""
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        start_new_session=True,
    )
    pids: set[int] = set()
    assert process.stdout is not None
    for line in process.stdout:
        if line == "ready\n":
            break
        pids |= {int(pid) for pid in line.split()}
    yield process, pids
    process.kill()
    process.communicate()


def test_workers_outlive_ctrl_c_and_die_with_their_trainer(
    trainer: tuple[subprocess.Popen[str], set[int]],
) -> None:
    process, pids = trainer
    assert len(pids) == 2
    for pid in pids:
        os.kill(pid, signal.SIGINT)
    time.sleep(0.5)
    assert all(alive(pid) for pid in pids)
    assert process.poll() is None
    process.kill()
    wait_until_gone(pids, within_s=2)


def test_c18_a_worker_that_gets_sigterm_says_nothing(
    trainer: tuple[subprocess.Popen[str], set[int]],
) -> None:
    process, pids = trainer
    os.killpg(process.pid, signal.SIGTERM)
    _, errors = process.communicate(timeout=20)
    wait_until_gone(pids)
    assert errors == ""


def test_script_that_ends_in_the_middle_of_an_epoch_ends() -> None:
    script = SCRIPT.replace("if number == 6:", "if number == 6:\n            return loader")
    script = script.replace("\nmain()\n", "\nkept = main()\n")
    assert "return loader" in script
    assert "kept = main()" in script
    ended = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=60,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    pids = {int(pid) for line in ended.stdout.splitlines() for pid in line.split()}
    assert len(pids) == 2
    wait_until_gone(pids, within_s=2)


# ------------------------------------------------------------------------------------------- what is refused
class Endless(IterableDataset[int]):
    """Only iterates."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(4))


class Both(Endless):
    """Iterates, and can be asked for any sample, as some streaming datasets can."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return 10 * index


class Mistyped(Dataset[int]):
    n: Any = 1.5  # what a job's wrong argument makes of it

    def __len__(self) -> int:
        return len(range(self.n))

    def __getitem__(self, index: int) -> int:
        return index


class Unsized(Dataset[int]):
    """Tells no length."""

    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize(
    ("dataset", "text"),
    [
        (Endless(), "dataset: found Endless, which only iterates, expected a map-style dataset, with __len__ and __getitem__(index); index what it reads, as docs/data.md shows under Streams"),
        (Mistyped(), "dataset: found Mistyped whose __len__ fails (TypeError: 'float' object cannot be interpreted as an integer), expected a whole number; are the job's args of the right type?"),
        (Unsized(), "dataset: found Unsized without a length, expected __len__"),
        (Drawing(0), "dataset: found Drawing with no samples, expected at least 1"),
    ],
)  # fmt: skip
def test_a_dataset_that_cannot_be_asked_for_any_sample_is_refused(
    dataset: Dataset[Any], text: str
) -> None:
    with pytest.raises(StartError) as caught:
        count_samples(dataset)
    assert str(caught.value) == text
    with pytest.raises(StartError):
        Loader(dataset, Plan(n=4, global_batch_size=2), rank=0)


def test_an_iterable_dataset_that_can_be_indexed_is_read_so() -> None:
    reader = loader(4, 4, dataset=Both(), workers=1)
    (batch,) = reader.epoch(0)
    assert batch.micro_batches[0].data.tolist() == [10 * i for i in reader.plan.indices(0, 0, 0)]
    reader.close()


def test_a_dataset_of_another_length_than_the_plans_is_refused() -> None:
    with pytest.raises(StartError, match=r"^dataset: found 5 samples, expected the plan's 4$"):
        Loader(Drawing(5), Plan(n=4, global_batch_size=2), rank=0)


def test_dataloaders_other_arguments_pass_through_and_win() -> None:
    seen: list[int] = []
    passed = {
        "num_workers": 0,
        "collate_fn": lambda samples: seen.append(len(samples)),
        "pin_memory": False,
    }
    reader = loader(8, 4, workers=2, passed=passed)
    assert [batch.micro_batches[0].data for batch in reader.epoch(0)] == [None, None]
    assert seen == [4, 4]


@pytest.mark.parametrize(
    "name", ["batch_size", "sampler", "shuffle", "drop_last", "generator", "in_order"]
)
def test_what_the_plan_decides_cannot_be_passed(name: str) -> None:
    with pytest.raises(StartError, match=f"^loader: found {name}, expected none"):
        loader(8, 4, passed={name: None})


def test_a_worker_start_of_ones_own_is_called() -> None:
    passed = {"worker_init_fn": _set_numpy_error}
    reader = loader(4, 4, workers=1, dataset=NumpyError(4), passed=passed)
    assert [row[1] for row in rows(reader.epoch(0))] == [1, 1, 1, 1]
    reader.close()


class NumpyError(Drawing):
    """Item i is i and whether the process was set up."""

    def __getitem__(self, index: int) -> tuple[int, int]:  # type: ignore[override]
        return index, int(np.geterr()["over"] == "raise")


def _set_numpy_error(worker: int) -> None:
    assert worker == 0
    np.seterr(over="raise")
