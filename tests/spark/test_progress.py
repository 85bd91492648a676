# SPDX-License-Identifier: Apache-2.0
"""Progress reports as Spark gives them, on a session of its own and over Spark Connect."""

from __future__ import annotations

from typing import Any

import pytest
from pyspark.sql.streaming.listener import StreamingQueryProgress

from tensorpool.spark import Progress, progress_of, total_of

METRICS = {"frames": 5, "nbytes": 320, "dropped": 0}
# As a Connect server of Spark 4.3 sends it: the values beside their schema, and offsets as text.
OVER_CONNECT = {
    "values": [5, 320, 0],
    "schema": {
        "type": "struct",
        "fields": [{"name": name, "type": "long", "nullable": False, "metadata": {}} for name in METRICS],
    },
}


def report(observed: Any) -> dict[str, Any]:
    offset = '{"20000": {"epoch": 1794977399628233141, "seq": %d}}'
    source = {
        "description": "PythonMicroBatchStream",
        "startOffset": offset % 3,
        "endOffset": offset % 9,
        "latestOffset": offset % 11,
        "numInputRows": 5,
        "inputRowsPerSecond": 0.0,
        "processedRowsPerSecond": 0.2,
    }
    return {
        "id": "8409e7b1-8335-4375-b307-5b35994c64fb",
        "runId": "5f64d034-c2ea-475e-a866-8aa476e4b9c0",
        "name": None,
        "timestamp": "2026-11-18T04:35:33.128Z",
        "batchId": 0,
        "batchDuration": 2402,
        "numInputRows": 5,
        "stateOperators": [],
        "sources": [source],
        "sink": {"description": "noop", "numOutputRows": 5},
        "observedMetrics": {"tensorpool": observed},
    }


@pytest.mark.parametrize("observed", [METRICS, OVER_CONNECT], ids=["own session", "over Connect"])
@pytest.mark.parametrize("as_spark_does", [dict, StreamingQueryProgress.fromJson], ids=["JSON", "object"])
def test_bytes_are_found_wherever_the_report_comes_from(observed: Any, as_spark_does: Any) -> None:
    reported = as_spark_does(report(observed))
    expected = Progress(frames=5, gaps=1, lag=2, nbytes=320, seconds=2.402)
    assert progress_of(reported) == expected
    assert total_of([reported, reported]).nbytes == 640
