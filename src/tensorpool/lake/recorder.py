# SPDX-License-Identifier: Apache-2.0
"""Recording live streams to a lake: what is the same whichever engine reads the rings.

    Recorder ── engine: Spark's query, or a thread ──► files, one entry of the log per commit
        └────── leases of its own: how far the producers are, how long the rings last; metadata and QoS besides

A recording has a name, and its checkpoint in the lake: started again under the same name it goes on where its last
commit ended, whatever ended it. What the rings lost meanwhile is a gap in the lake.

It is the service `service:recorder:<name>`: paused it takes no frames, and resumed it goes on where its last commit
ended, so that a pause costs what the rings forgot in it. Service Control §4.
"""

from __future__ import annotations

import abc
import errno
import os
import re
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import msgspec

from tensorpool.client import Client, connect
from tensorpool.client.ring_watch import RingWatch
from tensorpool.control import Service, ServiceAgent, State, add_common_commands
from tensorpool.errors import ConfigError, TensorPoolError
from tensorpool.lake import Lake, layout
from tensorpool.lake.live_options import LiveOptions
from tensorpool.lake.lock import RecordingLock
from tensorpool.lake.offsets import Offsets, Position
from tensorpool.lake.recording_engine import Engine, EngineGone, RecordingFailed, Settings, reason_of
from tensorpool.lake.side_tables import SideTables
from tensorpool.lake.totals import Counted, StreamTotals
from tensorpool.lake.upkeep import Upkeep, UpkeepPlan
from tensorpool.logs import get_logger

ATTACH_TIMEOUT_S: Final = 30.0
TURNS_PER_POLL: Final = 100  # of its service
RESTARTS: Final = 5  # of an engine that fails, without a commit in between
FULL: Final = os.strerror(errno.ENOSPC)
MIN_FREE_BYTES: Final = 1 << 20  # below, it is not tried
RETRY_S, MAX_RETRY_S = 1.0, 30.0  # between two tries, the first and the last
FINAL: Final = (
    "LakeConflict",
    "LakeDamaged",
    "DataLoss",
    "ConfigError",
    "RemoteProtocolError",
)  # no use in trying again


class RingDepth(msgspec.Struct, frozen=True):
    """How long a ring remembers, and how long the recorder needs it to."""

    stream_id: int
    slots: int
    rate_hz: float
    holds_s: float | None  # None: nothing is published, so nothing is forgotten
    needs_s: float

    @property
    def is_enough(self) -> bool:
        return self.holds_s is None or self.holds_s >= self.needs_s


class Totals(msgspec.Struct, frozen=True):
    """What this run of a recorder has committed."""

    frames: int
    payload_bytes: int
    file_bytes: int
    files: int
    lost: int
    batches: int
    seconds: float
    lag_frames: int  # published, but not committed yet
    streams: tuple[StreamTotals, ...]
    metadata_rows: int = 0
    qos_rows: int = 0
    restarts: int = 0

    @property
    def adds_up(self) -> bool:
        return all(stream.adds_up for stream in self.streams)


class RecorderBase(abc.ABC):
    """Records streams until it is stopped; a subclass says with which engine."""

    def __init__(
        self,
        streams: Sequence[int | str],
        lake: Path | str,
        *,
        name: str | None = None,
        settings: Settings | None = None,
    ) -> None:
        if not streams:
            raise ConfigError("streams", [], "at least one stream, by id or by name")
        self.settings: Final = settings or Settings()
        self.name: Final = default_name(streams) if name is None else name
        if not layout.is_plain_name(self.name):
            raise ConfigError("name", self.name, "letters, digits, '.', '_' and '-', at most 100")
        _ = self.settings.policy
        self._log = get_logger("recorder", recording=self.name)
        self._lake = Lake.create(lake)
        self._client: Client | None = None
        self._watches: list[RingWatch] = []
        self._names: dict[int, str] = {}  # of streams that were asked for by name
        self._side_tables: SideTables | None = None
        self._engine: Engine | None = None
        self._upkeep: Upkeep | None = None
        self._is_going = False
        self._start = Offsets()
        self._started_s = 0.0
        self._ended_s = 0.0
        self._first_commit = self._lake.state.number + 1
        self._read_commits = self._first_commit - 1
        self._counted = Counted()
        self._restarts = 0
        self._restarts_in_row = 0
        self._restarted_at = -1
        self._side_tables_rows = dict.fromkeys(layout.SIDE_TABLES, 0)
        self._full_at: int | None = None  # the last batch that there was space for
        self._retry_s = 0.0
        self._retry_after_s = RETRY_S
        self._service: Service | None = None
        self._agent: ServiceAgent | None = None
        self._is_drained = False
        self._lock = RecordingLock(self._lake.path / layout.CHECKPOINTS / f"{self.name}.lock", self.name)
        try:
            self._attach(streams)
        except BaseException:
            self.close()
            raise

    @property
    def checkpoint(self) -> Path:
        return self._lake.path / layout.CHECKPOINTS / self.name

    @property
    def lake(self) -> Lake:
        return self._lake

    @property
    def stream_ids(self) -> list[int]:
        return [watch.stream_id for watch in self._watches]

    @property
    def is_paused(self) -> bool:
        """Whether a command paused it."""
        return self._service is not None and self._service.state is State.PAUSED

    @property
    def is_drained(self) -> bool:
        """Whether a command ordered it to end: its owner then calls `stop`."""
        return self._is_drained

    @property
    def is_full(self) -> bool:
        """Whether it waits for space in the lake."""
        return self._full_at is not None

    @property
    def is_resumed(self) -> bool:
        """Whether there is a checkpoint to go on from."""
        return layout.engine_of(self.checkpoint) is not None

    @abc.abstractmethod
    def _new_engine(self) -> Engine:
        """The engine of this recording, not begun."""

    def start(self) -> None:
        """Warm up, take the first offset, and record from there. A resumed recording goes on without delay."""
        is_new = not self.is_resumed
        self._engine = self._new_engine()
        if self.settings.is_warmed_up and is_new:
            self._engine.warm_up()
        self._lock.tell(self._engine.process)
        self._side_tables = SideTables(self._lake, self._live_options(), self._names)
        self._start = self._positions()
        self._start = self._begin()
        self._started_s = time.monotonic()
        self._upkeep = self._new_upkeep()
        self._serve()

    def pause(self) -> None:
        """Take no frames: what is not committed yet is taken up when the recording goes on."""
        self._halt()

    def resume(self) -> None:
        """Go on where the last commit ended. What the rings forgot meanwhile is a gap."""
        if not self._is_going:
            self._begin()

    def depths(self, seconds: float = 0.5) -> list[RingDepth]:
        """How long every ring remembers, from what is published within some seconds."""
        before = self._positions().positions
        began_s = time.monotonic()
        time.sleep(seconds)
        after = self._positions().positions
        elapsed_s = time.monotonic() - began_s
        assert self._engine is not None
        needs_s = self._engine.needs_s
        found = []
        for watch in self._watches:
            stream, slots = watch.stream_id, watch.epochs[-1].mapped.reader.nslots
            is_same = before[stream].epoch == after[stream].epoch
            count = after[stream].seq - (before[stream].seq if is_same else 0)
            rate_hz = count / elapsed_s
            found.append(RingDepth(stream, slots, rate_hz, slots / rate_hz if count else None, needs_s))
        return found

    def poll(self) -> None:
        """To be called now and then: writes metadata and QoS, answers commands, restarts the engine.

        A full disk is waited for. Raises RecordingFailed when the query fails again and again.
        """
        if self._side_tables is not None:
            try:
                self._side_tables.write()
            except OSError as error:
                self._note_full(error)
        self._turn_service()
        failure = self._failure()
        if failure is None:
            self._note_space()
            return
        if failure == "":
            raise RecordingFailed(f"recording {self.name}: its query was stopped from outside")
        if FULL in failure:
            self._note_full(failure)
            if time.monotonic() < self._retry_s or shutil.disk_usage(self._lake.path).free < MIN_FREE_BYTES:
                return
            self._retry_s = time.monotonic() + self._retry_after_s
            self._retry_after_s = min(2 * self._retry_after_s, MAX_RETRY_S)
        else:
            self._restarts_in_row = self._restarts_in_row + 1 if self._committed_batch() == self._restarted_at else 1
            self._restarted_at = self._committed_batch()
            if self._restarts_in_row > RESTARTS or any(name in failure for name in FINAL):
                raise RecordingFailed(f"recording {self.name} failed: {reason_of(failure)}")
            self._log.warning("query_restarted", times=self._restarts_in_row, error=reason_of(failure))
        self._restarts += 1
        try:
            self._begin()
        except (TensorPoolError, OSError) as error:  # what failed stays: the next poll looks again
            self._log.debug("query_not_restarted", error=reason_of(str(error)))

    def wait(self, seconds: float) -> None:
        """Record for so long, or until a command drains it."""
        until_s = time.monotonic() + seconds
        while (left_s := until_s - time.monotonic()) > 0 and not self._is_drained:
            self.poll()
            time.sleep(min(0.2, left_s))

    def stop(self, timeout_s: float = 120.0) -> Totals:
        """Record everything that was published up to this call, commit it, and end. A paused one ends at once."""
        if self._service is not None:
            self._service.state = State.DRAINING
        target = self._positions()
        until_s = time.monotonic() + timeout_s
        if self._engine is not None and self._is_going:
            self._engine.drain(target)
        while self._is_behind(target) and time.monotonic() < until_s:
            self.poll()
            time.sleep(0.05)
        lag, is_early = self._lag(), self._is_behind(target)
        self.close()
        if is_early:
            self._log.warning(
                "stopped_early",
                waited_s=timeout_s,
                frames_left=lag,
                advice="start the recording again: it goes on where its last commit ended, as far as the rings go back",
            )
        if self._full_at is not None and is_early:
            raise RecordingFailed(
                f"recording {self.name}: no space is left for {self._lake.path}, {lag} frames are not recorded; "
                "make space and start it again: it goes on where its last commit ended"
            )
        return self.totals()

    def close(self) -> None:
        """End at once; what is not committed yet is staged, and taken up when the recording goes on."""
        self._ended_s = self._ended_s or time.monotonic()
        if self._agent is not None:
            self._agent.on_close()
            self._agent = None
        if self._upkeep is not None:
            self._upkeep.close()
            self._upkeep = None
        if self._is_going and self._halt():
            self._lock.tell(None)
        try:
            if self._side_tables is not None:
                tables, self._side_tables = self._side_tables, None
                try:
                    tables.close()
                except OSError as error:
                    self._note_full(error)
                self._side_tables_rows = dict(tables.rows)
        finally:
            if self._client is not None:
                self._client.close()
                self._client = None
            self._lock.release()

    def totals(self) -> Totals:
        """What this run has committed so far."""
        newest = self._lake.state.number
        while self._read_commits < newest:
            self._read_commits += 1
            commit = self._lake.commit(self._read_commits)
            if self._engine is not None and commit.kind == "record" and commit.query == self._engine.query:
                self._counted.add(commit)
        counted = self._counted
        rows = self._side_tables_rows if self._side_tables is None else self._side_tables.rows
        return Totals(
            frames=counted.frames,
            payload_bytes=counted.payload_bytes,
            file_bytes=counted.file_bytes,
            files=counted.files,
            lost=counted.lost,
            batches=counted.batches,
            seconds=round((self._ended_s or time.monotonic()) - (self._started_s or time.monotonic()), 3),
            lag_frames=self._lag(),
            streams=counted.streams(),
            metadata_rows=rows["metadata"],
            qos_rows=rows["qos"],
            restarts=self._restarts,
        )

    # --- the service

    def _serve(self) -> None:
        assert self._client is not None
        settings = self._client.config.control
        if not settings.enabled:
            return
        self._service = Service("recorder", self.name, config=settings)
        add_common_commands(self._service, status=self._status, drain=self._drain, pause=self.pause, resume=self.resume)
        self._agent = ServiceAgent(self._service, self._client.aeron_dir)
        self._agent.on_start()

    def _turn_service(self) -> None:
        """Polls are rare; a busy stream may have much to read between two of them."""
        for _ in range(TURNS_PER_POLL):
            if self._agent is None or not self._agent.do_work():
                break

    def _status(self) -> dict[str, object]:
        totals = self.totals()
        known = {name: getattr(totals, name) for name in ("frames", "payload_bytes", "files", "lost", "lag_frames")}
        return {"streams": self.stream_ids, "lake": self._lake.uri, **known, "restarts": totals.restarts}

    def _drain(self) -> None:
        self._is_drained = True

    # --- the engine, and what runs beside it

    def _new_upkeep(self) -> Upkeep | None:
        settings = self.settings
        if not settings.compacts and settings.max_age_s is None and settings.max_bytes is None:
            return None
        plan = UpkeepPlan(
            policy=settings.policy,
            merges=settings.compacts,
            max_age_s=settings.max_age_s,
            max_bytes=settings.max_bytes,
        )
        return Upkeep(self._lake, plan)

    def _begin(self) -> Offsets:
        assert self._engine is not None
        begun = self._engine.begin(self._start)
        self._is_going = True
        return begun

    def _halt(self) -> bool:
        """False: whether it has ended is not known."""
        self._is_going = False
        return self._engine is not None and self._engine.halt()

    def _is_behind(self, target: Offsets) -> bool:
        return self._engine is not None and self._is_going and not self._engine.has_reached(target)

    def _failure(self) -> str | None:
        """Why the engine ended, "" where another stopped it; None while it runs."""
        try:
            return self._engine.failure() if self._engine is not None and self._is_going else None
        except EngineGone as gone:
            self._is_going = False
            raise RecordingFailed(f"recording {self.name}: {gone}") from None

    def _note_full(self, failure: OSError | str) -> None:
        """Say once that the disk is full. Raises what is anything else."""
        if isinstance(failure, OSError) and FULL not in str(failure):
            raise failure
        if self._full_at is None:
            free = shutil.disk_usage(self._lake.path).free
            self._log.error("lake_full", path=str(self._lake.path), free_bytes=free, advice="make space: it goes on")
            self._full_at = self._committed_batch()

    def _note_space(self) -> None:
        if self._full_at is not None and self._committed_batch() > self._full_at:
            self._full_at, self._retry_after_s = None, RETRY_S
            self._log.warning("lake_goes_on", path=str(self._lake.path))

    def _committed_batch(self) -> int:
        return self._lake.state.last_batch("" if self._engine is None else self._engine.query)

    # --- what the recorder sees itself

    def _attach(self, streams: Sequence[int | str]) -> None:
        settings = self.settings
        self._client = connect(settings.aeron_dir, config=settings.config, overrides=settings.overrides)
        for stream in streams:
            watch = self._client.watch(stream, timeout=ATTACH_TIMEOUT_S)
            if watch.stream_id in self.stream_ids:
                raise ConfigError("streams", list(streams), f"stream {watch.stream_id} only once")
            self._watches.append(watch)
            if isinstance(stream, str):
                self._names[watch.stream_id] = stream

    def _positions(self) -> Offsets:
        positions = {}
        for watch in self._watches:
            newest = max(watch.epochs, key=lambda epoch: epoch.epoch)
            positions[watch.stream_id] = Position(newest.epoch, newest.end)
        return Offsets(positions)

    def _lag(self) -> int:
        """Frames that are published and not committed yet, in the current epochs."""
        if self._client is None:
            return 0
        lag = 0
        state = self._lake.state
        for stream, at in self._positions().positions.items():
            start = self._start.positions.get(stream)
            begin = start.seq if start is not None and start.epoch == at.epoch else 0
            lag += max(0, at.seq - max(begin, state.end(stream, at.epoch)))
        return lag

    def _live_options(self) -> LiveOptions:
        settings = self.settings
        return LiveOptions(
            streams=tuple(self.stream_ids),
            aeron_dir=settings.aeron_dir,
            config=settings.config,
            overrides=dict(settings.overrides),
        )

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.stop()
        else:
            self.close()


def default_name(streams: Sequence[int | str]) -> str:
    """The name of a recording that was given none: those of its streams.

    >>> default_name(["camera/front", 10001])
    'camera-front_10001'
    """
    return "_".join(re.sub(r"[^A-Za-z0-9.-]+", "-", str(stream)).strip("-.") for stream in streams)[:100]
