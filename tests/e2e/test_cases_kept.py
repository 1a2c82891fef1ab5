"""Public cases on state beside the weights: C39, C40; and a GAN that is killed."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.support import records
from tests.support.cases import EACH_STEP, REL, SUPPORT, run_once, weight
from tests.support.cluster import Cluster
from tests.support.phased import reference
from tests.support.soaking import soaked

AVERAGED = (
    *EACH_STEP,
    "args.n=12",
    "train.epochs=1",
    "train.global_batch_size=4",
    "train.ema=0.9",
    "eval.every=1 step",
)


def kept(name: str) -> str:
    """The JOB argument of a job of tests/support/kept.py."""
    return f"{SUPPORT / 'kept.py'}:{name}"


def files(url: Path, step: int, generation: int | None = None) -> Path:
    """The folder of the newest checkpoint of a step, or of that generation's."""
    names = [name for name in records.checkpoints(url) if name[1] == step]
    if generation is not None:
        names = [name for name in names if name[0] == generation]
    return records.checkpoint_path(url, names[-1])


def averages(url: Path, step: int, generation: int | None = None) -> tuple[float, float]:
    """Of a checkpoint the weight and its average."""
    folder = files(url, step, generation)
    found = [load_file(folder / name) for name in ("model.safetensors", "ema.safetensors")]
    return float(found[0]["w"]), float(found[1]["w"])


@pytest.mark.parametrize("world", [*soaked(1), 2])
def test_c40_weights_and_average_survive_a_kill(cluster: Cluster, world: int) -> None:
    given = ("args.kill=3@0", f"args.marks={cluster.folder / 'marks'}")
    agent = cluster.start(kept("Averaged"), *AVERAGED, *given, nproc=world, max_restarts=1)
    assert agent.wait(120) == 0, agent.tail()
    assert averages(cluster.url, 2) == pytest.approx((1.07, 0.1565), rel=REL)
    assert averages(cluster.url, 3) == pytest.approx((1.488, 0.28965), rel=REL)
    assert records.summary(cluster.url)["restarts"] == 1
    seen = {event["step"]: event["metrics"]["w"] for event in records.events(cluster.url, "eval")}
    assert seen == pytest.approx({1: 0.055, 2: 0.1565, 3: 0.28965}, rel=REL)


def test_c40_a_checkpoint_in_the_middle_of_an_evaluation_does_not_mix_them(
    cluster: Cluster,
) -> None:
    given = ("args.ask=2", f"args.marks={cluster.folder / 'marks'}", "eval.batch_size=1")
    agent = cluster.start(kept("Averaged"), *AVERAGED, *given, nproc=2, max_restarts=1)
    assert agent.wait(120) == 0, agent.tail()
    assert averages(cluster.url, 2, generation=1) == pytest.approx((1.07, 0.1565), rel=REL)
    assert averages(cluster.url, 3) == pytest.approx((1.488, 0.28965), rel=REL)
    seen = [(e["step"], e["metrics"]["w"]) for e in records.events(cluster.url, "eval")]
    assert dict(seen) == pytest.approx({1: 0.055, 2: 0.1565, 3: 0.28965}, rel=REL)
    assert [step for step, _ in seen] == [1, 2, 3]  # the one that was cut off is done again
    summary = records.summary(cluster.url)
    assert [row["end_step"] for row in summary["generations"]] == [2, 3]


def scaler_after(url: Path, step: int) -> dict[str, Any]:
    """The gradient scaler's state in the newest checkpoint of a step."""
    state = records.read_json(files(url, step) / "state.json")
    found: dict[str, Any] = _find(state, "scaler")["main"]["current"]
    return found


def _find(tree: Any, key: str) -> Any:
    """The value of the first such key in a tree of JSON."""
    if isinstance(tree, dict):
        if key in tree:
            return tree[key]
        tree = list(tree.values())
    below: list[Any] = tree if isinstance(tree, list) else []
    found = (_find(item, key) for item in below)
    return next((one for one in found if one is not None), None)


@pytest.mark.parametrize("world", [*soaked(1), 2])
def test_c39_the_loss_scale_and_its_growth_go_on(cluster: Cluster, world: int) -> None:
    overrides = (
        *EACH_STEP,
        "args.n=32",
        "train.epochs=1",
        "train.global_batch_size=4",
        "train.precision=fp16",
        "args.kill=6@0",
        f"args.marks={cluster.folder / 'marks'}",
    )
    agent = cluster.start(kept("Overflowing"), *overrides, nproc=world, max_restarts=1)
    assert agent.wait(120) == 0, agent.tail()
    assert scaler_after(cluster.url, 3)["scale"] == 8192.0
    tracked = {step: scaler_after(cluster.url, step)["_growth_tracker"] for step in range(3, 9)}
    assert tracked == {3: 0, 4: 1, 5: 2, 6: 3, 7: 4, 8: 5}
    assert scaler_after(cluster.url, 8)["scale"] == 8192.0
    summary = records.summary(cluster.url)
    assert (summary["restarts"], summary["steps"], summary["skipped_steps"]) == (1, 8, 3)
    steps = records.committed_steps(cluster.url)
    assert [one.skipped for one in steps] == [True] * 3 + [False] * 5
    assert steps[5].generation > steps[4].generation


@pytest.mark.parametrize("world", [*soaked(1, 2), 3])
def test_gan_that_is_killed_ends_as_a_plain_loop_does(cluster: Cluster, world: int) -> None:
    overrides = (*EACH_STEP, "train.epochs=2", "train.global_batch_size=4")
    kill = ("args.kill=3@0 5@0", f"args.marks={cluster.folder / 'marks'}")
    agent = cluster.start(kept("Gan"), *overrides, *kill, nproc=world, max_restarts=2)
    assert agent.wait(180) == 0, agent.tail()
    assert records.summary(cluster.url)["restarts"] == 2
    found = records.final_weights(cluster.url)
    expected = reference(10, 4, 2)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value)


@pytest.mark.soak
def test_gan_in_bitwise_mode_has_the_same_bits_in_every_world(cluster: Cluster) -> None:
    overrides = (
        "train.epochs=2",
        "train.global_batch_size=4",
        "train.logical_shards=4",
        "train.reproducible=bitwise",
    )
    hashes = set()
    for world in (1, 3):
        url = cluster.folder / f"bits-{world}"
        agent = cluster.start(
            kept("Gan"), *overrides, f"checkpoint.url={url}", nproc=world, max_restarts=0
        )
        assert agent.wait(120) == 0, agent.tail()
        hashes.add(records.summary(url)["weights_sha256"])
    assert len(hashes) == 1


@pytest.mark.soak
def test_weights_and_average_of_a_run_begin_another(cluster: Cluster) -> None:
    run_once(cluster, kept("Averaged"), *AVERAGED, nproc=1)
    for address, expected in ((cluster.url, 1.488), (f"{cluster.url}@ema", 0.28965)):
        url = cluster.folder / f"from-{expected}"
        given = (f"checkpoint.init_from={address}", f"checkpoint.url={url}", "args.lr=0")
        run_once(cluster, kept("Averaged"), *AVERAGED, *given, nproc=1)
        assert weight(url, 1) == pytest.approx(expected, rel=REL)
