# SPDX-License-Identifier: Apache-2.0
"""What is said of lost frames: once per change, with sums, whatever the number of batches."""

from __future__ import annotations

import logging

import pytest

from tensorpool.lake.losses import LossLog
from tensorpool.lake.offsets import Loss
from tensorpool.logs import get_logger


def lost(lo: int, frames: int | None = 5, stream_id: int = 10_000) -> Loss:
    return Loss(stream_id, 1, lo, None if frames is None else lo + frames, "overwritten")


def test_a_stream_that_loses_frames_all_the_time_is_logged_in_sums(caplog: pytest.LogCaptureFixture) -> None:
    """A line at the beginning, one every ten seconds, one when it is over; the next loss begins anew."""
    log = LossLog(get_logger("spark"))
    with caplog.at_level(logging.WARNING):
        for tenth in range(300):
            log.note([lost(10 * tenth)], tenth / 10)
        for tenth in range(300, 500):
            log.note([], tenth / 10)
        log.note([lost(7000), lost(7010)], 50.0)
    assert [record.message for record in caplog.records] == [
        "data_loss loss='stream 10000, epoch 1: frames 0 to 4 are lost (overwritten)'",
        "data_loss_goes_on stream_id=10000 frames=505 ranges=101",
        "data_loss_goes_on stream_id=10000 frames=1005 ranges=201",
        "data_loss_goes_on stream_id=10000 frames=1500 ranges=300",
        "data_loss_over stream_id=10000 frames=1500 ranges=300",
        "data_loss loss='stream 10000, epoch 1: frames 7000 to 7004 are lost (overwritten) and 1 more ranges'",
    ]


def test_streams_are_logged_separately_and_a_single_loss_once(caplog: pytest.LogCaptureFixture) -> None:
    log = LossLog(get_logger("spark"))
    with caplog.at_level(logging.WARNING):
        log.note([lost(0), lost(3, None, stream_id=7)], 0.0)
        for second in range(1, 11):
            log.note([], second)
    assert [record.message.split()[0] for record in caplog.records] == [
        "data_loss",
        "data_loss",
        "data_loss_over",
        "data_loss_over",
    ]
