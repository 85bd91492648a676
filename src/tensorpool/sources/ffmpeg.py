# SPDX-License-Identifier: Apache-2.0
"""Whatever ffmpeg can read: files, cameras, network streams, test pictures. Its frames come by a pipe, decoded.

ffmpeg 5.1 or newer. It decodes once and writes twice: frames, and a line with the time of each (its muxer framecrc).
"""

from __future__ import annotations

import itertools
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from tensorpool import pixel_formats
from tensorpool.errors import ConfigError
from tensorpool.extras import program
from tensorpool.pixel_formats import FORMATS
from tensorpool.sources.pipe import FramePipe
from tensorpool.sources.protocol import RATE_KEY, SOURCE_KEY, SourceFailed, SourceFrame

PROBE_S: Final = 60.0
QUIET: Final = ("-hide_banner", "-nostdin", "-loglevel", "error")
_DEEP: Final = re.compile(r"(9|10|12|14|16|32)(le|be)$")


class Probe(msgspec.Struct, frozen=True):
    """What ffmpeg gives for these arguments, before we ask for a pixel format."""

    pixel_format: str
    width: int
    height: int
    rate_hz: float


class FfmpegSource:
    """The video that `arguments` choose: all that stands before the output on ffmpeg's command line.

    >>> FfmpegSource(["-f", "v4l2", "-framerate", "60", "-i", "/dev/video0"])     # doctest: +SKIP

    `pixel_format` is one of tensorpool.pixel_formats; without it gray stays gray, everything else becomes rgb24, or
    rgb48le where the source has more than 8 bits. Files and lavfi are not live, unless you say so.
    """

    def __init__(
        self, arguments: Sequence[str], *, pixel_format: str | None = None, is_live: bool | None = None
    ) -> None:
        if "-i" not in arguments:
            raise ConfigError("--ffmpeg", " ".join(arguments), "arguments with an input, such as -i FILE")
        if pixel_format is not None and pixel_format not in FORMATS:
            raise ConfigError("--pixel-format", pixel_format, f"one of {', '.join(FORMATS)}")
        self._arguments = list(arguments)
        self._wanted = pixel_format
        self._is_live = _looks_live(self._arguments) if is_live is None else is_live
        self._probe: Probe | None = None
        self._about: dict[str, Any] = {}

    @property
    def is_live(self) -> bool:
        return self._is_live

    @property
    def about(self) -> Mapping[str, Any]:
        return self._about

    def frames(self) -> Iterator[SourceFrame | None]:
        if self._probe is None:
            self._probe = probe(self._arguments)
        name = self._wanted or _chosen(self._probe.pixel_format)
        about: dict[str, Any] = {SOURCE_KEY: "ffmpeg " + " ".join(self._arguments), pixel_formats.KEY: name}
        if self._probe.rate_hz:
            about[RATE_KEY] = self._probe.rate_hz
        self._about = about | {"source_pixel_format": self._probe.pixel_format}
        with FramePipe("ffmpeg", lambda frames: self._command(name, frames)) as pipe:
            yield from _frames(pipe, name)

    def _command(self, pixel_format: str, frames: int) -> list[str]:
        mapping = [] if "-map" in self._arguments else ["-map", "0:v:0"]
        outputs = f"[f=framecrc:flush_packets=1]pipe:1|[f=rawvideo]pipe:{frames}"
        return [
            program("ffmpeg", "this source", "ffmpeg"),
            *QUIET,
            *self._arguments,
            *mapping,
            *("-fps_mode", "passthrough", "-c:v", "rawvideo", "-pix_fmt", pixel_format, "-f", "tee", outputs),
        ]


def _frames(pipe: FramePipe, name: str) -> Iterator[SourceFrame | None]:
    tick_ns, width, height = Fraction(0), 0, 0
    while True:
        try:
            line = pipe.line()
        except EOFError:
            return
        if line is None:
            yield None
        elif line.startswith("#tb 0:"):
            tick_ns = Fraction(line.partition(":")[2].strip()) * 1_000_000_000
        elif line.startswith("#dimensions 0:"):
            width, height = map(int, line.partition(":")[2].strip().split("x"))
        elif not line.startswith("#"):
            fields = line.split(",")
            shape, dtype = FORMATS[name].shape(width, height), np.dtype(FORMATS[name].dtype)
            nbytes = int(np.prod(shape)) * dtype.itemsize
            if int(fields[4]) != nbytes:
                raise SourceFailed(
                    f"ffmpeg gives frames of {fields[4].strip()} bytes, {name} of {width}x{height} has {nbytes}; "
                    "choose another --pixel-format, or even extents"
                )
            yield SourceFrame(shape, dtype, pipe.fill, round(int(fields[2]) * tick_ns))


def probe(arguments: Sequence[str]) -> Probe:
    """Look at the first frame that ffmpeg makes of these arguments. Raises SourceFailed with what it says."""
    ffmpeg = program("ffmpeg", "this source", "ffmpeg")
    ffprobe = program("ffprobe", "this source", "ffmpeg")
    one_frame = [*arguments, "-frames:v", "1", "-an", "-sn", "-dn", "-c:v", "rawvideo", "-f", "nut", "pipe:1"]
    try:
        made = subprocess.run(
            [ffmpeg, *QUIET, *one_frame], stdin=subprocess.DEVNULL, capture_output=True, timeout=PROBE_S
        )
    except subprocess.TimeoutExpired:
        raise SourceFailed(f"ffmpeg has no frame after {PROBE_S:.0f} s: {' '.join(arguments)}") from None
    said = made.stderr.decode(errors="replace").strip().splitlines()
    if made.returncode or not made.stdout:
        raise SourceFailed(f"ffmpeg cannot read it: {'; '.join(said[-3:]) or 'there is no video in it'}")
    fields = "stream=pix_fmt,width,height,r_frame_rate"
    asked = [ffprobe, "-v", "error", "-show_entries", fields, "-of", "json", "-i", "pipe:0"]
    found = subprocess.run(asked, input=made.stdout, capture_output=True, timeout=PROBE_S, check=True)
    stream = msgspec.json.decode(found.stdout)["streams"][0]
    rate = stream.get("r_frame_rate", "0/0")
    return Probe(
        stream["pix_fmt"], stream["width"], stream["height"], 0.0 if rate.endswith("/0") else float(Fraction(rate))
    )


def _chosen(native: str) -> str:
    """The format in which frames of a source's own format are published."""
    if native in FORMATS and FORMATS[native].halves == 2 and FORMATS[native].channels != 2:
        return native
    is_deep = _DEEP.search(native) is not None
    if native.startswith(("gray", "ya", "mono")):
        return "gray16le" if is_deep else "gray"
    return "rgb48le" if is_deep else "rgb24"


def _looks_live(arguments: list[str]) -> bool:
    inputs = [value for option, value in itertools.pairwise(arguments) if option == "-i"]
    is_paced = "-re" in arguments or "-readrate" in arguments
    is_file = any(Path(name.removeprefix("file:")).is_file() for name in inputs)
    return is_paced or not (is_file or "lavfi" in arguments or any("%" in name for name in inputs))
