# SPDX-License-Identifier: Apache-2.0
"""Synthetic frames: what each pattern shows, and that the checked one catches every wrong byte."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tensorpool.cli.options import DTYPES
from tensorpool.cli.test_pattern import PATTERNS, Checked, Scene, checkable
from tensorpool.errors import ConfigError

SHAPES = [(1,), (7,), (64,), (5, 9), (4, 6, 3), (2, 3, 4, 5)]


@pytest.mark.parametrize("pattern", [name for name in PATTERNS if name != "scene"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("order", ["C", "F"])
def test_every_pattern_paints_every_dtype_shape_and_order(pattern: str, dtype: str, order: str) -> None:
    """All of the array is painted, nothing warns, and it stays as it was laid out."""
    for shape in SHAPES:
        painter = PATTERNS[pattern]()
        array = np.zeros(shape, dtype, order=order)  # type: ignore[call-overload]
        before = array.ctypes.data, array.strides
        for seq in (0, 1, 2**40):
            painter.paint(array, seq)
        assert (array.ctypes.data, array.strides) == before


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("order", ["C", "F"])
def test_checked_frames_are_right_for_their_seq_only(dtype: str, order: str) -> None:
    """A frame of another seq differs, whatever its dtype, shape and order."""
    pattern = Checked()
    for shape in SHAPES:
        array = np.empty(shape, dtype, order=order)  # type: ignore[call-overload]
        pattern.paint(array, 41)
        assert Checked().find(array, 41) is None
        if array.nbytes >= 8:
            assert pattern.find(array, 42) is not None


def test_checked_finds_each_wrong_byte_and_says_where() -> None:
    """One flipped bit anywhere is found at its own offset, in whole words and in the rest."""
    pattern, pixels = Checked(), np.empty(29, np.uint8)
    pattern.paint(pixels, 5)
    for offset in range(pixels.nbytes):
        right = int(pixels[offset])
        pixels[offset] ^= 4
        difference = pattern.find(pixels, 5)
        assert difference is not None
        assert (difference.offset, difference.expected, difference.found) == (offset, right, right ^ 4)
        pixels[offset] = right


def test_checked_tells_places_and_seqs_apart() -> None:
    """Words of different places, and of neighbouring frames, differ: a frame made of two is never right."""
    pattern = Checked()
    frames = np.empty((50, 4096), np.uint8)
    for seq, frame in enumerate(frames):
        pattern.paint(frame, seq)
    words = frames.view(np.uint64)
    assert np.unique(words).size == words.size


@pytest.mark.parametrize("shape", [(32, 48), (40, 64, 3), (33, 47, 4)])
def test_a_scene_is_another_picture_with_every_frame_and_known_again(shape: tuple[int, ...]) -> None:
    """Also far on, where landscape and sun have come round; and each wrong byte is found at its place."""
    scene, picture = Scene(), np.empty(shape, np.uint8)
    for seq in (0, 1, 2 * shape[1], 2**40):
        scene.paint(picture, seq)
        assert Scene().find(picture, seq) is None
        for other in (seq + 1, seq + 2 * shape[1]):
            assert scene.find(picture, other) is not None
        for offset in (0, picture.size // 2, picture.size - 1):
            picture.reshape(-1)[offset] ^= 4
            difference = scene.find(picture, seq)
            assert difference is not None
            assert difference.offset == offset
            picture.reshape(-1)[offset] ^= 4
    assert np.unique(picture).size > 50


@pytest.mark.parametrize(
    "array",
    [np.empty(64, np.uint8), np.empty((40, 40), np.uint16), np.empty((40, 40, 2), np.uint8), np.empty((8, 8), "u1")],
)
def test_a_scene_needs_a_picture(array: np.ndarray[Any, Any]) -> None:
    """And says so; the demo falls back to what suits any shape."""
    with pytest.raises(ConfigError, match="a picture of bytes"):
        Scene().paint(array, 0)
    assert isinstance(checkable((480, 640, 3)), Scene)
    assert isinstance(checkable((64,)), Checked)


def test_counter_and_gradient_move_with_every_frame() -> None:
    """`counter` is the seq, wrapped at the dtype's limit; `gradient` is the same ramp one step on."""
    array = np.empty((3, 10), np.uint8)
    PATTERNS["counter"]().paint(array, 300)
    assert (array == 44).all()
    gradient, first, second = PATTERNS["gradient"](), array, np.empty_like(array)
    gradient.paint(first, 0)
    gradient.paint(second, 1)
    assert np.unique(first).size == 10
    assert (np.roll(first, -1, axis=1) == second).all()
