# SPDX-License-Identifier: Apache-2.0
"""An export from beginning to end: continued where an earlier run stopped, under its final name when it is complete.

OUT                 the export; only ever a complete one
OUT.partial         what is written so far
OUT.export.json     what was asked for, how far it is, and which frames are missing
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgspec

from tensorpool.errors import ConfigError
from tensorpool.exports import FORMATS, image_files
from tensorpool.exports.frames import Frames
from tensorpool.exports.hdf5 import hdf5
from tensorpool.exports.mcap import FOXGLOVE, ROS, McapExport
from tensorpool.exports.mp4 import Mp4Export
from tensorpool.exports.protocol import Export, ExportRefused, Missing, Written
from tensorpool.exports.zarr import zarr

SUFFIXES: Final = {".mp4": "mp4", ".zarr": "zarr", ".h5": "hdf5", ".hdf5": "hdf5", ".mcap": "mcap"}


class Request(msgspec.Struct, frozen=True):
    """What is to be exported, as the user said it: a rerun with another request is refused."""

    source: str
    stream: str
    format: str
    begin: str | None = None
    end: str | None = None
    epoch: int | None = None


class Manifest(msgspec.Struct, frozen=True):
    """The file beside an export."""

    request: Request
    is_complete: bool
    frames: int
    missing: list[Missing]


class Outcome(msgspec.Struct, frozen=True):
    """How a run ended. `resumed` frames were there before, all `frames` are there now."""

    path: str
    is_complete: bool
    frames: int
    resumed: int
    missing: list[Missing]


def format_of(out: Path, given: str | None) -> str:
    """The format by its name, or by the suffix of the target. Raises ConfigError."""
    found = given or SUFFIXES.get(out.suffix.lower())
    if found not in FORMATS:
        raise ConfigError("--format", given or out.name, f"one of {', '.join(FORMATS)}, or a name such as out.mp4")
    return found


def make(name: str, path: Path, stream: str, rate_hz: Callable[[], float]) -> Export:
    """An export of a format, to a path that is not final."""
    folders = {"png": image_files.png, "tiff": image_files.tiff, "npy": image_files.npy}
    if name in folders:
        return folders[name](path)
    if name == "mp4":
        return Mp4Export(path, rate_hz())
    if name in ("mcap", "foxglove"):
        return McapExport(path, f"/{stream.strip('/')}", FOXGLOVE if name == "foxglove" else ROS)
    return hdf5(path) if name == "hdf5" else zarr(path)


class ExportJob:
    """Raises ExportRefused where the target holds something else."""

    def __init__(self, out: Path, request: Request) -> None:
        self._out = out
        self._request = request
        self._partial = out.with_name(out.name + ".partial")
        self._beside = out.with_name(out.name + ".export.json")
        self._known = self._load()
        if out.exists() and self._known is None:
            raise ExportRefused(f"{out} is there already, and no export of ours; choose another name")
        if self._known is not None and self._known.request != request:
            other = msgspec.json.encode(self._known.request).decode()
            raise ExportRefused(f"{out} is an export of something else, {other}; choose another name, or remove it")

    @property
    def known_missing(self) -> list[Missing]:
        """That earlier runs noted."""
        return [] if self._known is None else self._known.missing

    def complete(self) -> Outcome | None:
        """The outcome of an earlier run that completed it."""
        if self._known is None or not (self._known.is_complete or self._out.exists()):
            return None
        self._clean_up()
        self._save(self._known.frames, self._known.missing, is_complete=True)
        return Outcome(str(self._out), True, self._known.frames, self._known.frames, self._known.missing)

    def run(
        self,
        frames: Frames,
        goes_on: Callable[[], bool],
        on_frame: Callable[[int, int], object] = lambda done, nbytes: None,
        rate_hz: float | None = None,
    ) -> Outcome:
        """Export until there are no more frames or `goes_on()` is False, which completes the export of a live stream.

        Raises ExportRefused for a frame that the format cannot hold; what was written before it stays.
        """
        self._out.parent.mkdir(parents=True, exist_ok=True)
        self._save(0 if self._known is None else self._known.frames, self.known_missing, is_complete=False)
        export = make(self._request.format, self._partial, self._request.stream, lambda: rate_hz or frames.rate_hz)
        before = export.resume()
        done, is_complete = before.frames, True
        try:
            for frame in frames.after(before.position):
                if not goes_on():
                    is_complete = frames.is_live
                    break
                if frame is None:
                    continue
                export.add(frame)
                done += 1
                on_frame(done, frame.array.nbytes)
        except BaseException:
            export.suspend()
            self._save(done, frames.missing(), is_complete=False)
            raise
        return self._end(export, frames.missing(), Written(done), before, is_complete=is_complete)

    def _end(
        self, export: Export, missing: list[Missing], written: Written, before: Written, *, is_complete: bool
    ) -> Outcome:
        if is_complete:
            about: dict[str, Any] = {"source": self._request.source, "stream": self._request.stream}
            whole = export.finish(missing, about)
            self._save(written.frames, missing, is_complete=False)
            os.replace(whole, self._out)
            self._clean_up()
        else:
            export.suspend()
        self._save(written.frames, missing, is_complete=is_complete)
        return Outcome(str(self._out), is_complete, written.frames, before.frames, missing)

    def _clean_up(self) -> None:
        if self._partial.is_dir():
            shutil.rmtree(self._partial)

    def _load(self) -> Manifest | None:
        try:
            return msgspec.json.decode(self._beside.read_bytes(), type=Manifest)
        except FileNotFoundError:
            return None
        except msgspec.DecodeError as error:
            raise ExportRefused(f"{self._beside} is damaged ({error}): remove it and {self._partial.name}") from None

    def _save(self, frames: int, missing: list[Missing], *, is_complete: bool) -> None:
        draft = self._beside.with_name(f".{self._beside.name}")
        manifest = Manifest(self._request, is_complete, frames, missing)
        draft.write_bytes(msgspec.json.format(msgspec.json.encode(manifest)) + b"\n")
        os.replace(draft, self._beside)
