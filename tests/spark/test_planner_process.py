# SPDX-License-Identifier: Apache-2.0
"""The process that plans a query: it ends when Spark tells it to, however often, and gives back what it holds."""

from __future__ import annotations

import json
import signal

import pytest

import tensorpool as tp
from tensorpool.client import Client
from tests.support.deployment import consumer_leases, new_stream, options_of, publish
from tests.support.processes import Process, wait_until

PLANNER = """
import json, sys
from tensorpool.lake.live_options import source_options
from tensorpool.lake.query_planner import Planner
from tensorpool.spark.planner_process import exit_in_order
planner = Planner(source_options(json.loads(sys.argv[1])))
exit_in_order(planner.close)
print("ready", flush=True)
while True:
    planner.held()
"""


@pytest.mark.parametrize("times", [1, 20])
def test_a_planner_ends_on_request_however_often(pool: tp.Local, client: Client, times: int) -> None:
    """Spark never calls `stop`; it sends SIGTERM, and again while we are at it."""
    stream_id = new_stream()
    publish(client, stream_id, 3)
    options = json.dumps({"streams": str(stream_id), **options_of(pool)})
    with Process("-c", PLANNER, options) as planner:
        assert planner.read_line() == "ready"
        wait_until(lambda: consumer_leases(pool, stream_id) == 1, "it has its lease")
        for _ in range(times):
            planner.send(signal.SIGTERM)
        code, output = planner.finish()
    assert code == 128 + signal.SIGTERM, output
    assert consumer_leases(pool, stream_id) == 0
