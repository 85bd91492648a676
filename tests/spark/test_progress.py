# SPDX-License-Identifier: Apache-2.0
"""Progress reports as Spark gives them, on a session of its own and over Spark Connect."""

from __future__ import annotations

from typing import Any

import pytest
from pyspark.sql.streaming.listener import StreamingQueryProgress

from tensorpool.spark import Progress, progress_of, total_of

METRICS = {"nbytes": 320, "dropped": 0}
# As a Connect server of Spark 4.3 sends it: the values beside their schema, and offsets as text.
OVER_CONNECT = {
    "values": [320, 0],
    "schema": {
        "type": "struct",
        "fields": [{"name": name, "type": "long", "nullable": False, "metadata": {}} for name in METRICS],
    },
}


LIVE = '{"20000": {"epoch": 1794977399628233141, "seq": %d}}'


def report(observed: Any, offset: str = LIVE, start: str | None = LIVE % 3) -> dict[str, Any]:
    source = {
        "description": "PythonMicroBatchStream",
        "startOffset": start,
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


def test_gaps_of_the_first_batch_and_of_a_lake_are_those_that_the_rows_say() -> None:
    """A first batch has no start from which to count, and a lake's offsets count commits; its lag does too."""
    dropped = METRICS | {"dropped": 7}
    expected = Progress(frames=5, gaps=7, lag=2, nbytes=320, seconds=2.402)
    assert progress_of(report(dropped, start=None)) == expected
    assert progress_of(report(dropped, '{"commit": %d}', '{"commit": 3}')) == expected


def test_sources_add_up_and_those_of_others_do_not_count() -> None:
    """In one report: two streams that are joined, and a table of another source."""
    reported = report(METRICS)
    reported["sources"] += [
        *reported["sources"],
        reported["sources"][0] | {"endOffset": 17, "startOffset": 3, "latestOffset": 20},
    ]
    assert progress_of(reported) == Progress(frames=10, gaps=2, lag=4, nbytes=320, seconds=2.402)


def test_a_query_without_a_batch_has_done_nothing_yet() -> None:
    assert progress_of(None) == Progress()
