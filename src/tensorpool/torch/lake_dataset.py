# SPDX-License-Identifier: Apache-2.0
"""Frames of a lake by index: a map-style dataset.

Which frames it has is decided when it is made and does not change: an index is the same frame in every process, and
after a restart, while others record, compact and trim. A process opens the lake at its first sample, and a forked one
opens it anew, so that workers share neither files nor locks.
"""

from __future__ import annotations

import operator
import os
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np

from tensorpool import opening
from tensorpool.client import arguments
from tensorpool.errors import ConfigError
from tensorpool.lake.errors import NotRecorded, RecordingOutdated
from tensorpool.torch.bases import Dataset
from tensorpool.torch.sample import Sample, sample_of

if TYPE_CHECKING:
    from tensorpool.lake.open_files import Rows
    from tensorpool.lake.recording import RecordedFrame, RecordedStream, Recording


class _Span(msgspec.Struct, frozen=True):
    """The frames of an epoch that belong to the dataset."""

    stream_id: int
    epoch: int
    first_seq: int
    last_seq: int
    frames: int


class _State(msgspec.Struct, frozen=True):
    """What `state_dict` gives, as plain dicts, lists and numbers."""

    spans: tuple[_Span, ...]
    window: int | None
    position: int


class LakeDataset(Dataset):
    """Frames of one or several streams of a lake, by index: `len(frames)`, `frames[7]`.

    >>> frames = LakeDataset("/data/lake", "camera/front")                                   # doctest: +SKIP
    >>> loader = torch.utils.data.DataLoader(frames, batch_size=8, shuffle=True, num_workers=2)    # doctest: +SKIP

    A sample is the frame's array, or what `transform` makes of its Sample. With a `window` it is so many frames in a
    row, stacked, or what `transform` makes of the list of them; a window spans neither a gap nor two epochs. Without
    `streams` it has all of the lake, one after the other. Raises ConfigError where there is no lake, NotRecorded for a
    stream that it does not have, MissingExtra where the extra `lake` is not installed.
    """

    def __init__(
        self,
        lake: Path | str,
        streams: str | int | Sequence[str | int] | None = None,
        *,
        transform: Callable[[Any], Any] | None = None,
        window: int | None = None,
    ) -> None:
        if window is not None:
            arguments.whole_number("window", window, 2**31 - 1, 1)
        arguments.callback("transform", transform)
        self._lake: Final = lake
        self._transform: Final = transform
        self._window: Final = window
        self._position = 0
        recording = opening.open(lake)
        chosen = recording if streams is None else [streams] if isinstance(streams, str | int) else streams
        self._spans = _spans(recording[stream] for stream in chosen)
        self._opened: tuple[int, _OpenedLake] | None = None
        self._keep(_OpenedLake(recording, self._spans, window))

    def __len__(self) -> int:
        """How many samples there are: frames, or windows."""
        return self._open().samples

    def __getitem__(self, index: int) -> Any:
        """Raises IndexError, and NotRecorded where the frame has left the lake since the dataset was made."""
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """A batch, which a DataLoader asks for at once: each row group is read once."""
        numbers = [self._number(index) for index in indices]
        try:
            return self._samples(numbers)
        except RecordingOutdated:  # a compaction wrote its frames to another file
            self._opened = None
            return self._samples(numbers)

    def __iter__(self) -> Iterator[Any]:
        """The samples in order, from where a loop was that `load_state_dict` resumes."""
        while self._position < len(self):
            self._position += 1
            yield self[self._position - 1]
        self._position = 0

    def state_dict(self) -> dict[str, Any]:
        """Which frames it has, and how many of them a loop over it has taken.

        A DataLoader takes samples in the order of its sampler, and a StatefulDataLoader keeps that position itself.
        """
        found: dict[str, Any] = msgspec.to_builtins(_State(self._spans, self._window, self._position))
        return found

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Have the frames of that state, and go on there. Raises ConfigError, and NotRecorded where some are gone."""
        try:
            known = msgspec.convert(state, _State)
        except msgspec.ValidationError as error:
            raise ConfigError("state", type(state).__name__, f"a state_dict of a LakeDataset ({error})") from None
        streams = _streams(self._spans)
        if known.window != self._window or _streams(known.spans) != streams:
            expected = f"the state of a dataset with window {self._window} and streams {streams}"
            raise ConfigError("state", f"window {known.window}, streams {_streams(known.spans)}", expected)
        if known.spans != self._spans:
            self._keep(_OpenedLake(opening.open(self._lake), known.spans, self._window))
            self._spans = known.spans
        self._position = known.position

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_opened": None}

    def __repr__(self) -> str:
        window = "" if self._window is None else f"windows of {self._window}, "
        return f"<LakeDataset {self._lake}: {window}{len(self)} samples of streams {_streams(self._spans)}>"

    def _number(self, index: int) -> int:
        number = operator.index(index)
        if not -len(self) <= number < len(self):
            raise IndexError(f"sample {number} of {len(self)}")
        return number % len(self)

    def _samples(self, numbers: Sequence[int]) -> list[Any]:
        opened = self._open()
        found: list[Any] = [None] * len(numbers)
        for at in sorted(range(len(numbers)), key=numbers.__getitem__):
            frames = [_sample(frame) for frame in opened.frames(numbers[at])]
            if self._transform is not None:
                found[at] = self._transform(frames[0] if self._window is None else frames)
            else:
                found[at] = frames[0].array if self._window is None else np.stack([frame.array for frame in frames])
        return found

    def _open(self) -> _OpenedLake:
        if self._opened is None or self._opened[0] != os.getpid():
            self._keep(_OpenedLake(opening.open(self._lake), self._spans, self._window))
        assert self._opened is not None
        return self._opened[1]

    def _keep(self, opened: _OpenedLake) -> None:
        self._opened = os.getpid(), opened


class _OpenedLake:
    """The frames of a dataset in the lake as it is now. Raises NotRecorded where some have left it."""

    def __init__(self, recording: Recording, spans: Sequence[_Span], window: int | None) -> None:
        self._window: Final = window or 1
        self._parts: Final = [_part(recording, span) for span in spans]
        self._starts: Final = [_starts(part.seqs, self._window) for part in self._parts]
        self._ends: Final = list(accumulate(map(len, self._starts)))
        self.samples: Final = self._ends[-1] if self._ends else 0

    def frames(self, number: int) -> list[RecordedFrame]:
        at = bisect_right(self._ends, number)
        seq = int(self._starts[at][number - self._ends[at]])  # counted from the end of the part
        return [self._parts[at][seq + step] for step in range(self._window)]


def _starts(seqs: Rows, window: int) -> Rows:
    """The seqs with which windows begin that have no gap in them."""
    count = len(seqs) - window + 1
    if count <= 0:
        return seqs[:0]
    firsts: Rows = seqs[:count]
    whole: Rows = firsts[seqs[window - 1 :] - firsts == window - 1]
    return whole


def _spans(streams: Iterator[RecordedStream]) -> tuple[_Span, ...]:
    found = []
    for stream in streams:
        for epoch in stream.epochs:
            seqs = stream.epoch(epoch).seqs
            found.append(_Span(stream.stream_id, epoch, int(seqs[0]), int(seqs[-1]), len(seqs)))
    return tuple(found)


def _part(recording: Recording, span: _Span) -> RecordedStream:
    try:
        part = recording[span.stream_id].epoch(span.epoch)[span.first_seq : span.last_seq + 1]
        frames = len(part)
    except NotRecorded:
        frames = 0
    if frames != span.frames:
        raise NotRecorded(
            f"{recording.lake.uri} has {frames} of the {span.frames} frames {span.first_seq} to {span.last_seq} of "
            f"stream {span.stream_id}, epoch {span.epoch}, that this dataset was made of; retention removes the "
            "oldest: make the dataset anew"
        )
    return part


def _streams(spans: Sequence[_Span]) -> list[int]:
    return list(dict.fromkeys(span.stream_id for span in spans))


def _sample(frame: RecordedFrame) -> Sample:
    frame.array.flags.writeable = True  # it owns its memory, as every frame that is asked for by seq
    return sample_of(frame, frame.array, lambda: frame.metadata)
