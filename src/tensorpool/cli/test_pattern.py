# SPDX-License-Identifier: Apache-2.0
"""Synthetic frames: paints them, and checks every byte of those that can be checked.

counter     every element is the frame's seq, as far as the dtype can hold it
gradient    a ramp that moves one step with every frame
noise       random values
checked     each byte follows from the frame's seq and the byte's place; `find` returns the first that differs
scene       a moving landscape with a sun, for pictures of bytes; can be checked as well
"""

from __future__ import annotations

from typing import Any, Final, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from tensorpool.errors import ConfigError

type Array = npt.NDArray[Any]
type Words = npt.NDArray[np.uint64]

_NOISE_SHIFTS: Final = 4096
_OF_SEQS: Final = 1 << 63  # separates the numbers of seqs from those of word indices


class Painter(Protocol):
    """Makes frames of one pattern."""

    def paint(self, array: Array, seq: int) -> None:
        """Fill a dense array with frame `seq`."""


class Pattern(Painter, Protocol):
    """Makes frames, and checks them."""

    def find(self, array: Array, seq: int) -> Difference | None:
        """The first byte that differs from frame `seq` as painted; None where there is none."""


class Difference(msgspec.Struct, frozen=True):
    """The first wrong byte of a frame."""

    offset: int
    expected: int
    found: int


class Checked:
    """The pattern that can be checked: 8-byte word `i` of frame `seq` is mix(i) xor mix(2^63 + seq).

    >>> pattern, pixels = Checked(), np.empty((2, 3), np.uint8)
    >>> pattern.paint(pixels, 7)
    >>> pattern.find(pixels, 7) is None, pattern.find(pixels, 8) is None
    (True, False)
    """

    def __init__(self) -> None:
        self._places: Words = np.empty(0, np.uint64)
        self._expected: Words = np.empty(0, np.uint64)

    def paint(self, array: Array, seq: int) -> None:
        """Fill a dense array, in the order of its memory."""
        data = _memory_of(array)
        whole, rest = divmod(data.nbytes, 8)
        places, key = self._places_of(data.nbytes), _key(seq)
        np.bitwise_xor(places[:whole], key, out=data[: 8 * whole].view(np.uint64))
        if rest:
            data[8 * whole :] = (places[whole:] ^ key).view(np.uint8)[:rest]

    def find(self, array: Array, seq: int) -> Difference | None:
        """The first byte that differs; None where there is none.

        A frame that is overwritten meanwhile may differ: call its `is_intact` afterwards.
        """
        data = _memory_of(array)
        places = self._places_of(data.nbytes)
        words = np.bitwise_xor(places, _key(seq), out=self._expected[: places.size])
        expected = words.view(np.uint8)[: data.nbytes]
        whole = data.nbytes // 8
        is_same = np.array_equal(data[: 8 * whole].view(np.uint64), words[:whole])
        if is_same and np.array_equal(data[8 * whole :], expected[8 * whole :]):
            return None
        return _first_difference(data, expected)

    def _places_of(self, nbytes: int) -> Words:
        count = -(-nbytes // 8)
        if count > self._places.size:
            self._places = _mix(np.arange(count, dtype=np.uint64))
            self._expected = np.empty(count, np.uint64)
        return self._places[:count]


class Scene:
    """A moving landscape, a sun that crosses it, and the seq in the first bytes: each frame differs.

    For pictures: arrays of bytes, grey (height, width) or with 3 or 4 colours.
    """

    STEP: Final = 2  # columns per frame

    def __init__(self) -> None:
        self._panorama: Array | None = None
        self._expected: Array | None = None

    @staticmethod
    def suits(shape: tuple[int, ...]) -> bool:
        """Whether an array of this shape is a picture that is large enough."""
        is_picture = len(shape) == 2 or (len(shape) == 3 and shape[2] in (3, 4))
        return is_picture and min(shape[:2]) >= 32

    def paint(self, array: Array, seq: int) -> None:
        """Fill an array of bytes. Raises ConfigError for an array that is not a picture."""
        if not self.suits(array.shape) or array.dtype != np.uint8 or not array.flags.c_contiguous:
            raise ConfigError("shape", array.shape, "a picture of bytes for this pattern: HxW, HxWx3 or HxWx4")
        height, width = array.shape[:2]
        if self._panorama is None or self._panorama.shape != (height, 3 * width, *array.shape[2:]):
            self._panorama = _landscape(height, width, array.shape[2:])
        start = self.STEP * seq % (2 * width)
        array[...] = self._panorama[:, start : start + width]
        radius = height // 10
        across = width + 2 * radius
        x, y = (3 * seq) % across - radius, height // 4
        colour = (255, 214, 110, 255)[: array.shape[2]] if array.ndim == 3 else 214
        for row in range(-radius, radius):
            half = int((radius * radius - row * row) ** 0.5)
            array[y + row, max(0, x - half) : max(0, x + half)] = colour
        array.reshape(-1)[:8] = np.array([seq], np.uint64).view(np.uint8)

    def find(self, array: Array, seq: int) -> Difference | None:
        """The first byte that differs; None where there is none."""
        if self._expected is None or self._expected.shape != array.shape:
            self._expected = np.empty(array.shape, np.uint8)
        self.paint(self._expected, seq)
        if np.array_equal(array, self._expected):
            return None
        return _first_difference(array.reshape(-1), self._expected.reshape(-1))


def _landscape(height: int, width: int, colours: tuple[int, ...]) -> Array:
    """Three widths wide, the third equal to the first, so that a window of one width may begin anywhere in two."""
    period = 2 * width
    y = np.linspace(0, 1, height)[:, None, None]
    turn = 2 * np.pi * np.arange(period) / period
    sky = (1 - y) * np.array([84, 142, 222]) + y * np.array([238, 240, 244])
    picture = np.broadcast_to(sky, (height, period, 3)).copy()
    for base, waves, colour in (
        (0.60, ((0.08, 2, 0.0), (0.04, 5, 1.0)), (134, 156, 164)),
        (0.72, ((0.06, 3, 2.0), (0.03, 7, 0.5)), (92, 130, 96)),
        (0.86, ((0.04, 4, 4.0), (0.02, 9, 2.5)), (58, 96, 54)),
    ):
        ridge = base + sum(size * np.sin(count * turn + phase) for size, count, phase in waves)
        picture[y[:, :, 0] > ridge] = colour
    picture += np.random.default_rng(7).normal(0, 4, (height, period, 1))  # grain, the same in every process
    if not colours:
        picture = picture @ np.array([0.299, 0.587, 0.114])
    elif colours == (4,):
        picture = np.concatenate([picture, np.full((height, period, 1), 255.0)], axis=2)
    whole = np.clip(picture, 0, 255).astype(np.uint8)
    return np.concatenate([whole, whole[:, :width]], axis=1)


class Counter:
    """Every element is the frame's seq, as far as the dtype can hold it."""

    def paint(self, array: Array, seq: int) -> None:
        value = np.array(seq % 2 if array.dtype.kind == "b" else seq)
        array.fill(value.astype(array.dtype)[()])


class Gradient:
    """A ramp along the second axis, or the only one, that moves one step with every frame."""

    def __init__(self) -> None:
        self._twice: Array | None = None

    def paint(self, array: Array, seq: int) -> None:
        axis = min(1, array.ndim - 1)
        extent = array.shape[axis]
        if self._twice is None:
            top = 1 if array.dtype.kind in "fb" else 127 if array.dtype == np.int8 else 255
            ramp = np.linspace(0, top, 2 * extent).reshape(-1, *[1] * (array.ndim - axis - 1))
            ramp = np.concatenate([ramp[::2], ramp[::2]]).astype(array.dtype)
            shape = *array.shape[:axis], 2 * extent, *array.shape[axis + 1 :]
            self._twice = np.ascontiguousarray(np.broadcast_to(ramp, shape))
        start = seq % extent
        array[...] = self._twice[(slice(None),) * axis + (slice(start, start + extent),)]


class Noise:
    """Random values: another piece of one table for every frame."""

    def __init__(self) -> None:
        self._random = np.random.default_rng()
        self._table: Array | None = None

    def paint(self, array: Array, seq: int) -> None:
        if self._table is None:
            self._table = self._values(array.size + _NOISE_SHIFTS, array.dtype)
        start = int(self._random.integers(_NOISE_SHIFTS))
        array[...] = self._table[start : start + array.size].reshape(array.shape)

    def _values(self, size: int, dtype: np.dtype[Any]) -> Array:
        if dtype.kind == "f":
            return self._random.random(size).astype(dtype)
        if dtype.kind == "b":
            return self._random.integers(0, 2, size, dtype=dtype)
        limits = np.iinfo(dtype)
        return self._random.integers(limits.min, limits.max, size, dtype=dtype, endpoint=True)


PATTERNS: Final[dict[str, type[Painter]]] = {
    "counter": Counter,
    "gradient": Gradient,
    "noise": Noise,
    "checked": Checked,
    "scene": Scene,
}


def checkable(shape: tuple[int, ...]) -> Pattern:
    """A pattern for frames of bytes: a picture where the shape allows it."""
    return Scene() if Scene.suits(shape) else Checked()


def _first_difference(found: npt.NDArray[np.uint8], expected: npt.NDArray[np.uint8]) -> Difference | None:
    """None where a frame was overwritten between the two comparisons, and is right by now."""
    differing = np.flatnonzero(found != expected)
    if not differing.size:
        return None
    offset = int(differing[0])
    return Difference(offset, int(expected[offset]), int(found[offset]))


def _memory_of(array: Array) -> npt.NDArray[np.uint8]:
    """The bytes of a dense array in the order of memory."""
    return (array if array.flags.c_contiguous else array.T).reshape(-1).view(np.uint8)


def _key(seq: int) -> Words:
    return _mix(np.array([_OF_SEQS + seq], np.uint64))


def _mix(values: Words) -> Words:
    """The finaliser of splitmix64: neighbouring values differ in almost every byte."""
    mixed = values + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
