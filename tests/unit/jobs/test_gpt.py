"""The GPT job: tied, causal, weighed by bytes, and it learns."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from jobs import JobError, Mean, load_job
from jobs.gpt import GPT, IGNORED

TINY: dict[str, Any] = {"n_layer": 1, "width": 32, "block": 32, "max_bytes": 20_000}


@pytest.fixture
def job(tmp_path: Path) -> GPT:
    return GPT(**TINY, cache=str(tmp_path))


def test_prepare_makes_the_cache_file_that_the_datasets_use(job: GPT, tmp_path: Path) -> None:
    job.prepare()
    (cache,) = tmp_path.iterdir()
    assert job.dataset().path == cache
    heldout = job.eval_dataset()
    assert heldout is not None
    assert 0 < len(heldout) < len(job.dataset())


def test_prepare_is_not_needed_where_a_job_is_used_alone(job: GPT) -> None:
    assert len(job.dataset()) > 0


def test_fingerprint_tells_other_text_and_other_windows_apart(job: GPT, tmp_path: Path) -> None:
    same = GPT(**TINY, cache=str(tmp_path / "other"))
    longer = GPT(**{**TINY, "max_bytes": 20_001}, cache=str(tmp_path))
    wider = GPT(**{**TINY, "block": 16}, cache=str(tmp_path))
    prints = [one.fingerprint(one.dataset()) for one in (job, same, longer, wider)]
    assert prints[0] == prints[1]
    assert len(set(prints)) == 3


def test_collate_fills_short_windows_with_what_is_never_predicted(job: GPT) -> None:
    short, whole = torch.tensor([1, 2, 3], dtype=torch.uint8), torch.arange(33, dtype=torch.uint8)
    inputs, targets = job.collate([short, whole])
    assert inputs.shape == targets.shape == (2, 32)
    assert inputs[0].tolist() == [1, 2] + [0] * 30
    assert targets[0].tolist() == [2, 3] + [IGNORED] * 30
    assert targets[1].tolist() == list(range(1, 33))


def test_loss_is_weighed_by_bytes_however_the_batch_is_cut(job: GPT) -> None:
    model = job.model().eval()
    data = job.dataset()
    items = [data[i] for i in range(5)] + [torch.tensor([5, 6], dtype=torch.uint8)]
    whole = job.loss(model, job.collate(items))
    parts = [job.loss(model, job.collate(items[a : a + 2])) for a in (0, 2, 4)]
    assert int(whole.count) == sum(len(item) - 1 for item in items)
    assert sum(int(part.count) for part in parts) == int(whole.count)
    total = sum(float(part.sum.detach()) for part in parts)
    assert total == pytest.approx(float(whole.sum.detach()), rel=1e-5)


def test_embedding_is_tied_and_stored_once(job: GPT) -> None:
    model = job.model()
    shapes = [tuple(tensor.shape) for tensor in model.state_dict().values()]
    assert shapes.count((256, 32)) == 1
    assert len(list(model.parameters())) == len(model.state_dict())


def test_no_place_sees_what_follows_it(job: GPT) -> None:
    model = job.model().eval()
    one = torch.arange(32).view(1, 32)
    two = one.clone()
    two[0, 20:] = 99
    with torch.no_grad():
        assert torch.allclose(model(one)[0, :20], model(two)[0, :20], atol=1e-6)
        assert not torch.allclose(model(one)[0, 20:], model(two)[0, 20:], atol=1e-6)


def test_only_matrices_are_decayed(job: GPT) -> None:
    model = job.model()
    decayed, plain = job.optimizer(model).param_groups
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.1, 0.0)
    assert all(parameter.ndim > 1 for parameter in decayed["params"])
    assert all(parameter.ndim == 1 for parameter in plain["params"])
    together = len(decayed["params"]) + len(plain["params"])
    assert together == len(list(model.parameters()))


def test_evaluation_tells_perplexity_and_bits_per_byte(job: GPT) -> None:
    figures = job.summarize({"loss": Mean(torch.tensor(math.log(8.0) * 10), 10)})
    assert figures == pytest.approx(
        {"loss": math.log(8), "perplexity": 8.0, "bits_per_byte": 3.0}, rel=1e-6
    )
    assert job.summarize({"loss": Mean(torch.tensor(math.inf), 1)})["perplexity"] > 1e300


def test_arguments_that_cannot_be_are_refused() -> None:
    with pytest.raises(JobError, match=r"^args.n_layer: found 0, expected at least 1$"):
        GPT(n_layer=0)
    with pytest.raises(JobError, match=r"^args.width: found 30, expected a multiple of n_head"):
        GPT(width=30, n_head=4)
    with pytest.raises(JobError, match=r"^args.dropout: found -1"):
        GPT(dropout=-1)
    with pytest.raises(JobError, match=r"^args.heldout: found 2"):
        GPT(heldout=2)


def test_unknown_arguments_are_refused_with_the_nearest(tmp_path: Path) -> None:
    assert load_job("jobs.gpt:GPT", {**TINY, "cache": str(tmp_path)})
    with pytest.raises(JobError, match=r"args.n_layers: GPT .*did you mean 'n_layer'\?$"):
        load_job("jobs.gpt:GPT", {"n_layers": 3})


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_net_learns_with_accumulation_and_clipping(job: GPT, precision: str) -> None:
    torch.manual_seed(0)
    data, model = job.dataset(), job.model()
    optimizer = job.optimizer(model)
    scheduler = job.scheduler(optimizer, 40)
    losses = []
    for step in range(40):
        optimizer.zero_grad()
        items = [data[i] for i in range(step * 8, step * 8 + 8)]
        count = sum(len(item) - 1 for item in items)
        total = 0.0
        for part in (items[:5], items[5:]):
            with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
                loss = job.loss(model, job.collate(part))
            assert loss.sum.dtype == torch.float32
            (loss.sum / count).backward()
            total += float(loss.sum.detach())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        losses.append(total / count)
    assert losses[0] == pytest.approx(math.log(256), abs=0.3)
    assert sum(losses[-5:]) / 5 < 4.0
