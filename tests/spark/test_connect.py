# SPDX-License-Identifier: Apache-2.0
"""Spark Connect: a client without a JVM, and a server in which everything else happens.

The server is Spark's own, on a port of its own, in the JVM that all tests share. The client is a process: pyspark
decides once for all whether its functions make plans for a server or objects of a JVM.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

import tensorpool as tp
from tensorpool.client import Client
from tests.support.deployment import consumer_leases, options_of, pattern, publish
from tests.support.frame_rows import make_lake, rows_over_time
from tests.support.processes import run_script, wait_until

FRAMES = 12
MISSING = (4, 5)

CLIENT = """
import json, sys
from pyspark.errors import StreamingQueryException
from tensorpool.spark import progress_of, session, with_metrics
from tensorpool.spark.analytics import stats
from tensorpool.spark.functions import frame_stats, frame_udf, gaps

url, settings, lake, folder = sys.argv[1:5]
settings = json.loads(settings)
spark = session(url)

@frame_udf("bigint")
def largest(array):
    return array.max()

live = spark.read.format("tensorpool").options(**settings).load()
recorded = spark.read.format("tensorpool.lake").load(lake)
found = {
    "live": {row.seq: row.largest for row in live.select("seq", largest().alias("largest")).collect()},
    "measured": {row.seq: row.mean for row in frame_stats(live).select("seq", "mean").collect()},
    "recorded": sorted(row.seq for row in recorded.where("seq % 2 = 0").select("seq").collect()),
    "figures": [row.asDict() for row in stats(lake).select("frames", "lost").collect()],
}

def run(frames, name):
    writer = frames.writeStream.format("memory").queryName(name).trigger(availableNow=True)
    for _ in range(5):  # Spark gives a process of queries with state ten seconds to start; a busy machine needs more
        query = writer.option("checkpointLocation", folder + "/" + name).start()
        try:
            assert query.awaitTermination(180), query.exception()
            break
        except StreamingQueryException as error:
            if "Python worker failed to connect back" not in str(error):
                raise
    rows = spark.table(name).collect()
    found[name] = {"rows": len(rows), "last": rows[-1].asDict()}
    progress = progress_of(query)
    found[name]["progress"] = [progress.frames, progress.gaps, progress.lag, progress.nbytes]

streamed = spark.readStream.format("tensorpool").options(**settings, startingOffsets="earliest").load()
run(with_metrics(streamed).select("seq"), "streamed")
commits = spark.readStream.format("tensorpool.lake").load(lake)
run(gaps(with_metrics(commits)), "missing")
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def server(spark: SparkSession) -> Iterator[str]:
    """The address of a Connect server."""
    package: Any = spark._jvm.org.apache.spark.sql.connect.service  # type: ignore[union-attr]
    service: Any = getattr(getattr(package, "SparkConnectService$"), "MODULE$")
    service.start(spark.sparkContext._jsc.sc())
    yield f"sc://127.0.0.1:{service.localPort()}"
    nothing: Any = spark._jvm.scala.Option.empty()  # type: ignore[union-attr]
    service.stop(nothing, nothing)


def test_both_formats_functions_and_progress_over_connect(
    server: str, pool: tp.Local, client: Client, stream: Callable[..., int], tmp_path: Path
) -> None:
    """Live and recorded, at once and as streams; functions with and without state; and the lease is given back."""
    rows = [row for row in rows_over_time(FRAMES) if row["seq"] not in MISSING]
    lake = make_lake(tmp_path / "lake", rows)
    stream_id = stream()
    with publish(client, stream_id, FRAMES):
        settings = json.dumps(options_of(pool) | {"streams": str(stream_id)})
        code, output = run_script(CLIENT, server, settings, str(lake.path), str(tmp_path), timeout_s=280)
        assert code == 0, output
        found = json.loads(output.splitlines()[-1])
        wait_until(lambda: consumer_leases(pool, stream_id) <= 1, "the query's lease is given back")
    frames = {str(number): pattern(number) for number in range(FRAMES)}
    assert found["live"] == {seq: frame.max() for seq, frame in frames.items()}
    assert found["measured"] == {seq: pytest.approx(frame.mean()) for seq, frame in frames.items()}
    assert found["recorded"] == [0, 2, 6, 8, 10]
    assert found["figures"] == [{"frames": FRAMES - 2, "lost": 2}]
    streamed, missing = found["streamed"], found["missing"]
    assert (streamed["rows"], streamed["progress"]) == (FRAMES, [FRAMES, 0, 0, FRAMES * 64])
    assert missing["last"] == {"stream_id": 10_000, "epoch": 1, "lo": 4, "hi": 6, "frames": 2}
    assert (missing["rows"], missing["progress"]) == (1, [FRAMES - 2, 0, 0, (FRAMES - 2) * 6])
