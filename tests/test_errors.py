# SPDX-License-Identifier: Apache-2.0
"""Errors say what, which and what to do, and survive the way between processes."""

from __future__ import annotations

import pickle

import pytest

from tensorpool import errors


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (
            errors.ConfigError("shm.namespace", "a/b", "[A-Za-z0-9._-]+"),
            "shm.namespace = 'a/b' is not usable; accepted",
        ),
        (errors.DecodeError("FrameDescriptor ends early", 20), "FrameDescriptor ends early (at byte 20)"),
        (
            errors.RegionRejected("shm:file?path=/x", "regular file", "a FIFO"),
            "shm:file?path=/x: regular file: a FIFO",
        ),
        (errors.TransportError("no driver", 7), "no driver"),
        (errors.FrameTooLarge('stream "cam" (7)', 9, 8), 'a frame of 9 bytes fits no pool of stream "cam" (7): the'),
        (errors.RingRefused("cam", "too large"), "producer of stream cam: REJECTED: too large"),
        (errors.Closed("publication is closed"), "publication is closed"),
        (errors.LocalProtocolError("one writer"), "one writer"),
    ],
)
def test_an_error_arrives_in_another_process_as_it_was(error: errors.TensorPoolError, text: str) -> None:
    """Text, type and attributes are the same after pickling."""
    assert str(error).startswith(text)
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy), vars(copy)) == (type(error), str(error), vars(error))
