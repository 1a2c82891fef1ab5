"""How a worker's end is told, written down, and given its code."""

import json
import os
import re
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from checkpoints.errors import (
    PartedError,
    SupersededError,
    TransientStoreError,
    UnsupportedStateError,
)
from elastic.ending import end_worker
from elastic.errors import (
    AttentionError,
    CollectiveError,
    ConfigError,
    ElasticError,
    MeetingError,
    OverruledError,
    PeersLeftError,
    PreemptedError,
    StartError,
)
from elastic.monitor import Fault, previous_faults
from elastic.opening import Session, open_session
from jobs.errors import JobError
from tests.support.ranked import Ended, run_alone


def users_code() -> None:
    raise ValueError("the loss of step 3\nwent wrong")


def throw(error: BaseException) -> None:
    raise error


def caught(error: BaseException | None) -> BaseException:
    try:
        if error is None:
            users_code()
        else:
            throw(error)
    except BaseException as found:  # noqa: BLE001  # the very thing that is handed on
        return found
    raise AssertionError


def session_at(step: int) -> Session:
    session = open_session({}, ["SIGTERM"])
    session.slot.begin(0, 4)
    session.slot.beat(step, "step")
    return session


def end(error: BaseException | None, folder: str, former: list[Fault]) -> int:
    """End as a worker would; keep what it left for the next one."""
    session = session_at(3)
    raised = caught(error)
    signature = session.slot.fault(raised).signature
    session.former[:] = [replace(f, signature=f.signature or signature) for f in former]
    os.link(session.slot.path, Path(folder, "slot"))
    return end_worker(raised, session, None)


def recorded(slot: Path) -> dict[str, Any]:
    """The end that a worker wrote into its slot."""
    data = slot.read_bytes()
    length = int.from_bytes(data[512:520], "little")
    found: dict[str, Any] = json.loads(data[520 : 520 + length])
    return found


def ending_of(
    error: BaseException | None, folder: Path, former: list[Fault] | None = None
) -> tuple[Ended, dict[str, Any]]:
    ended = run_alone(end, error, str(folder), former or [])
    return ended, recorded(folder / "slot")


@pytest.mark.parametrize(
    ("error", "code", "line", "kind"),
    [
        (StartError("dataset: found none"), 2, "error: dataset: found none\n", "exception"),
        (ConfigError("train.epochs: found 0"), 2, "error: train.epochs: found 0\n", "exception"),
        (JobError("loss returned None"), 2, "error: loss returned None\n", "exception"),
        (UnsupportedStateError("job.f: found function"), 2, "error: job.f: found function\n", "exception"),
        (AttentionError("step 4: found nan"), 76, "error: step 4: found nan\n", "exception"),
        (OverruledError("a newer launch"), 77, "superseded: a newer launch\n", "exception"),
        (SupersededError("a newer launch"), 77, "superseded: a newer launch\n", "exception"),
        (PreemptedError("told to leave"), 75, "told to leave\n", "preempted"),
        (MeetingError("rank 1 did not come"), 1, "error: rank 1 did not come\n", "exception"),
        (PartedError("gone on"), 1, "error: gone on\n", "exception"),
        (TransientStoreError("busy"), 1, "error: busy\n", "exception"),
        (PeersLeftError("others were told to leave"), 1, "others were told to leave\n", "exception"),
        (ElasticError("this one restarts"), 1, "error: this one restarts\n", "exception"),
        (CollectiveError("sum: a peer is gone"), 1, "rank 0 lost a peer at step 3: sum: a peer is gone\n", "collective"),
        (RuntimeError("[/src/gloo/pair.cc:537] Read error [::1]:8: Connection reset by peer. This is typically GLHF!"), 1,
         "rank 0 lost a peer at step 3: Read error [::1]:8: Connection reset by peer.\n", "collective"),
        (CollectiveError("gather: a peer is gone: [/src/gloo/pair.cc:553] Connection closed"), 1,
         "rank 0 lost a peer at step 3: gather: a peer is gone: Connection closed\n", "collective"),
        (KeyboardInterrupt(), 1, "", "ended"),
    ],
)  # fmt: skip
def test_each_error_has_its_code_its_one_line_and_its_record(
    error: BaseException, code: int, line: str, kind: str, tmp_path: Path
) -> None:
    ended, fault = ending_of(error, tmp_path)
    assert (ended.code, ended.err) == (code, line)
    assert (fault["kind"], fault["step"], fault["rank"]) == (kind, 3, 0)


def test_exception_of_the_users_code_shows_its_traceback_and_may_be_tried_again(
    tmp_path: Path,
) -> None:
    ended, fault = ending_of(None, tmp_path)
    assert ended.code == 1
    assert ended.err.count("Traceback (most recent call last):") == 1
    place = re.escape(__file__)
    last = ended.err.splitlines()[-1]
    assert re.fullmatch(
        rf"worker raised ValueError: the loss of step 3 \(rank 0, step 3, {place}:\d+\) on \S+",
        last,
    ), last
    assert fault["type"] == "ValueError"


def former_fault(**changes: Any) -> Fault:
    known: dict[str, Any] = {
        "rank": 0, "local_rank": 0, "host": "h", "step": 3, "phase": "step", "kind": "exception",
    }  # fmt: skip
    return Fault(**{**known, **changes})


def test_same_exception_at_the_same_step_twice_ends_the_run_with_76(tmp_path: Path) -> None:
    ended, _ = ending_of(None, tmp_path, [former_fault()])
    assert ended.code == 76
    assert re.fullmatch(
        r"error: the same exception at the same step twice, without progress: ValueError: the loss of "
        rf"step 3 at {re.escape(__file__)}:\d+, step 3, rank 0; mend it and start again",
        ended.err.splitlines()[-1],
    ), ended.err


@pytest.mark.parametrize(
    "former", [former_fault(step=2), former_fault(signature="another"), former_fault(step=4)]
)
def test_another_step_or_another_exception_is_no_repetition(former: Fault, tmp_path: Path) -> None:
    ended, _ = ending_of(None, tmp_path, [former])
    assert ended.code == 1


def lose_peer_beside_a_killed_one() -> int:
    """A worker of the same node was killed a moment ago: it is the cause."""
    session = session_at(3)
    pid = os.fork()
    if pid == 0:
        from elastic.monitor import open_slot

        slot = open_slot(session.folder, 1)
        slot.begin(1, 4)
        slot.beat(3, "step")
        os.kill(os.getpid(), 9)
    os.waitpid(pid, 0)
    code = end_worker(CollectiveError("sum: a peer is gone"), session, None)
    (cause,) = [f for f in previous_faults(session.folder) if not f.is_secondary]
    print(cause)
    return code


def test_rank_that_lost_its_peer_names_what_ended_it() -> None:
    ended = run_alone(lose_peer_beside_a_killed_one)
    assert ended.code == 1
    assert re.fullmatch(
        r"worker killed \(SIGKILL, rank 1\) on \S+ at step 3: this generation ends\n", ended.err
    )
    # It only looked: those who come after are still told.
    assert ended.out == "worker killed (SIGKILL, rank 1)\n"


def end_with_a_child() -> int:
    import multiprocessing
    import time

    session = session_at(3)
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
    child.start()
    end_worker(ElasticError("this one restarts"), session, None)
    child.join(timeout=5)
    return 0 if child.exitcode == -9 else 3


def test_loader_workers_are_ended_with_their_trainer() -> None:
    assert run_alone(end_with_a_child).code == 0


class InterruptedTellingError(ElasticError):
    """The agent's signal comes while the line is made: another rank has asked for it."""

    def __str__(self) -> str:
        os.kill(os.getpid(), signal.SIGTERM)
        return "what is owed"


def end_while_the_agent_ends() -> int:
    return end_worker(caught(InterruptedTellingError()), session_at(3), None)


def test_line_that_is_owed_is_told_though_the_agent_ends_meanwhile() -> None:
    ended = run_alone(end_while_the_agent_ends)
    assert (ended.code, ended.err) == (1, "error: what is owed\n")
