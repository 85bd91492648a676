# SPDX-License-Identifier: Apache-2.0
"""What wakes the client's conductor."""

from __future__ import annotations

from tensorpool.client.conductor import Kick
from tests.support.processes import run_script


def test_a_kick_is_kept_until_it_is_waited_for() -> None:
    """Several are one, and clearing takes it away."""
    kick = Kick()
    assert not kick.wait(0)
    kick.set()
    kick.set()
    assert kick.wait(0)
    assert not kick.wait(0)
    kick.set()
    kick.clear()
    assert not kick.wait(0.001)


def test_a_kick_survives_an_exception_in_the_middle_of_it() -> None:
    """As a signal handler raises it: whoever waits is not locked out for good."""
    code, output = run_script(
        """
import signal, threading, time
from tensorpool.client.conductor import Kick

kick, turns, is_over = Kick(), 0, False

def turn():
    global turns
    while not is_over:
        turns += kick.wait(0.001)

def on_alarm(*_):
    raise KeyboardInterrupt

signal.signal(signal.SIGALRM, on_alarm)
thread = threading.Thread(target=turn, daemon=True)
thread.start()
end_s = time.monotonic() + 1.0
while time.monotonic() < end_s:
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.0002)
        while True:
            kick.set()
    except KeyboardInterrupt:
        pass
seen = turns
kick.set()
is_over = True
thread.join(10)
print(thread.is_alive(), seen > 0)
"""
    )
    assert (code, output.split()) == (0, ["False", "True"])
