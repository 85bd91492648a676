# SPDX-License-Identifier: Apache-2.0
"""What Spark wrote into a lake is played back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from pyspark.sql import SparkSession

import tensorpool as tp
from tensorpool.client import Client
from tensorpool.lake import Lake
from tests.lake.test_replay import client, deployment, play
from tests.spark.conftest import read
from tests.support.frame_rows import MS, SECOND_NS

__all__ = ["client", "deployment"]  # a driver of the replay's own


def test_a_live_stream_that_spark_recorded_is_played_as_it_was_published(
    spark: SparkSession, pool: tp.Local, client: Client, stream: Callable[..., int], tmp_path: Path
) -> None:
    """From a producer through the live source and the lake's writer to a consumer, with a gap that stays one."""
    stream_id, images = stream(), np.random.default_rng(5).integers(0, 60_000, (12, 8, 9), np.int32)
    seqs = [seq + 4 * (seq > 6) for seq in range(len(images))]
    with pool.connect() as camera, camera.producer(stream_id, create=True) as producer:
        for seq, image in zip(seqs, images, strict=True):
            producer.publish(image, seq=seq, timestamp_ns=SECOND_NS + seq * MS, meta_version=3)
        read(spark, pool, stream_id).write.format("tensorpool.lake").mode("append").save(str(tmp_path / "lake"))
    lake = Lake.open(tmp_path / "lake")
    ((received,), summary, _) = play(lake, client, frames=12, recorded=[stream_id], speed=1.0, timestamps="preserve")
    assert [frame.row["seq"] for frame in received] == seqs
    assert [frame.row["timestamp_ns"] for frame in received] == [SECOND_NS + seq * MS for seq in seqs]
    assert {frame.row["meta_version"] for frame in received} == {3}
    np.testing.assert_array_equal([frame.array for frame in received], images)
    assert summary.streams[0].dropped == {}
