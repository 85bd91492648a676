# SPDX-License-Identifier: Apache-2.0
"""MP4, encoded by ffmpeg (H.264), at a constant rate. Written in segments, which are joined at the end.

A segment that is complete is kept when the export is interrupted; the one in the making is encoded again.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from tensorpool.exports.protocol import ExportFrame, ExportRefused, Missing, Written, refuse_change
from tensorpool.extras import program
from tensorpool.pixel_formats import FORMATS

SEGMENT_FRAMES: Final = 600
QUIET: Final = ("-hide_banner", "-nostdin", "-loglevel", "error", "-y")
EVEN: Final = "pad=ceil(iw/2)*2:ceil(ih/2)*2"  # H.264 in yuv420p has no odd extents


class _Segment(msgspec.Struct, frozen=True):
    name: str
    frames: int
    last: tuple[int, int]
    layout: tuple[tuple[int, ...], str]


class Mp4Export:
    """A video of frames of one size: gray, RGB, Bayer and YUV, as their pixel format says."""

    def __init__(self, folder: Path, rate_hz: float, segment_frames: int = SEGMENT_FRAMES) -> None:
        self._folder = folder
        self._rate_hz = rate_hz
        self._segment_frames = segment_frames
        self._ffmpeg = program("ffmpeg", "writing MP4", "ffmpeg")
        self._segments: list[_Segment] = []
        self._process: subprocess.Popen[bytes] | None = None
        self._frames = 0  # of the open segment
        self._last = (0, 0)
        self._layout: tuple[tuple[int, ...], str] | None = None

    @property
    def _list(self) -> Path:
        return self._folder / "segments.json"

    def resume(self) -> Written:
        self._folder.mkdir(parents=True, exist_ok=True)
        if self._list.exists():
            self._segments = msgspec.json.decode(self._list.read_bytes(), type=list[_Segment])
        if not self._segments:
            return Written()
        self._layout = self._segments[-1].layout
        return Written(sum(segment.frames for segment in self._segments), self._segments[-1].last)

    def add(self, frame: ExportFrame) -> None:
        if self._layout is None:
            self._layout = frame.array.shape, str(frame.array.dtype)
        refuse_change(self._folder, self._layout, frame)
        if self._process is None:
            self._process = self._start(frame)
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(frame.array.tobytes())
        except BrokenPipeError:
            self._end_segment()
        self._frames += 1
        self._last = frame.position
        if self._frames >= self._segment_frames:
            self._end_segment()

    def finish(self, missing: Sequence[Missing], about: dict[str, Any]) -> Path:
        self._end_segment()
        if not self._segments:
            raise ExportRefused("there are no frames for a video")
        listing = self._folder / "segments.txt"
        listing.write_text("".join(f"file '{segment.name}'\n" for segment in self._segments))
        whole = self._folder / "whole.mp4"
        text = msgspec.json.encode({"missing": list(missing), **about}).decode()
        joined = ["-f", "concat", "-safe", "0", "-i", str(listing), "-c", "copy", "-metadata", f"comment={text}"]
        self._run([*joined, "-movflags", "+faststart", str(whole)])
        return whole

    def suspend(self) -> None:
        self._end_segment()

    def _start(self, frame: ExportFrame) -> subprocess.Popen[bytes]:
        known = FORMATS.get(frame.pixel_format or "")
        if known is None:
            raise ExportRefused(
                f"frame {frame.seq} is {frame.array.dtype} {frame.array.shape} without a pixel format that a video can "
                "have; export it as npy, zarr or hdf5"
            )
        rows, width = frame.array.shape[:2]
        raw = ["-f", "rawvideo", "-pix_fmt", known.name, "-s", f"{width}x{rows * 2 // known.halves}"]
        rate = ["-r", f"{self._rate_hz:.6f}", "-i", "pipe:0"]
        coded = ["-vf", EVEN, "-c:v", "libx264", "-preset", "veryfast", "-crf", "18", "-pix_fmt", "yuv420p"]
        command = [self._ffmpeg, *QUIET, *raw, *rate, *coded, "-f", "mp4", str(self._folder / "open.mp4")]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)

    def _end_segment(self) -> None:
        if self._process is None:
            return
        process, self._process = self._process, None
        said = process.communicate()[1].decode(errors="replace").strip()
        if process.returncode:
            raise ExportRefused(f"ffmpeg cannot encode it: {said.splitlines()[-1] if said else 'it said nothing'}")
        assert self._layout is not None
        name = f"{len(self._segments):06}.mp4"
        os.replace(self._folder / "open.mp4", self._folder / name)
        self._segments.append(_Segment(name, self._frames, self._last, self._layout))
        draft = self._list.with_suffix(".tmp")
        draft.write_bytes(msgspec.json.encode(self._segments))
        os.replace(draft, self._list)
        self._frames = 0

    def _run(self, arguments: Sequence[str]) -> None:
        done = subprocess.run([self._ffmpeg, *QUIET, *arguments], capture_output=True, text=True)
        if done.returncode:
            raise ExportRefused(f"ffmpeg cannot join the segments: {done.stderr.strip()}")
