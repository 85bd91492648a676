# SPDX-License-Identifier: Apache-2.0
"""Whatever OpenCV's VideoCapture opens: a camera by its number or device, a file, a URL."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from tensorpool import pixel_formats
from tensorpool.extras import library
from tensorpool.shm.arrays import Array
from tensorpool.sources.protocol import RATE_KEY, SERIAL_KEY, SOURCE_KEY, SourceFailed, SourceFrame

SYSFS: Final = Path("/sys/class/video4linux")


class OpenCvSource:
    """Pictures of a camera (`OpenCvSource(0)`, `OpenCvSource("/dev/video0")`), a file or a URL: bgr24, or gray."""

    def __init__(self, device: int | str) -> None:
        self._device = device
        self._about: dict[str, Any] = {}

    @property
    def is_live(self) -> bool:
        return isinstance(self._device, int) or not Path(self._device).is_file()

    @property
    def about(self) -> Mapping[str, Any]:
        return self._about

    def frames(self) -> Iterator[SourceFrame | None]:
        cv2 = library("cv2", "--opencv", "ingest")
        capture = cv2.VideoCapture(self._device)
        try:
            if not capture.isOpened():
                raise SourceFailed(f"OpenCV cannot open {self._device!r}: no such device, file or stream")
            rate_hz = capture.get(cv2.CAP_PROP_FPS)
            about = {SOURCE_KEY: f"opencv {self._device}"} | ({RATE_KEY: rate_hz} if rate_hz > 0 else {})
            serial = camera_serial(self._device)
            self._about = about | ({SERIAL_KEY: serial} if serial else {})
            yield from self._read(cv2, capture)
        finally:
            capture.release()

    def _read(self, cv2: Any, capture: Any) -> Iterator[SourceFrame]:
        is_first, picture = True, None
        while capture.grab():
            at_ms = capture.get(cv2.CAP_PROP_POS_MSEC)
            time_ns = round(at_ms * 1e6) if at_ms > 0 or (is_first and not self.is_live) else None
            is_first = False
            if picture is None:
                picture = _retrieved(capture, None, self._device)
                self._about |= {pixel_formats.KEY: "gray" if picture.ndim == 2 else "bgr24"}
                yield SourceFrame.of(picture, time_ns)
            else:
                yield SourceFrame(picture.shape, picture.dtype, lambda out: self._fill(capture, out), time_ns)

    def _fill(self, capture: Any, out: Array) -> None:
        """OpenCV decodes into the array where it has the right layout, and returns another one where it has not."""
        found = _retrieved(capture, out, self._device)
        if not np.shares_memory(found, out):
            if found.shape != out.shape:
                raise SourceFailed(f"{self._device} changed from {out.shape} to {found.shape}")
            np.copyto(out, found)


def _retrieved(capture: Any, out: Array | None, device: int | str) -> Array:
    is_there, picture = capture.retrieve() if out is None else capture.retrieve(out)
    if not is_there:
        raise SourceFailed(f"OpenCV cannot decode a frame of {device}")
    found: Array = picture
    return found


def camera_serial(device: int | str, sysfs: Path = SYSFS) -> str | None:
    """The serial number of a USB camera, as Linux tells it; None where it has none."""
    name = f"video{device}" if isinstance(device, int) else Path(device).resolve().name
    if not re.fullmatch("video[0-9]+", name):
        return None
    folder = (sysfs / name / "device").resolve()
    for place in (folder, folder.parent):
        if (place / "serial").is_file():
            return (place / "serial").read_text().strip() or None
    return None
