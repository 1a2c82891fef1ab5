"""The digits job: its data, its augmentation, and that it learns."""

import hashlib
from typing import TYPE_CHECKING, cast

import pytest
import torch
from safetensors.torch import load_file

from jobs import JobError
from jobs.digits import DATA, Digits, Images
from jobs.tensors import read_tensors

if TYPE_CHECKING:
    from collections.abc import Iterable


def test_data_is_the_file_that_its_readme_names() -> None:
    readme = (DATA.parent / "README.md").read_text(encoding="utf-8")
    assert hashlib.sha256(DATA.read_bytes()).hexdigest() in readme


def test_own_reader_agrees_with_the_safetensors_library() -> None:
    ours, theirs = read_tensors(DATA).tensors, load_file(DATA)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_split_holds_1437_and_360_images_with_36_of_each_digit() -> None:
    data = read_tensors(DATA).tensors
    assert data["train_images"].shape == (1437, 8, 8)
    assert data["heldout_labels"].bincount().tolist() == [36] * 10
    assert int(data["train_images"].max()) == 16


def test_augmentation_is_reproducible_from_torchs_global_seed() -> None:
    images = Digits().dataset()
    draws = []
    for _ in range(2):
        torch.manual_seed(7)
        draws.append(torch.stack([images[5][0] for _ in range(20)]))
    assert torch.equal(*draws)
    assert len(draws[0].flatten(1).unique(dim=0)) > 3


def test_augmentation_moves_by_up_to_one_pixel_and_keeps_the_label() -> None:
    pixel = torch.zeros(3, 8, 8, dtype=torch.uint8)
    pixel[1, 4, 4] = 16
    images = Images(pixel, torch.tensor([7, 8, 9], dtype=torch.uint8), shift=True)
    seen = set()
    for _ in range(300):
        image, label = images[1]
        assert label == 8
        assert image.sum() == 1
        seen.add(tuple(image[0].nonzero()[0].tolist()))
    assert seen == {(y, x) for y in (3, 4, 5) for x in (3, 4, 5)}
    assert torch.equal(images[-3][0], torch.zeros(1, 8, 8))


def test_indices_outside_the_dataset_are_refused_so_that_iteration_ends() -> None:
    for augment in (True, False):
        assert sum(1 for _ in cast("Iterable[object]", Digits(augment=augment).dataset())) == 1437


def test_heldout_images_are_never_moved() -> None:
    images = Digits().eval_dataset()
    assert all(torch.equal(images[3][0], images[3][0]) for _ in range(20))


def test_metrics_are_counted_over_samples() -> None:
    job = Digits(width=4)
    model = job.model().eval().requires_grad_(requires_grad=False)
    images = job.eval_dataset()
    whole = job.metrics(model, job.collate([images[i] for i in range(360)]))
    parts = [
        job.metrics(model, job.collate([images[i] for i in part]))
        for part in (range(7), range(7, 360))
    ]
    assert whole["accuracy"].count == 360
    assert sum(int(part["accuracy"].sum) for part in parts) == int(whole["accuracy"].sum)
    assert sum(float(part["loss"].sum) for part in parts) == pytest.approx(float(whole["loss"].sum))


def test_arguments_that_cannot_be_are_refused() -> None:
    with pytest.raises(JobError, match=r"^args.width: found 0, expected at least 1$"):
        Digits(width=0)
    with pytest.raises(JobError, match=r"^args.dropout: found 1.0"):
        Digits(dropout=1.0)


def test_the_net_learns_the_digits_in_three_epochs() -> None:
    torch.manual_seed(0)
    job = Digits(width=16)
    images, model = job.dataset(), job.model()
    optimizer = job.optimizer(model)
    scheduler = job.scheduler(optimizer, 3 * 23)
    for _ in range(3):
        order = torch.randperm(len(images)).tolist()
        for start in range(0, len(order), 64):
            optimizer.zero_grad()
            batch = job.collate([images[i] for i in order[start : start + 64]])
            job.loss(model, batch).backward()
            optimizer.step()
            scheduler.step()
    model.eval()
    heldout = job.eval_dataset()
    with torch.no_grad():
        metrics = job.metrics(model, job.collate([heldout[i] for i in range(len(heldout))]))
    assert metrics["accuracy"].value > 0.95
