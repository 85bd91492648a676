# SPDX-License-Identifier: Apache-2.0
"""What can be wrong with a lake. Every error names the file."""

from __future__ import annotations

from tensorpool.errors import TensorPoolError


class LakeDamaged(TensorPoolError):
    """A file of the lake is missing, torn, or not what the log says: `path`, and `problem` in words."""

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(path, problem)
        self.text = f"{path}: {problem}"
        self.path = path
        self.problem = problem


class LakeConflict(TensorPoolError):
    """A commit that would contradict what the lake holds: frames twice, or files that another job removed."""


class NotRecorded(TensorPoolError, KeyError):
    """A recording has no such stream or frame: the text says what it has, and why a frame is missing."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text


class RecordingOutdated(TensorPoolError):
    """A file was deleted after it left the lake, while a recording that was opened before still refers to it."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.text = (
            f"{path}: the file left the lake by compaction or retention and was deleted since the recording was "
            "opened; call refresh() on the recording and take the stream from it again"
        )
        self.path = path
