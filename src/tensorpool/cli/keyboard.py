# SPDX-License-Identifier: Apache-2.0
"""Keys as they are typed, for commands that fill the terminal; and what the terminal answers to questions."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator


class Keyboard:
    """Reads keys; none where standard input is not a terminal."""

    def __init__(self, is_there: bool) -> None:
        self._is_there = is_there

    def read(self, timeout_s: float) -> str:
        """What was typed, within that time."""
        if not self._is_there:
            time.sleep(timeout_s)
            return ""
        if not select.select([sys.stdin], [], [], timeout_s)[0]:
            return ""
        typed = os.read(sys.stdin.fileno(), 64)
        self._is_there = bool(typed)  # empty: the terminal is closed
        return typed.decode(errors="replace").lower()

    def ask(self, question: str, is_answer: Callable[[str], bool], timeout_s: float) -> str:
        """What the terminal sends after an escape sequence; what there is after `timeout_s`, as not all answer."""
        if not self._is_there:
            return ""
        sys.stdout.write(question)
        sys.stdout.flush()
        answer, deadline = "", time.monotonic() + timeout_s
        while not is_answer(answer) and (left_s := deadline - time.monotonic()) > 0:
            answer += self.read(left_s)
        return answer


@contextlib.contextmanager
def keyboard() -> Iterator[Keyboard]:
    """Key by key and without an echo; restores the terminal at the end."""
    if not sys.stdin.isatty():
        yield Keyboard(False)
        return
    before = termios.tcgetattr(sys.stdin)
    try:
        tty.setcbreak(sys.stdin)
        yield Keyboard(True)
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSAFLUSH, before)  # an answer that comes late is no command of the shell
