"""A snapshot is a copy, in buffers that are used again, and belongs to its holder until released."""

import gc
import threading

import pytest
import torch

from checkpoints.buffers import Buffers, Snapshot
from checkpoints.errors import CheckpointError, UnsupportedStateError
from checkpoints.serialization import decode
from tests.support.states import name, same, state


def stage(buffers: Buffers, tree: dict[str, object], step: int = 1, **info: object) -> Snapshot:
    return buffers.stage(tree, name=name(step), parent=None, run_id="r", info=info)  # type: ignore[arg-type]  # wrong ones too


def file(snapshot: Snapshot, file_name: str) -> dict[str, torch.Tensor]:
    data = next(file.data for file in snapshot.files if file.name == file_name)
    return decode(bytes(data))


def test_c27_a_later_step_does_not_leak_into_a_snapshot() -> None:
    buffers = Buffers(split_bytes=10**9)
    weights = torch.full((1000,), 1.0, requires_grad=True)
    moments = {"state": {0: {"exp_avg": torch.zeros(1000), "step": torch.tensor(1.0)}}}
    snapshot = stage(buffers, {"model": {"w": weights}, "optimizer": moments})
    with torch.no_grad():
        weights.fill_(2.0)
        moments["state"][0]["step"].fill_(2.0)
    assert bool((file(snapshot, "model.safetensors")["w"] == 1.0).all())
    assert file(snapshot, "optimizer.safetensors")["state.0.step"] == 1.0


def test_layouts_of_any_kind_are_copied_right() -> None:
    tree = {
        "t": torch.arange(12.0).reshape(3, 4).t(),
        "expanded": torch.ones(1, 3).expand(4, 3),
        "conj": torch.randn(3, dtype=torch.complex64).conj(),
        "half": torch.randn(5).half(),
        "f8": torch.randn(5).to(torch.float8_e4m3fn),
        "u64": torch.tensor([2**63], dtype=torch.uint64),
        "bool": torch.tensor([True, False]),
        "scalar": torch.tensor(3),
        "empty": torch.ones(0, 2),
    }
    snapshot = stage(Buffers(split_bytes=10**9), {"model": tree})
    found = file(snapshot, "model.safetensors")
    assert all(same(found[key], tree[key].resolve_conj().contiguous()) for key in tree)


def test_buffers_are_made_once_and_used_again() -> None:
    buffers = Buffers(split_bytes=400)
    places = set()
    for step in range(5):
        snapshot = stage(buffers, state(step), step)
        image = torch.frombuffer(snapshot.files[0].data, dtype=torch.uint8)
        places.add(image.data_ptr())
        snapshot.release()
    assert len(places) == 1
    assert next(iter(places)) % 4096 == 0


def test_another_shape_gets_buffers_that_fit() -> None:
    buffers = Buffers(split_bytes=10**9)
    for width in (4, 64, 8, 200):
        tree = state(1, width=width)
        snapshot = stage(buffers, tree)
        model = tree["model"]
        assert isinstance(model, dict)
        found = file(snapshot, "model.safetensors")
        assert all(same(found[key], model[key]) for key in model)
        snapshot.release()


def test_a_held_snapshot_is_never_overwritten() -> None:
    buffers = Buffers(split_bytes=10**9)
    held = stage(buffers, state(1), 1)
    for step in (2, 3, 4):
        stage(buffers, state(step), step).release()
    assert bool((file(held, "model.safetensors")["net.weight"] == 1.0).all())


def test_a_fourth_snapshot_is_refused_until_one_is_released_or_forgotten() -> None:
    buffers = Buffers(split_bytes=10**9)
    held = [stage(buffers, state(step), step) for step in (1, 2, 3)]
    with pytest.raises(CheckpointError, match="3 are held already"):
        stage(buffers, state(4), 4)
    held.pop()
    gc.collect()
    held.append(stage(buffers, state(4), 4))
    held[0].release()
    assert held[0].is_released
    stage(buffers, state(5), 5)


def test_a_state_that_is_refused_holds_no_buffer() -> None:
    buffers = Buffers(split_bytes=10**9, max_slots=1)
    for info in ({"a": float}, {"a": torch.ones(1)}, {"n": 2**80}):
        with pytest.raises(UnsupportedStateError, match=r"^info"):
            stage(buffers, state(1), **info)
    stage(buffers, state(1), loss=float("nan"), position=(1, 2))


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"model": {"w": 1}}, r"model\.w: found int, expected a tensor"),
        ({"model": {"a": {"b": torch.ones(1)}}}, r"model\.a: found dict, expected a tensor"),
        ({"model": {5: torch.ones(1)}}, r"model\.5: found Tensor, expected a tensor under a plain"),
        ({"model": {"__metadata__": torch.ones(1)}}, r"model\.__metadata__: .* plain name"),
        ({"model": [torch.ones(1)]}, r"model: found list, expected a dict"),
        ({"a/b": 1}, "'a/b': found a key that makes no file name"),
        ({"": 1}, "'': found a key that makes no file name"),
        ({"job": {"sampler_fn": print}}, r"job\.sampler_fn: found builtin_function_or_method"),
    ],
    ids=["number", "tree", "key", "reserved", "list", "path", "empty", "function"],
)
def test_c52_a_state_that_cannot_be_saved_is_refused_by_key(
    tree: dict[str, object], message: str
) -> None:
    with pytest.raises(UnsupportedStateError, match=f"^{message}"):
        stage(Buffers(split_bytes=100), tree)


def test_a_model_that_is_split_and_another_key_do_not_share_a_file() -> None:
    tree: dict[str, object] = {
        "model": {"a": torch.ones(9), "b": torch.ones(9)},
        "model-00001-of-00002": [torch.ones(1)],
    }
    with pytest.raises(UnsupportedStateError, match="found a second file"):
        stage(Buffers(split_bytes=40), tree)


def test_a_snapshot_can_be_read_in_another_thread_while_the_next_is_staged() -> None:
    buffers = Buffers(split_bytes=10**9)
    torn: list[int] = []

    def read(snapshot: Snapshot, step: int) -> None:
        weights = file(snapshot, "model.safetensors")["net.weight"]
        if not bool((weights == step).all()):
            torn.append(step)
        snapshot.release()

    for step in range(30):
        snapshot = stage(buffers, state(step, width=100), step)
        thread = threading.Thread(target=read, args=(snapshot, step))
        thread.start()
        if step % 2:
            thread.join()
    thread.join()
    assert not torn
