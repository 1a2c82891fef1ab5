"""The second half of a start: which run, which generation, the word that it began."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from checkpoints.generations import read_claims, read_started
from checkpoints.layout import AgentId, CheckpointName, Claim, claim_name
from checkpoints.store import Store, open_store
from elastic import resume
from elastic.errors import OverruledError, StartError
from elastic.finding import Found
from elastic.monitor import Fault
from elastic.world import World
from tests.support.ranked import world_of


def agent(number: int) -> AgentId:
    return AgentId(host="h", boot_id="b", pid=number, start=number)


def claim_of(generation: int, *agents: int, launch: str = "l") -> Claim:
    return Claim(
        generation=generation, run_id="r", launch=launch, agents=tuple(map(agent, agents)),
        world_size=1, nodes=1, hosts=("h",),
    )  # fmt: skip


def fault(**changes: Any) -> Fault:
    known: dict[str, Any] = {
        "rank": 1, "local_rank": 1, "host": "h", "step": 3, "phase": "step", "kind": "killed", "signal": "SIGKILL",
    }  # fmt: skip
    return Fault(**{**known, **changes})


ECHO = fault(kind="collective", signal=None, rank=0)


@pytest.mark.parametrize(
    ("previous", "agents", "faults", "new", "cause"),
    [
        (None, [1], [], True, "start"),
        (claim_of(1, 1), [2], [fault()], True, "start"),
        (claim_of(1, 1), [1], [ECHO, fault()], False, "worker killed (SIGKILL, rank 1)"),
        (claim_of(1, 1, 2), [1], [ECHO], False, "node lost"),
        (claim_of(1, 1), [1, 2], [ECHO], False, "node joined"),
        (claim_of(1, 1, 2), [1, 3], [ECHO], False, "node replaced"),
        (claim_of(1, 1), [1], [ECHO], False, "worker lost a peer (rank 0)"),
        (claim_of(1, 1), [1], [], False, "restart"),
    ],
)
def test_cause_is_told_from_what_the_generation_before_left(
    previous: Claim | None, agents: list[int], faults: list[Fault], new: bool, cause: str
) -> None:
    assert resume.cause_of(previous, [agent(n) for n in agents], faults, new) == cause


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(str(tmp_path / "run"))


@pytest.fixture
def world(tmp_path: Path) -> Any:
    with world_of(0, 1, tmp_path) as found:
        yield found


def test_first_start_creates_the_run_and_the_next_is_of_it(world: World, store: Store) -> None:
    run_id, notes = resume.agree_on_run(world, store, {"train.seed": 0}, [])
    assert notes == []
    assert resume.agree_on_run(world, store, {"train.seed": 0}, []) == (run_id, [])
    found, notes = resume.agree_on_run(world, store, {"train.seed": 1}, ["train.seed"])
    assert found == run_id
    assert notes == ["train.seed: it was 0, this start has 1 (accepted by run.accept)"]
    with pytest.raises(StartError, match=r"^train\.seed: this run is another one, it was 0"):
        resume.agree_on_run(world, store, {"train.seed": 1}, [])


def test_run_record_that_cannot_be_read_is_refused(world: World, store: Store) -> None:
    store.put("run.json", b"{}")
    with pytest.raises(StartError, match=r"run\.json"):
        resume.agree_on_run(world, store, {}, [])


def claim_next(world: World, store: Store, *agents: int, faults: tuple[Fault, ...] = ()) -> Claim:
    return resume.claim_generation(
        world, store, agents=tuple(map(agent, agents)), hosts=["h"], run_id="r", config={"a": 1}, faults=faults
    )  # fmt: skip


def test_generations_of_one_launch_inherit_it_and_tell_their_cause(
    world: World, store: Store
) -> None:
    first = claim_next(world, store, 1)
    second = claim_next(world, store, 1, faults=(fault(),))
    assert (first.generation, second.generation) == (1, 2)
    assert (first.cause, second.cause) == ("start", "worker killed (SIGKILL, rank 1)")
    assert first.launch == second.launch
    third = claim_next(world, store, 2)
    assert (third.generation, third.cause) == (3, "start")
    assert third.launch != second.launch
    assert read_claims(store) == [first, second, third]
    assert second.faults[0]["signal"] == "SIGKILL"


def test_world_of_an_older_launch_is_overruled(world: World, store: Store) -> None:
    claim_next(world, store, 1)
    claim_next(world, store, 2)
    with pytest.raises(OverruledError, match="another launch has claimed generation 2"):
        claim_next(world, store, 1)


def test_started_is_written_behind_the_fence(world: World, store: Store) -> None:
    claim_next(world, store, 1)
    mine = claim_next(world, store, 1)
    found = Found(name=CheckpointName(1, 8), tree={})
    resume.say_started(store, mine, found=found, source="store", step=8, position=(1, 4))
    (started,) = read_started(store)
    assert (started.generation, started.parent) == (2, "000001-000000000008")
    assert (started.source, started.start_step, started.position) == ("store", 8, (1, 4))
    late = claim_next(world, store, 1)
    claim_next(world, store, 2)
    with pytest.raises(OverruledError, match="generation 3 is superseded"):
        resume.say_started(store, late, found=found, source="store", step=8, position=(1, 4))


# --------------------------------------------------------------------------------------- init_from
def test_weights_to_begin_with_are_loaded_as_far_as_they_fit(tmp_path: Path) -> None:
    path = tmp_path / "weights.pt"
    old = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    torch.save(old.state_dict(), path)
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    lines = resume.load_initial(model, str(path), {})
    assert lines[0] == f"checkpoint.init_from: 2 tensors loaded from {path}"
    assert all(line.startswith("checkpoint.init_from: ") for line in lines)
    assert any("1.weight" in line for line in lines[1:])
    found, expected = model.state_dict(), old.state_dict()
    assert torch.equal(found["0.weight"], expected["0.weight"])


def test_weights_of_which_none_fits_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "weights.pt"
    torch.save({"other": torch.zeros(3)}, path)
    message = f"checkpoint.init_from: none of the 1 tensors in {path} fits the model ("
    with pytest.raises(StartError, match=f"^{re.escape(message)}"):
        resume.load_initial(nn.Linear(2, 3), str(path), {})


def test_weights_that_are_not_there_are_refused(tmp_path: Path) -> None:
    with pytest.raises(StartError, match=r"^checkpoint\.init_from: "):
        resume.load_initial(nn.Linear(2, 3), str(tmp_path / "nothing.pt"), {})


def test_claims_name_is_what_the_format_says() -> None:
    assert claim_name(3) == "generations/000003.json"
