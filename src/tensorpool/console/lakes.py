# SPDX-License-Identifier: Apache-2.0
"""The lakes that the console was given: what is recorded in them, frames of them, and recordings into them.

Everything here may block; several threads may ask at once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np

from tensorpool import pixel_formats
from tensorpool.console.drawing import Drawable, ns_since_1970
from tensorpool.console.recorder_process import RecorderProcess
from tensorpool.console.timeline import ends, lost_by_reason, timeline
from tensorpool.errors import ConfigError, LocalProtocolError, TensorPoolError
from tensorpool.logs import get_logger
from tensorpool.looks import pixels_of

if TYPE_CHECKING:
    from tensorpool.lake.recording import RecordedFrame, RecordedStream, Recording


class Where(msgspec.Struct, frozen=True, kw_only=True):
    """Which recorded frame: a seq of an epoch, or a moment, at or before which it was taken."""

    stream: str
    epoch: int | None = None
    seq: int | None = None
    step: int = 0  # 1, -1: the recorded frame after or before that seq
    at_ns: int | None = None


class RecordedLake:
    """One of them. A lake that is not there yet has no streams: a recording makes it."""

    def __init__(self, name: str, path: str) -> None:
        self.name: Final = name
        self.path: Final = path
        self._lock = threading.RLock()
        self._recording: Recording | None = None
        self._recorder: RecorderProcess | None = None

    def about(self) -> dict[str, Any]:
        """What is recorded, by stream."""
        recorder, error = self._recorder, None
        streams: list[dict[str, Any]] = []
        try:
            streams = self._streams()
        except ConfigError as missing:
            error = str(missing) if self._is_other() else None
        except TensorPoolError as failure:
            error = str(failure)
        return {
            "name": self.name,
            "path": self.path,
            "streams": streams,
            "recording": None if recorder is None else recorder.about,
            "error": error,
        }

    def timeline(self, stream: str, start_ns: int | None, end_ns: int | None) -> dict[str, Any]:
        """Raises NotRecorded."""
        with self._lock:
            recording = self._refreshed()
            stream_id = recording[stream].stream_id
            files, gaps = recording.lake.files(stream_id), recording.lake.gaps(stream_id)
        return timeline(files, gaps, start_ns, end_ns)

    def frame(self, where: Where) -> Drawable:
        """Raises NotRecorded, and LakeDamaged for a file that cannot be read."""
        from tensorpool.lake.errors import RecordingOutdated

        with self._lock:
            try:
                return _drawable(_find(self._refreshed()[where.stream], where))
            except RecordingOutdated:  # its file was compacted between two looks at the log
                return _drawable(_find(self._refreshed()[where.stream], where))

    def record(self, streams: Sequence[str], options: Sequence[str]) -> dict[str, Any]:
        """Start to record. Raises LocalProtocolError where a recording into this lake runs already."""
        with self._lock:
            if self._recorder is not None and self._recorder.is_running:
                raise LocalProtocolError(f"a recording into {self.name} is running; end it first")
            self.close()
            self._recorder = RecorderProcess(streams, self.path, options)
            return self._recorder.about

    def end_recording(self) -> dict[str, Any]:
        """Raises LocalProtocolError where there is none, TensorPoolError where it does not end."""
        recorder = self._recorder
        if recorder is None:
            raise LocalProtocolError(f"the console records nothing into {self.name}")
        return recorder.end()

    def close(self) -> None:
        """End what the console records into it."""
        recorder, self._recorder = self._recorder, None
        if recorder is not None:
            recorder.close()

    def _streams(self) -> list[dict[str, Any]]:
        with self._lock:
            recording = self._refreshed()
            lake, names = recording.lake, recording.lake.names_by_id()
            files, gaps = lake.files(), lake.gaps()
        found = []
        for stream_id in dict.fromkeys(file.stream_id for file in files):
            own = [file for file in files if file.stream_id == stream_id]
            first_ns, last_ns = ends(own) or (None, None)
            found.append(
                {
                    "stream": names.get(stream_id, str(stream_id)),
                    "stream_id": stream_id,
                    "epochs": len({file.epoch for file in own}),
                    "frames": sum(file.frames for file in own),
                    "bytes": sum(file.bytes for file in own),
                    "from": first_ns,
                    "to": last_ns,
                    "lost": lost_by_reason(gap for gap in gaps if gap.stream_id == stream_id),
                }
            )
        return found

    def _refreshed(self) -> Recording:
        """As it is now. Raises ConfigError where there is no lake yet."""
        from tensorpool.opening import open as open_recording

        if self._recording is None:
            self._recording = open_recording(self.path)
        elif self._recording.version != self._recording.lake.state.number:
            self._recording.refresh()
        return self._recording

    def _is_other(self) -> bool:
        """Whether there is something at its place that is no lake."""
        path = Path(self.path)
        return path.exists() and (not path.is_dir() or any(path.iterdir()))


class Lakes:
    """By name: that of the folder, with a number where two have the same."""

    def __init__(self, paths: Sequence[str]) -> None:
        self._lakes: dict[str, RecordedLake] = {}
        for path in paths:
            base = Path(path).name or "lake"
            name, number = base, 2
            while name in self._lakes:
                name, number = f"{base}-{number}", number + 1
            self._lakes[name] = RecordedLake(name, path)

    def __getitem__(self, name: str) -> RecordedLake:
        """Raises KeyError."""
        return self._lakes[name]

    def about(self) -> list[dict[str, Any]]:
        return [lake.about() for lake in self._lakes.values()]

    def close(self) -> None:
        """End the recordings that pages started, all at once; one that does not end is left to itself."""
        enders = [threading.Thread(target=_close, args=(lake,)) for lake in self._lakes.values()]
        for ender in enders:
            ender.start()
        for ender in enders:
            ender.join()


def _close(lake: RecordedLake) -> None:
    try:
        lake.close()
    except TensorPoolError as error:
        get_logger("console").warning("recorder_left", lake=lake.path, error=str(error))


def _find(stream: RecordedStream, where: Where) -> RecordedFrame:
    if where.at_ns is not None:
        return stream.at(np.datetime64(where.at_ns // 1000, "us"))
    epoch = stream.epochs[-1] if where.epoch is None and stream.epochs else where.epoch or 0
    part = stream.epoch(epoch)
    if where.seq is None:
        return part[int(part.seqs[-1])]
    return _beside(stream, epoch, where.seq, where.step) if where.step else part[where.seq]


def _beside(stream: RecordedStream, epoch: int, seq: int, step: int) -> RecordedFrame:
    """The next recorded frame in one direction, also of the next epoch; at the end the last one there is."""
    epochs = list(stream.epochs)
    pick: Callable[[Any], int] = min if step > 0 else max
    seqs = stream.epoch(epoch).seqs
    further = seqs[seqs > seq] if step > 0 else seqs[seqs < seq]
    others = [other for other in epochs if (other > epoch if step > 0 else other < epoch)]
    if not len(further) and others:
        epoch = pick(others)
        further = stream.epoch(epoch).seqs
    if not len(further):
        further = seqs[-1:] if step > 0 else seqs[:1]
    return stream.epoch(epoch)[int(pick(further))]


def _drawable(frame: RecordedFrame) -> Drawable:
    metadata = frame.metadata
    return Drawable(
        stream_id=frame.stream_id,
        epoch=frame.epoch,
        seq=frame.seq,
        time_ns=ns_since_1970(frame.time),
        timestamp_ns=None,
        latency_ms=None,
        pixel_format=pixel_formats.stated(None if metadata is None else metadata.attributes),
        array=pixels_of(frame),
    )
