# SPDX-License-Identifier: Apache-2.0
"""How commands end before they have begun: an interrupt counts, whatever became of it on its way."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator

import pytest

from tensorpool.cli.signals import StopSignals, interruptible

NUMBERS = (signal.SIGTERM, signal.SIGINT)


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """As they were."""
    before = {number: signal.getsignal(number) for number in NUMBERS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def interrupted(number: signal.Signals) -> None:
    """A command that gets a signal while it prepares."""
    with interruptible():
        os.kill(os.getpid(), number)
        pytest.fail("it goes on")


def interrupted_in_vain(number: signal.Signals) -> None:
    """A signal that arrives inside a handler that catches every exception."""
    with interruptible():
        with contextlib.suppress(BaseException):
            os.kill(os.getpid(), number)
        StopSignals()
        pytest.fail("it goes on")


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("command", [interrupted, interrupted_in_vain])
def test_a_signal_ends_what_has_not_begun(
    command: Callable[[signal.Signals], None], number: signal.Signals, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line, and exit code 0. Libraries have bare excepts: a user's one Ctrl-C must not be lost in them."""
    with pytest.raises(SystemExit) as caught:
        command(number)
    assert caught.value.code == 0
    assert capsys.readouterr().err == "stopped before it began\n"


def test_the_handlers_of_before_are_back_afterwards() -> None:
    """Unless a command has its own by then."""
    before = [signal.getsignal(number) for number in NUMBERS]
    with interruptible():
        assert [signal.getsignal(number) for number in NUMBERS] != before
    assert [signal.getsignal(number) for number in NUMBERS] == before
    with interruptible():
        StopSignals()
        own = [signal.getsignal(number) for number in NUMBERS]
    assert [signal.getsignal(number) for number in NUMBERS] == own


@pytest.mark.parametrize("number", NUMBERS)
def test_from_then_on_a_signal_is_waited_for(number: signal.Signals) -> None:
    """It interrupts nothing; each one counts."""
    with interruptible():
        stop = StopSignals()
        assert not stop.wait(0)
        for count in (1, 2):
            os.kill(os.getpid(), number)
            assert stop.wait(20)
            assert (stop.count, stop.name) == (count, number.name)
