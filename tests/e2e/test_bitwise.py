"""train.reproducible: bitwise under real torchruns: the same bits for every world and history of kills."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support import records
from tests.support.cases import EACH_STEP, run_once, tracer
from tests.support.cluster import Cluster
from tests.support.sameness import BITWISE, DIGITS, GPT, SMALL_DIGITS, Bits, run_worlds


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Bits:
    """Digits in a world of one, whose threads torchrun leaves alone."""
    folder = tmp_path_factory.mktemp("alone")
    return run_worlds(folder, DIGITS, (*SMALL_DIGITS, *BITWISE), [], last=1)


@pytest.mark.soak
def test_digits_have_the_same_bits_through_kills_and_worlds_of_4_2_3_1_and_4(
    alone: Bits, tmp_path: Path
) -> None:
    worlds = [(4, 6), (2, 16), (3, 27), (1, 35)]
    found = run_worlds(tmp_path / "run", DIGITS, (*SMALL_DIGITS, *BITWISE), worlds, last=4)
    assert found == alone
    assert len(found.losses) == 48


@pytest.mark.soak
def test_digits_have_the_same_bits_in_an_undisturbed_world_of_3_with_other_readers(
    alone: Bits, tmp_path: Path
) -> None:
    overrides = (*SMALL_DIGITS, *BITWISE, "loader.workers=2", "checkpoint.every=7 steps")
    assert run_worlds(tmp_path / "run", DIGITS, overrides, [], last=3) == alone


@pytest.mark.soak
def test_breaker_default_mode_has_other_bits_in_another_world(tmp_path: Path) -> None:
    # Or the tests above would prove nothing.
    found = [
        run_worlds(tmp_path / str(size), DIGITS, (*SMALL_DIGITS, "train.threads=1"), [], last=size)
        for size in (1, 3)
    ]
    assert found[0].weights != found[1].weights
    assert found[0].metrics["loss"] == pytest.approx(found[1].metrics["loss"], rel=0.05)


@pytest.mark.soak
def test_breaker_number_of_threads_is_refused_and_changes_bits(
    alone: Bits, cluster: Cluster
) -> None:
    overrides = (*SMALL_DIGITS, *BITWISE, "train.max_steps=9", "checkpoint.every=3 steps")
    assert run_once(cluster, str(DIGITS), *overrides, "train.max_steps=3", nproc=1)
    agent = cluster.start(DIGITS, *overrides, "train.threads=2", nproc=1)
    assert agent.wait(60) != 0
    assert "train.threads: this run is another one, it was 1, this start has 2" in agent.output()
    accept = "run.accept=[train.threads]"
    summary = run_once(cluster, str(DIGITS), *overrides, "train.threads=2", accept, nproc=1)
    assert summary["bits_until"] == 3
    losses = [event["loss"] for event in records.step_events(cluster.url)]
    expected = [loss for _, loss, _, _ in alone.losses[:9]]
    assert losses == pytest.approx(expected, rel=0.05)
    assert losses != expected


@pytest.mark.soak
def test_gpt_has_the_same_bits_in_worlds_of_1_and_2_and_through_a_kill(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{number} times {number} is {number**2}. " for number in range(900)))
    overrides = (
        *BITWISE,
        f"args.url={text}",
        f"args.cache={tmp_path / 'cache'}",
        "args.n_layer=1",
        "args.width=16",
        "args.block=24",
        "train.max_steps=24",
        "train.global_batch_size=26",
        "train.logical_shards=6",
        "train.micro_batch_size=3",
        "eval.every=12 steps",
        "checkpoint.every=5 steps",
    )
    one = run_worlds(tmp_path / "one", GPT, overrides, [], last=1)
    assert run_worlds(tmp_path / "more", GPT, overrides, [(4, 8)], last=2) == one


@pytest.mark.soak
def test_another_kind_of_processor_is_told_and_the_run_goes_on(cluster: Cluster) -> None:
    overrides = (*SMALL_DIGITS, *BITWISE)
    summary = run_once(cluster, str(DIGITS), *overrides, "train.max_steps=8", nproc=1)
    assert summary["bits_until"] is None
    agent = cluster.start(
        DIGITS, *overrides, "train.max_steps=12", nproc=1, env={"ATEN_CPU_CAPABILITY": "default"}
    )
    assert agent.wait(60) == 0
    assert "bits: equal bits are promised up to step 8 and not beyond" in agent.output()
    assert "ATEN_CPU_CAPABILITY" in agent.output()
    assert records.summary(cluster.url)["bits_until"] == 8
    # It stays so where the old one comes back.
    assert run_once(cluster, str(DIGITS), *overrides, nproc=1)["bits_until"] == 8


def test_a_rollback_keeps_what_is_known_of_the_bits(cluster: Cluster) -> None:
    overrides = (
        *EACH_STEP,
        "args.n=12",
        "args.nan_item=10",
        "train.epochs=1",
        "train.global_batch_size=4",
        "train.on_nonfinite=rollback",
        "train.reproducible=bitwise",
        "train.logical_shards=2",
    )
    run_once(cluster, tracer(), *overrides, "train.max_steps=1", nproc=1)
    agent = cluster.start(tracer(), *overrides, nproc=1, env={"ATEN_CPU_CAPABILITY": "default"})
    assert agent.wait(60) == 0, agent.tail()
    summary = records.summary(cluster.url)
    # The checkpoint that it went back to is of the generation before, which knew nothing of another processor.
    assert summary["generations"][-1]["parent"] == "000001-000000000001"
    assert summary["bits_until"] == 1


def masks(folder: Path) -> dict[tuple[int, ...], str]:
    """The recorded dropout masks by their samples, over all ranks; each forward once."""
    found: dict[tuple[int, ...], str] = {}
    for path in sorted(folder.glob("*.jsonl")):
        for line in path.read_text().splitlines():
            record: dict[str, Any] = json.loads(line)
            found[tuple(record["indices"])] = record["mask"]
    return found


def test_c12_masks_belong_to_the_shard_and_the_step_whatever_the_world(tmp_path: Path) -> None:
    recorded = {}
    for size in (1, 2, 4):
        (tmp_path / str(size)).mkdir()
        with Cluster(tmp_path / str(size)) as cluster:
            folder = cluster.folder / "masks"
            run_once(
                cluster, tracer("Masks"), f"args.folder={folder}", "args.n=64", "train.epochs=1",
                "train.global_batch_size=16", "train.logical_shards=4", nproc=size,
            )  # fmt: skip
            recorded[size] = masks(folder)
    assert len(recorded[1]) == 16
    assert recorded[1] == recorded[2] == recorded[4]
    # No two shards or steps draw the same.
    assert len(set(recorded[1].values())) == 16
