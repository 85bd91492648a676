# SPDX-License-Identifier: Apache-2.0
"""The data pipeline next to what people would use instead: GiB/s and CPU seconds per GiB, in one interleaved run.

    source → noop        format("tensorpool"), payload inline, into Spark's noop sink
    recorder             ranges through Spark, payloads from shared memory straight to Parquet, two tasks
    Spark's own sink     format("tensorpool") into format("parquet"), tuned so that large frames survive it
    pyarrow              one process, no Spark: the ring into a ParquetWriter with the same layout

A ring is filled once with pictures (smooth, with grain) and read whole by each. Then, live: what a micro-batch costs,
how long a frame takes from publish to row at a trigger of 200 ms, and the cases of benchmarks/recorders.py: whether the
recorders keep up, and what they cost.

    python -m benchmarks.spark [--quick] [--sizes 64,640] [--rounds N] [--live-seconds S] [--to DIR] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession

import tensorpool as tp
from benchmarks import recorders
from benchmarks.live_camera import ATTACH_S, STREAM_ID, CpuMeter, Site, camera, wait_for
from tensorpool.cli.test_pattern import Scene
from tensorpool.spark import session

GIB = 1 << 30
SHAPES = {"64 KiB": (256, 256), "640 KiB": (512, 1280), "4 MiB": (2048, 2048)}
FILL_BYTES = GIB
ROW_GROUP_BYTES = 16 << 20
LIVE_SHAPE = SHAPES["640 KiB"]
CALM_HZ, CALM_S, CALM_TRIGGER = 100, 20.0, "200 milliseconds"

CONF = {
    "spark.log.level": "ERROR",
    "spark.driver.memory": "4g",
    # Without these Spark's own Parquet writer looks at its buffers every 100 rows, which 4 MiB frames do not survive.
    "spark.hadoop.parquet.page.size.row.check.min": "1",
    "spark.hadoop.parquet.block.size.row.check.min": "1",
    "spark.hadoop.parquet.block.size": str(ROW_GROUP_BYTES),
}


# What is measured; it may say itself how many seconds it took, and of how many of the processors.
type Candidate = Callable[[SparkSession, Site, Path], tuple[float, float] | None]


# --- a ring that stands still, read by each candidate


def fill(client: tp.Client, shape: tuple[int, ...], frames: int) -> tp.Producer:
    """Publish pictures until the ring is full; the producer stays, and with it the epoch."""
    producer = client.producer(STREAM_ID, create=True, timeout=ATTACH_S)
    scene = Scene()
    for seq in range(frames):
        with producer.claim(shape) as slot:
            scene.paint(slot.array, seq)
    return producer


def source(spark: SparkSession, site: Site, **options: str) -> DataFrame:
    reader = spark.read.format("tensorpool").option("streams", str(STREAM_ID)).options(**site.options, **options)
    return reader.load()


def to_noop(spark: SparkSession, site: Site, folder: Path) -> None:
    source(spark, site).write.format("noop").mode("overwrite").save()


def to_lake(codec: str) -> Callable[[SparkSession, Site, Path], None]:
    def run(spark: SparkSession, site: Site, folder: Path) -> None:
        ranges = source(spark, site, table="ranges", minPartitions="2")
        ranges.write.format("tensorpool.lake").options(codec=codec, durable="false").mode("append").save(str(folder))

    return run


def to_parquet(codec: str) -> Callable[[SparkSession, Site, Path], None]:
    def run(spark: SparkSession, site: Site, folder: Path) -> None:
        source(spark, site).write.option("compression", codec).mode("overwrite").parquet(str(folder))

    return run


def plain(codec: str) -> Candidate:
    def run(spark: SparkSession, site: Site, folder: Path) -> tuple[float, float]:
        """Its start is not counted, as Spark's is not."""
        folder.mkdir()
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        path = str(folder / "frames.parquet")
        process = context.Process(target=record_plainly, args=(site.settings, path, codec, theirs), daemon=True)
        process.start()
        theirs.close()
        ours.recv()
        with CpuMeter() as meter:
            began_s = time.perf_counter()
            ours.send("go")
            ours.recv()
            took_s = time.perf_counter() - began_s
        ours.close()
        process.join()
        return took_s, meter.seconds

    return run


def record_plainly(settings: dict[str, Any], path: str, codec: str, pipe: Connection) -> None:
    """What a careful engineer writes in an afternoon: row groups of 16 MiB, neither dictionary nor statistics."""
    schema = pa.schema([("seq", pa.int64()), ("timestamp_ns", pa.int64()), ("payload", pa.binary())])
    client = tp.connect(settings["aeron_dir"], overrides=settings["overrides"])
    with client, client.watch(STREAM_ID) as watch:
        epoch = watch.epochs[-1]
        reader = epoch.mapped.reader
        pipe.send("ready")
        pipe.recv()
        level = 1 if codec == "zstd" else None
        options = {"compression": codec, "compression_level": level, "use_dictionary": False, "write_statistics": False}
        with pq.ParquetWriter(path, schema, **options) as writer:
            seq = epoch.first
            while seq < epoch.end:
                slots = []
                size = 0
                while seq < epoch.end and size < ROW_GROUP_BYTES:
                    slot = reader.read(seq)
                    seq += 1
                    slots.append(slot)
                    size += slot.values_len_bytes  # type: ignore[union-attr]
                edges = np.cumsum([0, *(slot.values_len_bytes for slot in slots)], dtype=np.int32)  # type: ignore[union-attr]
                data = np.empty(size, np.uint8)
                for slot, lo, hi in zip(slots, edges[:-1], edges[1:], strict=True):
                    if not reader.copy_into(slot, data[lo:hi]):  # type: ignore[arg-type]
                        raise RuntimeError("overwritten")
                buffers = [None, pa.py_buffer(edges), pa.py_buffer(data)]
                columns = [
                    pa.array([slot.seq for slot in slots]),  # type: ignore[union-attr]
                    pa.array([slot.timestamp_ns for slot in slots]),  # type: ignore[union-attr]
                    pa.BinaryArray.from_buffers(pa.binary(), len(slots), buffers),
                ]
                writer.write_batch(pa.record_batch(columns, schema=schema))
        pipe.send("done")


PATHS: dict[str, Candidate] = {
    "source → noop": to_noop,
    "recorder none": to_lake("none"),
    "recorder zstd": to_lake("zstd"),
    "pyarrow none": plain("none"),
    "pyarrow zstd": plain("zstd"),
    "Spark's sink zstd": to_parquet("zstd"),
}


def measure_paths(spark: SparkSession, sizes: list[str], rounds: int, folder: Path) -> dict[str, Any]:
    """Per size and path: GiB/s and CPU seconds per GiB, each round's."""
    found: dict[str, Any] = {size: {name: {"gib_s": [], "cpu_s": []} for name in PATHS} for size in sizes}
    for size in sizes:
        shape = SHAPES[size]
        frames = FILL_BYTES // int(np.prod(shape))
        nslots = 1 << (frames - 1).bit_length()
        gib = frames * int(np.prod(shape)) / GIB
        with Site(shape, nslots) as site:
            client = site.pool.connect()
            producer = fill(client, shape, frames)
            for turn in range(-1, rounds):  # the first round warms up
                names = list(PATHS)
                for name in names[turn % len(names) :] + names[: turn % len(names)]:
                    print(f"\r{size}, round {turn + 1}, {name}            ", end="", file=sys.stderr, flush=True)
                    target = folder / f"{turn}-{names.index(name)}"
                    with CpuMeter() as meter:
                        began_s = time.perf_counter()
                        own = PATHS[name](spark, site, target)
                        took_s = time.perf_counter() - began_s
                    took_s, worked_s = own or (took_s, meter.seconds)
                    if turn >= 0:
                        found[size][name]["gib_s"].append(gib / took_s)
                        found[size][name]["cpu_s"].append(worked_s / gib)
                    shutil.rmtree(target, ignore_errors=True)
            producer.close()
            client.close()
    print("\r" + " " * 60 + "\r", end="", file=sys.stderr)
    return found


# --- live


def measure_batches(spark: SparkSession, site: Site) -> float:
    """What a micro-batch of next to nothing costs: median of their durations, in ms."""
    frames = spark.readStream.format("tensorpool").option("streams", str(STREAM_ID)).options(**site.options)
    query = frames.option("maxFramesPerTrigger", "1").load().writeStream.format("noop").start()
    try:
        wait_for(lambda: len(query.recentProgress) >= 15, 120)
        durations = [report["durationMs"]["triggerExecution"] for report in query.recentProgress[5:]]
    finally:
        query.stop()
    return float(statistics.median(durations))


def measure_latency(spark: SparkSession, site: Site, seconds: float) -> dict[str, float]:
    """From publish to the row in the hands of a foreachBatch, in ms, and how many frames never came."""
    seen: list[tuple[int, int, int]] = []

    def take(batch: DataFrame, number: int) -> None:
        rows = batch.select("seq", "timestamp_ns").collect()
        now_ns = time.monotonic_ns()
        seen.extend((row["seq"], row["timestamp_ns"], now_ns) for row in rows)

    frames = spark.readStream.format("tensorpool").option("streams", str(STREAM_ID)).options(**site.options).load()
    query = frames.writeStream.foreachBatch(take).trigger(processingTime=CALM_TRIGGER).start()
    try:
        wait_for(lambda: len(query.recentProgress) >= 5, 120)  # warm
        seen.clear()
        time.sleep(seconds)
        found = list(seen)
    finally:
        query.stop()
    late = np.array([now_ns - stamp_ns for _, stamp_ns, now_ns in found]) / 1e6
    seqs = np.array([seq for seq, _, _ in found])
    return {
        "frames": len(found),
        "p50_ms": float(np.percentile(late, 50)),
        "p99_ms": float(np.percentile(late, 99)),
        "within_1s": float((late <= 1000).mean()),
        "gaps": int((np.diff(seqs) - 1).sum()),
    }


# --- the report


def report(paths: dict[str, Any]) -> None:
    print(f"{'GiB/s (CPU s per GiB)':<22}" + "".join(f"{size:>18}" for size in paths))
    for name in PATHS:
        cells = []
        for size in paths:
            row = paths[size][name]
            cells.append(f"{statistics.median(row['gib_s']):.2f} ({statistics.median(row['cpu_s']):.1f})")
        print(f"{name:<22}" + "".join(f"{cell:>18}" for cell in cells))
    print()


def ratio(paths: dict[str, Any], size: str, ours: str, theirs: str) -> float:
    """Median of the rounds' ratios."""
    pairs = zip(paths[size][ours]["gib_s"], paths[size][theirs]["gib_s"], strict=True)
    return float(statistics.median(mine / other for mine, other in pairs))


def targets(paths: dict[str, Any], live: dict[str, Any]) -> Iterator[tuple[str, float, bool]]:
    for size in paths:
        noop = statistics.median(paths[size]["source → noop"]["gib_s"])
        yield f"{size}: source → noop, GiB/s, at least 0.7", noop, noop >= 0.7
        for ours, theirs, bound in (
            ("recorder zstd", "pyarrow zstd", 1.5),
            ("recorder none", "pyarrow none", 0.6),
            ("recorder zstd", "Spark's sink zstd", 3.0),
        ):
            value = ratio(paths, size, ours, theirs)
            yield f"{size}: {ours} / {theirs}, at least {bound}", value, value >= bound
    if "latency" in live:
        share = live["latency"]["within_1s"]
        yield "rows within 1 s at 100 Hz of 640 KiB, share, at least 0.99", share, share >= 0.99
        yield "frames missed meanwhile, 0", live["latency"]["gaps"], live["latency"]["gaps"] == 0
    yield from recorders.targets(live.get("recorders", []))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round of 640 KiB, ten seconds live")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sizes", help="only frames of so many KiB, such as 64,640")
    parser.add_argument("--live-seconds", type=float, default=60.0)
    parser.add_argument("--to", type=Path, help="where files go; by default a temporary directory")
    parser.add_argument("--json", type=Path, help="also write everything to this file")
    options = parser.parse_args()
    names = {"64": "64 KiB", "640": "640 KiB", "4096": "4 MiB"}
    sizes = [names[part] for part in options.sizes.split(",")] if options.sizes else list(SHAPES)
    rounds, live_s = options.rounds, options.live_seconds
    if options.quick:
        sizes, rounds, live_s = ["640 KiB"], 1, 10.0
    live: dict[str, Any] = {}
    spark = session("local[2]", "tensorpool benchmark", **CONF)
    with tempfile.TemporaryDirectory(dir=options.to, prefix="tensorpool-spark-") as name:
        folder = Path(name)
        paths = measure_paths(spark, sizes, rounds, folder)
        report(paths)
        os.sync()  # memory for the rings does not wait for what was written above
        with Site(LIVE_SHAPE, 4096) as site, camera(site, LIVE_SHAPE, CALM_HZ):
            live["batch_ms"] = measure_batches(spark, site)
            print(f"micro-batch           {live['batch_ms']:.0f} ms")
            live["latency"] = measure_latency(spark, site, min(CALM_S, live_s))
            result = live["latency"]
            print(
                f"publish to row        p50 {result['p50_ms']:.0f} ms, p99 {result['p99_ms']:.0f} ms, "
                f"{result['within_1s']:.2%} within 1 s, {result['gaps']} missed of {result['frames']}"
            )
        live["recorders"] = []
        for case in recorders.CASES[: 2 if options.quick else len(recorders.CASES)]:
            live["recorders"].append(recorders.measure(spark, case, folder, live_s))
            print(live["recorders"][-1], flush=True)
    spark.stop()
    verdicts = list(targets(paths, live))
    for words, value, holds in verdicts:
        print(f"{'holds ' if holds else 'MISSED'}  {words}: {value:.2f}")
    if options.json:
        verdict_list = [{"target": words, "value": value, "holds": holds} for words, value, holds in verdicts]
        options.json.write_text(
            json.dumps(msgspec.to_builtins({"paths": paths, "live": live, "targets": verdict_list}), indent=2)
        )
    return 0 if all(holds for *_, holds in verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
