"""Schedules and groups: the same rates after a restore, and changed constants that take effect."""

import json
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim import lr_scheduler as schedulers

from checkpoints.serialization import join, split
from elastic.errors import StartError
from elastic.schedule import Driver, Schedule

Built = tuple[Optimizer, Any]
WATCHED = ("lr", "momentum", "betas", "weight_decay")


def saved_and_read(tree: Any) -> Any:
    """The tree as it comes back from a checkpoint."""
    tensors, skeleton = split(tree)
    text = json.dumps(skeleton)
    return join(json.loads(text), {name: tensor.clone() for name, tensor in tensors.items()})


def sgd(lr: Any = 0.1, **others: Any) -> SGD:
    return SGD([nn.Parameter(torch.ones(2))], lr=lr, **others)


def two_groups(lr: float = 0.1) -> SGD:
    groups: list[dict[str, Any]] = [
        {"params": [nn.Parameter(torch.ones(1))]},
        {"params": [nn.Parameter(torch.ones(1))], "lr": lr / 2},
    ]
    return SGD(groups, lr=lr, momentum=0.9)


class Warmup:
    """A callable with state of its own, which torch saves."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __call__(self, step: int) -> float:
        return min(1.0, (step + 1) / self.length)


def sequential(optimizer: Optimizer, warmup: int = 4, lasting: int = 16) -> Any:
    parts = [
        schedulers.LinearLR(optimizer, start_factor=0.1, total_iters=warmup),
        schedulers.CosineAnnealingLR(optimizer, T_max=lasting),
    ]
    return schedulers.SequentialLR(optimizer, parts, milestones=[warmup])


def chained(optimizer: Optimizer, gamma: float = 0.9) -> Any:
    parts = [
        schedulers.ConstantLR(optimizer, factor=0.1, total_iters=5),
        schedulers.ExponentialLR(optimizer, gamma=gamma),
    ]
    return schedulers.ChainedScheduler(parts, optimizer=optimizer)


def nested(optimizer: Optimizer) -> Any:
    return schedulers.ChainedScheduler(
        [sequential(optimizer), schedulers.ExponentialLR(optimizer, 0.97)], optimizer=optimizer
    )


MAKERS: dict[str, Callable[[], Built]] = {
    "step": lambda: _with(sgd(), lambda o: schedulers.StepLR(o, 5)),
    "multistep": lambda: _with(sgd(), lambda o: schedulers.MultiStepLR(o, [4, 4, 9])),
    "constant": lambda: _with(sgd(), lambda o: schedulers.ConstantLR(o, 0.3, 6)),
    "linear": lambda: _with(sgd(), lambda o: schedulers.LinearLR(o, 0.1, total_iters=9)),
    "exponential": lambda: _with(two_groups(), lambda o: schedulers.ExponentialLR(o, 0.9)),
    "polynomial": lambda: _with(sgd(), lambda o: schedulers.PolynomialLR(o, 18, 2.0)),
    "cosine": lambda: _with(two_groups(), lambda o: schedulers.CosineAnnealingLR(o, 7, 1e-3)),
    "restarts": lambda: _with(sgd(), lambda o: schedulers.CosineAnnealingWarmRestarts(o, 3, 2)),
    "onecycle": lambda: _with(
        Adam([nn.Parameter(torch.ones(2))]), lambda o: schedulers.OneCycleLR(o, 0.1, 25)
    ),
    "onecycle-sgd": lambda: _with(
        sgd(momentum=0.9), lambda o: schedulers.OneCycleLR(o, 0.1, 25, three_phase=True)
    ),
    "cyclic": lambda: _with(
        sgd(momentum=0.9), lambda o: schedulers.CyclicLR(o, 0.01, 0.1, 3, mode="triangular2")
    ),
    "lambda": lambda: _with(sgd(), lambda o: schedulers.LambdaLR(o, lambda t: 0.95**t)),
    "lambda-object": lambda: _with(sgd(), lambda o: schedulers.LambdaLR(o, Warmup(6))),
    "lambdas": lambda: _with(
        two_groups(), lambda o: schedulers.LambdaLR(o, [Warmup(6), lambda t: 1 / (t + 1)])
    ),
    "product": lambda: _with(sgd(), lambda o: schedulers.MultiplicativeLR(o, lambda t: 1 - t / 99)),
    "sequential": lambda: _with(two_groups(), sequential),
    "chained": lambda: _with(sgd(), chained),
    "nested": lambda: _with(sgd(), nested),
    "tensor-lr": lambda: _with(
        sgd(torch.tensor(0.1, dtype=torch.float64)), lambda o: schedulers.StepLR(o, 3, 0.3)
    ),
    "plateau": lambda: _with(
        sgd(), lambda o: schedulers.ReduceLROnPlateau(o, patience=1, cooldown=1)
    ),
}


def _with(optimizer: Optimizer, make: Callable[[Optimizer], Any]) -> Built:
    return optimizer, make(optimizer)


def attach(built: Built, per: Any = "step") -> Schedule:
    drivers = {} if built[1] is None else {"scheduler": Driver(scheduler=built[1], per=per)}
    return Schedule(built[0], drivers, "optimizer")


def go_on(built: Built, steps: int, start: int = 0) -> list[list[list[Any]]]:
    """What each step used, of each group."""
    optimizer, scheduler = built
    used = []
    for step in range(start, start + steps):
        rows = [[float(group["lr"]), *_rest(group)] for group in optimizer.param_groups]
        used.append(rows)
        optimizer.step()
        if isinstance(scheduler, schedulers.ReduceLROnPlateau):
            scheduler.step([5.0, 4, 4, 4, 4, 3, 3, 3, 3, 3, 3, 3, 3, 2, 2, 2, 2, 2, 2, 2][step])
        elif scheduler is not None:
            scheduler.step()
    return used


def _rest(group: dict[str, Any]) -> list[Any]:
    return [group.get(key) for key in WATCHED[1:]]


def resume(
    make: Callable[[], Built], remake: Callable[[], Built], steps: int, **done: int | None
) -> tuple[Built, list[str]]:
    """Train `steps` steps with one set of constants, restore into another; the latter and its notes."""
    before = make()
    schedule = attach(before)
    go_on(before, steps)
    groups, drivers = saved_and_read([schedule.capture_groups(), schedule.capture_drivers()])
    after = remake()
    notes = attach(after).restore(groups, drivers, {"step": None, "epoch": None, **done})
    return after, notes


# -------------------------------------------------------------------------------- nothing has changed
@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("done", [0, 1, 3, 4, 5, 9, 13])
def test_rates_after_a_restore_are_bit_identical_to_the_undisturbed_ones(
    kind: str, done: int
) -> None:
    undisturbed = go_on(MAKERS[kind](), 20)
    after, notes = resume(MAKERS[kind], MAKERS[kind], done)
    assert notes == []
    assert go_on(after, 20 - done, done) == undisturbed[done:]


@pytest.mark.parametrize("kind", MAKERS)
def test_a_used_schedule_goes_back_to_the_saved_position(kind: str) -> None:
    undisturbed = go_on(MAKERS[kind](), 20)
    built = MAKERS[kind]()
    schedule = attach(built)
    go_on(built, 6)
    saved: Any = saved_and_read([schedule.capture_groups(), schedule.capture_drivers()])
    go_on(built, 5, 6)
    for _ in range(2):
        assert schedule.restore(saved[0], saved[1], {}) == []
        assert go_on(built, 14, 6) == undisturbed[6:]


@pytest.mark.parametrize("kind", MAKERS)
def test_a_second_save_after_a_restore_is_the_first(kind: str) -> None:
    built = MAKERS[kind]()
    schedule = attach(built)
    go_on(built, 7)
    saved: Any = [schedule.capture_groups(), schedule.capture_drivers()]
    again = attach(MAKERS[kind]())
    again.restore(*saved_and_read([*saved, {}]))
    assert split([again.capture_groups(), again.capture_drivers()])[1] == split(saved)[1]


def test_c37_cosine_rate_of_step_46_after_a_kill_at_45() -> None:
    def make() -> Built:
        return _with(sgd(0.001), lambda o: schedulers.CosineAnnealingLR(o, T_max=100))

    after, notes = resume(make, make, 45)
    rates = [rows[0][0] for rows in go_on(after, 55)]
    assert notes == []
    assert rates[0] == pytest.approx(0.000578217232520116, rel=1e-12)
    assert rates[1] == pytest.approx(0.000562666616782152, rel=1e-12)
    assert rates[54] == pytest.approx(2.467198e-07, rel=1e-6)
    assert rates == [rows[0][0] for rows in go_on(make(), 100)[45:]]


@pytest.mark.parametrize("epochs", [0, 1, 2, 3, 4, 5])
def test_c37_multistep_by_epoch(epochs: int) -> None:
    def make() -> Built:
        return _with(sgd(100.0), lambda o: schedulers.MultiStepLR(o, milestones=[4], gamma=0.1))

    after, _ = resume(make, make, epochs)
    rates = [rows[0][0] for rows in go_on(after, 7 - epochs)]
    assert rates == [100, 100, 100, 100, 10, 10, 10][epochs:]


@pytest.mark.parametrize("done", [0, 10, 19, 20, 21, 39, 40, 59])
def test_c46_one_scheduler_step_for_each_step(done: int) -> None:
    def make() -> Built:
        return _with(sgd(0.1), lambda o: schedulers.StepLR(o, step_size=20, gamma=0.1))

    after, _ = resume(make, make, done)
    rates = [rows[0][0] for rows in go_on(after, 60 - done)]
    for step, rate in {0: 0.1, 19: 0.1, 20: 0.01, 39: 0.01, 40: 0.001, 59: 0.001}.items():
        if step >= done:
            assert rates[step - done] == pytest.approx(rate, rel=1e-12)


# ------------------------------------------------------------------------------- constants have changed
CHANGES: dict[str, tuple[Callable[[], Built], Callable[[], Built], list[str]]] = {
    "lr of cosine": (
        lambda: _with(sgd(0.001), lambda o: schedulers.CosineAnnealingLR(o, 30)),
        lambda: _with(sgd(0.0005), lambda o: schedulers.CosineAnnealingLR(o, 30)),
        ["optimizer.lr: 0.001 -> 0.0005 (from code and config)"],
    ),
    "T_max": (
        lambda: _with(sgd(0.1), lambda o: schedulers.CosineAnnealingLR(o, 30)),
        lambda: _with(sgd(0.1), lambda o: schedulers.CosineAnnealingLR(o, 60)),
        ["scheduler.T_max: 30 -> 60 (from code and config)"],
    ),
    "milestones": (
        lambda: _with(sgd(0.1), lambda o: schedulers.MultiStepLR(o, [3, 30])),
        lambda: _with(sgd(0.1), lambda o: schedulers.MultiStepLR(o, [15])),
        ["scheduler.milestones: [3, 30] -> [15] (from code and config)"],
    ),
    "max_lr of onecycle": (
        lambda: _with(Adam([nn.Parameter(torch.ones(1))]), lambda o: _one_cycle(o, 0.1)),
        lambda: _with(Adam([nn.Parameter(torch.ones(1))]), lambda o: _one_cycle(o, 0.2)),
        [
            "optimizer.lr: 0.004 -> 0.008 (from code and config)",
            "optimizer.max_lr: 0.1 -> 0.2 (from code and config)",
            "optimizer.min_lr: 4e-07 -> 8e-07 (from code and config)",
        ],
    ),
    "momentum of onecycle": (
        lambda: _with(Adam([nn.Parameter(torch.ones(1))]), lambda o: _one_cycle(o, 0.1)),
        lambda: _with(Adam([nn.Parameter(torch.ones(1))]), lambda o: _one_cycle(o, 0.1, 0.97)),
        [
            "optimizer.betas: (0.95, 0.999) -> (0.97, 0.999) (from code and config)",
            "optimizer.max_momentum: 0.95 -> 0.97 (from code and config)",
        ],
    ),
    "warm-up of a sequence": (
        lambda: _with(sgd(), lambda o: sequential(o, 4)),
        lambda: _with(sgd(), lambda o: sequential(o, 6)),
        [
            "scheduler.milestones: [4] -> [6] (from code and config)",
            "scheduler.schedulers[0].total_iters: 4 -> 6 (from code and config)",
        ],
    ),
    "gamma in a chain": (
        lambda: _with(sgd(), lambda o: chained(o, 0.9)),
        lambda: _with(sgd(), lambda o: chained(o, 0.8)),
        ["scheduler.schedulers[1].gamma: 0.9 -> 0.8 (from code and config)"],
    ),
    "length of a callable object": (
        lambda: _with(sgd(), lambda o: schedulers.LambdaLR(o, Warmup(6))),
        lambda: _with(sgd(), lambda o: schedulers.LambdaLR(o, Warmup(30))),
        ["scheduler.lr_lambdas: [{'length': 6}] -> [{'length': 30}] (from code and config)"],
    ),
    "what a lambda closes over": (
        lambda: _with(sgd(), lambda o: schedulers.LambdaLR(o, lambda t: min(1, (t + 1) / 20))),
        lambda: _with(sgd(), lambda o: schedulers.LambdaLR(o, lambda t: min(1, (t + 1) / 40))),
        ["scheduler.lr_lambda: changed (from code and config)"],
    ),
    "T_0 of restarts": (
        lambda: _with(sgd(), lambda o: schedulers.CosineAnnealingWarmRestarts(o, 3, 2)),
        lambda: _with(sgd(), lambda o: schedulers.CosineAnnealingWarmRestarts(o, 4, 2)),
        [
            "scheduler.T_0: 3 -> 4 (from code and config)",
            "scheduler.T_i: 3 -> 4 (from code and config)",
        ],
    ),
    "another scheduler": (
        lambda: _with(sgd(), lambda o: schedulers.StepLR(o, 2)),
        lambda: _with(sgd(), lambda o: schedulers.CosineAnnealingLR(o, 40)),
        ["scheduler: StepLR -> CosineAnnealingLR (from code and config)"],
    ),
    "fed before, not now": (
        lambda: _with(sgd(), lambda o: schedulers.ReduceLROnPlateau(o, patience=1)),
        lambda: _with(sgd(), lambda o: schedulers.StepLR(o, 6)),
        ["scheduler: ReduceLROnPlateau -> StepLR (from code and config)"],
    ),
}


def _one_cycle(optimizer: Optimizer, max_lr: float, max_momentum: float = 0.95) -> Any:
    return schedulers.OneCycleLR(optimizer, max_lr, 40, max_momentum=max_momentum)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("done", [1, 8, 12])
def test_a_changed_constant_takes_effect_from_the_saved_position(change: str, done: int) -> None:
    make, remake, expected = CHANGES[change]
    after, notes = resume(make, remake, done)
    assert notes == expected
    assert go_on(after, 6, done) == go_on(remake(), done + 6)[done:]


def test_no_warning_is_raised_by_a_replay_and_none_after_it() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make, remake, _ = CHANGES["T_max"]
        after, _ = resume(make, remake, 5)
        go_on(after, 3)


def test_a_plain_constant_takes_effect_and_the_schedule_is_untouched() -> None:
    def make(decay: float, betas: tuple[float, float]) -> Built:
        optimizer = AdamW([nn.Parameter(torch.ones(1))], 0.1, weight_decay=decay, betas=betas)
        return optimizer, schedulers.CosineAnnealingLR(optimizer, 30)

    undisturbed = go_on(make(0.01, (0.9, 0.999)), 12)
    after, notes = resume(lambda: make(0.01, (0.9, 0.999)), lambda: make(0.2, (0.8, 0.99)), 8)
    assert notes == [
        "optimizer.betas: (0.9, 0.999) -> (0.8, 0.99) (from code and config)",
        "optimizer.weight_decay: 0.01 -> 0.2 (from code and config)",
    ]
    used = go_on(after, 4)
    assert [rows[0][0] for rows in used] == [rows[0][0] for rows in undisturbed[8:]]
    assert used[0][0][2:] == [(0.8, 0.99), 0.2]


def test_a_changed_rate_without_a_schedule_takes_effect() -> None:
    after, notes = resume(lambda: (sgd(0.1), None), lambda: (sgd(0.02), None), 4)
    assert after[0].param_groups[0]["lr"] == 0.02
    assert notes == ["optimizer.lr: 0.1 -> 0.02 (from code and config)"]


def test_what_was_set_by_hand_in_the_loop_is_kept() -> None:
    before = (sgd(0.1, weight_decay=0.01), None)
    schedule = attach(before)
    before[0].param_groups[0].update(lr=0.05, weight_decay=0.5, mine="x")
    after = (sgd(0.1, weight_decay=0.01), None)
    attach(after).restore(saved_and_read(schedule.capture_groups()), {}, {})
    group = after[0].param_groups[0]
    assert (group["lr"], group["weight_decay"], group["mine"]) == (0.05, 0.5, "x")


def test_a_rate_set_by_hand_follows_a_changed_base_in_its_ratio() -> None:
    before = (sgd(0.1), None)
    schedule = attach(before)
    before[0].param_groups[0]["lr"] = 0.05
    after = (sgd(0.2), None)
    attach(after).restore(saved_and_read(schedule.capture_groups()), {}, {})
    assert after[0].param_groups[0]["lr"] == pytest.approx(0.1)


def test_a_change_in_one_group_names_it() -> None:
    def make(second: float) -> Built:
        optimizer = two_groups()
        optimizer.param_groups[1]["lr"] = second
        return optimizer, schedulers.StepLR(optimizer, 3)

    after, notes = resume(lambda: make(0.05), lambda: make(0.01), 4)
    assert notes == ["optimizer.group1.lr: 0.05 -> 0.01 (from code and config)"]
    assert [group["lr"] for group in after[0].param_groups] == pytest.approx([0.01, 0.001])


def test_plateau_keeps_its_counters_and_scales_the_rate() -> None:
    def make(lr: float, factor: float = 0.1) -> Built:
        optimizer = sgd(lr)
        return optimizer, schedulers.ReduceLROnPlateau(optimizer, factor=factor, patience=1)

    after, notes = resume(lambda: make(0.1), lambda: make(0.2, 0.5), 5)
    optimizer, scheduler = after
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.02)  # reduced once: 0.2 · 0.1
    assert scheduler.get_last_lr() == [optimizer.param_groups[0]["lr"]]
    assert (scheduler.best, scheduler.last_epoch, scheduler.factor) == (4.0, 5, 0.5)
    assert notes == [
        "optimizer.lr: 0.1 -> 0.2 (from code and config)",
        "scheduler.factor: 0.1 -> 0.5 (from code and config)",
    ]


def test_a_scheduler_that_tells_no_position_keeps_its_state() -> None:
    class Own:
        def __init__(self, optimizer: Optimizer, decay: float) -> None:
            self.optimizer, self.decay, self.count = optimizer, decay, 0

        def step(self) -> None:
            self.count += 1
            for group in self.optimizer.param_groups:
                group["lr"] *= self.decay

        def state_dict(self) -> dict[str, Any]:
            return {"decay": self.decay, "count": self.count}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.__dict__.update(state)

    def make(decay: float, lr: float = 1.0) -> Built:
        optimizer = sgd(lr)
        return optimizer, Own(optimizer, decay)

    after, notes = resume(lambda: make(0.5), lambda: make(0.1, 2.0), 2)
    assert after[0].param_groups[0]["lr"] == 0.5  # 0.25 · 2
    assert (after[1].count, after[1].decay) == (2, 0.1)
    assert len(notes) == 2
    same, notes = resume(lambda: make(0.5), lambda: make(0.5), 2)
    assert (same[0].param_groups[0]["lr"], same[1].count, notes) == (0.25, 2, [])


def test_a_schedule_that_was_taken_away_leaves_the_rate_of_the_code() -> None:
    after, notes = resume(MAKERS["onecycle-sgd"], lambda: (sgd(0.3, momentum=0.7), None), 9)
    group = after[0].param_groups[0]
    assert (group["lr"], group["momentum"]) == (0.3, 0.7)
    assert "initial_lr" not in group
    assert notes[-1] == "scheduler: OneCycleLR -> none (from code and config)"


@pytest.mark.parametrize("steps", [None, 7])
def test_an_added_schedule_begins_where_the_run_is_if_that_is_known(steps: int | None) -> None:
    def remake() -> Built:
        return _with(sgd(), lambda o: schedulers.CosineAnnealingLR(o, 20))

    after, notes = resume(lambda: (sgd(), None), remake, 7, step=steps)
    assert go_on(after, 3) == go_on(remake(), 10)[steps or 0 :][:3]
    assert notes[0] == "scheduler: none -> CosineAnnealingLR (from code and config)"
    assert notes[1:] == (
        [] if steps else ["scheduler: its position is not known; it begins at its start"]
    )


def test_a_scheduler_that_is_now_stepped_by_epoch_stands_at_the_epoch() -> None:
    def make() -> Built:
        return _with(sgd(1.0), lambda o: schedulers.ExponentialLR(o, 0.5))

    before = make()
    schedule = attach(before)
    go_on(before, 12)
    groups, drivers = saved_and_read([schedule.capture_groups(), schedule.capture_drivers()])
    after = make()
    notes = attach(after, "epoch").restore(groups, drivers, {"step": 12, "epoch": 3})
    assert after[0].param_groups[0]["lr"] == 0.125
    assert notes == ["scheduler.per: 'step' -> 'epoch' (from code and config)"]


def test_a_schedule_stepped_within_epochs_is_replayed_to_the_same_point() -> None:
    def make(lr: float) -> Built:
        return _with(sgd(lr), lambda o: schedulers.CosineAnnealingWarmRestarts(o, 4))

    before = make(0.1)
    schedule = attach(before)
    before[1].step(2.5)
    groups, drivers = saved_and_read([schedule.capture_groups(), schedule.capture_drivers()])
    after = make(0.2)
    attach(after).restore(groups, drivers, {})
    assert after[0].param_groups[0]["lr"] == pytest.approx(2 * before[0].param_groups[0]["lr"])
    assert after[1].T_cur == 2.5


def test_a_schedule_that_is_now_too_short_is_refused_in_one_line() -> None:
    def make(total: int) -> Built:
        optimizer = Adam([nn.Parameter(torch.ones(1))])
        return optimizer, schedulers.OneCycleLR(optimizer, 0.1, total)

    with pytest.raises(StartError, match=r"^scheduler: found a schedule .* to 30, .*Tried to step"):
        resume(lambda: make(40), lambda: make(20), 30)


def test_a_tensor_rate_keeps_its_memory() -> None:
    after = MAKERS["tensor-lr"]()
    rate = after[0].param_groups[0]["lr"]
    before = MAKERS["tensor-lr"]()
    schedule = attach(before)
    go_on(before, 4)
    saved: Any = saved_and_read([schedule.capture_groups(), schedule.capture_drivers()])
    attach(after).restore(saved[0], saved[1], {})
    assert after[0].param_groups[0]["lr"] is rate
    assert rate.dtype == torch.float64
    assert rate.item() == before[0].param_groups[0]["lr"].item()


def test_functions_in_groups_are_code_and_stay() -> None:
    before = (sgd(0.1), None)
    before[0].param_groups[0]["hook"] = math.cos
    schedule = attach(before)
    after = (sgd(0.1), None)
    after[0].param_groups[0]["hook"] = math.sin
    attach(after).restore(saved_and_read(schedule.capture_groups()), {}, {})
    assert after[0].param_groups[0]["hook"] is math.sin


def test_numbers_of_numpy_become_pythons() -> None:
    numpy = pytest.importorskip("numpy")
    before = _with(sgd(), lambda o: schedulers.LambdaLR(o, lambda t: numpy.cos(t / 30)))
    schedule = attach(before)
    go_on(before, 3)
    saved: Any = [schedule.capture_groups(), schedule.capture_drivers()]
    assert type(saved[0][0]["current"]["lr"]) is float
    assert saved[0][0]["current"]["lr"] == before[0].param_groups[0]["lr"]
    saved_and_read(saved)
