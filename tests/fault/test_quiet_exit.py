# SPDX-License-Identifier: Apache-2.0
"""A program that ends, in whatever order, has nothing to warn about: it ended its media driver and did not lose it."""

from __future__ import annotations

import pytest

from tests.support.processes import run_script

BEGIN = """
import time
import tensorpool as tp

def attached():
    pool = tp.local(overrides={"profiles.default": {
        "header_nslots": 8, "payload_pools": [{"pool_id": 1, "stride_bytes": 4096}]
    }})
    client = pool.connect()
    return pool, client, client.producer("camera", create=True), client.consumer("camera")
"""
IN_ORDER = """
for _ in range(6):
    pool, client, producer, consumer = attached()
    for each in (consumer, producer, client, pool):
        each.close()
"""
POOL_FIRST = """
for _ in range(10):
    pool, client, producer, consumer = attached()
    time.sleep(0.3)  # a client that has nothing to do looks less often
    pool.close()
    while client._conductor._connection.client is not None:  # until the client has noticed
        time.sleep(0.01)
    client.close()
"""
FORGOTTEN = "kept = [attached() for _ in range(3)]"
DRIVER_ONLY = "kept = [tp.local() for _ in range(3)]"


@pytest.mark.parametrize("end", [IN_ORDER, POOL_FIRST, FORGOTTEN, DRIVER_ONLY], ids=["with", "pool", "exit", "driver"])
def test_the_end_of_a_program_prints_nothing(end: str) -> None:
    """Closed in order, the driver before its clients, or not at all: several times, since it is a matter of moments."""
    assert run_script(BEGIN + end, PYTHONWARNINGS="ignore") == (0, "")
