"""A trial under a fleet of no processes: when faults strike, what belongs to which, and that all is given back."""

import json
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from checkpoints.layout import AgentId
from elastic import kin, trial
from elastic.fleet import Agent, Fleet, Worker
from elastic.timetable import Kind, Planned
from elastic.trial import Outcome, Trial


class Clock:
    """Time that passes only where somebody sleeps."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.events: list[tuple[float, Callable[[], None]]] = []

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        while self.events and self.events[0][0] <= self.now:
            self.events.pop(0)[1]()

    def at(self, moment: float, act: Callable[[], None]) -> None:
        self.events.append((moment, act))
        self.events.sort(key=lambda event: event[0])


class Pretended:
    """A fleet of one agent with two workers, and what its run writes."""

    def __init__(self, folder: Path, clock: Clock) -> None:
        self.folder, self.clock = folder, clock
        self.nodes, self.nproc, self.bridge = 1, 2, None
        self.is_closed = False
        self.is_over = False
        self.sent: list[tuple[int, str]] = []
        self.agent = self._agent()
        self.agents, self.all = {0: self.agent}, [self.agent]

    def _agent(self) -> Agent:
        made = SimpleNamespace(
            node=0,
            identity=AgentId(host="", boot_id="b", pid=1, start=1),
            process=SimpleNamespace(pid=1, returncode=0),
            was_hit=False,
            is_running=False,
            restarts=lambda: len(self._claims()) - 1,
            tail=lambda: "the end",
        )
        return cast("Agent", made)

    def _claims(self) -> list[Path]:
        return list(self.folder.glob("generations/*.json"))

    def start(self, node: int) -> Agent:
        assert node == 0
        return self.agent

    def running(self) -> list[Agent]:
        return [] if self.is_over else [self.agent]

    def workers(self) -> list[Worker]:
        return [Worker(rank=rank, pid=100 + rank, node=0) for rank in range(2)]

    def leftovers(self, *, limit_s: float) -> list[str]:
        assert limit_s > 0
        return []

    def close(self) -> None:
        self.is_closed = True

    # ------------------------------------------------------------------------- what the run does
    def begin(self, generation: int, step: int, cause: str) -> None:
        (self.folder / "generations").mkdir(parents=True, exist_ok=True)
        (self.folder / "journal").mkdir(exist_ok=True)
        claim = self.folder / "generations" / f"{generation:06d}.json"
        claim.write_text(json.dumps({"cause": cause}))
        self.write(
            generation, "start", step=step, world_size=2, cause=cause, parent=None, source="store"
        )

    def step(self, generation: int, step: int) -> None:
        self.write(generation, "step", step=step)

    def write(self, generation: int, kind: str, **fields: Any) -> None:
        line = {"event": kind, "generation": generation, "time": self.clock.now, **fields}
        with (self.folder / "journal" / f"{generation:06d}.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")

    def end(self) -> None:
        self.is_over = True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    pretended = SimpleNamespace(sleep=made.sleep, monotonic=lambda: made.now, time=lambda: made.now)
    monkeypatch.setattr(trial, "time", pretended)
    monkeypatch.setattr("elastic.strikes.time", pretended)
    return made


@pytest.fixture
def fleet(tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Pretended:
    made = Pretended(tmp_path / "run", clock)

    def send(pids: list[int], number: signal.Signals) -> None:
        made.sent += [(pid, number.name) for pid in pids]

    monkeypatch.setattr(kin, "send", send)
    return made


def planned(number: int, kind: Kind, at_s: float, lasts_s: float = 0.0) -> Planned:
    return Planned(number=number, kind=kind, at_s=at_s, lasts_s=lasts_s, gap_s=1.0, whom=0.6)


def run(fleet: Pretended, *schedule: Planned) -> Outcome:
    made = Trial(cast("Fleet", fleet), fleet.folder, say=lambda _line: None)
    return made.run(schedule)


def test_each_restart_and_each_lost_step_belongs_to_one_fault(
    fleet: Pretended, clock: Clock
) -> None:
    begin = clock.now
    clock.at(begin + 1, lambda: fleet.begin(1, 0, "start"))
    for step in range(1, 8):
        clock.at(begin + 1 + step, lambda step=step: fleet.step(1, step))  # type: ignore[misc]
    clock.at(begin + 12, lambda: fleet.begin(2, 4, "worker killed"))
    clock.at(begin + 14, lambda: fleet.step(2, 5))
    clock.at(begin + 15.6, lambda: fleet.step(2, 6))
    clock.at(begin + 20, lambda: fleet.begin(3, 5, "worker killed again"))
    clock.at(begin + 21, lambda: fleet.step(3, 6))
    # A restart that comes after the recovery is of the same fault.
    clock.at(begin + 22, lambda: fleet.begin(4, 6, "for no reason"))
    clock.at(begin + 30, fleet.end)
    found = run(fleet, planned(1, "kill", 7.5), planned(2, "kill", 8.0))
    assert found.problem is None
    assert fleet.is_closed
    assert fleet.sent == [(101, "SIGKILL"), (101, "SIGKILL")]
    first, second = found.struck
    assert (first.generation, first.step, first.lost_steps) == (1, 7, 3)
    assert first.claims == ["worker killed"]
    assert first.recovery_s == pytest.approx(14 - (2 + 7.5), abs=0.2)
    # The second waits for the recovery from the first, and a while longer.
    assert second.time - begin == pytest.approx(15, abs=0.3)
    assert second.claims == ["worker killed again", "for no reason"]
    assert second.restarts == 1
    assert second.lost_steps == 1


def test_a_stopped_worker_goes_on_and_costs_no_restart(fleet: Pretended, clock: Clock) -> None:
    begin = clock.now
    clock.at(begin + 1, lambda: fleet.begin(1, 0, "start"))
    for at, step in ((2, 1), (3, 2), (8, 3)):
        clock.at(begin + at, lambda step=step: fleet.step(1, step))  # type: ignore[misc]
    clock.at(begin + 9, fleet.end)
    found = run(fleet, planned(1, "stop", 1.5, lasts_s=3.0))
    assert fleet.sent == [(101, "SIGSTOP"), (101, "SIGCONT")]
    (struck,) = found.struck
    assert struck.recovery_s == pytest.approx(8 - 3.5, abs=0.2)
    assert struck.claims == []
    assert struck.lost_steps == 0


def test_a_store_that_is_away_comes_back_also_where_the_drill_is_broken_off(
    fleet: Pretended, clock: Clock
) -> None:
    begin = clock.now
    clock.at(begin + 1, lambda: fleet.begin(1, 0, "start"))
    clock.at(begin + 2, lambda: fleet.step(1, 1))

    def break_off() -> None:
        assert fleet.folder.is_file()
        raise KeyboardInterrupt

    clock.at(begin + 5, break_off)
    with pytest.raises(KeyboardInterrupt):
        run(fleet, planned(1, "storage", 1.0, lasts_s=5.0))
    assert fleet.folder.is_dir()
    assert [path.name for path in fleet.folder.parent.iterdir()] == ["run"]
    assert fleet.is_closed


def test_a_run_that_does_not_recover_is_told_with_its_fault(fleet: Pretended, clock: Clock) -> None:
    begin = clock.now
    clock.at(begin + 1, lambda: fleet.begin(1, 0, "start"))
    clock.at(begin + 2, lambda: fleet.step(1, 1))
    found = run(fleet, planned(1, "kill", 1.0))
    assert found.problem == "fault 1 (kill of rank 1 (pid 101)): not recovered from within 300 s"
    assert found.tail == "the end"
    assert [one.recovery_s for one in found.struck] == [None]
    assert fleet.is_closed


def test_a_run_that_ends_before_its_faults_is_no_problem_of_the_trial(
    fleet: Pretended, clock: Clock
) -> None:
    begin = clock.now
    clock.at(begin + 1, lambda: fleet.begin(1, 0, "start"))
    clock.at(begin + 2, lambda: fleet.step(1, 1))
    clock.at(begin + 4, fleet.end)
    found = run(fleet, planned(1, "kill", 60.0))
    assert (found.struck, found.planned, found.problem) == ([], 1, None)


def test_agents_that_never_begin_are_a_problem(fleet: Pretended, clock: Clock) -> None:
    clock.at(clock.now + 5, fleet.end)
    found = run(fleet, planned(1, "kill", 1.0))
    assert found.problem == "the agents ended before the first step of the whole world"
