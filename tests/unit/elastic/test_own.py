"""One's own loop: the five calls, what they refuse, and the exact mean on real ranks."""

import os
import re
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import elastic
from checkpoints.buffers import Buffers
from checkpoints.manager import CheckpointManager
from checkpoints.store import open_store
from elastic.own import OwnRun, _sum_weighed
from elastic.sampler import part
from elastic.world import World
from tests.support import records
from tests.support.ports import free_port
from tests.support.ranked import Ended, run_alone, run_ranks
from tests.support.soaking import soaked
from tests.support.tracer import Scalar


def dataset(n: int = 12) -> TensorDataset:
    return TensorDataset(torch.arange(n, dtype=torch.float32))


def open_run(url: str, **options: Any) -> tuple[OwnRun, nn.Module, torch.optim.Optimizer, Any]:
    run = elastic.start(url, **options)
    model = Scalar()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = run.loader(dataset(), global_batch_size=4)
    run.attach(model=model, optimizer=optimizer)
    return run, model, optimizer, loader


def train(url: str, epochs: int, die_at: int = 0) -> None:
    run, model, optimizer, loader = open_run(url, every="1 step")
    for _ in run.epochs(epochs):
        for (values,) in loader:
            if run.steps + 1 == die_at:
                raise ValueError("the script's own fault")
            loss = 0.5 * (model(values) ** 2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.step(loss=loss, extra=1.5)
    assert run.steps == 3 * epochs
    run.finish()  # once more changes nothing
    run.finish()


def weight(url: Path) -> float:
    (value,) = records.final_weights(url).values()
    return float(value)


def expected_weight(epochs: int) -> float:
    w = 0.0
    for epoch in range(epochs):
        order = torch.randperm(12, generator=torch.Generator().manual_seed(epoch)).float()
        for step in order.split(4):
            w += 0.1 * (float(step.mean()) - w)
    return w


def test_own_loop_trains_to_its_end(tmp_path: Path) -> None:
    ended = run_alone(train, str(tmp_path), 2)
    assert ended.code == 0, ended.err
    found = records.summary(tmp_path)
    assert (found["status"], found["steps"], found["samples"]) == ("complete", 6, 24)
    assert weight(tmp_path) == pytest.approx(expected_weight(2), rel=1e-6)
    assert [event["extra"] for event in records.events(tmp_path, "step")] == [1.5] * 6


def test_script_that_raises_tells_it_and_goes_on_at_the_position(tmp_path: Path) -> None:
    ended = run_alone(train, str(tmp_path), 2, 5)
    assert ended.code == 1
    assert ended.err.count("Traceback") == 1
    assert re.search(
        r"\nworker raised ValueError: the script's own fault \(rank 0, step 5, .*test_own\.py:\d+\) on \S+\n$",
        ended.err,
    ), ended.err
    assert run_alone(train, str(tmp_path), 2).code == 0
    found = records.summary(tmp_path)
    assert (found["steps"], found["lost_steps"]) == (6, 0)
    assert weight(tmp_path) == pytest.approx(expected_weight(2), rel=1e-6)


def swap(url: str) -> None:
    """An evaluation that shows other weights, between two steps and at an epoch's end, and a copy that is slow."""
    write = Buffers._write

    def slowly(self: Buffers, *given: Any) -> None:
        time.sleep(0.02)
        write(self, *given)

    Buffers._write = slowly  # type: ignore[method-assign,assignment]  # this process ends with the test
    run, model, optimizer, loader = open_run(url, every="1 step", keep=99)
    assert isinstance(model, Scalar)
    for _ in run.epochs(2):
        for (values,) in loader:
            optimizer.zero_grad()
            (0.5 * (model(values) ** 2).mean()).backward()
            optimizer.step()
            run.step()
            with torch.no_grad():
                kept = model.w.clone()
                model.w.fill_(-7)
                time.sleep(0.05)
                model.w.copy_(kept)


def test_what_a_script_shows_between_two_steps_is_in_no_checkpoint(tmp_path: Path) -> None:
    assert run_alone(swap, str(tmp_path)).code == 0
    store = open_store(str(tmp_path))
    manager = CheckpointManager(store)
    names = manager.names()
    assert len(names) == 6
    for name in names:
        tree: Any = manager.restore(name, keys=["model"])
        assert float(tree["model"]["w"]) != -7, name


def leave_early(url: str) -> None:
    run, model, optimizer, loader = open_run(url)
    for _ in run.epochs(1):
        for (values,) in loader:
            optimizer.zero_grad()
            (0.5 * (model(values) ** 2).mean()).backward()
            optimizer.step()
            run.step()
            break


def test_a_loop_that_ends_before_its_epoch_is_told_once(tmp_path: Path) -> None:
    ended = run_alone(leave_early, str(tmp_path))
    assert ended.code == 0
    told = [line for line in (ended.err.splitlines() + list(ended.notes)) if "run.epochs" in line]
    assert len(told) == 1, ended
    assert "ended at 4 of the epoch's 12 samples: the epoch comes again, from there" in told[0]


# ---------------------------------------------------------------------------------------- refusals
def no_step(url: str) -> None:
    run, _, _, loader = open_run(url)
    for _ in run.epochs(1):
        for _batch in loader:
            pass


def two_steps(url: str) -> None:
    run, _, _, loader = open_run(url)
    for _ in run.epochs(1):
        for _batch in loader:
            run.step(loss=1.0)
            run.step(loss=1.0)


def attach_first(url: str) -> None:
    elastic.start(url).attach(model=Scalar())


def batch_size(url: str) -> None:
    elastic.start(url).loader(dataset(), global_batch_size=4, shuffle=True)


def endless(url: str) -> None:
    elastic.start(url).loader(iter([1]), global_batch_size=4)  # type: ignore[arg-type]


def empty(url: str) -> None:
    elastic.start(url).loader(dataset(0), global_batch_size=4)


def bad_interval(url: str) -> None:
    elastic.start(url, every="now and then")


def bad_option(url: str) -> None:
    elastic.start(url, keeps=3)


def bad_backend(url: str) -> None:
    elastic.start(url, backend="ucc")


def bad_signal(url: str) -> None:
    elastic.start(url, signals=("SIGNAL",))


def unused(url: str) -> None:
    run = elastic.start(url)
    model = DistributedDataParallel(nn.ModuleDict({"a": nn.Linear(1, 1), "b": nn.Linear(1, 1)}))
    model.module.forward = lambda values: model.module["a"](values[:, None])
    loader = run.loader(dataset(), global_batch_size=4)
    run.attach(model=model)
    for _ in run.epochs(1):
        for (values,) in loader:
            model(values).mean().backward()
            run.step()


def second_loader(url: str) -> None:
    run = elastic.start(url)
    run.loader(dataset(), global_batch_size=4)
    run.loader(dataset(8), global_batch_size=8)


def own_average(url: str) -> None:
    run = elastic.start(url)
    run.loader(dataset(), global_batch_size=4)
    model = Scalar()
    run.attach(model=model, ema=torch.optim.swa_utils.AveragedModel(model))


def renormalised(url: str) -> None:
    run = elastic.start(url)
    run.loader(dataset(), global_batch_size=4)
    run.attach(model=nn.Sequential(nn.Embedding(3, 2, max_norm=1.0)))


def lazy(url: str) -> None:
    run = elastic.start(url)
    run.loader(dataset(), global_batch_size=4)
    run.attach(model=nn.LazyLinear(1))


def other_seed(url: str) -> None:
    run, *_ = open_run(url)
    run.close()
    open_run(url, seed=1)


@pytest.mark.parametrize(
    ("body", "code", "line"),
    [
        (no_step, 1, "error: run.step: found 0 calls for a batch, expected one"),
        (two_steps, 1, "error: run.step: found no batch taken from run.loader, expected one"),
        (attach_first, 2, "error: run.attach: found no loader, expected run.loader(...) before it"),
        (batch_size, 2, "error: loader: found shuffle, expected none: the global batch and the position decide it"),
        (endless, 2, "error: dataset: found list_iterator, which only iterates, expected a map-style dataset, with __len__ and __getitem__(index); index what it reads, as docs/data.md shows under Streams"),
        (empty, 2, "error: dataset: found TensorDataset with no samples, expected at least 1"),
        (bad_interval, 2, "error: elastic.start: found 'now and then', expected 500 steps, 10 min, 1 epoch or off"),
        (bad_option, 2, "error: elastic.start: CheckpointOptions.__init__() got an unexpected keyword argument 'keeps'"),
        (bad_backend, 2, "error: backend: found ucc (this torch does not know it), expected auto or one of: gloo"),
        (bad_signal, 2, "error: signals: found 'SIGNAL', expected names like SIGTERM or SIGUSR1"),
        (unused, 2, "error: gradients: found none of parameter b.weight, b.bias in a backward, expected each in the loss of every rank: nothing would be summed over the ranks; use it, or give DDP find_unused_parameters=True"),
        (second_loader, 2, "error: run.loader: found a second call, expected one, which is the run's position; read an evaluation set with a DataLoader of your own"),
        (own_average, 2, "error: run.attach: ema: found AveragedModel, expected none: the name is the project's own; give it another, for instance average="),
        (renormalised, 2, "error: run.attach: model: found 0 with max_norm=1, expected none: its forward changes the weights of the samples that a rank has, so that ranks would differ; leave it out, and renormalise in the loss or in a hook of the optimizer's step, on all ranks alike"),
        (lazy, 2, "error: run.attach: model: found weight without a shape (a lazy module), expected one for every parameter and buffer; give the layer its sizes, or run a forward before"),
        (other_seed, 2, "error: train.seed: this run is another one, it was 0, this start has 1; restore it, take a new checkpoint.url, or say run.accept=[train.seed]"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)  # fmt: skip
def test_what_cannot_be_is_refused_in_one_line_with_its_code(
    body: Callable[[str], None], code: int, line: str, tmp_path: Path
) -> None:
    ended: Ended = run_alone(body, str(tmp_path))
    assert (ended.code, ended.err) == (code, line + "\n")


def test_rank_variables_that_make_no_sense_are_one_line_and_code_2(tmp_path: Path) -> None:
    ended = run_alone(attach_first, str(tmp_path), environ={"RANK": "3"})
    assert ended.code == 2
    assert ended.err.startswith("error: ")
    assert ended.err.count("\n") == 1


# --------------------------------------------------------------------------------------- exact mean
def weigh(world: World) -> list[list[float]]:
    """W after steps of 5, 2 and 1 samples, cut unevenly, with the hook alone."""
    model = DistributedDataParallel(Scalar())
    run: Any = SimpleNamespace(share=0.0, world=world)
    model.register_comm_hook(run, _sum_weighed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    weights = []
    for size in (5, 2, 1):
        values = torch.arange(size, dtype=torch.float32) ** 2 + 1
        start, stop = part(0, size, world.rank, world.world_size)
        mine = values[start:stop] if stop > start else values[:1]
        run.share = (stop - start) / size
        optimizer.zero_grad()
        (0.5 * (model(mine) ** 2).mean()).backward()
        optimizer.step()
        weights.append(model.module.w.tolist())
    return weights


@pytest.mark.parametrize("size", [3, *soaked(2)])
def test_mean_of_uneven_and_empty_parts_is_exact(size: int) -> None:
    w, expected = 0.0, []
    for n in (5, 2, 1):
        w += 0.1 * (sum(i**2 + 1 for i in range(n)) / n - w)
        expected.append(w)
    for found in run_ranks(size, weigh):
        assert found == pytest.approx(expected, rel=1e-6)


def two_models(url: str, rank: int, port: int, disc: str) -> None:
    os.environ.update(
        RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )  # fmt: skip
    run = elastic.start(url)
    a, b = DistributedDataParallel(Scalar()), DistributedDataParallel(Scalar())
    optimizers = {
        "a": torch.optim.SGD(a.parameters(), lr=0.1),
        "b": torch.optim.SGD(b.parameters(), lr=0.1),
    }
    loader = run.loader(dataset(10), global_batch_size=3)
    more: dict[str, Any] = {"disc": {"ddp": b, "plain": b.module}.get(disc)}
    run.attach(model=a, optimizer=optimizers, **({} if disc == "none" else more))
    for _ in run.epochs(1):
        for (values,) in loader:
            for model, optimizer in ((a, optimizers["a"]), (b, optimizers["b"])):
                optimizer.zero_grad()
                (0.5 * (model(values) ** 2).mean()).backward()
                optimizer.step()
            run.step()
    assert a.module.w.tolist() == b.module.w.tolist()


@pytest.mark.parametrize(
    ("disc", "told"),
    [
        ("ddp", ""),
        ("none", "optimizer: found a parameter of shape () that is in no attached module"),
        ("plain", "disc: found Scalar in a world of 2, whose parameters an optimizer changes"),
    ],
)
def test_c45_each_model_has_the_exact_mean_or_is_refused(
    disc: str, told: str, tmp_path: Path
) -> None:
    port = free_port()
    with ThreadPoolExecutor(2) as pool:
        ended = list(pool.map(lambda rank: run_alone(two_models, str(tmp_path), rank, port, disc), range(2)))  # fmt: skip
    assert {one.code for one in ended} == {2 if told else 0}, [one.err for one in ended]
    assert told in "".join(one.err for one in ended)
    if not told:
        assert records.summary(tmp_path)["steps"] == 4


def test_module_is_not_imported_by_the_front() -> None:
    assert elastic.start is sys.modules["elastic.own"].start
