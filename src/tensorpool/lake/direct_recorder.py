# SPDX-License-Identifier: Apache-2.0
"""Recording without Spark and without Java: a thread of this process follows the rings.

For short rings, high rates and machines without a JVM. Files and commits are those of Spark's recorder.
"""

from __future__ import annotations

import threading
import uuid
from pathlib import Path
from typing import Final

import msgspec

from tensorpool.errors import ConfigError
from tensorpool.lake import layout
from tensorpool.lake.lake import Lake
from tensorpool.lake.live_options import source_options
from tensorpool.lake.log_store import write_once
from tensorpool.lake.offsets import Offsets
from tensorpool.lake.recorder import RecorderBase
from tensorpool.lake.recording_engine import Engine
from tensorpool.lake.ring_follower import Plan, RingFollower

NEEDS_S: Final = 0.5  # that the thread may be held up, where processors and disk are not at their limit
HALT_S: Final = 20.0  # that it may take to commit what it has


class DirectRecorder(RecorderBase):
    """Records streams until it is stopped.

    >>> with DirectRecorder(["camera/front"], "/data/lake") as recorder:       # doctest: +SKIP
    ...     recorder.wait(60)
    >>> print(recorder.totals().frames)                                        # doctest: +SKIP
    """

    def _new_engine(self) -> Engine:
        if layout.engine_of(self.checkpoint) == "spark":
            raise ConfigError("--direct", self.name, "a recording that was begun with it, or another --name")
        live = source_options(self.settings.source(self.stream_ids, self.settings.starting_offsets))
        plan = Plan(
            recording=self.name,
            query=_query_of(self.checkpoint),
            options=live,
            policy=self.settings.policy,
            commit_s=min(self.settings.trigger_s, self.settings.max_file_seconds),
        )
        return FollowerThread(self.lake, plan)


class _Mark(msgspec.Struct, frozen=True):
    """What direct.json says: the name under which the recording commits."""

    id: str


def _query_of(checkpoint: Path) -> str:
    """Chosen when the recording is begun, and kept. Raises ConfigError where it cannot be read."""
    path = checkpoint / layout.DIRECT
    checkpoint.mkdir(parents=True, exist_ok=True)
    write_once(path, msgspec.json.encode(_Mark(uuid.uuid4().hex)))
    try:
        return msgspec.json.decode(path.read_bytes(), type=_Mark).id
    except msgspec.DecodeError:
        raise ConfigError("checkpoint", str(path), "what a direct recording wrote there") from None


class FollowerThread:
    """The engine: a follower on a thread."""

    process: Final = None  # of its own
    needs_s: Final = NEEDS_S

    def __init__(self, lake: Lake, plan: Plan) -> None:
        self._lake = lake
        self._plan = plan
        self._thread: threading.Thread | None = None
        self._failure: str | None = None
        self._target: Offsets | None = None
        self.query: Final = plan.query

    def warm_up(self) -> None:
        """Nothing is slow the first time."""

    def begin(self, start: Offsets) -> Offsets:
        follower = RingFollower(self._lake, self._plan)
        try:
            begun = follower.begin()
        except BaseException:
            follower.close()
            raise
        self._failure = None
        self._thread = threading.Thread(target=self._follow, args=(follower,), name="tensorpool-follower", daemon=True)
        self._thread.start()
        return begun

    def failure(self) -> str | None:
        return None if self._is_running else self._failure

    def drain(self, target: Offsets) -> None:
        self._target = target

    def has_reached(self, target: Offsets) -> bool:
        return self._thread is not None and not self._is_running and self._failure is None

    def halt(self) -> bool:
        thread, target = self._thread, self._target
        if thread is None:
            return True
        self._target = Offsets()
        thread.join(HALT_S)
        if thread.is_alive():
            return False
        self._thread, self._target = None, target
        return True

    @property
    def _is_running(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _follow(self, follower: RingFollower) -> None:
        try:
            try:
                follower.run(lambda: self._target)
            finally:
                follower.close()
        except Exception as error:  # the recorder decides what comes of it
            kind = type(error)
            self._failure = f"{kind.__module__}.{kind.__qualname__}: {error}"
