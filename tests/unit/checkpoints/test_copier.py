"""The copy beside the training: what changes is kept at once, what is still is copied later, errors come back."""

import threading
import time
from collections import Counter, OrderedDict

import pytest
import torch

from checkpoints.buffers import Buffers, Place
from checkpoints.copier import Copier, keep
from checkpoints.errors import UnsupportedStateError
from checkpoints.memory import load_snapshot
from checkpoints.snapshots import Snapshot
from tests.support.states import name, same


def test_errors_of_the_thread_reach_whoever_waits() -> None:
    copier = Copier()
    with pytest.raises(ZeroDivisionError):
        copier.start(lambda: 1 // 0).result(10)
    assert copier.start(lambda: threading.current_thread().name).result(10) == "snapshot"
    copier.close()


def test_c27_buffers_and_numbers_are_those_of_the_beginning() -> None:
    weights, running = torch.full((1000,), 1.0), torch.full((10,), 1.0)
    numbers = [1, 2]
    tree = {
        "model": {"w": weights, "running": running},
        "job": {"numbers": numbers, "counts": Counter(a=1)},
    }
    buffers = Buffers(split_bytes=10**9, place=Place())
    filling = buffers.begin(
        tree, name=name(1), parent=None, run_id="r", info={}, still={weights.data_ptr()}
    )
    running.fill_(2.0)  # what a forward does
    numbers.append(3)
    tree["job"]["counts"]["a"] = 7  # type: ignore[index]  # what a job may do
    copier = Copier()
    snapshot: Snapshot = copier.start(filling.copy).result(10)
    weights.fill_(2.0)  # what an update does, once the copy was waited for
    found = load_snapshot(snapshot)
    expected = {
        "model": {"w": torch.full((1000,), 1.0), "running": torch.full((10,), 1.0)},
        "job": {"numbers": [1, 2], "counts": Counter(a=1)},
    }
    assert same(found, expected)
    copier.close()


def test_a_copy_that_is_not_waited_for_is_torn() -> None:
    """The control: were the still tensors not still, it would show."""
    weights = torch.full((1000,), 1.0)
    buffers = Buffers(split_bytes=10**9, place=Place())
    filling = buffers.begin(
        {"model": {"w": weights}}, name=name(1), parent=None, run_id="r", info={},
        still={weights.data_ptr()},
    )  # fmt: skip
    weights.fill_(2.0)
    model = load_snapshot(filling.copy())["model"]
    assert isinstance(model, dict)
    assert bool((model["w"] == 2.0).all())


def test_kept_containers_are_of_their_kind() -> None:
    tensor = torch.ones(2)
    value = {
        "o": OrderedDict(b=1, a=[tensor]), "t": (1, (2.0,)), "n": None, "size": torch.Size([1]),
    }  # fmt: skip
    found = keep(value, frozenset())
    assert same(found, value)
    assert isinstance(found, dict)
    tensor.fill_(5.0)
    assert float(found["o"]["a"][0][0]) == 1.0


def test_what_cannot_be_saved_is_told_by_the_copy() -> None:
    buffers = Buffers(split_bytes=10**9)
    filling = buffers.begin({"job": {"f": print}}, name=name(1), parent=None, run_id="r", info={})
    with pytest.raises(UnsupportedStateError, match=r"job\.f"):
        filling.copy()
    assert buffers.has_free


def test_the_interpreter_is_free_while_it_copies() -> None:
    big = [torch.ones(1 << 20) for _ in range(16)]
    tree = {"model": {str(i): t for i, t in enumerate(big)}}
    buffers = Buffers(split_bytes=10**9, place=Place())
    still = {t.data_ptr() for t in big}

    def begin(step: int) -> Snapshot:
        filling = buffers.begin(
            tree, name=name(step), parent=None, run_id="r", info={}, still=still
        )
        future = copier.start(filling.copy)
        longest = last = time.perf_counter()
        longest = 0.0
        while not future.done():
            now = time.perf_counter()
            longest, last = max(longest, now - last), now
        gaps.append(longest)
        found: Snapshot = future.result()
        return found

    copier, gaps = Copier(), list[float]()
    for step in range(5):
        begin(step).release()
    copier.close()
    assert min(gaps) < 1.0  # a copy that held it would stop this thread for all of its length
