# SPDX-License-Identifier: Apache-2.0
"""Every process that takes part in a bridge is killed and started again; the far consumer receives frames again.

`benchmarks/bridge_soak.py --kills` is the long form; TENSORPOOL_SEED repeats an order.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.levels import SEED
from tests.support.bridge_chaos import POLICIES, BridgeChaos
from tests.support.crossing import crossing


@pytest.mark.timeout(300)
@pytest.mark.spec("BRG-8-01", "BRG-8-06")
def test_a_consumer_on_the_far_side_recovers_whichever_process_was_killed(shm_dir: Path) -> None:
    """kill -9 of either bridge, either SHM driver, either media driver and the producer, in random order.

    No user's loop sees an exception, no frame is torn or in the wrong place, and frames arrive again by themselves.
    """
    print(f"seed {SEED}")
    with crossing(shm_dir, rate_hz=15, policies=POLICIES) as hosts:
        chaos = BridgeChaos(hosts, random.Random(SEED))
        chaos.hit_everybody()
        print(chaos.settle())
