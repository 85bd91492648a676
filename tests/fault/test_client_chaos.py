# SPDX-License-Identifier: Apache-2.0
"""Producers, consumers, the driver and the media driver are killed and stopped at random while frames flow.

TENSORPOOL_SEED repeats a run as far as the machine does.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.levels import SEED, SOAK
from tests.support.stream_chaos import WITHIN_S, StreamChaos

SECONDS = 10 * SOAK
STREAMS = (41_000, 41_001)


@pytest.mark.timeout(SECONDS + 3 * WITHIN_S)
def test_produced_is_received_plus_dropped_whichever_process_is_killed_or_stopped(shm_dir: Path) -> None:
    """No loop sees an exception, no torn frame is accepted, all recover by themselves, every frame is accounted for.

    SIGKILL, and SIGSTOP for 0.2 to 8 s, of producers, consumers, the driver and the media driver; afterwards nothing is
    left of them in /dev/shm.
    """
    print(f"seed {SEED}")
    with StreamChaos(shm_dir, STREAMS, SEED) as chaos:
        chaos.run(SECONDS)
        figures = chaos.settle()
    print(figures)
    assert figures["received"] > 0
