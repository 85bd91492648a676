# SPDX-License-Identifier: Apache-2.0
"""When a held back batch may begin."""

from __future__ import annotations

from tensorpool.lake.trigger_delay import MAX_DELAY_S, TriggerDelay


def test_a_batch_waits_for_enough_frames_or_for_long_enough() -> None:
    delay = TriggerDelay(10, 5.0)
    assert not delay.is_due(3, now_s=100.0)
    assert not delay.is_due(9, now_s=104.9)
    assert delay.is_due(9, now_s=105.0), "the first has waited long enough"
    assert not delay.is_due(1, now_s=105.1), "and the next batch waits anew"
    assert delay.is_due(10, now_s=105.2)
    assert not delay.is_due(0, now_s=200.0)
    assert not delay.is_due(1, now_s=300.0), "without frames nothing waits"


def test_without_a_time_a_second_is_long_enough() -> None:
    delay = TriggerDelay(10, None)
    assert not delay.is_due(1, now_s=0.0)
    assert delay.is_due(1, now_s=MAX_DELAY_S)
