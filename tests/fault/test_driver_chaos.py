# SPDX-License-Identifier: Apache-2.0
"""Producers, consumers and the driver are killed at random moments.

TENSORPOOL_SEED repeats a run as far as the machine does.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tensorpool import aeron
from tests.levels import SEED, SOAK
from tests.support.chaos import TOKEN, Chaos
from tests.support.driver_process import Deployment

ROUNDS = 20 * SOAK  # one kill each
STREAMS = range(35_000, 35_003)


@pytest.mark.timeout(240 + ROUNDS)
def test_random_kills_leave_no_file_no_lease_and_no_failed_attach(
    shared_media_driver: aeron.MediaDriver, shm_dir: Path
) -> None:
    """Whichever process dies, and when: epochs only grow, every client attaches again, and no file is left."""
    print(f"seed {SEED}")
    deployment = Deployment(
        shm_dir, shared_media_driver.aeron_dir, streams=STREAMS, policies={"max_leases": 60, "shutdown_token": TOKEN}
    )
    with Chaos(deployment, STREAMS, SEED) as chaos:
        started_s = time.monotonic()
        rounds = chaos.run(ROUNDS)
        print(f"{rounds} kills in {time.monotonic() - started_s:.1f} s: {dict(chaos.kills)}")
        chaos.settle()
        print(f"{chaos.bumps} epochs, {chaos.grants} grants, clients: {dict(chaos.diary())}")
