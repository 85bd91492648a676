# SPDX-License-Identifier: Apache-2.0
"""Picture files, in the order of their names: PNG, JPEG, TIFF and whatever else Pillow reads."""

from __future__ import annotations

import glob
import io
import re
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from tensorpool import pixel_formats
from tensorpool.errors import ConfigError
from tensorpool.extras import library
from tensorpool.shm.arrays import Array
from tensorpool.sources.protocol import RATE_KEY, SOURCE_KEY, SourceFailed, SourceFrame

DEFAULT_HZ: Final = 30.0
TIFF: Final = (".tif", ".tiff")


def files_of(option: str, pattern: str) -> list[Path]:
    """The files of a glob, those with numbers in order of the numbers. Raises ConfigError where there are none."""
    found = [Path(name) for name in glob.glob(pattern, recursive=True) if Path(name).is_file()]
    if not found:
        raise ConfigError(option, pattern, "a file, or a pattern that matches files, in quotes")
    return sorted(found, key=lambda path: [int(part) if part.isdecimal() else part for part in _parts(path)])


def _parts(path: Path) -> list[str]:
    return re.split(r"(\d+)", str(path))


class ImageSource:
    """Each picture a frame. `rate_hz` is how fast they are published: files have no times."""

    is_live: Final = False

    def __init__(self, pattern: str, *, rate_hz: float = DEFAULT_HZ) -> None:
        self._files = files_of("--images", pattern)
        self._about: dict[str, Any] = {SOURCE_KEY: f"images {pattern}", RATE_KEY: rate_hz}

    @property
    def about(self) -> Mapping[str, Any]:
        return self._about

    def frames(self) -> Iterator[SourceFrame]:
        for path in self._files:
            array = read_image(path)
            name = pixel_formats.guess(array.shape, array.dtype)
            if name is not None:
                self._about = self._about | {pixel_formats.KEY: name}
            yield SourceFrame.of(array)


def read_image(path: Path) -> Array:
    """The pixels of a file, RGB. Raises SourceFailed."""
    try:
        if path.suffix.lower() in TIFF:
            found: Array = library("tifffile", "reading TIFF files", "ingest").imread(path)
            return found
        return decode_picture(path.read_bytes(), str(path))
    except (OSError, ValueError) as error:
        raise SourceFailed(f"{path}: {error}") from None


def decode_picture(data: bytes, name: str) -> Array:
    """The pixels of what Pillow reads, RGB. Raises SourceFailed, which begins with `name`."""
    pillow = library("PIL.Image", "reading pictures", "ingest")
    try:
        with pillow.open(io.BytesIO(data)) as image:
            plain = image if image.mode in ("L", "RGB", "RGBA", "I;16", "F", "I") else image.convert("RGB")
            return np.asarray(plain)
    except pillow.UnidentifiedImageError:
        raise SourceFailed(f"{name}: Pillow reads no such picture") from None
    except (OSError, ValueError, SyntaxError, EOFError, struct.error, pillow.DecompressionBombError) as error:
        raise SourceFailed(f"{name}: {error}") from None
