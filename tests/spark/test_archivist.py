# SPDX-License-Identifier: Apache-2.0
"""The demo's live query, where Spark gives it up."""

from __future__ import annotations

import multiprocessing as mp
import threading
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming import StreamingQuery

import tensorpool as tp
from tensorpool.cli import archivist
from tensorpool.cli.archivist import WATCHES
from tensorpool.client import Client
from tensorpool.spark.recorder import Recorder, Settings
from tests.spark.conftest import look_until, new_stream
from tests.support.lakes import options_of

PUBLISHED = 4711


def test_a_live_query_that_fails_is_started_again_a_few_times(
    spark: SparkSession, pool: tp.Local, client: Client, tmp_path: Path
) -> None:
    """The demo waits for what it says, and the last one says it; one that ends after it is the last all the same."""
    queries: list[StreamingQuery] = []
    numbers = spark.readStream.format("rate").option("rowsPerSecond", 50).load()

    def start(live: archivist._Live) -> StreamingQuery:
        number = len(queries) + 1

        def show(batch: DataFrame, _: int) -> None:
            if number < WATCHES:
                raise RuntimeError("a worker was given up")
            live.words = f"query {number}"

        checkpoint = tmp_path / f"checkpoint-{number}"
        writer = numbers.writeStream.foreachBatch(show).option("checkpointLocation", str(checkpoint))
        queries.append(writer.start())
        return queries[-1]

    demo, theirs = mp.Pipe()
    heard: list[archivist.Archive] = []

    def play() -> None:
        """The demo: it listens until it is recorded, and says how many frames there were."""
        while not heard or not heard[-1].is_recording:
            heard.append(demo.recv())
        demo.send(PUBLISHED)

    stream = new_stream()
    settings = Settings(is_warmed_up=False, **options_of(pool))
    with client.producer(stream, create=True):
        recorder = Recorder(spark, [stream], tmp_path / "lake", settings=settings)
        listener = threading.Thread(target=play, daemon=True)
        listener.start()
        live = archivist._Live(start)
        try:
            assert archivist._follow(recorder, live, theirs) == PUBLISHED
            listener.join()
            assert heard[-1].live == f"query {WATCHES}"
            assert [query.exception() is None for query in queries] == [False] * (WATCHES - 1) + [True]
            queries[-1].stop()
            look_until(lambda: not queries[-1].isActive, "the last one has ended")
            live.tend()
            assert len(queries) == WATCHES
        finally:
            live.stop()
            recorder.close()
