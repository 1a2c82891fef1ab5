"""The writer, its trainers and their agent, as real processes that are killed, stopped and left alone."""

import os
import random
import secrets
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from checkpoints.segments import segments_of
from tests.support.fault_proxy import Fault, FaultProxy, Kind
from tests.support.object_stores import S3Server, s3_options, s3_server
from tests.support.saving import Node
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
