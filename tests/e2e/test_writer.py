"""The writer, its trainers and their agent, as real processes that are killed, stopped and left alone."""

import os
import random
import secrets
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from checkpoints import remote
from checkpoints.layout import Claim, claim_name
from checkpoints.manager import CheckpointManager
from checkpoints.options import CheckpointOptions
from checkpoints.segments import segments_of
from elastic.keeping import Keeper
from elastic.saving import Saver
from tests.support.fault_proxy import Fault, FaultProxy, Kind
from tests.support.object_stores import S3Server, s3_options, s3_server
from tests.support.saving import Node
from tests.support.states import same, state
from tests.support.writer_kills import kill_trainers, kill_writers

__all__ = ["s3_server"]


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    with Node(str(tmp_path / "run")) as made:
        yield made


def test_c22_a_trainer_killed_right_after_a_snapshot_does_not_lose_it(node: Node) -> None:
    for _ in range(3):
        trainer = node.start(megabytes=32)
        node.until_step(2)
        trainer.kill()
        trainer.wait()
        # What was printed was offered, and a line is printed after the offer.
        last = node.steps()[-1]

        def is_durable(last: int = last) -> bool:
            names = node.committed()
            return bool(names) and names[0].step >= last

        node.until(is_durable, f"step {last}")
        node.check_newest()


def test_a_writer_killed_at_random_moments_leaves_the_newest_whole(node: Node) -> None:
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    kill_writers(node, 5, random.Random(seed))


def test_a_trainer_killed_at_random_moments_leaves_the_newest_whole(node: Node) -> None:
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    kill_trainers(node, 5, random.Random(seed))


def test_nothing_is_left_when_a_run_is_finished(node: Node) -> None:
    trainer = node.start(steps=10)
    assert trainer.wait(60) == 0, node.log()
    node.until(lambda: not node.writers(), "the writer's end", 10)
    assert segments_of(node.agent) == []
    newest = node.check_newest()
    assert newest is not None
    assert newest.step == 10


@pytest.mark.parametrize("memory", [True, False])
def test_nothing_is_left_when_agent_and_trainer_are_killed(node: Node, memory: bool) -> None:
    trainer = node.start(memory=memory)
    node.until_step(3)
    trainer.kill()
    node.end_agent()
    trainer.wait()
    node.until(lambda: not node.writers(), "the writer's end", 20)
    assert segments_of(node.agent) == []
    node.check_newest()


def test_a_second_trainer_beside_a_living_one_makes_its_own_writer(node: Node) -> None:
    node.start(megabytes=1)
    node.until_step(3)
    stopped = node.trainers[0]
    os.kill(stopped.pid, signal.SIGSTOP)
    node.start(megabytes=1)
    node.until_step(3)
    assert len(node.writers()) == 2
    os.kill(stopped.pid, signal.SIGCONT)


def test_a_silent_writer_is_left_alone(node: Node) -> None:
    trainer = node.start(megabytes=1)
    node.until_step(3)
    (writer,) = node.writers()
    os.kill(writer, signal.SIGSTOP)
    trainer.kill()
    trainer.wait()
    node.start(megabytes=1)
    node.until_step(3)
    assert len(node.writers()) == 2
    before = node.committed()[:1]
    node.until(lambda: node.committed()[:1] > before, "a commit of the new writer")
    os.kill(writer, signal.SIGCONT)
    node.until_step(5)
    node.check_newest()


@pytest.mark.soak
@pytest.mark.parametrize("memory", [True, False])
def test_durable_steps_advance_though_trainers_die_faster_than_uploads_end(
    s3_server: S3Server, memory: bool
) -> None:
    with FaultProxy(s3_server.port) as proxy:
        url = s3_server.url()
        with Node(url, s3_options(proxy.endpoint)) as node:
            # An upload takes longer than any trainer lives.
            proxy.faults.append(
                Fault(kind=Kind.DELAY, method="PUT", contains="safetensors", delay_s=3)
            )
            steps = []
            for _ in range(6):
                trainer = node.start(megabytes=1, memory=memory)
                node.until_step(3)
                time.sleep(1)
                trainer.kill()
                trainer.wait()
                names = node.committed()
                steps.append(names[0].step if names else 0)
            node.until(lambda: node.committed()[0].step > 0, "a commit")
            assert steps[-1] > 0, steps
            assert len(set(steps)) > 2, steps
            node.check_newest()


@pytest.mark.parametrize("first", ["writer", "trainer"])
def test_a_writer_given_up_as_silent_may_commit_the_very_step_that_its_trainer_saves_again(
    node: Node, monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    monkeypatch.setattr(remote, "SILENT_S", 0.4)
    monkeypatch.setattr(remote, "_MOST_STARTS", 1)
    store = node.store()
    options = CheckpointOptions(url=node.url)
    keeper = Keeper(agent=node.agent, folder=node.folder, options=options, store=store, leads=True)
    keeper.open("r")
    manager = CheckpointManager(store, fence=lambda: None)
    saver = Saver(manager, options, keeper, run_id="r", generation=1, parent=None)
    claimed = Claim(
        generation=1,
        run_id="r",
        launch="l",
        agents=(node.agent,),
        world_size=1,
        nodes=1,
        hosts=("h",),
    )
    store.put_new(claim_name(1), claimed.to_json())
    keeper.begin(claimed)
    (pid,) = node.writers()
    os.kill(pid, signal.SIGSTOP)
    try:
        taken = keeper.take(state(5), name=saver.name(5), parent=None, info={}, still=frozenset())
        assert taken is not None
        saver.begin(5)
        saver.offer(taken.copied.result(), protect=[], keep=False)
        while keeper.writes_beside:  # a moment of silence, and it is given up
            saver.look(lambda _: None)
            time.sleep(0.05)
        assert not saver.is_begun(5)
        if first == "trainer":
            # What it captures now is not what the snapshot holds: the snapshot is what counts.
            assert saver.save(state(6), step=5, info={}, protect=[])
        os.kill(pid, signal.SIGCONT)
        if first == "writer":
            node.until(lambda: bool(node.committed()), "the writer's commit", 10)
            assert saver.save(state(6), step=5, info={}, protect=[])
        assert saver.save(state(7), step=6, info={}, protect=[])
    finally:
        os.kill(pid, signal.SIGCONT)
    node.end_agent()
    node.until(lambda: not node.writers(), "the writer's end", 20)
    assert [name.step for name in node.committed()] == [6, 5]
    assert same(manager.restore(saver.name(5)), state(5))
    manager.close()
    keeper.close(finished=True)
