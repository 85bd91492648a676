# SPDX-License-Identifier: Apache-2.0
"""Functions over frames: the same answers on batches and on streams, and a clear refusal where a stream cannot."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as fn

from tensorpool.errors import ConfigError
from tensorpool.lake.control_tables import SCHEMAS
from tensorpool.spark.columns import FRAME_DDL, TABLE_DDL
from tensorpool.spark.functions import (
    consumer_lag,
    downsample,
    frame_stats,
    frame_udf,
    frames_to_numpy,
    gaps,
    latency,
    rates,
    to_training_set,
    with_metadata,
)
from tensorpool.spark.stateful import ROCKS_DB, STATE_STORE
from tests.support.frame_rows import MS, SECOND_NS, attribute, bit_row, row, rows_over_time, table, write_in_order

type Rows = list[dict[str, Any]]
QOS = ("received_ns", "kind", "stream_id", "client_id", "epoch", "seq", "drops_gap", "drops_late", "mode")


class Tables:
    """Rows as DataFrames, at rest and in flow, and what became of a function of them."""

    def __init__(self, spark: SparkSession, folder: Path) -> None:
        self.spark = spark
        self.folder = folder
        self._count = 0

    def batch(self, rows: Rows) -> DataFrame:
        return self.spark.createDataFrame(table(rows), FRAME_DDL)

    def stream(self, batches: Iterable[Rows]) -> DataFrame:
        """Each list of rows is a micro-batch of its own."""
        folder = self._fresh()
        write_in_order(folder, map(table, batches))
        return self._reader(folder, FRAME_DDL)

    def qos(self, rows: Iterable[tuple[Any, ...]]) -> DataFrame:
        return self.spark.createDataFrame(list(rows), TABLE_DDL["qos"])

    def qos_stream(self, batches: Iterable[list[tuple[Any, ...]]]) -> DataFrame:
        folder = self._fresh()
        columns = [[dict(zip(QOS, one, strict=True)) for one in rows] for rows in batches]
        write_in_order(folder, (pa.Table.from_pylist(rows, SCHEMAS["qos"]) for rows in columns))
        return self._reader(folder, TABLE_DDL["qos"])

    def metadata(self, *rows: tuple[Any, ...]) -> DataFrame:
        return self.spark.createDataFrame(list(rows), TABLE_DDL["metadata"])

    def metadata_stream(self) -> DataFrame:
        return self._reader(self._fresh(), TABLE_DDL["metadata"])

    def run(self, streaming: DataFrame, mode: str = "append") -> Rows:
        """All that a streaming query gives, to its end.

        Spark gives a process of queries with state ten seconds to start, which no setting changes: on a busy machine it
        is too late, and the query starts again.
        """
        for attempts_left in reversed(range(5)):
            self._count += 1
            name = f"found_{id(self)}_{self._count}"
            writer = streaming.writeStream.format("memory").queryName(name).outputMode(mode)
            query = writer.trigger(availableNow=True).start()
            try:
                query.awaitTermination()
                break
            except StreamingQueryException as error:
                if "Python worker failed to connect back" not in str(error) or not attempts_left:
                    raise
        return as_dicts(self.spark.table(name))

    def _fresh(self) -> Path:
        self._count += 1
        folder = self.folder / str(self._count)
        folder.mkdir()
        return folder

    def _reader(self, folder: Path, schema: str) -> DataFrame:
        return self.spark.readStream.schema(schema).option("maxFilesPerTrigger", 1).parquet(str(folder))


@pytest.fixture
def tables(spark: SparkSession, tmp_path: Path) -> Tables:
    return Tables(spark, tmp_path)


def as_dicts(frames: DataFrame) -> Rows:
    return [one.asDict(recursive=True) for one in frames.collect()]


def sorted_by(rows: Rows, *names: str) -> Rows:
    return sorted(rows, key=lambda one: tuple(one[name] for name in names))


def values(rows: Iterable[Mapping[str, Any]], *names: str) -> list[tuple[Any, ...]]:
    return [tuple(one[name] for name in names) for one in rows]


# --- functions of arrays


@frame_udf("double")
def mean(array: np.ndarray[Any, Any]) -> Any:
    """The mean of a frame."""
    return array.mean()


@frame_udf("struct<rows: int, top: array<int>, name: string>")
def described(array: np.ndarray[Any, Any]) -> Any:
    return {"rows": array.shape[0], "top": array.reshape(array.shape[0], -1)[0], "name": str(array.dtype)}


def test_a_function_of_arrays_is_a_function_of_frames(tables: Tables) -> None:
    """Dtype, shape and order are those of the frame; whatever fits the type may be returned."""
    images: list[np.ndarray[Any, Any]] = [
        np.arange(6, dtype=np.int16).reshape(2, 3),
        np.asfortranarray(np.arange(4, dtype=np.uint8).reshape(2, 2)),
    ]
    frames = tables.batch([row(image, seq=seq) for seq, image in enumerate(images)])
    found = as_dicts(frames.select("seq", mean().alias("mean"), described().alias("what")))
    assert values(found, "seq", "mean") == [(0, 2.5), (1, 1.5)]
    assert [one["what"] for one in found] == [
        {"rows": 2, "top": [0, 1, 2], "name": "int16"},
        {"rows": 2, "top": [0, 1], "name": "uint8"},
    ]
    assert mean.__doc__ == "The mean of a frame."
    joined = frames.alias("front").select(mean("front.").alias("mean"))
    assert values(as_dicts(joined), "mean") == [(2.5,), (1.5,)]


def test_a_function_of_arrays_works_on_streams(tables: Tables) -> None:
    """As a column and as a filter."""
    streaming = tables.stream([rows_over_time(5)])
    found = tables.run(streaming.where(mean() > 2).select("seq", mean().alias("mean")))
    assert sorted(values(found, "seq", "mean")) == [(3, 3.0), (4, 4.0)]


def test_frames_without_payload_are_refused_by_functions_of_arrays(tables: Tables) -> None:
    """A null payload is a reference, and is not taken for an empty frame."""
    frames = tables.batch([row(payload=None)])
    with pytest.raises(Exception, match="payload=inline"):
        frames.select(mean()).collect()


def test_collected_rows_become_arrays(tables: Tables) -> None:
    """From collect and from Arrow."""
    frames = tables.batch(rows_over_time(3)).orderBy("seq")
    for rows in (frames.collect(), frames.toArrow()):
        assert [array.tolist() for array in frames_to_numpy(rows)] == [[[n] * 3] * 2 for n in range(3)]


# --- per frame


def test_statistics_of_frames_are_exact(tables: Tables) -> None:
    """For every kind of dtype; integers beyond 2^53 keep their last digit."""
    large = np.array([2**64 - 1, 2**64 - 3], np.uint64)
    rows = [
        row(np.array([1, 2, 255], np.uint8), seq=0),
        row(large, seq=1),
        row(np.array([1.5, np.nan, 2.5], np.float32), seq=2),
        row(np.array([True, False]), seq=3),
        bit_row(9, seq=4),
        row(np.empty((0, 3), np.int32), seq=5),
    ]
    found = sorted_by(as_dicts(frame_stats(tables.batch(rows))), "seq")
    assert values(found, "values", "nan", "min", "max", "min_int", "max_int")[0] == (3, 0, 1.0, 255.0, 1, 255)
    assert values(found, "min_int", "max_int", "std")[1] == (2**64 - 3, 2**64 - 1, 1.0)
    assert values(found, "values", "nan", "min", "mean", "max", "max_int", "saturated")[2] == (
        2, 1, 1.5, 2.0, 2.5, None, None,
    )  # fmt: skip
    assert values(found, "mean", "std")[3:5] == [(0.5, 0.5), (1.0, 0.0)]
    assert values(found, "values", "mean", "std", "max")[5] == (0, None, None, None)
    assert found[0]["saturated"] == pytest.approx(1 / 3)
    assert found[0]["std"] == pytest.approx(np.array([1, 2, 255]).std())
    assert "payload" not in found[0]
    scaled = as_dicts(frame_stats(tables.batch(rows[:1]), full_scale=2))
    assert scaled[0]["saturated"] == pytest.approx(2 / 3)


def test_statistics_of_frames_work_on_streams(tables: Tables) -> None:
    """The same rows as on a batch."""
    rows = rows_over_time(6)
    found = tables.run(frame_stats(tables.stream([rows[:4], rows[4:]])))
    assert sorted_by(found, "seq") == sorted_by(as_dicts(frame_stats(tables.batch(rows))), "seq")


# --- over time


def test_rates_count_frames_and_bytes_of_each_window(tables: Tables) -> None:
    """By the time of capture; frames without one by the time of receipt."""
    rows = [*rows_over_time(250), row(stream_id=7, seq=0, received_ns=SECOND_NS + 5)]
    found = sorted_by(as_dicts(rates(tables.batch(rows), "1s")), "stream_id", "start_ns")
    assert values(found, "stream_id", "start_ns", "frames", "hz", "bytes") == [
        (7, SECOND_NS, 1, 1.0, 6),
        (10_000, SECOND_NS, 100, 100.0, 600),
        (10_000, 2 * SECOND_NS, 100, 100.0, 600),
        (10_000, 3 * SECOND_NS, 50, 50.0, 300),
    ]
    short = as_dicts(rates(tables.batch(rows), "500ms"))
    assert sum(one["frames"] for one in short) == 251
    assert {one["hz"] for one in short if one["stream_id"] == 10_000} == {100.0}


def test_rates_and_latency_work_on_streams(tables: Tables) -> None:
    """Windows are given out when they are final, and are those of the batch."""
    rows = rows_over_time(300, rate_hz=100)
    batches = [rows[:150], [*rows[150:], row(seq=300, timestamp_ns=60 * SECOND_NS, received_ns=60 * SECOND_NS)]]
    for function in (rates, latency):
        found = tables.run(function(tables.stream(batches), "1s", watermark="2s"))
        assert sorted_by(found, "start_ns") == sorted_by(as_dicts(function(tables.batch(rows), "1s")), "start_ns")


def test_latency_tells_its_percentiles(tables: Tables) -> None:
    """From capture to receipt; frames without a capture time do not count."""
    rows = rows_over_time(100)
    for number, one in enumerate(rows):
        one["received_ns"] = one["timestamp_ns"] + (number + 1) * MS
    rows.append(row(seq=100, received_ns=10**15))
    (found,) = as_dicts(latency(tables.batch(rows), "1s"))
    assert found == {
        "stream_id": 10_000,
        "start_ns": SECOND_NS,
        "frames": 100,
        "p50_ms": 50.0,
        "p90_ms": 90.0,
        "p99_ms": 99.0,
        "max_ms": 100.0,
    }


# --- what is missing


@contextlib.contextmanager
def setting(spark: SparkSession, name: str, value: str) -> Iterator[None]:
    """Of the session, for a while."""
    before = spark.conf.get(name)
    spark.conf.set(name, value)
    yield
    spark.conf.set(name, str(before))


def without(rows: Rows, *seqs: int) -> Rows:
    return [one for one in rows if one["seq"] not in seqs]


def test_gaps_are_the_seqs_between_frames(tables: Tables) -> None:
    """Of each epoch for itself, in any order of rows; the same on a stream, across its batches."""
    rows = without(rows_over_time(20), 3, 4, 9) + without(rows_over_time(6, epoch=2), 0, 1, 4)
    expected = [(1, 3, 5, 2), (1, 9, 10, 1), (2, 4, 5, 1)]
    found = as_dicts(gaps(tables.batch(rows[::-1])))
    assert sorted(values(found, "epoch", "lo", "hi", "frames")) == expected
    with setting(tables.spark, "spark.sql.execution.arrow.maxRecordsPerBatch", "4"):  # an epoch comes in several parts
        streamed = tables.run(gaps(tables.stream([rows[:3], rows[3:][::-1]])))
    assert sorted(values(streamed, "epoch", "lo", "hi", "frames")) == expected


def test_lag_is_how_far_a_consumer_is_behind_its_producer(tables: Tables) -> None:
    """By what the producer had reported by then, in the same epoch; the same on a stream."""
    rows: list[tuple[Any, ...]] = [
        (10, "consumer", 5, 77, 1, 3, 0, 0, "STREAM"),
        (20, "producer", 5, 1, 1, 100, None, None, None),
        (30, "consumer", 5, 77, 1, 90, 2, 1, "STREAM"),
        (40, "producer", 5, 1, 1, 200, None, None, None),
        (50, "consumer", 5, 77, 1, 205, 2, 1, "STREAM"),
        (60, "consumer", 5, 78, 2, 4, 0, 0, "STREAM"),
    ]
    expected = [(10, 77, None), (30, 77, 10), (50, 77, 0), (60, 78, None)]
    found = as_dicts(consumer_lag(tables.qos(rows)))
    assert sorted(values(found, "received_ns", "client_id", "lag")) == expected
    streamed = tables.run(consumer_lag(tables.qos_stream([rows[:4], rows[4:]])))
    assert sorted(values(streamed, "received_ns", "client_id", "lag")) == expected


def test_state_is_refused_in_a_session_that_cannot_keep_it(tables: Tables) -> None:
    """Where the function is called, with the setting to make; Spark itself would say so after the query has begun."""
    own = Tables(tables.spark.newSession(), tables.folder)
    own.spark.conf.set(STATE_STORE, "org.apache.spark.sql.execution.streaming.state.HDFSBackedStateStoreProvider")
    calls: dict[str, Callable[[], DataFrame]] = {
        "gaps": lambda: gaps(own.stream([[row()]])),
        "consumer_lag": lambda: consumer_lag(own.qos_stream([])),
    }
    for name, call in calls.items():
        with pytest.raises(ConfigError, match=f"{name} on a stream: {STATE_STORE} = .*HDFS.*spark.conf.set") as refused:
            call()
        assert ROCKS_DB in str(refused.value)


# --- what frames mean


def test_frames_get_the_metadata_that_applied(tables: Tables) -> None:
    """Their own version, or else the newest earlier one; none for version 0; the same on a stream."""
    metadata = tables.metadata(
        attribute(10_000, 1, "exposure_ms", "4", kind="application/json"),
        attribute(10_000, 1, "lens", "35 mm"),
        attribute(10_000, 1, "lens", "35 mm"),
        attribute(10_000, 3, "exposure_ms", "8", kind="application/json"),
        attribute(10_000, 3, "table", "raw", kind="application/octet-stream"),
        attribute(99, 2, "other", "stream"),
    )
    rows = [row(seq=version, meta_version=version) for version in range(5)]
    expected = [
        (0, None, None),
        (1, 1, {"exposure_ms": "4", "lens": "35 mm"}),
        (2, 1, {"exposure_ms": "4", "lens": "35 mm"}),
        (3, 3, {"exposure_ms": "8", "table": "cmF3"}),
        (4, 3, {"exposure_ms": "8", "table": "cmF3"}),
    ]
    found = with_metadata(tables.batch(rows), metadata)
    assert values(sorted_by(as_dicts(found), "seq"), "seq", "metadata_version", "metadata") == expected
    assert found.columns == [*tables.batch(rows).columns, "metadata_version", "metadata"]
    streamed = tables.run(with_metadata(tables.stream([rows]), metadata))
    assert values(sorted_by(streamed, "seq"), "seq", "metadata_version", "metadata") == expected


def test_a_version_that_is_sent_anew_applies_from_then_on(tables: Tables) -> None:
    """A restarted producer counts its versions from one again."""
    metadata = tables.metadata(
        attribute(10_000, 1, "run", "first", told_ns=100), attribute(10_000, 1, "run", "second", told_ns=500)
    )
    rows = [row(seq=seq, meta_version=1, timestamp_ns=at) for seq, at in enumerate((50, 200, 499, 500, 900))]
    found = sorted_by(as_dicts(with_metadata(tables.batch(rows), metadata)), "seq")
    assert [one["metadata"]["run"] for one in found] == ["first", "first", "first", "second", "second"]


# --- fewer and smaller frames


def test_fewer_frames(tables: Tables) -> None:
    """Each n-th seq, or at most so many a second."""
    rows = rows_over_time(100)
    frames = tables.batch(rows)
    assert sorted(one["seq"] for one in as_dicts(downsample(frames, every=30))) == [0, 30, 60, 90]
    assert sorted(one["seq"] for one in as_dicts(downsample(frames, rate_hz=4))) == [0, 25, 50, 75]
    assert sorted(one["seq"] for one in tables.run(downsample(tables.stream([rows]), every=50))) == [0, 50]


def test_smaller_frames(tables: Tables) -> None:
    """Each n-th row and column, whatever the order; further axes stay."""
    image = np.arange(5 * 4 * 3, dtype=np.uint16).reshape(5, 4, 3)
    line = np.arange(7, dtype=np.float64)
    rows = [row(np.asfortranarray(image), seq=0), row(line, seq=1)]
    found = downsample(tables.batch(rows), step=2).orderBy("seq")
    small, thin = frames_to_numpy(found.collect())
    np.testing.assert_array_equal(small, image[::2, ::2])
    np.testing.assert_array_equal(thin, line[::2])
    assert values(as_dicts(found), "nbytes", "order") == [(3 * 2 * 3 * 2, "C"), (32, "C")]


def test_a_training_set_is_scaled_sized_labelled_and_split(tables: Tables) -> None:
    """Blocks of neighbours stay together, and the same seed splits the same way; the same on a stream."""
    rows = rows_over_time(400)
    frames = tables.batch(rows)
    examples = to_training_set(
        frames, label=fn.col("seq") % 2, size=(1, 3), block=10, splits={"a": 0.5, "b": 0.25, "c": 0.25}
    )
    found = sorted_by(as_dicts(examples), "seq")
    assert [one["label"] for one in found[:4]] == [0, 1, 0, 1]
    assert {one["dtype"] for one in found} == {"FLOAT32"}
    np.testing.assert_allclose(frames_to_numpy(found)[100], np.full((1, 3), 100 / 255), rtol=1e-6)
    blocks = {one["seq"] // 10: one["split"] for one in found}
    assert all(blocks[one["seq"] // 10] == one["split"] for one in found)
    assert set(blocks.values()) == {"a", "b", "c"}
    again = sorted_by(tables.run(to_training_set(tables.stream([rows]), block=10)), "seq")
    assert values(again, "split") == values(sorted_by(as_dicts(to_training_set(frames, block=10)), "seq"), "split")
    assert values(again, "split") != values(
        sorted_by(as_dicts(to_training_set(frames, block=10, seed=1)), "seq"), "split"
    )


def test_training_frames_are_averaged_down_and_standardised(tables: Tables) -> None:
    """Each pixel is the mean of those that it stands for; rows without a label are left out."""
    image = np.arange(35, dtype=np.float32).reshape(5, 7)
    frames = tables.batch([row(image, seq=0), row(image, seq=1)])
    label = fn.when(fn.col("seq") == 0, fn.lit("x"))
    (small,) = frames_to_numpy(to_training_set(frames, label=label, size=(2, 3), scale="none").collect())
    expected = [[part.mean() for part in (r[:, 0:2], r[:, 2:4], r[:, 4:7])] for r in (image[0:2], image[2:5])]
    np.testing.assert_allclose(small, expected)
    (standard, _) = frames_to_numpy(to_training_set(frames, scale="standard").collect())
    assert standard.mean() == pytest.approx(0, abs=1e-6)
    assert standard.std() == pytest.approx(1, rel=1e-5)


# --- refusals

REFUSED: dict[str, tuple[Callable[[Tables], Any], str]] = {
    "no frames": (lambda t: frame_stats(t.batch([row()]).select("seq")), "frame_stats: columns"),
    "no time": (lambda t: rates(t.batch([row()]).drop("received_ns")), "received_ns"),
    "window": (lambda t: rates(t.batch([row()]), "soon"), "such as 500ms"),
    "watermark": (lambda t: rates(t.stream([[row()]]), watermark="soon"), "watermark"),
    "metadata stream": (lambda t: with_metadata(t.batch([row()]), t.metadata_stream()), "a batch"),
    "rate on a stream": (lambda t: downsample(t.stream([[row()]]), rate_hz=5), "use every="),
    "nothing to do": (lambda t: downsample(t.batch([row()])), "every=, rate_hz= or step="),
    "no number": (lambda t: downsample(t.batch([row()]), every=0), "positive number"),
    "scale": (lambda t: to_training_set(t.batch([row()]), scale="big"), "unit, standard or none"),
    "size": (lambda t: to_training_set(t.batch([row()]), size=(0, 3)), "rows and columns"),
    "splits": (lambda t: to_training_set(t.batch([row()]), splits={"a": 0.5}), "add up to 1"),
    "block": (lambda t: to_training_set(t.batch([row()]), block=0), "from 1"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_done_is_refused_with_what_can(tables: Tables, name: str) -> None:
    """Before anything runs."""
    call, words = REFUSED[name]
    with pytest.raises(ConfigError, match=words):
        call(tables)


def test_frames_that_do_not_fit_a_function_say_so_when_it_runs(tables: Tables) -> None:
    """A frame that is smaller than the size that is asked for, or of bits."""
    with pytest.raises(Exception, match=r"at most 2, the extent of axis 0"):
        to_training_set(tables.batch([row()]), size=(5, 5)).collect()
    with pytest.raises(Exception, match="whole bytes"):
        downsample(tables.batch([bit_row(8)]), step=2).collect()
