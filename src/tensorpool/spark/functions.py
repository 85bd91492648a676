# SPDX-License-Identifier: Apache-2.0
"""Functions over frames: DataFrames in, DataFrames out, for live streams and recordings alike.

Payloads are looked at by the executors' Python in Arrow batches, as views of Arrow's buffers, or of shared memory where
rows are references; everything else is plain Spark SQL. What Spark cannot do on a stream is refused with what to do
instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa
from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as fn
from pyspark.sql.pandas.functions import arrow_udf
from pyspark.sql.pandas.types import to_arrow_type
from pyspark.sql.types import DataType, _parse_datatype_string

from tensorpool.errors import ConfigError
from tensorpool.lake.durations import parse_duration_ns
from tensorpool.lake.payloads import array_of, arrays_of, dtype_named, frames_to_numpy, over_payloads
from tensorpool.lake.pixels import Pixels, measure
from tensorpool.shm.arrays import Array
from tensorpool.spark.stateful import GAPS_DDL, LAG_COLUMNS, LAG_DDL, Gaps, Lag, with_state
from tensorpool.wire.control import Dtype

__all__ = [
    "consumer_lag",
    "downsample",
    "frame_stats",
    "frame_udf",
    "frames_to_numpy",
    "gaps",
    "latency",
    "rates",
    "to_training_set",
    "with_metadata",
]

KEY: Final = ("stream_id", "epoch", "seq")
PAYLOAD: Final = (*KEY, "dtype", "shape", "order", "nbytes", "payload")
PERCENTILES: Final = (0.5, 0.9, 0.99)
ACCURACY: Final = 10_000  # of percentiles: exact for groups of so many frames, within 1/10 000 beyond
MIB: Final = 2**20
FORGOTTEN_AFTER: Final = "10s"

STATS_DDL: Final = (
    "stream_id BIGINT, epoch BIGINT, seq BIGINT, time TIMESTAMP, timestamp_ns BIGINT, received_ns BIGINT, "
    "nbytes BIGINT, dropped_before BIGINT, dtype STRING, shape ARRAY<INT>, `values` BIGINT, nan BIGINT, `min` DOUBLE, "
    "mean DOUBLE, `max` DOUBLE, std DOUBLE, min_int DECIMAL(20,0), max_int DECIMAL(20,0), saturated DOUBLE, "
    "spread DOUBLE"
)
_STATS_KEPT: Final = (*KEY, "time", "timestamp_ns", "received_ns", "nbytes", "dropped_before", "dtype", "shape")


# --- functions of arrays


class FrameFunction:
    """A function of a numpy array as a column of Spark. Made by `frame_udf`."""

    def __init__(self, function: Callable[[Array], Any], return_type: DataType | str) -> None:
        self.function: Final = function
        self._return_type = return_type
        self._udf: Callable[..., Column] | None = None
        self.__doc__ = function.__doc__

    def __call__(self, prefix: str = "") -> Column:
        """The column of its results; `prefix` names the frames where several tables are joined: "front."."""
        if self._udf is None:
            self._udf = self._make()  # only now: reading a type takes a session
        return self._udf(*(fn.col(f"{prefix}{name}") for name in PAYLOAD))

    def _make(self) -> Callable[..., Column]:
        given, function = self._return_type, self.function
        returns = _parse_datatype_string(given) if isinstance(given, str) else given
        target = to_arrow_type(returns)

        def of_batch(*columns: pa.Array) -> pa.Array:
            batch = pa.RecordBatch.from_arrays(list(columns), list(PAYLOAD))
            kinds = [batch.column(name).to_pylist() for name in ("dtype", "shape", "order")]

            def of_payload(index: int, payload: Array) -> Any:
                return _plain(function(array_of(payload, *(kind[index] for kind in kinds))))

            return pa.array(over_payloads(batch, of_payload), target)

        make: Any = arrow_udf  # whose overloads know no function of any number of columns
        made: Callable[..., Column] = make(of_batch, returns)
        return made


def frame_udf(return_type: DataType | str) -> Callable[[Callable[[Array], Any]], FrameFunction]:
    """Make a function of one numpy array a function of frames, on streams and on batches.

    >>> @frame_udf("double")                                          # doctest: +SKIP
    ... def contrast(image):
    ...     return image.std() / image.mean()
    >>> frames.select("seq", contrast().alias("contrast"))            # doctest: +SKIP

    The array is a read-only view, valid while the function runs: copy what you keep. Numpy's scalars and arrays,
    numbers, text, lists and dicts may be returned; they must fit the type. Of rows that were read with
    payload=reference it is a view of shared memory, and a frame that is overwritten before the function is done gives
    null.
    """
    return lambda function: FrameFunction(function, return_type)


def _plain(value: Any) -> Any:
    """What Arrow takes, in place of numpy's own, which may be a view of a frame that goes."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, list | tuple) else value


# --- per frame


def frame_stats(frames: DataFrame, *, full_scale: float | None = None) -> DataFrame:
    """What the values of every frame look like: one row per frame, without its payload. Streams and batches.

    >>> frame_stats(frames).select("seq", "min", "mean", "max", "std", "saturated")       # doctest: +SKIP

    `min` and `max` are exact for integers in `min_int` and `max_int`, which are null for floats. NaN is no value: it is
    counted in `nan`. `saturated` is the share of values at `full_scale` and above, by default at an end of the integer
    dtype's range; null where there is no scale. Of BIT frames the values are the bits. Of rows that were read with
    payload=reference, a frame that is overwritten by then has no values.
    """
    _require("frame_stats", frames, *_STATS_KEPT, "payload")

    def of_partition(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return (stats_of(batch, full_scale) for batch in batches)

    return frames.select(*_STATS_KEPT, "order", "payload").mapInArrow(of_partition, STATS_DDL)


def stats_of(batch: pa.RecordBatch, full_scale: float | None) -> pa.RecordBatch:
    """The rows of `frame_stats` for a batch of frames."""
    shapes = batch.column("shape").to_pylist()
    names = batch.column("dtype").to_pylist()

    def pixels(index: int, payload: Array) -> Pixels:
        return measure(payload, names[index], math.prod(shapes[index]), full_scale)

    found = [one or Pixels() for one in over_payloads(batch, pixels)]
    whole = pa.decimal128(20, 0)
    number, count = pa.float64(), pa.int64()
    own = [
        ("values", pa.array([one.values for one in found], count)),
        ("nan", pa.array([one.nan for one in found], count)),
        ("min", pa.array([None if one.low is None else float(one.low) for one in found], number)),
        ("mean", pa.array([one.mean for one in found], number)),
        ("max", pa.array([None if one.high is None else float(one.high) for one in found], number)),
        ("std", pa.array([one.std for one in found], number)),
        ("min_int", pa.array([_whole(one.low) for one in found], whole)),
        ("max_int", pa.array([_whole(one.high) for one in found], whole)),
        ("saturated", pa.array([_share(one) for one in found], number)),
        ("spread", pa.array([one.spread for one in found], number)),
    ]
    columns = [batch.column(name) for name in _STATS_KEPT] + [column for _, column in own]
    return pa.RecordBatch.from_arrays(columns, [*_STATS_KEPT, *(name for name, _ in own)])


def _whole(value: int | float | None) -> Any:
    from decimal import Decimal

    return Decimal(value) if isinstance(value, int) else None


def _share(pixels: Pixels) -> float | None:
    return None if pixels.saturated is None or not pixels.values else pixels.saturated / pixels.values


# --- over time


def frame_time() -> Column:
    """When a frame was captured, or else received, as a timestamp of Spark: the host's monotonic clock from 1970 on."""
    return fn.timestamp_micros(fn.expr("coalesce(timestamp_ns, received_ns) div 1000"))


def by_window(frames: DataFrame, window: str | None, watermark: str) -> tuple[DataFrame, list[Column], float | None]:
    """Frames with a time, the columns to group them by, and the seconds of a window."""
    timed = frames.withColumn("time", frame_time())
    if timed.isStreaming:
        timed = timed.withWatermark("time", f"{parse_duration_ns('watermark', watermark) // 1000} microseconds")
    if window is None:
        return timed, [fn.col("stream_id")], None
    length_ns = parse_duration_ns("window", window)
    return timed, [fn.col("stream_id"), fn.window("time", f"{length_ns // 1000} microseconds")], length_ns / 1e9


def window_start() -> Column:
    """Of a window of `by_window`, on the clock of timestamp_ns."""
    return (fn.unix_micros(fn.col("window.start")) * 1000).alias("start_ns")


def rates(frames: DataFrame, window: str = "1s", *, watermark: str = FORGOTTEN_AFTER) -> DataFrame:
    """Frames and bytes a second, per stream and window of capture time. Streams and batches.

    >>> rates(frames, "1s").select("stream_id", "start_ns", "frames", "hz", "mib_per_s")      # doctest: +SKIP

    The first and the last window are rarely full. On a stream, a window is final when frames are `watermark` older
    than the newest one.
    """
    _require("rates", frames, "stream_id", "timestamp_ns", "received_ns", "nbytes")
    slim = frames.select("stream_id", "timestamp_ns", "received_ns", "nbytes")
    timed, keys, seconds = by_window(slim, window, watermark)
    grouped = timed.groupBy(*keys).agg(fn.count("*").alias("frames"), fn.sum("nbytes").alias("bytes"))
    return grouped.select(
        "stream_id",
        window_start(),
        "frames",
        (fn.col("frames") / fn.lit(seconds)).alias("hz"),
        "bytes",
        (fn.col("bytes") / fn.lit(seconds) / MIB).alias("mib_per_s"),
    )


def latency(frames: DataFrame, window: str = "1s", *, watermark: str = FORGOTTEN_AFTER) -> DataFrame:
    """From capture to receipt, in milliseconds, per stream and window of capture time. Streams and batches.

    >>> latency(frames, "10s").select("start_ns", "p50_ms", "p99_ms", "max_ms")               # doctest: +SKIP

    Means something where the capture time is the host's monotonic clock, as it is unless the producer says otherwise.
    Frames without a capture time are left out.
    """
    _require("latency", frames, "stream_id", "timestamp_ns", "received_ns")
    slim = frames.select("stream_id", "timestamp_ns", "received_ns").where("timestamp_ns IS NOT NULL")
    timed, keys, _ = by_window(slim, window, watermark)
    grouped = timed.groupBy(*keys).agg(fn.count("*").alias("frames"), *latency_figures())
    return grouped.select("stream_id", window_start(), "frames", *latency_columns(), "max_ms")


def latency_figures() -> list[Column]:
    """Of a group of frames."""
    apart = fn.col("received_ns") - fn.col("timestamp_ns")
    points = fn.array(*(fn.lit(point) for point in PERCENTILES))
    return [fn.percentile_approx(apart, points, ACCURACY).alias("latency"), (fn.max(apart) / 1e6).alias("max_ms")]


def latency_columns() -> list[Column]:
    """p50_ms, p90_ms and p99_ms of `latency_figures`."""
    return [
        (fn.col("latency")[index] / 1e6).alias(f"p{round(100 * point)}_ms") for index, point in enumerate(PERCENTILES)
    ]


# --- what is missing


def gaps(frames: DataFrame) -> DataFrame:
    """The seqs that are missing between the first and the last frame of each epoch. Streams and batches.

    >>> gaps(frames).show()                       # stream_id, epoch, lo, hi (exclusive), frames     # doctest: +SKIP

    What was lost before the first frame or after the last one, no frame can tell: see the lake's table "gaps".
    """
    _require("gaps", frames, *KEY)
    keys = frames.select(*KEY)
    if frames.isStreaming:
        return with_state("gaps", keys, Gaps(), GAPS_DDL)
    order = Window.partitionBy("stream_id", "epoch").orderBy("seq")
    found = keys.withColumn("lo", fn.lag("seq").over(order) + 1).where("seq > lo")
    return found.select(
        "stream_id", "epoch", "lo", fn.col("seq").alias("hi"), (fn.col("seq") - fn.col("lo")).alias("frames")
    )


def consumer_lag(qos: DataFrame) -> DataFrame:
    """How far each consumer was behind its producer, in frames, at each of its reports. Streams and batches.

    >>> consumer_lag(spark.read.format("tensorpool").option("table", "qos").load())           # doctest: +SKIP

    Takes the table "qos", live or of a lake. `lag` is null until the producer has reported in the same epoch.
    """
    _require("consumer_lag", qos, "received_ns", "kind", "stream_id", "client_id", "epoch", "seq")
    kept = qos.select(*_QOS)
    if qos.isStreaming:
        return with_state("consumer_lag", kept, Lag(), LAG_DDL)
    return with_lag(kept).where("kind = 'consumer'").select(*LAG_COLUMNS)


def with_lag(reports: DataFrame) -> DataFrame:
    """Reports of producers and consumers, a batch, with `producer_seq` and the consumers' `lag`."""
    order = Window.partitionBy("stream_id", "epoch").orderBy("received_ns")
    so_far = order.rangeBetween(Window.unboundedPreceding, 0)
    newest = fn.max(fn.when(fn.col("kind") == "producer", fn.col("seq"))).over(so_far)
    lag = fn.greatest(fn.lit(0), fn.col("producer_seq") - fn.col("seq"))
    is_known = (fn.col("kind") == "consumer") & fn.col("producer_seq").isNotNull()
    return reports.withColumn("producer_seq", newest).withColumn("lag", fn.when(is_known, lag))


_QOS: Final = ("received_ns", "kind", "stream_id", "client_id", "epoch", "seq", "drops_gap", "drops_late")


# --- what frames mean


def with_metadata(frames: DataFrame, metadata: DataFrame) -> DataFrame:
    """Frames with the attributes that applied: columns `metadata` (a map) and `metadata_version`. Streams and batches.

    >>> table = spark.read.format("tensorpool.lake").option("table", "metadata").load(lake)    # doctest: +SKIP
    >>> with_metadata(frames, table).select("seq", "metadata.exposure_ms")                     # doctest: +SKIP

    An as-of join: a frame gets its own meta_version, or the newest earlier one that was recorded, and of a version that
    a restarted producer has sent again, what was sent last when the frame was captured. Text and JSON are shown as
    text, everything else as base64. `metadata` is a batch; a stream of it is refused.
    """
    _require("with_metadata", frames, "stream_id", "meta_version", "timestamp_ns", "received_ns")
    _require("with_metadata", metadata, "stream_id", "meta_version", "timestamp_ns", "key", "format", "value")
    if metadata.isStreaming:
        raise ConfigError("with_metadata(metadata)", "a streaming DataFrame", "a batch: spark.read of table=metadata")
    is_text = fn.col("format").isin("text/plain", "application/json")
    text = fn.when(is_text, fn.decode("value", "UTF-8")).otherwise(fn.base64("value"))
    entries = metadata.where("`key` IS NOT NULL AND meta_version > 0").select(
        fn.col("stream_id").alias("told_stream"),
        fn.col("meta_version").alias("metadata_version"),
        fn.col("timestamp_ns").alias("told_ns"),
        fn.struct("key", text.alias("value")).alias("entry"),
    )
    tellings = entries.groupBy("told_stream", "metadata_version", "told_ns").agg(
        fn.map_from_entries(fn.collect_set("entry")).alias("metadata")
    )
    same = Window.partitionBy("told_stream", "metadata_version").orderBy("told_ns")
    versions = entries.select("told_stream", "metadata_version").distinct()
    following = fn.lead("metadata_version").over(Window.partitionBy("told_stream").orderBy("metadata_version"))
    versions = (
        tellings.withColumn("is_first", fn.row_number().over(same) == 1)
        .withColumn("until_ns", fn.lead("told_ns").over(same))
        .join(versions.withColumn("next_version", following), ["told_stream", "metadata_version"])
    )
    at = fn.coalesce(fn.col("timestamp_ns"), fn.col("received_ns"))
    applies = (
        (fn.col("stream_id") == fn.col("told_stream"))
        & (fn.col("meta_version") >= fn.col("metadata_version"))
        & (fn.col("next_version").isNull() | (fn.col("meta_version") < fn.col("next_version")))
        & (fn.col("is_first") | (at >= fn.col("told_ns")))
        & (fn.col("until_ns").isNull() | (at < fn.col("until_ns")))
    )
    joined = frames.join(fn.broadcast(versions), applies, "left")
    return joined.drop("told_stream", "told_ns", "is_first", "until_ns", "next_version")


# --- fewer and smaller frames


def downsample(
    frames: DataFrame, *, every: int | None = None, rate_hz: float | None = None, step: int | None = None
) -> DataFrame:
    """Fewer frames, or smaller ones.

    >>> downsample(frames, every=10)              # each tenth seq: streams and batches       # doctest: +SKIP
    >>> downsample(frames, rate_hz=5)             # at most five a second: batches            # doctest: +SKIP
    >>> downsample(frames, step=4)                # each fourth row and column: streams and batches   # doctest: +SKIP

    `step` thins out the first two axes of a tensor, or the only one. Raises ConfigError for `rate_hz` on a stream,
    where Spark cannot look at the frame before: use `every`.
    """
    if every is None and rate_hz is None and step is None:
        raise ConfigError("downsample", None, "every=, rate_hz= or step=")
    for name, value in (("every", every), ("rate_hz", rate_hz), ("step", step)):
        if value is not None and (value <= 0 or (name != "rate_hz" and int(value) != value)):
            raise ConfigError(f"downsample({name})", value, "a positive number, whole for every and step")
    if every is not None:
        _require("downsample", frames, "seq")
        frames = frames.where(fn.col("seq") % every == 0)
    if rate_hz is not None:
        frames = _at_most(frames, rate_hz)
    if step is not None:
        frames = _thinned(frames, step)
    return frames


def _at_most(frames: DataFrame, rate_hz: float) -> DataFrame:
    _require("downsample", frames, *KEY, "timestamp_ns", "received_ns")
    if frames.isStreaming:
        raise ConfigError("downsample(rate_hz)", rate_hz, "a batch; on a stream use every=")
    slot = fn.floor(fn.coalesce(fn.col("timestamp_ns"), fn.col("received_ns")) * fn.lit(rate_hz / 1e9))
    first = frames.groupBy("stream_id", "epoch", slot.alias("slot")).agg(fn.min("seq").alias("seq")).drop("slot")
    return frames.join(fn.broadcast(first), list(KEY), "left_semi")


def _thinned(frames: DataFrame, step: int) -> DataFrame:
    def thin(array: Array, dtype: Dtype) -> tuple[Array, str]:
        if dtype is Dtype.BIT:
            raise ConfigError("downsample(step)", "a BIT frame", "frames whose elements are whole bytes")
        return array[tuple(slice(None, None, step) for _ in array.shape[:2])], dtype.name

    return _reshaped("downsample", frames, thin)


def _reshaped(function: str, frames: DataFrame, change: Callable[[Array, Dtype], tuple[Array, str]]) -> DataFrame:
    """Frames with other arrays in place of theirs, in C order; further columns stay. References that are gone go."""
    _require(function, frames, "seq", "dtype", "shape", "order", "nbytes", "payload")

    def of_partition(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            arrays = list(arrays_of(batch))
            kept = batch.filter(pa.array([array is not None for array in arrays]))
            names = kept.column("dtype").to_pylist()
            present = [array for array in arrays if array is not None]
            changed = [change(array, dtype_named(name)) for array, name in zip(present, names, strict=True)]
            fresh = {
                "dtype": pa.array([name for _, name in changed], pa.string()),
                "shape": pa.array([list(array.shape) for array, _ in changed], pa.list_(pa.int32())),
                "order": pa.array(["C"] * len(changed), pa.string()),
                "nbytes": pa.array([array.nbytes for array, _ in changed], pa.int64()),
                "payload": pa.array([np.ascontiguousarray(array).tobytes() for array, _ in changed], pa.binary()),
            }
            columns = [fresh.get(name, kept.column(name)) for name in batch.schema.names]
            yield pa.RecordBatch.from_arrays(columns, batch.schema.names)

    return frames.mapInArrow(of_partition, frames.schema)


def to_training_set(
    frames: DataFrame,
    *,
    label: Column | str | None = None,
    size: Sequence[int] | None = None,
    scale: str = "unit",
    splits: Mapping[str, float] | None = None,
    block: int = 100,
    seed: int = 0,
) -> DataFrame:
    """Frames as a learner takes them: float32, one scale and size, a `label` and a `split`. Streams and batches.

    >>> examples = to_training_set(frames, label="metadata.material", size=(32, 32))          # doctest: +SKIP
    >>> X = np.stack(frames_to_numpy(examples.where("split = 'train'").toArrow()))            # doctest: +SKIP

    `size` averages the first two axes down; `scale` is "unit" (integers from 0 to 1), "standard" (each frame with mean
    0 and deviation 1) or "none". `splits` are shares by name, 80 % "train" and 20 % "test" by default: `block` frames
    that follow each other stay together, because neighbours look alike, and the same frame with the same `seed` always
    falls into the same split. Rows without a label are left out.
    """
    _require("to_training_set", frames, *KEY)
    if scale not in ("unit", "standard", "none"):
        raise ConfigError("to_training_set(scale)", scale, "unit, standard or none")
    if size is not None and not (len(size) == 2 and min(size) > 0):
        raise ConfigError("to_training_set(size)", size, "rows and columns: (32, 32)")
    if block < 1:
        raise ConfigError("to_training_set(block)", block, "a whole number from 1")
    if label is not None:
        frames = frames.withColumn("label", fn.col(label) if isinstance(label, str) else label).where(
            "label IS NOT NULL"
        )
    changed = _reshaped(
        "to_training_set", frames, lambda array, dtype: (_example(array, dtype, size, scale), "FLOAT32")
    )
    return changed.withColumn("split", _split(splits or {"train": 0.8, "test": 0.2}, block, seed))


def _split(splits: Mapping[str, float], block: int, seed: int) -> Column:
    if not splits or any(share <= 0 for share in splits.values()) or abs(sum(splits.values()) - 1) > 1e-9:
        raise ConfigError("to_training_set(splits)", dict(splits), "positive shares that add up to 1")
    place = fn.xxhash64("stream_id", "epoch", fn.floor(fn.col("seq") / block), fn.lit(seed))
    where = fn.pmod(place, fn.lit(1_000_000)) / 1_000_000
    *names, last = splits
    chosen, upto = fn.lit(last), 1.0 - splits[last]
    for name in reversed(names):
        chosen = fn.when(where < fn.lit(upto), fn.lit(name)).otherwise(chosen)
        upto -= splits[name]
    return chosen


def _example(array: Array, dtype: Dtype, size: Sequence[int] | None, scale: str) -> Array:
    if dtype is Dtype.BIT:
        raise ConfigError("to_training_set", "a BIT frame", "frames whose elements are whole bytes")
    values = array.astype(np.float32)
    if size is not None:
        for axis, extent in enumerate(size):
            values = _averaged(values, axis, extent)
    if scale == "unit" and array.dtype.kind in "iu":
        values /= np.float32(np.iinfo(array.dtype).max)
    elif scale == "standard":
        deviation = float(values.std(dtype=np.float64))
        values = (values - np.float32(values.mean(dtype=np.float64))) / np.float32(deviation or 1.0)
    return values


def _averaged(values: Array, axis: int, extent: int) -> Array:
    """The mean of neighbours along an axis, as even as the extents allow."""
    have = values.shape[axis] if values.ndim > axis else 0
    if have < extent:
        raise ConfigError(
            "to_training_set(size)", extent, f"at most {have}, the extent of axis {axis} of {values.shape}"
        )
    starts = np.arange(extent) * have // extent
    widths = np.diff([*starts, have]).astype(np.float32)
    summed: Array = np.add.reduceat(values, starts, axis=axis)
    return summed / widths.reshape([-1 if at == axis else 1 for at in range(values.ndim)])


def _require(function: str, frames: DataFrame, *names: str) -> None:
    missing = [name for name in names if name not in frames.columns]
    if missing:
        raise ConfigError(f"{function}: columns", frames.columns, f"a table with {', '.join(missing)} too")
