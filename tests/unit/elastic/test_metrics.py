"""Where the time goes, and the progress line."""

import io

import pytest

from elastic.metrics import Console, Ledger, Status


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Gone(io.StringIO):
    """A stream whose reader is gone."""

    def write(self, text: str) -> int:
        raise BrokenPipeError(text)


def status(saved: int | None = None, epochs: int | None = 10) -> Status:
    return Status(
        epoch=0, epochs=epochs, step=12, loss=0.25, samples=48, world_size=2, saved_step=saved
    )


def test_seconds_are_booked_to_what_they_were_spent_on() -> None:
    clock = Clock()
    ledger = Ledger(clock=clock)
    ledger.start()
    clock.now += 2
    assert ledger.step_done() == 2
    clock.now += 1  # between the step and the save: still the steps'
    with ledger.spend("checkpoint"):
        clock.now += 5
    with ledger.spend("eval"):
        clock.now += 7
    clock.now += 0.5
    assert ledger.step_done() == 0.5
    assert ledger.totals() == {"steps": 3.5, "checkpoint": 5.0, "eval": 7.0}


def test_time_is_booked_where_the_save_raises() -> None:
    clock = Clock()
    ledger = Ledger(clock=clock)
    ledger.start()

    def save() -> None:
        with ledger.spend("checkpoint"):
            clock.now += 3
            raise OSError("full")

    with pytest.raises(OSError, match="full"):
        save()
    clock.now += 1
    ledger.step_done()
    assert ledger.totals() == {"steps": 1.0, "checkpoint": 3.0, "eval": 0.0}


def test_plain_lines_come_now_and_then_where_there_is_no_terminal() -> None:
    clock, stream = Clock(), io.StringIO()
    console = Console(stream, clock=clock)
    for _ in range(25):
        clock.now += 1
        console.update(64, status)
    console.close()
    line = "epoch 1/10  step 12  loss 0.2500  64 samples/s  W=2  not saved yet\n"
    assert stream.getvalue() == line * 2


def test_terminal_is_redrawn_in_place_and_left_on_a_new_line() -> None:
    clock, stream = Clock(), Terminal()
    console = Console(stream, clock=clock)
    clock.now += 0.5
    console.update(1000, lambda: status(saved=8, epochs=None))
    console.say("saved")
    clock.now += 0.5
    console.update(1000, status)
    console.close()
    assert stream.getvalue() == (
        "\r\x1b[Kepoch 1  step 12  loss 0.2500  2,000 samples/s  W=2  saved at 8"
        "\r\x1b[Ksaved\n"
        "\r\x1b[Kepoch 1/10  step 12  loss 0.2500  2,000 samples/s  W=2  not saved yet\n"
    )


def test_stream_that_is_gone_does_not_end_the_training() -> None:
    clock = Clock()
    console = Console(Gone(), clock=clock)
    console.say("hello")
    clock.now += 60
    console.update(1, status)
    console.close()
