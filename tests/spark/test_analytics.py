# SPDX-License-Identifier: Apache-2.0
"""Figures of recordings and of live streams: right to the last digit, on batches, streams and lakes."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pyspark.sql import DataFrame, SparkSession

import tensorpool as tp
from tensorpool.client import Client
from tensorpool.errors import ConfigError
from tensorpool.spark.analytics import frames_of, qos, stats
from tensorpool.spark.columns import FRAME_DDL
from tensorpool.spark.functions import frame_stats, frame_udf, gaps
from tests.spark.conftest import read
from tests.support.deployment import new_stream, publish
from tests.support.frame_rows import MS, SECOND_NS, make_lake, row, rows_over_time, source, table, write_in_order

type Rows = list[dict[str, Any]]


def frames(spark: SparkSession, rows: Rows) -> DataFrame:
    return spark.createDataFrame(table(rows), FRAME_DDL)


def as_dicts(found: DataFrame) -> Rows:
    return sorted((one.asDict() for one in found.collect()), key=lambda one: (one["stream_id"], one["start_ns"]))


def noisy(count: int, **fields: Any) -> Rows:
    """Frames of different sizes, some of them missing."""
    rng = np.random.default_rng(3)
    rows = rows_over_time(count, **fields)
    for one in rows:
        image = rng.integers(0, 65_536, (int(rng.integers(1, 4)), 50), np.uint16)
        one |= row(image, **{name: one[name] for name in ("seq", "timestamp_ns", "received_ns", "stream_id")})
    return [one for one in rows if one["seq"] not in (5, 6, 120)]


def expected(rows: Rows) -> dict[str, Any]:
    values = np.concatenate([np.frombuffer(one["payload"], np.uint16) for one in rows]).astype(np.float64)
    return {
        "frames": len(rows),
        "bytes": sum(one["nbytes"] for one in rows),
        "values": values.size,
        "min": values.min(),
        "max": values.max(),
        "mean": pytest.approx(values.mean(), rel=1e-12),
        "std": pytest.approx(values.std(), rel=1e-12),
        "saturated": pytest.approx((values == 65_535).mean()),
    }


def test_figures_of_a_whole_recording(spark: SparkSession) -> None:
    """Per stream: rates from the first frame to the last, breaks in the seqs, latency, and the pixels of all frames."""
    rows = noisy(200) + rows_over_time(3, stream_id=7)
    other, found = as_dicts(stats(frames(spark, rows)))
    own = [one for one in rows if one["stream_id"] == 10_000]
    assert found == found | expected(own)
    assert (found["gaps"], found["lost"], found["start_ns"]) == (2, 3, SECOND_NS)
    assert (found["seconds"], found["hz"]) == (pytest.approx(1.99), pytest.approx(196 / 1.99))
    assert (found["p50_ms"], found["p99_ms"], found["max_ms"]) == (2.0, 2.0, 2.0)
    assert (other["stream_id"], other["frames"], other["hz"]) == (7, 3, pytest.approx(100))


def test_figures_of_windows_add_up(spark: SparkSession) -> None:
    """Each window has what its frames have; a gap belongs to the frame after it. Measured frames serve twice."""
    rows = noisy(200)
    measured = frame_stats(frames(spark, rows))
    first, second = as_dicts(stats(measured, "1s"))
    for found, second_ns in ((first, SECOND_NS), (second, 2 * SECOND_NS)):
        own = [one for one in rows if 0 <= one["timestamp_ns"] - second_ns < SECOND_NS]
        assert found == found | expected(own)
        assert (found["start_ns"], found["seconds"], found["hz"]) == (second_ns, 1.0, len(own))
    assert (first["gaps"], first["lost"], second["gaps"], second["lost"]) == (1, 2, 1, 1)
    assert sum(one["frames"] for one in as_dicts(stats(measured, "100ms"))) == len(rows)


def test_figures_do_not_lose_digits(spark: SparkSession) -> None:
    """Integers beyond 2^53, and a spread that is tiny beside its mean."""
    base = 2**63
    rows = [row(np.array([base + number, base + number + 4], np.uint64), seq=number) for number in range(4)]
    (found,) = as_dicts(stats(frames(spark, rows)))
    assert (found["min_int"], found["max_int"]) == (Decimal(base), Decimal(base + 7))
    assert found["saturated"] == 0
    floats = [row(np.array([1e9 + number / 8, 1e9 + 1 + number / 8]), seq=number) for number in range(4)]
    (found,) = as_dicts(stats(frames(spark, floats)))
    values = np.concatenate([np.frombuffer(one["payload"]) for one in floats])
    assert found["std"] == pytest.approx((values - 1e9).std(), rel=1e-9)
    assert found["min_int"] is None


def test_figures_where_there_is_little_to_tell(spark: SparkSession) -> None:
    """One frame, no capture time, no values, NaN: nulls, and never a wrong number."""
    rows = [row(np.full(3, np.nan, np.float32), seq=0)]
    (found,) = as_dicts(stats(frames(spark, rows)))
    assert [found[name] for name in ("hz", "p50_ms", "min", "mean", "max", "std", "saturated")] == [None] * 7
    assert (found["frames"], found["values"], found["nan"], found["lost"]) == (1, 0, 3, 0)
    assert as_dicts(stats(frames(spark, []))) == []


def test_figures_of_a_lake(spark: SparkSession, tmp_path: Path) -> None:
    """By path or by object, of all streams or of some; an unknown one is refused."""
    both = noisy(60) + rows_over_time(10, stream_id=7)
    lake = make_lake(tmp_path / "lake", both, metadata=[source(7, "camera/side")])
    small, large = as_dicts(stats(str(lake.path)))
    assert large == large | expected(noisy(60))
    assert (small["stream_id"], small["frames"]) == (7, 10)
    with pytest.raises(ConfigError, match="a recorded stream: camera/side \\(7\\), 10000"):
        stats(lake, streams=(8,))
    with pytest.raises(ConfigError, match="have no names of streams"):
        frames_of(spark.range(1), ("camera/side",))
    with pytest.raises(ConfigError, match="record to it first"):
        stats(tmp_path)
    assert {one.stream_id for one in frames_of(lake, ("camera/side",)).collect()} == {7}
    named = spark.read.format("tensorpool.lake").option("streams", "camera/side").load(str(lake.path))
    assert named.count() == 10


def test_figures_of_a_stream(spark: SparkSession, tmp_path: Path) -> None:
    """Window by window, as they become final; without a window there is no end to wait for."""
    rows = noisy(200)
    for one in rows:
        one["dropped_before"] = {7: 2, 121: 1}.get(one["seq"], 0)
    folder = tmp_path / "in"
    folder.mkdir()
    late = [row(seq=300, timestamp_ns=90 * SECOND_NS, received_ns=90 * SECOND_NS)]
    write_in_order(folder, map(table, (rows[:90], rows[90:] + late)))
    reader = spark.readStream.schema(FRAME_DDL).option("maxFilesPerTrigger", 1)
    streaming = reader.parquet(str(folder))
    query = stats(streaming, "1s", watermark="1s").writeStream.format("memory").queryName("figures")
    query.outputMode("append").trigger(availableNow=True).start().awaitTermination()
    for found, batch in zip(as_dicts(spark.table("figures")), as_dicts(stats(frames(spark, rows), "1s")), strict=True):
        assert found == {**batch, "mean": pytest.approx(batch["mean"]), "std": pytest.approx(batch["std"])}
    with pytest.raises(ConfigError, match="a window such as 1s"):
        stats(streaming)


QOS = [
    (1 * SECOND_NS, "producer", 5, 1, 1, 100, None, None, None),
    (1 * SECOND_NS + MS, "consumer", 5, 77, 1, 90, 0, 0, "STREAM"),
    (2 * SECOND_NS, "producer", 5, 1, 1, 200, None, None, None),
    (2 * SECOND_NS + MS, "consumer", 5, 77, 1, 150, 3, 1, "STREAM"),
    (3 * SECOND_NS, "producer", 5, 1, 1, 300, None, None, None),
    (3 * SECOND_NS + MS, "consumer", 5, 77, 1, 298, 3, 2, "STREAM"),
]


def test_quality_of_service_by_client(spark: SparkSession, tmp_path: Path) -> None:
    """How fast producers went, how far consumers lagged, and what they dropped in all."""
    lake = make_lake(tmp_path / "lake", [row(stream_id=5)], qos=QOS)
    consumer, producer = sorted(as_dicts(qos(lake)), key=lambda one: one["kind"])
    assert (producer["hz"], producer["lag_max"], producer["reports"]) == (100.0, None, 3)
    figures = [consumer[name] for name in ("lag_mean", "lag_max", "lag_last", "drops_gap", "drops_late")]
    assert figures == [pytest.approx(62 / 3), 50, 2, 3, 2]
    windows = [one for one in as_dicts(qos(lake, "1s")) if one["kind"] == "consumer"]
    assert [(one["start_ns"], one["lag_max"]) for one in windows] == [
        (SECOND_NS, 10), (2 * SECOND_NS, 50), (3 * SECOND_NS, 2),
    ]  # fmt: skip


@frame_udf("bigint")
def number_of(array: np.ndarray[Any, Any]) -> Any:
    return int.from_bytes(array[:8].tobytes(), "little")


@pytest.mark.parametrize("payload", ["inline", "reference"])
def test_live_frames_are_measured_where_they_are(
    spark: SparkSession, pool: tp.Local, client: Client, payload: str
) -> None:
    """Payloads travel with the rows, or are fetched from shared memory by the task that needs them: same answers."""
    stream_id = new_stream()
    with publish(client, stream_id, 40):
        live = read(spark, pool, stream_id, payload=payload)
        assert sorted(row.n for row in live.select(number_of().alias("n")).collect()) == list(range(40))
        (found,) = as_dicts(stats(live))
        assert (found["frames"], found["min_int"], found["max_int"], found["lost"]) == (40, 0, 39, 0)
        assert found["values"] == 40 * 64
        assert gaps(live).count() == 0
