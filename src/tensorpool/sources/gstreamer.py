# SPDX-License-Identifier: Apache-2.0
"""A GStreamer pipeline, as gst-launch-1.0 takes it. Its frames come by a pipe; caps and times from what it prints.

We add two elements to its end: one prints the time of each buffer (identity), one writes it to the pipe (fdsink).
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import Any, Final

import numpy as np

from tensorpool import pixel_formats
from tensorpool.errors import ConfigError
from tensorpool.extras import program
from tensorpool.pixel_formats import FORMATS
from tensorpool.sources.pipe import FramePipe
from tensorpool.sources.protocol import RATE_KEY, SOURCE_KEY, SourceFailed, SourceFrame

NAMES: Final = {
    "gray": "GRAY8",
    "gray16le": "GRAY16_LE",
    "rgb24": "RGB",
    "bgr24": "BGR",
    "rgba": "RGBA",
    "bgra": "BGRA",
    "yuyv422": "YUY2",
    "uyvy422": "UYVY",
    "nv12": "NV12",
}
TAP: Final = "tensorpool_tap"
_DEFAULT: Final = ("RGB", "GRAY8", "GRAY16_LE")  # videoconvert takes the one that is nearest to the pipeline's own
_CAPS: Final = re.compile(rf"GstIdentity:{TAP}\.GstPad:src: caps = (.*)")
_BUFFER: Final = re.compile(
    rf"GstIdentity:{TAP}: last-message = chain .*?\((?P<bytes>\d+) bytes, .*?pts: (?:(?P<pts>[\d:.]+)|none)"
)
_LIVE: Final = "Pipeline is live"


class GStreamerSource:
    """The pipeline's pictures: `GStreamerSource("v4l2src device=/dev/video0")`, without a sink at its end.

    Whether it is live is what GStreamer says of it.
    """

    def __init__(self, pipeline: str, *, pixel_format: str | None = None) -> None:
        if not pipeline.strip():
            raise ConfigError("--gstreamer", pipeline, "a pipeline without a sink, such as v4l2src ! videoconvert")
        if pixel_format is not None and pixel_format not in NAMES:
            raise ConfigError("--pixel-format", pixel_format, f"for GStreamer one of {', '.join(NAMES)}")
        self._pipeline = pipeline
        self._formats = _DEFAULT if pixel_format is None else (NAMES[pixel_format],)
        self._is_live = False
        self._about: dict[str, Any] = {}

    @property
    def is_live(self) -> bool:
        return self._is_live

    @property
    def about(self) -> Mapping[str, Any]:
        return self._about

    def frames(self) -> Iterator[SourceFrame | None]:
        caps: dict[str, str] = {}
        with FramePipe("GStreamer", self._command) as pipe:
            while True:
                try:
                    line = pipe.line()
                except EOFError:
                    return
                if line is None:
                    yield None
                    continue
                self._is_live = self._is_live or line.startswith(_LIVE)
                if found := _CAPS.search(line):
                    caps = dict(re.findall(r"([\w-]+)=\([\w]+\)([^,]+)", found[1]))
                    self._about = self._describe(caps)
                elif buffer := _BUFFER.search(line):
                    yield self._frame(pipe, caps, int(buffer["bytes"]), buffer["pts"])

    def _command(self, frames: int) -> list[str]:
        formats = ",".join(self._formats)
        ours = f"videoconvert ! video/x-raw,format=(string){{{formats}}} ! identity name={TAP} silent=false"
        pipeline = f"{self._pipeline} ! {ours} ! fdsink fd={frames} sync=false"
        gst = program("gst-launch-1.0", "this source", "gstreamer1.0-tools")
        return [gst, "-v", *shlex.split(pipeline)]

    def _describe(self, caps: Mapping[str, str]) -> dict[str, Any]:
        rate = Fraction(caps.get("framerate", "0/1"))
        about: dict[str, Any] = {
            SOURCE_KEY: f"gstreamer {self._pipeline}",
            pixel_formats.KEY: {value: key for key, value in NAMES.items()}[caps["format"]],
        }
        return about | ({RATE_KEY: float(rate)} if rate else {})

    def _frame(self, pipe: FramePipe, caps: Mapping[str, str], nbytes: int, pts: str | None) -> SourceFrame:
        known = FORMATS[self._about[pixel_formats.KEY]]
        shape = known.shape(int(caps["width"]), int(caps["height"]))
        dtype = np.dtype(known.dtype)
        padded, remainder = divmod(nbytes, shape[0])
        row_bytes = int(np.prod(shape[1:])) * dtype.itemsize
        if remainder or not row_bytes <= padded < row_bytes + 4:
            raise SourceFailed(f"GStreamer gives buffers of {nbytes} bytes for {shape} {dtype}; choose even extents")
        return SourceFrame(shape, dtype, lambda out: pipe.fill(out, padded), None if pts is None else _nanoseconds(pts))


def _nanoseconds(clock_time: str) -> int:
    """0:00:01.033333333 as GStreamer writes it."""
    hours, minutes, seconds = clock_time.split(":")
    whole, _, fraction = seconds.partition(".")
    return ((int(hours) * 60 + int(minutes)) * 60 + int(whole)) * 1_000_000_000 + int(fraction.ljust(9, "0"))
