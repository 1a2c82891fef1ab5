"""The whole state: captured, written, restored, compared."""

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch._C._distributed_c10d import HashStore
from torch.nn.parallel import DistributedDataParallel
from torch.optim import lr_scheduler as schedulers

from checkpoints.errors import UnsupportedStateError
from checkpoints.layout import CheckpointName
from checkpoints.manager import CheckpointManager
from checkpoints.serialization import join, split
from checkpoints.store import open_store
from elastic.errors import StartError
from elastic.state import TrainState


class Net(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.first = nn.Linear(3, width)
        self.norm = nn.BatchNorm1d(width)
        self.last = nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.norm(self.first(x))))  # type: ignore[no-any-return]


class Counter:
    """A job, or anything else, with state."""

    def __init__(self) -> None:
        self.best, self.bad, self.seen = 9.0, 0, torch.zeros(2)

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "bad": self.bad, "seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)


class Training:
    """A small training with all that can be attached."""

    def __init__(
        self, *, lr: float = 0.01, decay: float = 0.1, span: int = 20, width: int = 4
    ) -> None:
        torch.manual_seed(0)
        self.model = Net(width)
        self.optimizer = optim.AdamW(self.model.parameters(), lr=lr, weight_decay=decay)
        self.scheduler = schedulers.CosineAnnealingLR(self.optimizer, span)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
        self.job, self.other = Counter(), Counter()
        self.state = TrainState()
        self.state.attach(
            model=self.model,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            scaler=self.scaler,
            job=self.job,
            other=self.other,
        )

    def train(self, start: int, stop: int) -> None:
        for step in range(start, stop):
            batch = torch.randn(6, 3, generator=torch.Generator().manual_seed(step))
            self.optimizer.zero_grad()
            loss = self.model(batch).square().mean()
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.scheduler.step()
            self.job.bad += 1
            self.other.seen += 0.5


def written(state: TrainState) -> dict[str, Any]:
    tensors, skeleton = split(state.capture())
    tree = join(json.loads(json.dumps(skeleton)), {n: t.clone() for n, t in tensors.items()})
    assert isinstance(tree, dict)
    return tree


class Queue(nn.Module):
    """Buffers whose forward makes them other ones."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(1, 1)
        self.register_buffer("made", None)
        self.register_buffer("queue", torch.zeros(2))
        self.register_buffer("cache", None, persistent=False)


@pytest.mark.parametrize(
    ("name", "value", "found"),
    [
        ("made", torch.ones(3), "'made': found float32 [3] after training began, expected none"),
        ("queue", torch.ones(3), "'queue': found float32 [3] after training began, expected float32 [2]"),
        ("queue", torch.ones(2).long(), "'queue': found int64 [2] after training began, expected float32 [2]"),
        ("queue", None, "'queue': found none after training began, expected float32 [2]"),
    ],
)  # fmt: skip
def test_a_buffer_that_no_restart_could_load_is_told_at_the_first_save(
    name: str, value: Tensor | None, found: str
) -> None:
    model = Queue()
    state = TrainState()
    state.attach(model=model)
    model.cache = torch.ones(3)
    state.capture()
    setattr(model, name, value)
    with pytest.raises(StartError, match=re.escape(f"model: tensor {found}")):
        state.capture()


# ------------------------------------------------------------------------------------------ the whole
@pytest.mark.parametrize("done", [0, 1, 5, 9])
def test_training_goes_on_as_if_nothing_had_happened(done: int) -> None:
    undisturbed, before, after = Training(), Training(), Training()
    undisturbed.train(0, 12)
    before.train(0, done)
    assert after.state.restore(written(before.state)) == []
    assert after.state.digest() == before.state.digest()
    after.train(done, 12)
    assert after.state.digest() == undisturbed.state.digest()


def test_a_state_goes_back_in_the_same_process() -> None:
    training = Training()
    training.train(0, 4)
    saved, digest = written(training.state), training.state.digest()
    training.train(4, 7)
    assert training.state.digest() != digest
    assert training.state.restore(saved) == []
    assert training.state.digest() == digest


def test_the_state_survives_a_checkpoint_and_the_model_file_has_plain_names(tmp_path: Path) -> None:
    before, after = Training(), Training()
    before.train(0, 5)
    manager = CheckpointManager(open_store(str(tmp_path)))
    name = CheckpointName(generation=1, step=5)
    manager.commit(
        manager.stage(before.state.capture(), name=name, parent=None, run_id="r", info={})
    )
    assert after.state.restore(manager.restore(name)) == []
    assert after.state.digest() == before.state.digest()
    manager.close()
    safetensors = pytest.importorskip("safetensors.torch")
    file = tmp_path / "checkpoints" / str(name) / "model.safetensors"
    assert set(safetensors.load_file(file)) == set(before.model.state_dict())


def test_nothing_of_the_tree_stays_alive_in_the_objects() -> None:
    before, after = Training(), Training()
    before.train(0, 3)
    saved = written(before.state)
    after.state.restore(saved)
    digest = after.state.digest()
    for tensor in split(saved)[0].values():
        tensor.zero_()
    assert after.state.digest() == digest


def test_capture_holds_live_tensors() -> None:
    training = Training()
    training.train(0, 2)
    tree = training.state.capture()
    weight = training.model.first.weight
    moments = tree["optimizer"]["main"]["state"]["first.weight"]
    assert tree["model"]["first.weight"].data_ptr() == weight.data_ptr()
    assert moments["exp_avg"].data_ptr() == training.optimizer.state[weight]["exp_avg"].data_ptr()
    assert not any(tensor.requires_grad for tensor in split(tree)[0].values())


# ---------------------------------------------------------------------- what changes between two starts
def test_changed_constants_take_effect_and_are_told() -> None:
    before, after = Training(), Training(lr=0.02, decay=0.3, span=40)
    before.train(0, 5)
    notes = after.state.restore(written(before.state))
    assert notes == [
        "optimizer.lr: 0.01 -> 0.02 (from code and config)",
        "optimizer.weight_decay: 0.1 -> 0.3 (from code and config)",
        "scheduler.T_max: 20 -> 40 (from code and config)",
    ]
    like = Training(lr=0.02, decay=0.3, span=40)
    like.train(0, 5)
    for ours, theirs in zip(after.optimizer.param_groups, like.optimizer.param_groups, strict=True):
        assert (ours["lr"], ours["weight_decay"]) == (theirs["lr"], 0.3)
    after.train(5, 6)
    like.train(5, 6)
    assert after.optimizer.param_groups[0]["lr"] == like.optimizer.param_groups[0]["lr"]


def test_c39_the_loss_scale_goes_on() -> None:
    def make() -> tuple[TrainState, torch.amp.GradScaler, nn.Linear, optim.SGD]:
        model = nn.Linear(1, 1, bias=False)
        optimizer = optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu")
        state = TrainState()
        state.attach(model=model, optimizer=optimizer, scaler=scaler)
        return state, scaler, model, optimizer

    def step(made: Any, value: float) -> None:
        _, scaler, model, optimizer = made
        optimizer.zero_grad()
        scaler.scale(model(torch.tensor([[value]])).sum()).backward()
        scaler.step(optimizer)
        scaler.update()

    made = make()
    for number in range(1, 6):
        step(made, float("inf") if number <= 3 else 1.0)
        if number == 3:
            assert made[1].get_scale() == 8192
    resumed = make()
    assert resumed[0].restore(written(made[0])) == []
    assert resumed[1].state_dict() == made[1].state_dict()
    assert resumed[1].state_dict()["_growth_tracker"] == 2
    step(resumed, 1.0)
    assert (resumed[1].get_scale(), resumed[1].state_dict()["_growth_tracker"]) == (8192, 3)


def test_a_changed_constant_of_the_scaler_takes_effect_and_the_scale_stays() -> None:
    def make(init: float, interval: int) -> tuple[TrainState, torch.amp.GradScaler]:
        scaler = torch.amp.GradScaler("cpu", init_scale=init, growth_interval=interval)
        state = TrainState()
        state.attach(model=nn.Linear(1, 1), scaler=scaler)
        return state, scaler

    before, scaler = make(1024.0, 7)
    scaler.load_state_dict({**scaler.state_dict(), "scale": 64.0, "_growth_tracker": 4})
    after, fresh = make(2048.0, 9)
    notes = after.restore(written(before))
    assert notes == ["scaler.growth_interval: 7 -> 9 (from code and config)"]
    assert (fresh.get_scale(), fresh.get_growth_interval()) == (64.0, 9)
    assert fresh.state_dict()["_growth_tracker"] == 4


@pytest.mark.parametrize("scaler", [None, torch.amp.GradScaler("cpu", enabled=False)])
def test_a_scaler_that_came_or_went_is_told(scaler: Any) -> None:
    with_one, without = TrainState(), TrainState()
    model = nn.Linear(1, 1)
    with_one.attach(model=model, scaler=torch.amp.GradScaler("cpu"))
    without.attach(model=model, scaler=scaler)
    assert without.restore(written(with_one)) == [
        "scaler: in the checkpoint, not attached; left aside"
    ]
    assert with_one.restore(written(without)) == ["scaler: not in the checkpoint; it begins anew"]
    assert without.restore(written(without)) == []


def test_things_that_came_or_went_are_told_and_unknown_entries_too() -> None:
    model = nn.Linear(1, 1)
    before, after = TrainState(), TrainState()
    before.attach(
        model=model, optimizer=optim.SGD(model.parameters()), job=Counter(), old=Counter()
    )
    after.attach(model=model, new=Counter())
    notes = after.restore({**written(before), "later": 1})
    assert notes == [
        "optimizer: in the checkpoint, not attached; left aside",
        "new: not in the checkpoint; it begins anew",
        "old: in the checkpoint, not attached; left aside",
        "job: in the checkpoint, not attached; left aside",
        "later: in the checkpoint, not known here; left aside",
    ]


def test_c43_the_jobs_own_state_is_kept() -> None:
    before, after = Training(), Training()
    before.job.best, before.job.bad = 3.0, 2
    after.state.restore(written(before.state))
    assert (after.job.best, after.job.bad) == (3.0, 2)


def test_c52_state_that_is_neither_tensor_nor_json_is_refused_by_its_key() -> None:
    training = Training()
    training.job.best = lambda: 0  # type: ignore[assignment]
    with pytest.raises(UnsupportedStateError, match=r"^job\.best: found .*function"):
        split(training.state.capture())


# ------------------------------------------------------------------------------------- what is refused
def test_c44_another_model_is_refused_before_anything_changes() -> None:
    before, after = Training(), Training(width=5)
    before.train(0, 1)
    digest = after.state.digest()
    with pytest.raises(StartError, match=r"^model: tensor 'first.weight': found float32 \[4, 3\]"):
        after.state.restore(written(before.state))
    assert after.state.digest() == digest


def test_a_checkpoint_without_a_model_is_refused() -> None:
    with pytest.raises(StartError, match=r"^state: found job in the checkpoint, expected a model"):
        Training().state.restore({"job": {}})


def test_c38_an_optimizer_without_its_state_is_refused() -> None:
    model = nn.Linear(1, 1)
    before, after = TrainState(), TrainState()
    before.attach(model=model)
    after.attach(model=model, optimizer=optim.SGD(model.parameters()))
    with pytest.raises(StartError, match=r"^optimizer: found no state for it .*\(found none\)"):
        after.restore(written(before))


def test_a_parameter_that_left_its_group_is_refused_by_name() -> None:
    model = nn.Linear(1, 1)
    before, after = TrainState(), TrainState()
    before.attach(model=model, optimizer=optim.SGD(model.parameters()))
    after.attach(model=model, optimizer=optim.SGD([model.weight]))
    with pytest.raises(
        StartError, match=r"^optimizer: parameter bias: found in no group of the opt"
    ):
        after.restore(written(before))


@pytest.mark.parametrize(
    ("attach", "message"),
    [
        (
            lambda s, m: s.attach(model=m, extra=3),
            r"^attach: extra: found int, expected something with",
        ),
        (
            lambda s, m: s.attach(
                model=m, scheduler=schedulers.StepLR(optim.SGD(m.parameters()), 1)
            ),
            r"^scheduler: found one that drives none of the attached optimizers \(none\)",
        ),
        (
            lambda s, m: s.attach(
                model=m, optimizer={"a": optim.SGD(m.parameters())}, scheduler=Counter()
            ),
            r"^scheduler: found one that drives none of the attached optimizers \(a\)",
        ),
        (
            lambda s, m: s.attach(model=m, scheduler={"a": (Counter(), "day")}),
            r'^scheduler.a: found .*, expected a scheduler or \(scheduler, "epoch"\)',
        ),
        (
            lambda s, m: [s.attach(model=m), s.attach(model=m)],
            r"^attach: found a second call",
        ),
    ],
)
def test_what_cannot_be_attached_is_refused(
    attach: Callable[[TrainState, nn.Module], object], message: str
) -> None:
    with pytest.raises(StartError, match=message):
        attach(TrainState(), nn.Linear(1, 1))


def test_nothing_works_without_a_model() -> None:
    for use in (TrainState().capture, TrainState().digest, lambda: TrainState().restore({})):
        with pytest.raises(StartError, match=r"^state: found no model attached"):
            use()


# ------------------------------------------------------------------------------------- several of them
def two(lr: float = 0.1, gamma: float = 0.5) -> tuple[TrainState, dict[str, Any], dict[str, Any]]:
    torch.manual_seed(1)
    model = nn.ModuleDict({"gen": nn.Linear(2, 2), "disc": nn.Linear(2, 1)})
    optimizers: dict[str, Any] = {
        "disc": optim.Adam(model["disc"].parameters(), lr=lr),
        "gen": optim.SGD(model["gen"].parameters(), lr=0.1, momentum=0.9),
    }
    drivers: dict[str, Any] = {
        "slow": (schedulers.ExponentialLR(optimizers["disc"], gamma), "epoch"),
        "fast": schedulers.StepLR(optimizers["gen"], 2),
    }
    state = TrainState()
    state.attach(model=model, optimizer=optimizers, scheduler=drivers)
    return state, optimizers, drivers


def train_two(optimizers: dict[str, Any], drivers: dict[str, Any], steps: int) -> None:
    for step in range(steps):
        for optimizer in optimizers.values():
            for group in optimizer.param_groups:
                for param in group["params"]:
                    param.grad = torch.full_like(param, 0.1 * (step + 1))
            optimizer.step()
        drivers["fast"].step()
    drivers["slow"][0].step()


def test_several_optimizers_and_schedulers_go_on() -> None:
    before, after, undisturbed = two(), two(), two()
    train_two(*before[1:], 3)
    assert after[0].restore(written(before[0])) == []
    assert after[0].digest() == before[0].digest()
    train_two(*after[1:], 2)
    train_two(*undisturbed[1:], 3)
    train_two(*undisturbed[1:], 2)
    assert after[0].digest() == undisturbed[0].digest()


def test_a_change_of_one_of_several_names_it() -> None:
    before, after = two(), two(lr=0.2, gamma=0.25)
    train_two(*before[1:], 3)
    assert after[0].restore(written(before[0])) == [
        "optimizer.disc.lr: 0.1 -> 0.2 (from code and config)",
        "scheduler.slow.gamma: 0.5 -> 0.25 (from code and config)",
    ]
    assert after[1]["disc"].param_groups[0]["lr"] == pytest.approx(0.05)
    assert after[1]["gen"].param_groups[0]["lr"] == pytest.approx(0.01)


def test_one_of_several_optimizers_that_is_gone_or_new_is_named() -> None:
    state, optimizers, _ = two()
    saved = written(state)
    saved["optimizer"]["other"] = saved["optimizer"].pop("gen")
    with pytest.raises(StartError, match=r"^optimizer.gen: found no state .*\(found disc, other\)"):
        state.restore(saved)
    alone = TrainState()
    model = nn.ModuleDict({"gen": nn.Linear(2, 2), "disc": nn.Linear(2, 1)})
    alone.attach(model=model, optimizer={"disc": optim.Adam(model["disc"].parameters(), lr=0.1)})
    notes = alone.restore(written(two()[0]))
    assert notes == [
        "scheduler.slow: ExponentialLR -> none (from code and config)",
        "optimizer.gen: in the checkpoint, not attached; left aside",
    ]
    assert optimizers


def test_a_scheduler_by_epoch_that_was_added_stands_at_the_runs_epoch() -> None:
    model = nn.Linear(1, 1)
    before, after = TrainState(), TrainState()
    before.attach(model=model, optimizer=optim.SGD(model.parameters(), lr=1.0))
    optimizer = optim.SGD(model.parameters(), lr=1.0)
    scheduler = schedulers.ExponentialLR(optimizer, 0.5)
    after.attach(model=model, optimizer=optimizer, scheduler=(scheduler, "epoch"))
    after.restore(written(before), steps=30, epochs=3)
    assert optimizer.param_groups[0]["lr"] == 0.125


def test_c42_wrapped_models_have_the_same_tree() -> None:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        torch.manual_seed(0)
        model = Net()
        wrapped = DistributedDataParallel(model)
        optimizer = optim.AdamW(wrapped.parameters(), lr=0.01, weight_decay=0.1)
        state = TrainState()
        state.attach(model=wrapped, optimizer=optimizer)
        tree = state.capture()
        assert list(tree["model"]) == list(model.state_dict())
        assert tree["optimizer"]["main"]["groups"][0]["names"] == [
            name for name, _ in model.named_parameters()
        ]
        plain = TrainState()
        fresh = Net()
        plain.attach(model=fresh, optimizer=optim.AdamW(fresh.parameters(), 0.01, weight_decay=0.1))
        assert plain.restore(written(state)) == []
    finally:
        dist.destroy_process_group()


# --------------------------------------------------------------------------------- digest, broadcast
def test_the_digest_sees_one_flipped_bit_and_each_number() -> None:
    training = Training()
    training.train(0, 2)
    digests = {training.state.digest()}
    with torch.no_grad():
        training.model.last.bias.view(torch.int32)[1] ^= 1
    digests.add(training.state.digest())
    training.optimizer.state[training.model.last.bias]["exp_avg_sq"].view(torch.int32)[0] ^= 1
    digests.add(training.state.digest())
    training.optimizer.param_groups[0]["lr"] *= 1 + 2**-52
    digests.add(training.state.digest())
    training.job.bad += 1
    digests.add(training.state.digest())
    assert len(digests) == 5
    assert all(len(digest) == 32 for digest in digests)


def test_the_digest_of_replicas_leaves_out_what_each_rank_has_for_itself() -> None:
    one, two_ = Training(), Training()
    two_.model.norm.running_mean.add_(1)  # type: ignore[union-attr]
    two_.job.bad = 7
    assert one.state.digest() != two_.state.digest()
    assert one.state.digest(replicated=True) == two_.state.digest(replicated=True)
    with torch.no_grad():
        two_.model.first.weight[0, 0] += 1
    assert one.state.digest(replicated=True) != two_.state.digest(replicated=True)


def test_parameters_and_buffers_are_broadcast_from_the_primary() -> None:
    class World:
        def broadcast_tensors(self, tensors: Sequence[Tensor], src: int = 0) -> None:
            assert src == 0
            for tensor in tensors:
                tensor.fill_(3)

    training = Training()
    training.state.broadcast_model(World())
    assert all(tensor.eq(3).all() for tensor in training.model.state_dict().values())


def test_each_phases_scaler_comes_back_under_its_name() -> None:
    def scalers(*names: str) -> dict[str, torch.amp.GradScaler]:
        made = {name: torch.amp.GradScaler("cpu", init_scale=4.0) for name in names}
        for scaler in made.values():
            scaler.scale(torch.zeros(()))  # the scale is made when it is first used
        return made

    was, now = scalers("disc", "gen"), scalers("gen", "other")
    was["gen"].update(2.0)
    state, restored = TrainState(), TrainState()
    state.attach(model=nn.Linear(1, 1), scaler=was)
    restored.attach(model=nn.Linear(1, 1), scaler=now)
    notes = restored.restore(state.capture())
    assert notes == [
        "scaler.disc: in the checkpoint, not attached; left aside",
        "scaler.other: not in the checkpoint; it begins anew",
    ]
    assert (now["gen"].get_scale(), now["other"].get_scale()) == (2.0, 4.0)
