# SPDX-License-Identifier: Apache-2.0
"""How commands that publish frames end: consumers see the last one, and a summary says what became of all."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from tensorpool.cli import format, progress
from tensorpool.cli.signals import StopSignals
from tensorpool.client import DropReason, Producer

DRAIN_S: Final = 5.0
SLICE_S: Final = 0.1  # the longest time that a signal waits


class PublishSummary(msgspec.Struct, frozen=True, kw_only=True):
    """What became of the frames; commands add to it."""

    stream_id: int | None
    name: str | None
    published: int
    bytes: int
    seconds: float
    rate_hz: float
    mib_per_s: float
    dropped: dict[str, int]

    def text(self) -> str:
        rate = progress.Rate(self.rate_hz, self.mib_per_s)
        lines = [f"published {self.published} frames, {format.size(self.bytes)}, in {self.seconds:.1f} s: {rate}"]
        if self.dropped:
            lines.append(f"dropped {sum(self.dropped.values())}: {format.counts(self.dropped)}")
        return "\n".join(lines + self.more_lines())

    def more_lines(self) -> list[str]:
        """What a command has to say besides."""
        return []


def summarize[S: PublishSummary](
    kind: type[S],
    producer: Producer | None,
    meter: progress.Meter,
    *,
    published: int,
    nbytes: int,
    dropped: Mapping[DropReason, int],
    **more: Any,
) -> S:
    """The summary of a run, with what the command adds to it."""
    overall = meter.overall
    return kind(
        stream_id=None if producer is None else producer.stream_id,
        name=None if producer is None else producer.name,
        published=published,
        bytes=nbytes,
        seconds=round(meter.seconds, 6),
        rate_hz=round(overall.hz, 3),
        mib_per_s=round(overall.mib_per_s, 3),
        dropped=progress.drops_by_name(dropped),
        **more,
    )


def drain(producer: Producer, stop: StopSignals) -> bool:
    """Wait for consumers to see the last frame; another signal ends that too."""
    deadline_s, signals = time.monotonic() + DRAIN_S, stop.count
    while not producer.drain(SLICE_S):
        if time.monotonic() > deadline_s or stop.count > signals:
            return False
    return True
