# SPDX-License-Identifier: Apache-2.0
"""What a recording is set to do, and the engine that does it: a streaming query of Spark, or a thread of the recorder.

An engine reads the rings and commits files. The recorder around it holds the lock, watches the streams, counts what is
committed, and begins again after a failure: see `tensorpool.lake.recorder`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final, Protocol

import msgspec

from tensorpool.errors import TensorPoolError
from tensorpool.lake.file_policy import FilePolicy
from tensorpool.lake.offsets import Offsets

MAX_BYTES_PER_TRIGGER: Final = 4 << 30


class RecordingFailed(TensorPoolError):
    """The recording ended and could not be started again; its checkpoint is kept."""


class EngineGone(TensorPoolError):
    """The process that ran the engine is gone: starting again is up to the user."""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """How to record."""

    codec: str = "zstd"
    trigger_s: float = 1.0  # between two commits
    starting_offsets: str = "latest"  # of a recording that has no checkpoint yet
    max_file_bytes: int = 256 << 20
    max_file_seconds: float = 3600.0
    compacts: bool = True  # merge small files beside the recording
    max_age_s: float | None = None  # let go of frames that were recorded longer ago
    max_bytes: int | None = None  # let go of the oldest frames beyond so many bytes
    is_durable: bool = True
    is_warmed_up: bool = True  # Spark, before a new recording takes its first offset
    fail_on_data_loss: bool = False
    aeron_dir: str | None = None
    config: str | None = None
    overrides: Mapping[str, str] = MappingProxyType({})

    @property
    def policy(self) -> FilePolicy:
        """Raises ConfigError for a codec that there is none of."""
        return FilePolicy(self.codec, self.max_file_bytes, round(self.max_file_seconds * 1e9), self.is_durable)

    def source(self, streams: Sequence[int], starting_offsets: str) -> dict[str, str]:
        """As options of the live source."""
        options = {
            "streams": ",".join(map(str, streams)),
            "table": "ranges",
            "startingOffsets": starting_offsets,
            "maxBytesPerTrigger": str(MAX_BYTES_PER_TRIGGER),
            "failOnDataLoss": str(self.fail_on_data_loss).lower(),
            **self.overrides,
        }
        if self.aeron_dir is not None:
            options["aeronDir"] = self.aeron_dir
        if self.config is not None:
            options["config"] = self.config
        return options


class Engine(Protocol):
    """Reads rings and commits. Every method may be called while it runs, by the recorder's thread only."""

    @property
    def query(self) -> str:
        """The name under which its commits are found; known once it began."""

    @property
    def process(self) -> int | None:
        """A process that may still commit after the recorder was killed; None where there is none."""

    @property
    def needs_s(self) -> float:
        """How long a ring must last so that nothing is lost."""

    def warm_up(self) -> None:
        """Do once what is slow the first time, before a new recording takes its first offset."""

    def begin(self, start: Offsets) -> Offsets:
        """Start, or start again; where it begins. `start` is where the newest frames are.

        Raises TensorPoolError and OSError.
        """

    def failure(self) -> str | None:
        """Why it ended, "" where another stopped it; None while it runs, or has drained. Raises EngineGone."""

    def drain(self, target: Offsets) -> None:
        """Take nothing that lies beyond a target; called once."""

    def has_reached(self, target: Offsets) -> bool:
        """Whether everything up to a target is committed."""

    def halt(self) -> bool:
        """End soon; what is not committed yet is taken up when the recording goes on. False: it may not have ended."""


def reason_of(failure: str) -> str:
    """The line of an error in which Python says what it was."""
    lines = [line.strip() for line in failure.splitlines() if line.strip()]
    ours = [line for line in lines if re.match(r"tensorpool\.[\w.]+: ", line)]
    ours = ours or [line for line in lines if re.match(r"\w+(Error|Exception): ", line)]
    return ours[-1] if ours else lines[0] if lines else "no reason given"
