"""Which state is taken: the furthest of store and memory, and who differs from the others."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest

from checkpoints.layout import CheckpointName
from checkpoints.manager import CheckpointManager
from checkpoints.store import open_store
from elastic.errors import ReplicaError
from elastic.finding import _furthest, compare_replicas
from tests.support.states import name, state

if TYPE_CHECKING:
    from elastic.world import World


class Ranks:
    """What `compare_replicas` needs of a world whose other ranks have answered already."""

    def __init__(self, *digests: str) -> None:
        self.digests = list(digests)
        self.hosts = tuple(f"host{rank}" for rank in range(len(digests)))

    def gather(self, _item: object) -> list[str]:
        return self.digests


def compare(*digests: str) -> None:
    compare_replicas(cast("World", Ranks(*digests)), digests[0], when="before the checkpoint")


def test_equal_replicas_pass() -> None:
    compare("a", "a", "a")


def test_the_rank_that_differs_is_named_also_where_it_is_the_primary() -> None:
    with pytest.raises(ReplicaError, match=r"rank 2 of 3 differs .* memory of host2"):
        compare("a", "a", "b")
    with pytest.raises(ReplicaError, match=r"rank 0 of 3 differs .* memory of host0"):
        compare("b", "a", "a")
    with pytest.raises(ReplicaError, match="ranks 1, 3 of 5 differ from the others"):
        compare("a", "b", "a", "c", "a")


def test_of_two_that_differ_neither_is_believed() -> None:
    with pytest.raises(ReplicaError, match="ranks 0 and 1 differ"):
        compare("a", "b")


def saved(folder: Path, step: int, position: int) -> CheckpointManager:
    manager = CheckpointManager(open_store(str(folder)))
    snapshot = manager.stage(
        state(step), name=name(step), parent=None, run_id="r",
        info={"epoch": 1, "position": position},
    )  # fmt: skip
    manager.commit(snapshot)
    return manager


def held(step: int, position: list[int], known: CheckpointName | None) -> dict[str, Any]:
    told = None if known is None else str(known)
    return {"name": str(name(step, 2)), "position": position, "path": "/p", "known": told}


def choose(
    manager: CheckpointManager, *nodes: tuple[str, list[dict[str, Any]]], wrong: Any = ()
) -> dict[str, Any]:
    told = [{"node": node, "held": found} for node, found in nodes]
    return _furthest(manager, told, set(wrong), [])


def test_the_greater_position_wins_between_tiers(tmp_path: Path) -> None:
    manager = saved(tmp_path, 10, 40)
    ahead, behind = held(11, [1, 44], name(10)), held(9, [1, 36], name(10))
    assert choose(manager, ("a", [ahead]))["source"] == "memory"
    assert choose(manager, ("a", [behind])) == {
        "source": "store", "name": str(name(10)), "paths": {},
    }  # fmt: skip
    # (e + 1, 0) is after every position of epoch e.
    assert choose(manager, ("a", [held(10, [2, 0], name(10))]))["source"] == "memory"


def test_every_node_that_has_it_is_told_where(tmp_path: Path) -> None:
    manager = saved(tmp_path, 10, 40)
    ahead, behind = held(11, [1, 44], name(10)), held(9, [1, 36], name(10))
    found = choose(manager, ("a", [ahead, behind]), ("b", [behind]), ("c", [ahead]))
    assert set(found["paths"]) == {"a", "c"}


def test_memory_of_another_history_of_the_store_is_left_out(tmp_path: Path) -> None:
    manager = saved(tmp_path, 10, 40)
    assert choose(manager, ("a", [held(11, [1, 44], name(99))]))["source"] == "store"


def test_what_is_known_to_be_wrong_is_left_out(tmp_path: Path) -> None:
    manager = saved(tmp_path, 10, 40)
    node = ("a", [held(11, [1, 44], name(10))])
    wrong = [("memory", name(11, 2))]
    assert choose(manager, node, wrong=wrong)["source"] == "store"
    assert choose(manager, node, wrong=[*wrong, ("store", name(10))])["source"] is None


def test_a_manifest_that_is_damaged_is_told_and_left_out(tmp_path: Path) -> None:
    saved(tmp_path, 10, 40)
    path = tmp_path / name(10).manifest
    path.write_bytes(path.read_bytes().replace(b'"run_id":"r"', b'"run_id":"x"'))
    damaged: list[str] = []
    fresh = CheckpointManager(open_store(str(tmp_path)))
    wrong: set[tuple[str, CheckpointName]] = set()
    assert _furthest(fresh, [], wrong, damaged)["source"] is None
    assert len(damaged) == 1
    assert wrong == {("store", name(10))}
