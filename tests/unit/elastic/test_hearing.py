"""The launcher's signals, sent to this very process."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from elastic.hearing import Hearing
from tests.support.distribution import ROOT

HEARD = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
)


@pytest.fixture(autouse=True)
def own_handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (*HEARD, signal.SIGALRM)}
    limit = signal.setitimer(signal.ITIMER_REAL, 0.0)  # the test's own
    yield
    signal.setitimer(signal.ITIMER_REAL, *limit)
    for number, handler in before.items():
        signal.signal(number, handler)


def hearing_of_torch() -> Hearing:
    hearing = Hearing()
    hearing.exception = lambda: KeyError("torch's own")
    return hearing


@pytest.mark.parametrize("number", HEARD[:4])
def test_what_ends_a_launcher_is_raised_where_it_stands(number: signal.Signals) -> None:
    hearing_of_torch()
    with pytest.raises(KeyError):
        os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", HEARD[:4])
def test_before_anything_began_it_ends_there_and_then(number: signal.Signals) -> None:
    script = (
        "import os\nfrom elastic.hearing import Hearing\nHearing()\n"
        f"try:\n    os.kill(os.getpid(), {int(number)})\n    import time; time.sleep(9)\n"
        "except BaseException:\n    print('swallowed by an import')"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False
    )
    told = (done.returncode, done.stdout, done.stderr)
    assert told == (75, "", "launch: told to end before anything began\n")


def test_what_was_swallowed_is_raised_again_until_it_has_arrived() -> None:
    hearing = hearing_of_torch()
    for _ in range(2):
        with contextlib.suppress(KeyError):  # as a library does
            os.kill(os.getpid(), signal.SIGTERM)
    for _ in range(2):
        with pytest.raises(KeyError):
            time.sleep(5)
    hearing.settle()
    time.sleep(1.2)


def test_what_is_on_its_way_is_not_raised_twice() -> None:
    hearing = hearing_of_torch()

    def torch() -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        finally:
            time.sleep(1.2)  # it says good-bye to its rendezvous

    with pytest.raises(KeyError) as caught:
        torch()
    hearing.settle()
    assert caught.value.__context__ is None


def test_a_second_signal_breaks_nothing_off_but_is_raised_where_torch_lost_the_first(
    capfd: pytest.CaptureFixture[str],
) -> None:
    hearing_of_torch()

    def _shutdown() -> str:
        os.kill(os.getpid(), signal.SIGINT)
        return "stopped"

    with pytest.raises(KeyError):
        os.kill(os.getpid(), signal.SIGTERM)
    assert _shutdown() == "stopped"
    assert capfd.readouterr().err == "launch: SIGINT: saving; once more to end at once\n"
    with pytest.raises(KeyError):
        os.kill(os.getpid(), signal.SIGTERM)


def test_what_was_ignored_stays_ignored() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    Hearing()
    os.kill(os.getpid(), signal.SIGHUP)
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


def test_a_notice_is_handed_on_by_its_name() -> None:
    heard: list[str] = []
    hearing = hearing_of_torch()

    def note(name: str) -> bool:
        heard.append(name)
        return name == "SIGUSR2"

    hearing.notice = note
    os.kill(os.getpid(), signal.SIGUSR1)
    assert heard == ["SIGUSR1"]
    with pytest.raises(KeyError):
        os.kill(os.getpid(), signal.SIGUSR2)
