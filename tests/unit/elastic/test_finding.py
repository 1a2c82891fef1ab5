"""Which state a generation begins from, as all ranks decide it, and replicas that differ."""

import logging
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from checkpoints import snapshots
from checkpoints.buffers import Buffers, Place, Slot
from checkpoints.layout import CheckpointName
from checkpoints.manager import CheckpointManager
from checkpoints.options import CheckpointOptions
from checkpoints.processes import process_start, this_process
from checkpoints.segments import leftovers
from checkpoints.store import Store, open_store
from elastic.errors import ReplicaError
from elastic.finding import Found, _furthest, compare_replicas, find_state
from elastic.keeping import Keeper
from elastic.world import World
from tests.support.ranked import run_ranks, world_of
from tests.support.states import name, same, state


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(str(tmp_path / "run"))


@pytest.fixture
def world(tmp_path: Path) -> Any:
    with world_of(0, 1, tmp_path) as found:
        yield found


def make_keeper(store: Store, folder: Path, *, leads: bool = True) -> Keeper:
    folder.mkdir(exist_ok=True)
    made = Keeper(
        agent=this_process(),
        folder=folder,
        options=CheckpointOptions(url=store.url),
        store=store,
        leads=leads,
    )
    made.open("r")
    return made


@pytest.fixture(params=["memory", "no memory"])
def keeper(request: pytest.FixtureRequest, store: Store, tmp_path: Path) -> Iterator[Keeper | None]:
    """A node that shares memory, and one that asks the store alone."""
    made = make_keeper(store, tmp_path / "node") if request.param == "memory" else None
    yield made
    if made is not None:
        made.close(finished=True)


def save(store: Store, *steps: int) -> None:
    manager = CheckpointManager(store, keep=9)
    for step in steps:
        snapshot = manager.stage(
            state(step), name=name(step), parent=None, run_id="r", info={"step": step}
        )
        manager.commit(snapshot)
    manager.close()


def damage(folder: Path, step: int) -> None:
    path = folder / name(step).folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_nothing_is_found_at_a_fresh_start(
    world: World, store: Store, keeper: Keeper | None
) -> None:
    manager = CheckpointManager(store)
    assert find_state(world, manager, keeper) == Found(name=None, tree=None)
    manager.close()


def test_older_checkpoint_is_taken_where_newer_ones_are_damaged(
    world: World,
    store: Store,
    keeper: Keeper | None,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    save(store, 4, 8, 12)
    damage(tmp_path / "run", 12)
    (tmp_path / "run" / name(8).folder / "state.json").unlink()
    manager = CheckpointManager(store)
    with caplog.at_level(logging.ERROR, "elastic"):
        found = find_state(world, manager, keeper)
    manager.close()
    assert (found.name, found.source) == (name(4), "store")
    assert found.ruins == (name(8), name(12))
    assert same(dict(found.tree or {}), state(4))
    assert [text.partition(":")[0] for text in found.damaged] == [str(name(12)), str(name(8))]
    assert "model.safetensors" in found.damaged[0]
    assert [message.partition(" is damaged")[0] for message in caplog.messages] == [
        f"checkpoint {name(12)}",
        f"checkpoint {name(8)}",
    ]


def find_with_views(world: World, views: list[str], node: str | None) -> tuple[str, float]:
    """Each rank reads another folder: what rank 0 sees need not be there for rank 1.

    With the folder of a node each rank leads one of its own; otherwise no rank has shared memory.
    """
    store = open_store(views[world.rank])
    manager = CheckpointManager(store)
    keeper = None if node is None else make_keeper(store, Path(f"{node}-{world.rank}"))
    found = find_state(world, manager, keeper)
    manager.close()
    assert found.tree is not None
    weight = float(found.tree["model"]["net.weight"][0, 0])
    if keeper is not None:
        keeper.close(finished=True)
    return str(found.name), weight


def differ(world: World) -> str:
    with pytest.raises(ReplicaError) as found:
        compare_replicas(world, "aa" if world.rank != 1 else "bb", when="after the restore")
    compare_replicas(world, "aa", when="after the restore")
    return str(found.value)


def ranks_find(world: World, folder: str) -> dict[str, Any]:
    whole, behind, flipped = (f"{folder}/{kind}" for kind in ("whole", "behind", "flipped"))
    found: dict[str, Any] = {"differ": differ(world)}
    for node in (None, f"{folder}/node"):
        found[f"behind {node}"] = find_with_views(world, [whole, behind], node)
        found[f"flipped {node}"] = find_with_views(world, [whole, flipped], node)
    return found


def test_c24_which_checkpoint_is_used_is_decided_once_for_all_ranks(tmp_path: Path) -> None:
    for kind, steps in [("whole", (4, 8)), ("behind", (4,)), ("flipped", (4, 8))]:
        save(open_store(str(tmp_path / kind)), *steps)
    damage(tmp_path / "flipped", 8)
    one, other = run_ranks(2, ranks_find, str(tmp_path))
    assert one == other
    assert one.pop("differ") == (
        "after the restore: ranks 0 and 1 differ (digests aa, bb); nothing of this state is saved; the "
        "memory of here may be faulty, a parameter is not synchronised, or a hook (on_step, on_epoch) changed something on the primary alone"
    )
    # Rank 1 does not see the newest, or reads a flipped bit in it: nobody uses it.
    assert len(one) == 4
    assert set(one.values()) == {(str(name(4)), 4.0)}


def differ_one(world: World) -> str:
    with pytest.raises(ReplicaError) as found:
        compare_replicas(world, "aa" if world.rank else "bb", when="at the end")
    return str(found.value)


def test_the_rank_that_differs_from_most_is_named() -> None:
    (told,) = set(run_ranks(3, differ_one))
    assert told.startswith("at the end: rank 0 of 3 differs from the others (digests bb, aa); ")


# ------------------------------------------------------------------------------------------- memory
def take(keeper: Keeper, step: int, *, position: int, generation: int = 1) -> None:
    """Leave a snapshot in the node's memory, as a step's end does."""
    taken = keeper.take(
        state(step),
        name=CheckpointName(generation, step),
        parent=None,
        info={"epoch": 0, "position": position},
        still=frozenset(),
    )
    assert taken is not None
    taken.copied.result()


@pytest.fixture
def node(store: Store, tmp_path: Path) -> Iterator[Keeper]:
    made = make_keeper(store, tmp_path / "node")
    yield made
    made.close(finished=True)


def find(world: World, store: Store, node: Keeper) -> tuple[int | None, str]:
    manager = CheckpointManager(store)
    found = find_state(world, manager, node)
    manager.close()
    if found.name is not None:
        assert same(dict(found.tree or {}), state(found.name.step))
    return None if found.name is None else found.name.step, found.source


def save_at(store: Store, step: int, *, position: int) -> None:
    manager = CheckpointManager(store)
    info: dict[str, Any] = {"epoch": 0, "position": position}
    manager.commit(manager.stage(state(step), name=name(step), parent=None, run_id="r", info=info))
    manager.close()


def test_the_furthest_of_memory_and_store_is_taken(
    world: World, store: Store, node: Keeper
) -> None:
    take(node, 4, position=16)
    assert find(world, store, node) == (4, "memory")
    save_at(store, 8, position=32)
    assert find(world, store, node) == (8, "store")
    take(node, 12, position=48)
    assert find(world, store, node) == (12, "memory")


def test_a_snapshot_in_memory_that_does_not_verify_is_left_out(
    world: World, store: Store, node: Keeper, caplog: pytest.LogCaptureFixture
) -> None:
    save_at(store, 4, position=16)
    take(node, 8, position=32)
    (held,) = node.held()
    with Path(held.path).open("r+b") as file:
        file.seek(snapshots.PAGE)  # where its first file begins
        file.write(b"\xff" * 16)
    with caplog.at_level(logging.WARNING):
        assert find(world, store, node) == (4, "store")
    assert f"the snapshot in memory {name(8)} is damaged (" in caplog.text


# ------------------------------------------------------------------- what decides, taken by itself
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


def test_c22_a_snapshot_of_a_launch_that_is_over_is_taken_over(
    world: World, store: Store, tmp_path: Path
) -> None:
    save(store, 1)
    owner = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    agent = replace(this_process(), pid=owner.pid, start=process_start(owner.pid) or 0)
    theirs = Buffers(split_bytes=10**9, place=Place(agent, "r"))
    other = Buffers(split_bytes=10**9, place=Place(agent, "another"))
    left = [
        theirs.stage(
            state(step), name=name(step), parent=name(1), run_id="r", info={"position": step}
        )
        for step in (5, 7)
    ]
    left.append(
        other.stage(state(9), name=name(9), parent=None, run_id="another", info={"position": 9})
    )
    living = make_keeper(store, tmp_path / "before")
    assert not living.held()  # that launch is not over
    living.close(finished=True)
    owner.kill()
    owner.wait()
    keeper = make_keeper(store, tmp_path / "after")
    found = find_state(world, CheckpointManager(store), keeper)
    assert (found.name, found.source) == (name(7), "memory")
    assert found.tree is not None
    assert same(dict(found.tree), state(7))
    assert leftovers() == []
    # Its writer may be reading it still: nobody writes there.
    slot = keeper.held()[0].path
    assert slot not in {str(cast("Slot", one.slot).memory.path) for one in left}
    keeper.close(finished=True)
