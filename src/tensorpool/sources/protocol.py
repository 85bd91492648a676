# SPDX-License-Identifier: Apache-2.0
"""What a source of frames is: a camera, a file, a program. A camera of your own implements `Source` in ten lines.

class MyCamera:
    is_live = True
    about = {"camera_serial": "SN-1", "pixel_format": "gray", "rate_hz": 60.0}

    def frames(self):
        with my_sdk.open() as device:              # opened anew after a failure
            while True:
                picture = device.next()
                yield SourceFrame.of(picture.pixels, time_ns=picture.timestamp_ns)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, Protocol, Self

import msgspec
import numpy as np
import numpy.typing as npt

from tensorpool.errors import TensorPoolError
from tensorpool.shm.arrays import Array

RATE_KEY: Final = "rate_hz"
SOURCE_KEY: Final = "source"
SERIAL_KEY: Final = "camera_serial"


class SourceFailed(TensorPoolError):
    """A source cannot be opened or read; a live one is opened again."""


class SourceFrame(msgspec.Struct, frozen=True, eq=False):
    """A frame that a source has ready: its layout, and how to write it into the memory of the stream.

    `time_ns` is the time at which the source says it was captured, by a clock of its own; None where it says nothing.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    fill: Callable[[Array], None]
    time_ns: int | None = None

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @classmethod
    def of(cls, array: npt.ArrayLike, time_ns: int | None = None) -> Self:
        """A frame that is in memory already: copied once, into the stream."""
        data = np.asarray(array)
        return cls(data.shape, data.dtype, lambda out: np.copyto(out, data), time_ns)


class Source(Protocol):
    """Where frames come from.

    `frames()` opens the source and yields its frames until it ends; it is called again to open it again. While it waits
    it may yield None now and then, so that `Ingest` can be stopped meanwhile. A frame is filled before the next one is
    asked for. It raises SourceFailed, or OSError, when the source is not there or goes away.
    """

    @property
    def is_live(self) -> bool:
        """Whether frames come at their own pace, and the source is opened again when it ends. A file is not live."""

    @property
    def about(self) -> Mapping[str, Any]:
        """Metadata of the stream: RATE_KEY, `pixel_format`, SERIAL_KEY and whatever you like. Read at each frame."""

    def frames(self) -> Iterator[SourceFrame | None]: ...
