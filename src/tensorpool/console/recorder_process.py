# SPDX-License-Identifier: Apache-2.0
"""A recording that a page started: `tensorpool record --direct` as a child of the console.

Its output goes to a file without a name, not to a pipe: a console that is killed does not break its recording, which is
then ended as any other, by `tensorpool event send service:recorder:NAME drain`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any, Final

from tensorpool.errors import TensorPoolError

END_S: Final = 30.0  # until what was published is on disk
_TAIL: Final = 4096


class RecorderProcess:
    """One run. `streams` are as the user names them; `options` say which driver."""

    def __init__(self, streams: Sequence[str], lake: str, options: Sequence[str]) -> None:
        self._streams = list(streams)
        self._since_ns = time.time_ns()
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the process
        command = [sys.executable, "-m", "tensorpool", "record", "--to", lake, "--direct", *options, "--", *streams]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C in the console's terminal is the console's: it ends this one in order
        )

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    @property
    def about(self) -> dict[str, Any]:
        """As a page shows it."""
        code = self._process.poll()
        return {
            "streams": self._streams,
            "since": self._since_ns,
            "pid": self._process.pid,
            "is_running": code is None,
            "exit_code": code,
            "text": self._last_line(),
        }

    def end(self) -> dict[str, Any]:
        """Have it record what was published until now, and wait. Raises TensorPoolError where that takes too long."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            raise TensorPoolError(
                f"the recorder, pid {self._process.pid}, has not ended after {END_S:.0f} s: it still writes; ask again"
            ) from None
        return self.about

    def close(self) -> None:
        """End it, and forget what it printed. Raises like `end`."""
        try:
            self.end()
        finally:
            self._output.close()

    def _last_line(self) -> str:
        size = os.fstat(self._output.fileno()).st_size
        tail = os.pread(self._output.fileno(), _TAIL, max(0, size - _TAIL)).decode(errors="replace")
        lines = [line.strip() for line in tail.replace("\r", "\n").splitlines() if line.strip()]
        return lines[-1] if lines else ""
