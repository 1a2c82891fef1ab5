"""Kills of writers and trainers at random moments; the suite does a tenth, a soak all of them."""

import os
import random
import signal
import time

from tests.support.saving import Node


def kill_writers(node: Node, kills: int, moments: random.Random) -> None:
    """SIGKILL the writer again and again while a trainer saves: the newest is whole, steps go on."""
    node.start()
    node.until_step(2)
    for _ in range(kills):
        node.until(node.writers, "a writer")
        time.sleep(moments.uniform(0, 0.6))
        for writer in node.writers():
            os.kill(writer, signal.SIGKILL)
        found = node.check_newest()
        before = 0 if found is None else found.step

        def goes_on(before: int = before) -> bool:
            names = node.committed()
            return bool(names) and names[0].step > before

        node.until(goes_on, f"a step after {before}")
    node.check_newest()


def kill_trainers(node: Node, kills: int, moments: random.Random) -> None:
    """SIGKILL the trainer again and again: the newest is whole, and the next one goes on from there."""
    durable = 0
    for _ in range(kills):
        trainer = node.start()
        node.until_step(1)
        time.sleep(moments.uniform(0, 0.6))
        trainer.kill()
        trainer.wait()
        found = node.check_newest()
        step = 0 if found is None else found.step
        assert step >= durable
        durable = step
    assert durable > 0
