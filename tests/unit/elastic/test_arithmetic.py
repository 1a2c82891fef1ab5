"""What the bits depend on: fixed, part of the identity, or told."""

import os
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from elastic.arithmetic import (
    BITS,
    check_machine,
    compile_each_shape,
    describe_machine,
    fix_arithmetic,
    identity,
    pin_optimizer,
)
from elastic.errors import StartError
from elastic.identity import compare_identity
from elastic.options import IDENTITY, TrainOptions
from elastic.progress import Progress
from tests.support.ranked import run_alone

CPU = torch.device("cpu")
MACHINE = {"torch": "2.13.0", "cpu": "One (AVX512)"}


def threads_after(given: int | None) -> int:
    fix_arithmetic(given)
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.set_flush_denormal(False) or torch.tensor(1e-39).mul(1).item() != 0
    return torch.get_num_threads()


@pytest.mark.parametrize("environ", ["1", "2", "7"])
@pytest.mark.parametrize("given", [None, 2])
def test_breaker_threads_are_never_the_launchers_to_choose(environ: str, given: int | None) -> None:
    ended = run_alone(threads_after, given, environ={"OMP_NUM_THREADS": environ})
    assert ended.code == (given or 1), ended.err


def test_settings_that_the_bits_depend_on_are_refused_where_they_changed() -> None:
    base: dict[str, Any] = {"reproducible": "bitwise", "logical_shards": 8}
    old = identity(TrainOptions(**base), threads=1, kernels={"main": "plain"})
    assert tuple(old) == BITS
    changes: list[tuple[str, dict[str, Any]]] = [
        ("train.logical_shards", {"train": TrainOptions(**base | {"logical_shards": 4})}),
        ("train.micro_batch_size", {"train": TrainOptions(**base, micro_batch_size=2)}),
        ("train.precision", {"train": TrainOptions(**base, precision="bf16")}),
        ("train.compile", {"train": TrainOptions(**base, compile=True)}),
        ("train.threads", {"threads": 2}),
        ("train.fused", {"kernels": {"main": "fused"}}),
    ]
    for key, change in changes:
        given = {
            "train": TrainOptions(**base),
            "threads": 1,
            "kernels": {"main": "plain"},
            **change,
        }
        new = identity(given["train"], threads=given["threads"], kernels=given["kernels"])
        with pytest.raises(
            StartError, match=f"^{key}: this run is another one, it was .*, this start has "
        ):
            compare_identity(old, new, ())
        assert len(compare_identity(old, new, (key,))) == 1


def test_bitwise_run_is_not_gone_on_with_in_the_default_mode() -> None:
    old = identity(TrainOptions(reproducible="bitwise", logical_shards=8), threads=1, kernels={})
    with pytest.raises(StartError, match=r"^train\."):
        compare_identity(old, {}, ())


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(3))]


@pytest.mark.parametrize(
    ("optimizer", "kind"),
    [
        (AdamW(parameters()), "plain"),
        (Adam(parameters(), foreach=True), "plain"),
        (AdamW(parameters(), fused=True), "fused"),
        (SGD(parameters(), lr=1), "plain"),
        (torch.optim.LBFGS(parameters()), "own"),
    ],
    ids=["default", "foreach", "fused", "sgd", "own"],
)
def test_kernel_of_the_optimizer_is_chosen_in_code(optimizer: Optimizer, kind: str) -> None:
    assert pin_optimizer(optimizer) == kind
    assert pin_optimizer(optimizer) == kind
    for group in optimizer.param_groups:
        assert group.get("foreach", False) is not None
        assert group.get("fused", False) is not None


def test_machine_is_described_by_what_its_arithmetic_depends_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = describe_machine(CPU)
    assert found["torch"] == torch.__version__
    assert torch.backends.cpu.get_cpu_capability() in found["cpu"]
    monkeypatch.setitem(os.environ, "ONEDNN_MAX_CPU_ISA", "AVX2")
    assert describe_machine(CPU)["ONEDNN_MAX_CPU_ISA"] == "AVX2"


def test_the_first_machine_is_the_runs_and_another_ends_the_promise_where_it_came() -> None:
    progress = Progress()
    assert check_machine(progress, [MACHINE, MACHINE]) == []
    assert (progress.arithmetic, progress.bits_until) == (MACHINE, None)
    progress.step = 40
    assert check_machine(progress, [MACHINE]) == []
    notes = check_machine(progress, [MACHINE, MACHINE | {"cpu": "Two (AVX2)"}])
    assert notes == ["cpu: the run's is One (AVX512), rank 1 has Two (AVX2)"]
    assert progress.bits_until == 40
    progress.step = 50
    assert check_machine(progress, [MACHINE | {"torch": "3.0"}]) == [
        "torch: the run's is 2.13.0, rank 0 has 3.0"
    ]
    assert progress.bits_until == 40
    assert check_machine(progress, [MACHINE]) == []
    assert progress.bits_until == 40


def test_ranks_that_differ_from_the_start_promise_nothing() -> None:
    progress = Progress()
    assert check_machine(progress, [MACHINE, MACHINE | {"cpu": "Two"}])
    assert progress.bits_until == 0


def test_progress_of_the_first_version_is_read() -> None:
    tree = Progress(step=3).to_tree()
    del tree["arithmetic"], tree["bits_until"]
    assert Progress.from_tree(tree) == Progress(step=3)


def test_every_key_of_it_may_be_accepted() -> None:
    assert set(BITS) <= set(IDENTITY)


def count_compiled() -> int:
    graphs = []

    def backend(graph: Any, _inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch.compiler.set_default_backend(backend)
    model = compile_each_shape(nn.Linear(2, 2))
    for rows in range(2, 12):
        model(torch.ones(rows, 2))
    return len(graphs)


def test_every_shape_is_compiled_by_itself_the_ninth_too() -> None:
    ended = run_alone(count_compiled)
    assert (ended.code, ended.err) == (10, "")
