"""The tracer jobs: they are loaded as users load theirs, and give the public cases' values."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import default_collate

from jobs import Job, Mean, load_job, read_loss

TRACER = Path(__file__).parents[2] / "support" / "tracer.py"


def load(name: str, /, **args: Any) -> Any:
    return load_job(f"{TRACER}:{name}", args)


def train(job: Job, *, batch: int, epochs: int = 1) -> list[float]:
    """Train in one process by the rule of the cases; w after each step."""
    dataset: Any = job.dataset()
    model = job.model()
    optimizer = job.optimizer(model)
    assert isinstance(optimizer, torch.optim.Optimizer)
    schedule = job.scheduler(optimizer, 0)
    assert not isinstance(schedule, Mapping)
    scheduler, unit = schedule if isinstance(schedule, tuple) else (schedule, "step")
    weights: list[float] = []
    for epoch in range(epochs):
        generator = torch.Generator().manual_seed(epoch)
        order = torch.randperm(len(dataset), generator=generator).tolist()
        for start in range(0, len(order), batch):
            items = default_collate([dataset[i] for i in order[start : start + batch]])
            loss = read_loss(job.loss(model, items))
            optimizer.zero_grad()
            (loss.sum / loss.count if isinstance(loss, Mean) else loss).backward()
            optimizer.step()
            if scheduler is not None and unit == "step":
                scheduler.step()
            weights.append(float(next(model.parameters()).detach().flatten()[0]))
            job.on_step(SimpleNamespace(step=len(weights)))
        if scheduler is not None and unit == "epoch":
            scheduler.step()
    return weights


def test_tracer_gives_the_values_of_c01_c02_c05() -> None:
    assert train(load("Tracer"), batch=4) == pytest.approx([0.55, 1.07, 1.488], rel=1e-5)
    c02 = train(load("Tracer", n=20), batch=4, epochs=3)
    assert [c02[2], c02[4], c02[-1]] == pytest.approx([2.48025, 3.8690025, 7.577655], rel=1e-5)
    c05 = train(load("Tracer", n=10), batch=4, epochs=3)
    assert len(c05) == 9
    assert [c05[2], c05[-1]] == pytest.approx([1.19425, 2.673095], rel=1e-5)


def test_tracer_with_weights_gives_the_values_of_c45() -> None:
    weights = train(load("Tracer", n=10, weighted=True), batch=4)
    assert weights == pytest.approx([0.4333333, 0.99, 1.191], rel=1e-5)


def test_tracer_without_a_rate_shows_the_loss_of_c13() -> None:
    job = load("Tracer", lr=0.0)
    model = job.model()
    items = default_collate([job.dataset()[i] for i in range(12)])
    assert float(job.loss(model, items).detach()) == pytest.approx(21.083333, rel=1e-6)


def test_tracer_has_a_nan_where_c24_wants_it() -> None:
    job = load("Tracer", nan_item=10)
    model = job.model()
    assert math.isnan(float(job.loss(model, default_collate([(7.0, 7), (10.0, 10)])).detach()))
    assert not math.isnan(float(job.loss(model, default_collate([(7.0, 7), (4.0, 4)])).detach()))


def test_tracer_keeps_its_ballast_in_its_state() -> None:
    job = load("Tracer", ballast_mb=2)
    state = job.state_dict()
    assert state["ballast"].nbytes == 2 << 20
    other = load("Tracer")
    assert other.state_dict() == {}
    other.load_state_dict(state)
    assert torch.equal(other.ballast, state["ballast"])


def test_adam_scalar_gives_the_values_of_c38() -> None:
    weights = train(load("AdamScalar", n=8), batch=1)
    assert weights[3:] == pytest.approx(
        [0.6039391, 0.5079637, 0.4142365, 0.3234208, 0.2362638], rel=1e-5
    )


def test_scheduled_jobs_give_the_rates_of_c37_and_c46() -> None:
    cosine = load("Cosine", n=100)
    assert set(train(cosine, batch=1)) == {0.0}
    rates = dict(cosine.state_dict()["rates"])
    assert rates[46] == pytest.approx(0.000578217232520116, rel=1e-12)
    assert rates[47] == pytest.approx(0.000562666616782152, rel=1e-12)
    assert rates[100] == pytest.approx(2.467198e-07, rel=1e-6)
    multi = load("MultiStep", n=4)
    train(multi, batch=2, epochs=6)
    assert [rate for _, rate in multi.state_dict()["rates"][::2]] == pytest.approx(
        [100.0] * 4 + [10.0] * 2, rel=1e-12
    )
    stairs = load("Stairs", n=60)
    train(stairs, batch=1)
    rates = dict(stairs.state_dict()["rates"])
    assert [rates[t + 1] for t in (0, 19, 20, 39, 40, 59)] == pytest.approx(
        [0.1, 0.1, 0.01, 0.01, 0.001, 0.001]
    )


def test_scheduled_jobs_take_their_rates_back() -> None:
    job = load("Cosine", n=8)
    train(job, batch=4)
    other = load("Cosine", n=8)
    other.load_state_dict(json.loads(json.dumps(job.state_dict())))
    assert other.rates == job.rates != {}


def test_scored_job_gives_its_scores_by_epoch() -> None:
    job = load("Scored", n=8, steps_per_epoch=2)
    model = job.model()
    batch = default_collate([(0.0, 0), (1.0, 1)])
    seen = []
    for steps in (2, 4, 6, 8, 10, 12, 14):
        torch.nn.init.constant_(model.w, steps)
        seen.append(job.metrics(model, batch)["score"].value)
    assert seen == [5.0, 3.0, 4.0, 4.0, 4.0, 4.0, 4.0]


def test_counter_counts_its_steps_in_its_weight() -> None:
    assert train(load("Counter"), batch=4, epochs=2) == [1, 2, 3, 4, 5, 6]


def test_graded_job_gives_seven_of_ten_for_c47() -> None:
    job = load("Graded")
    items = [job.eval_dataset()[i] for i in range(10)]
    parts = [job.metrics(None, default_collate(items[a : a + 4])) for a in (0, 4, 8)]
    hits = sum(float(part["accuracy"].sum) for part in parts)
    count = sum(float(part["accuracy"].count) for part in parts)
    assert (hits / count, count) == (0.7, 10)
    assert sum(float(part["seen"]) for part in parts) == 10


def test_shuffled_and_uneven_datasets_differ_as_c07_wants(monkeypatch: pytest.MonkeyPatch) -> None:
    job = load("Shuffled")
    one, two = job.dataset(), job.dataset()
    assert sorted(one.values) == sorted(two.values) == [float(i) for i in range(40)]
    assert one.values != two.values
    monkeypatch.setenv("RANK", "1")
    assert len(load("Uneven").dataset()) == 41
    assert len(load("Empty").dataset()) == 0


def test_faulty_job_raises_at_its_step_on_its_rank_once_per_marker(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("RANK", "0")
    assert train(load("Faulty", n=20), batch=4)[-1] == 5
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(ValueError, match=r"^the fault of step 3 on rank 1$"):
        train(load("Faulty", n=20), batch=4)
    job = load("Faulty", n=20, marker=str(tmp_path / "done"))
    with pytest.raises(ValueError, match="the fault of step 3"):
        train(job, batch=4)
    assert train(job, batch=4)[-1] == 5


def test_broken_model_raises_the_users_own_error_for_c48() -> None:
    with pytest.raises(ValueError, match=r"^the model of this job is broken$"):
        load("BrokenModel").model()


def test_shaped_model_changes_as_c44_wants() -> None:
    assert load("Shaped").model().state_dict()["layer.weight"].shape == (4, 1)
    assert load("Shaped", width=5).model().state_dict()["layer.weight"].shape == (5, 1)
    assert list(load("Shaped", name="other", extra=False).model().state_dict()) == [
        "other.weight",
        "other.bias",
    ]
    assert len(train(load("Shaped"), batch=4)) == 3


def test_masks_are_recorded_as_the_random_state_gives_them_for_c12(tmp_path: Path) -> None:
    job = load("Masks", folder=str(tmp_path))
    model = job.model()
    batch = default_collate([job.dataset()[i] for i in (5, 9)])
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        job.loss(model, batch)
    job.loss(model.eval(), batch)
    (file,) = tmp_path.iterdir()
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    assert [line["indices"] for line in lines] == [[5, 9]] * 3
    assert len(lines[0]["mask"]) == 32
    assert lines[0]["mask"] == lines[1]["mask"] != lines[2]["mask"]
