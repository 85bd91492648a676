# SPDX-License-Identifier: Apache-2.0
"""The demo's live query is started again when Spark gives up its worker."""

from __future__ import annotations

import multiprocessing as mp
import threading
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

import tensorpool as tp
from tensorpool.cli import demo_recorder
from tensorpool.cli.demo_recorder import MAX_STARTS
from tensorpool.client import Client
from tensorpool.spark.recorder import Recorder, Settings
from tests.support.deployment import look_until, new_stream
from tests.support.lakes import options_of

PUBLISHED = 4711


def test_a_live_query_that_fails_is_started_again_a_few_times(
    spark: SparkSession, pool: tp.Local, client: Client, tmp_path: Path
) -> None:
    """The demo waits for its statistics, which the last start delivers; after MAX_STARTS it is not started again."""
    queries: list[StreamingQuery] = []
    numbers = spark.readStream.format("rate").option("rowsPerSecond", 50).load()

    def start(live: demo_recorder._LiveQuery) -> StreamingQuery:
        number = len(queries) + 1

        def show(batch: DataFrame, _: int) -> None:
            if number < MAX_STARTS:
                raise RuntimeError("a worker was given up")
            live.statistics = f"query {number}"

        checkpoint = tmp_path / f"checkpoint-{number}"
        writer = numbers.writeStream.foreachBatch(show).option("checkpointLocation", str(checkpoint))
        queries.append(writer.start())
        return queries[-1]

    demo, theirs = mp.Pipe()
    reports: list[demo_recorder.RecorderReport] = []

    def play() -> None:
        """The demo: it receives reports until the recorder records, then sends how many frames there were."""
        while not reports or not reports[-1].is_recording:
            reports.append(demo.recv())
        demo.send(PUBLISHED)

    stream = new_stream()
    settings = Settings(is_warmed_up=False, **options_of(pool))
    with client.producer(stream, create=True):
        recorder = Recorder(spark, [stream], tmp_path / "lake", settings=settings)
        listener = threading.Thread(target=play, daemon=True)
        listener.start()
        live = demo_recorder._LiveQuery(start)
        try:
            assert demo_recorder._follow(recorder, live, theirs) == PUBLISHED
            listener.join()
            assert reports[-1].live == f"query {MAX_STARTS}"
            assert [query.exception() is None for query in queries] == [False] * (MAX_STARTS - 1) + [True]
            queries[-1].stop()
            look_until(lambda: not queries[-1].isActive, "the last one has ended")
            live.restart_if_ended()
            assert len(queries) == MAX_STARTS
        finally:
            live.stop()
            recorder.close()
