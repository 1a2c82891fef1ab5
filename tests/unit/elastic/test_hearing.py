"""The launcher's signals, sent to this very process."""

import os
import signal
from collections.abc import Iterator

import pytest

from elastic.hearing import Hearing, ToldError

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
    before = {number: signal.getsignal(number) for number in HEARD}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", HEARD[:4])
def test_what_ends_a_launcher_is_raised_where_it_stands(number: signal.Signals) -> None:
    Hearing()
    with pytest.raises(ToldError):
        os.kill(os.getpid(), number)


def test_a_second_signal_breaks_nothing_off_but_is_raised_where_torch_lost_the_first(
    capfd: pytest.CaptureFixture[str],
) -> None:
    hearing = Hearing()
    hearing.exception = lambda: KeyError("torch's own")

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
    hearing = Hearing()

    def note(name: str) -> bool:
        heard.append(name)
        return name == "SIGUSR2"

    hearing.notice = note
    os.kill(os.getpid(), signal.SIGUSR1)
    assert heard == ["SIGUSR1"]
    with pytest.raises(ToldError):
        os.kill(os.getpid(), signal.SIGUSR2)
