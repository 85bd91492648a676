# SPDX-License-Identifier: Apache-2.0
"""What can be wrong with a lake. Every error names the file."""

from __future__ import annotations

from tensorpool.errors import TensorPoolError


class LakeDamaged(TensorPoolError):
    """A file of the lake is missing, torn, or not what the manifest says: `path`, and `problem` in words."""

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(path, problem)
        self.text = f"{path}: {problem}"
        self.path = path
        self.problem = problem


class LakeConflict(TensorPoolError):
    """A commit that would contradict what the lake holds: frames twice, or files that another job removed."""
