# SPDX-License-Identifier: Apache-2.0
"""A program that writes raw frames to a pipe, and a line about each of them to its standard output."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import subprocess
import tempfile
from collections import deque
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Final, Self

import numpy as np

from tensorpool.shm.arrays import Array
from tensorpool.sources.protocol import SourceFailed

WAIT_S: Final = 0.1  # a source that has nothing to give says so this often
STALL_S: Final = 10.0  # a frame that has begun is complete by then
PIPE_BYTES: Final = 1 << 20  # what an ordinary user may ask for


class FramePipe:
    """The program, as long as it is open. `command` gets the descriptor to which it writes frames."""

    def __init__(self, name: str, command: Callable[[int], Sequence[str]]) -> None:
        self._name = name
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed by close()
        self._frames, frames_in = os.pipe()
        self._lines, lines_in = os.pipe()
        self._text = b""
        self._found: deque[str] = deque()
        with contextlib.suppress(OSError):  # a limit of the user; it works with less
            fcntl.fcntl(self._frames, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        self._process = subprocess.Popen(
            command(frames_in),
            stdin=subprocess.DEVNULL,
            stdout=lines_in,
            stderr=self._errors,
            pass_fds=(frames_in,),
            start_new_session=True,  # Ctrl-C is ours to handle
        )
        os.close(frames_in)
        os.close(lines_in)

    def line(self) -> str | None:
        """The next line; None where there is none for a moment. Raises EOFError at the end of a program that did well.

        Raises SourceFailed with what the program said where it did not.
        """
        if not self._found:
            if not select.select([self._lines], [], [], WAIT_S)[0]:
                return None
            data = os.read(self._lines, 1 << 16)
            if not data:
                self._end()
            *lines, self._text = (self._text + data).split(b"\n")
            self._found.extend(line.decode(errors="replace") for line in lines)
        return self._found.popleft() if self._found else None

    def fill(self, out: Array, padded_row_bytes: int = 0) -> None:
        """The next frame, straight into `out`; rows that the program pads to `padded_row_bytes` lose the padding."""
        row_bytes = out.strides[0]
        if padded_row_bytes in (0, row_bytes) and out.flags.c_contiguous:
            self._read(memoryview(out).cast("B"))
            return
        padded = np.empty((out.shape[0], padded_row_bytes or row_bytes), np.uint8)
        self._read(memoryview(padded).cast("B"))
        rows = padded[:, : out.nbytes // out.shape[0]]
        np.copyto(out, np.ascontiguousarray(rows).view(out.dtype).reshape(out.shape))

    def _read(self, view: memoryview) -> None:
        done = 0
        while done < len(view):
            if not select.select([self._frames], [], [], STALL_S)[0]:
                raise SourceFailed(f"{self._name} stopped in the middle of a frame, {done} of {len(view)} bytes")
            count = os.readv(self._frames, [view[done:]])
            if not count:
                raise SourceFailed(f"{self._name} ended in the middle of a frame, {done} of {len(view)} bytes")
            done += count

    def _end(self) -> None:
        code = self._process.wait()
        if code == 0:
            raise EOFError
        self._errors.seek(0)
        said = [line.strip() for line in self._errors.read().decode(errors="replace").splitlines() if line.strip()]
        raise SourceFailed(f"{self._name} failed (exit code {code}): {'; '.join(said[-3:]) or 'it said nothing'}")

    def close(self) -> None:
        """End the program if it is still running."""
        if self._process.poll() is None:
            self._process.terminate()
            os.close(self._frames)  # a program that writes to it gets an error, and ends
            try:
                self._process.wait(2)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        else:
            os.close(self._frames)
        os.close(self._lines)
        self._errors.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
