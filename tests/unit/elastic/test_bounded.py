import signal
import threading

import pytest

from elastic.bounded import run_bounded


def test_result_and_error_of_the_call_come_back() -> None:
    assert run_bounded(lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        run_bounded(lambda: 1 // 0)


@pytest.mark.timeout(60)
def test_call_that_outlasts_its_limit_is_left_behind() -> None:
    never = threading.Event()
    with pytest.raises(TimeoutError, match="no answer within 0 s"):
        run_bounded(never.wait, 0.3)
    assert not never.is_set()
    never.set()


def test_signal_is_handled_while_the_call_blocks() -> None:
    heard = threading.Event()
    before = signal.signal(signal.SIGALRM, lambda *_: heard.set())
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        run_bounded(lambda: heard.wait(30))
        assert heard.is_set()
    finally:
        signal.signal(signal.SIGALRM, before)
