# SPDX-License-Identifier: Apache-2.0
"""Reading one frame out of a large lake: by Spark with a filter, natively, and by `tensorpool.open`.

    python -m benchmarks.lake_reads [FOLDER] [--gib 1 10] [--looks 9]

A lake of 640 KiB frames, uncompressed. Per size of the lake: `where seq = N` through format("tensorpool.lake") next to
Spark's own Parquet reader over the same files with the same filter, in turns; `select seq` of all frames, by reference,
with the bytes that were read; and a frame at random by `tensorpool.open`, cold (the page cache is emptied of the lake's
files first) and warm, next to its share of reading in order.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

import tensorpool as tp
from tensorpool.cli.test_pattern import Scene
from tensorpool.lake import Lake, commits
from tensorpool.lake.file_policy import FilePolicy
from tensorpool.lake.ring_reader import FRAME_SCHEMA
from tensorpool.lake.row_staging import stage_rows
from tensorpool.lake.staging import Staging
from tensorpool.spark import native_frames, session

SHAPE: Final = (512, 1280)
FRAME_BYTES: Final = SHAPE[0] * SHAPE[1]
STREAM_ID: Final = 10_000
FRAMES_PER_COMMIT: Final = 512  # 320 MiB: two files
FRAMES_PER_BATCH: Final = 16
SECOND_NS: Final = 1_000_000_000
SEQUENTIAL: Final = 256  # frames


def grow(lake: Lake, frames: int) -> None:
    """Append frames until the lake has so many."""
    picture = np.empty(SHAPE, np.uint8)
    payloads = []
    for number in range(FRAMES_PER_BATCH):
        Scene().paint(picture, number)
        payloads.append(picture.tobytes())
    policy = FilePolicy("none", 256 << 20, 3600 * SECOND_NS, False)
    begin = lake.state.end(STREAM_ID, 1)
    for lo in range(begin, frames, FRAMES_PER_COMMIT):
        batch = lo // FRAMES_PER_COMMIT
        staged = stage_rows(Staging(lake.path, "grow", batch), _rows(lo, lo + FRAMES_PER_COMMIT, payloads), policy)
        commits.commit(lake, "grow", batch, [staged], kind="write", is_durable=False)


def _rows(lo: int, hi: int, payloads: list[bytes]) -> Iterator[pa.RecordBatch]:
    for begin in range(lo, hi, FRAMES_PER_BATCH):
        rows: list[dict[str, Any]] = [
            {
                "stream_id": STREAM_ID,
                "epoch": 1,
                "seq": seq,
                "time": None,
                "timestamp_ns": SECOND_NS + seq * 10_000_000,
                "received_ns": SECOND_NS + seq * 10_000_000 + 1000,
                "meta_version": 0,
                "trace_id": None,
                "dtype": "UINT8",
                "shape": list(SHAPE),
                "order": "C",
                "nbytes": FRAME_BYTES,
                "dropped_before": 0,
                "dropped_reason": None,
                "payload": payloads[seq % FRAMES_PER_BATCH],
            }
            for seq in range(begin, begin + FRAMES_PER_BATCH)
        ]
        yield pa.RecordBatch.from_pylist(rows, FRAME_SCHEMA)


class Reads(msgspec.Struct, frozen=True):
    """What was measured on a lake of one size, in seconds."""

    gib: float
    filter_s: float  # where seq = N
    native_s: float  # the same by Spark's own Parquet reader
    select_s: float  # select seq of all frames, by reference
    select_share: float  # bytes that it read / bytes of all payloads
    in_order_s: float  # a frame among its neighbours
    cold_s: float  # a frame at random, from the disk
    warm_s: float  # the same, from the page cache

    def __str__(self) -> str:
        return (
            f"{self.gib:5.1f} GiB: where seq = N {1e3 * self.filter_s:.0f} ms, natively {1e3 * self.native_s:.0f} ms; "
            f"select seq by reference {1e3 * self.select_s:.0f} ms; a frame in order {1e3 * self.in_order_s:.2f} ms, "
            f"at random {1e3 * self.cold_s:.2f} ms cold, {1e3 * self.warm_s:.2f} ms warm"
        )


def measure(spark: SparkSession, lake: Lake, looks: int) -> Reads:
    frames = sum(file.frames for file in lake.files())
    filter_s, native_s = filters(spark, lake, frames, looks)
    select_s, select_bytes = select(spark, lake)
    in_order_s, cold_s, warm_s = random_access(lake, looks)
    size = frames * FRAME_BYTES
    return Reads(
        size / 2**30,
        filter_s,
        native_s,
        select_s,
        select_bytes / size,
        in_order_s=in_order_s,
        cold_s=cold_s,
        warm_s=warm_s,
    )


def filters(spark: SparkSession, lake: Lake, frames: int, looks: int) -> tuple[float, float]:
    """`where seq = N`, ours and natively: medians of looks in turns."""
    natively = native_frames(spark, lake.path)
    ours_s, native_s = [], []
    for number in range(-2, looks):  # the first two warm up
        seq = random.randrange(frames)
        reader = spark.read.format("tensorpool.lake").option("pushFilters", "true")
        ours = find(reader.load(str(lake.path)), seq)
        theirs = find(natively, seq)
        if number >= 0:
            ours_s.append(ours)
            native_s.append(theirs)
    return statistics.median(ours_s), statistics.median(native_s)


def find(frames: DataFrame, seq: int) -> float:
    """How long it takes to get one frame with its payload."""
    begin_s = time.perf_counter()
    (row,) = frames.where(f"seq = {seq}").select("seq", "payload").collect()
    took_s = time.perf_counter() - begin_s
    assert row["seq"] == seq
    assert len(row["payload"]) == FRAME_BYTES
    return took_s


def select(spark: SparkSession, lake: Lake) -> tuple[float, int]:
    """All seqs, by reference: the second of two runs, and how many bytes it read."""
    frames = spark.read.format("tensorpool.lake").option("payload", "reference").load(str(lake.path))
    frames.selectExpr("sum(seq)").collect()
    before, begin_s = read_bytes(), time.perf_counter()
    frames.selectExpr("sum(seq)").collect()
    return time.perf_counter() - begin_s, read_bytes() - before


def read_bytes() -> int:
    """What this process and all below it have read so far, of those that still run."""
    children: dict[int, list[int]] = {}
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with suppress(OSError):
            fields = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()
            children.setdefault(int(fields[1]), []).append(int(name))
    total, waiting = 0, [os.getpid()]
    while waiting:
        pid = waiting.pop()
        waiting += children.get(pid, [])
        with suppress(OSError):
            total += int(Path(f"/proc/{pid}/io").read_text().split()[1])
    return total


def random_access(lake: Lake, looks: int) -> tuple[float, float, float]:
    """A frame in order, at random from the disk, and the same from the page cache."""
    stream = tp.open(lake.path)[STREAM_ID]
    seqs = stream.seqs
    forget(lake)
    first = int(seqs[len(seqs) // 3])
    begin_s = time.perf_counter()
    for frame in stream[first : first + SEQUENTIAL]:
        frame.array.sum()
    in_order_s = (time.perf_counter() - begin_s) / SEQUENTIAL
    cold, warm = [], []
    for _ in range(looks):
        seq = int(random.choice(seqs))
        forget(lake)
        cold.append(take(lake, seq))
        warm.append(take(lake, seq))
    return in_order_s, statistics.median(cold), statistics.median(warm)


def take(lake: Lake, seq: int) -> float:
    """How long one frame takes of a stream that was opened already."""
    stream = tp.open(lake.path)[STREAM_ID]
    begin_s = time.perf_counter()
    stream[seq].array.sum()
    return time.perf_counter() - begin_s


def forget(lake: Lake) -> None:
    """Empty the page cache of the lake's files."""
    for file in lake.files():
        descriptor = os.open(lake.path / file.path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def targets(found: Sequence[Reads]) -> Iterator[tuple[str, float, bool]]:
    """What is demanded, what was found, and whether it holds."""
    for reads in found:
        ratio = reads.filter_s / reads.native_s
        yield f"{reads.gib:.1f} GiB: where seq = N / natively, at most 2", ratio, ratio <= 2
        share = reads.select_share
        yield (
            f"{reads.gib:.1f} GiB: select seq by reference, share of payload bytes, at most 0.02",
            share,
            share <= 0.02,
        )
    if len(found) > 1:
        growth = found[-1].filter_s / found[0].filter_s
        yield "where seq = N, largest lake / smallest, at most 2", growth, growth <= 2


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=Path("."), help="on the disk to measure")
    parser.add_argument("--gib", nargs="+", type=float, default=[1, 10])
    parser.add_argument("--looks", type=int, default=9)
    options = parser.parse_args()
    spark = session("local[2]", "tensorpool benchmark", **{"spark.log.level": "ERROR"})
    found = []
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="tensorpool-lake-") as folder:
        lake = Lake.create(f"{folder}/lake")
        for gib in sorted(options.gib):
            grow(lake, int(gib * 2**30) // FRAME_BYTES // FRAMES_PER_COMMIT * FRAMES_PER_COMMIT)
            found.append(measure(spark, lake, options.looks))
            print(found[-1], flush=True)
    spark.stop()
    verdicts = list(targets(found))
    for words, value, holds in verdicts:
        print(f"{'holds ' if holds else 'MISSED'}  {words}: {value:.3f}")
    return 0 if all(holds for *_, holds in verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
