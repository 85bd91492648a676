# SPDX-License-Identifier: Apache-2.0
"""Recording live streams, by Spark's query and by `--direct`: what is lost, how far the commits lag, and what it costs.

    fast          640 KiB at 800 Hz (500 MiB/s), a ring of 5 s
    short ring    512 KiB at 512 Hz (256 MiB/s), a ring of 0.5 s: only --direct is meant for it
    small frames  4 KiB at 10 kHz
    many streams  32 streams of 64 KiB at 10 Hz

A camera publishes from a process of its own, whose work is not counted; the driver's, which is small, is. Every case
runs with the recorder's own defaults. Part of `python -m benchmarks.spark`.

    python -m benchmarks.recorders [--seconds 60] [--only NAME…] [--to DIR] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec
from pyspark.sql import SparkSession

from benchmarks.live_camera import STREAM_ID, Camera, CpuMeter, Site, camera
from tensorpool.lake import maintenance
from tensorpool.lake.direct_recorder import DirectRecorder
from tensorpool.lake.recorder import RecorderBase
from tensorpool.spark import session
from tensorpool.spark.recorder import Recorder, Settings

MIB: Final = 1 << 20
KEPT_BYTES, TRIM_EVERY_S = 4 << 30, 5.0  # a minute of the fast stream would be 30 GiB


class Case(msgspec.Struct, frozen=True):
    """One recording."""

    name: str
    engine: str
    codec: str
    shape: tuple[int, ...]
    rate_hz: float
    nslots: int
    streams: int = 1


FAST: Final = ((512, 1280), 800, 4096)
SHORT: Final = ((512, 1024), 512, 256)
SMALL: Final = ((64, 64), 10_000, 65_536)
MANY: Final = ((256, 256), 10, 128)
CASES: Final = (
    Case("fast", "spark", "zstd", *FAST),
    Case("fast", "direct", "zstd", *FAST),
    Case("fast", "spark", "none", *FAST),
    Case("fast", "direct", "none", *FAST),
    Case("short ring", "direct", "zstd", *SHORT),
    Case("small frames", "spark", "zstd", *SMALL),
    Case("small frames", "direct", "zstd", *SMALL),
    Case("many streams", "spark", "zstd", *MANY, 32),
    Case("many streams", "direct", "zstd", *MANY, 32),
)


class Result(msgspec.Struct, frozen=True):
    """What a recording did."""

    case: Case
    frames: int
    lost: int
    offered_mib_s: float
    ring_s: float
    highest_lag_s: float
    cores: float
    adds_up: bool

    def __str__(self) -> str:
        case = self.case
        return (
            f"{case.name:<13} {case.engine:<6} {case.codec:<4} "
            f"{self.offered_mib_s:6.0f} MiB/s, ring of {self.ring_s:.1f} s: "
            f"{self.lost} of {self.frames + self.lost} frames lost, highest lag {self.highest_lag_s:.1f} s, "
            f"{self.cores:.2f} cores"
        )


def measure(spark: SparkSession | None, case: Case, folder: Path, seconds: float) -> Result:
    """Record one case for so long."""
    with Site(case.shape, case.nslots) as site, camera(site, case.shape, case.rate_hz, case.streams) as filming:
        settings, lake = Settings(codec=case.codec, **site.settings), folder / "live"
        streams = [STREAM_ID + number for number in range(case.streams)]
        recorder: RecorderBase
        if case.engine == "direct":
            recorder = DirectRecorder(streams, lake, settings=settings)
        else:
            assert spark is not None
            recorder = Recorder(spark, streams, lake, settings=settings)
        try:
            return _watch(case, recorder, filming, seconds)
        finally:
            recorder.close()
            shutil.rmtree(lake, ignore_errors=True)


def _watch(case: Case, recorder: RecorderBase, filming: Camera, seconds: float) -> Result:
    recorder.start()
    recorder.wait(min(3.0, seconds / 4))  # what is slow the first time is over
    with CpuMeter(without=filming.pid) as meter:
        highest = _keep_recording(recorder, began_s := time.monotonic(), seconds)
        took_s = time.monotonic() - began_s
    filming.end()
    totals = recorder.stop()
    rate_hz = (totals.frames + totals.lost) / totals.seconds / case.streams
    return Result(
        case,
        frames=totals.frames,
        lost=totals.lost,
        offered_mib_s=rate_hz * case.streams * math.prod(case.shape) / MIB,
        ring_s=case.nslots / rate_hz,
        highest_lag_s=highest / case.streams / rate_hz,
        cores=meter.seconds / took_s,
        adds_up=totals.adds_up,
    )


def _keep_recording(recorder: RecorderBase, began_s: float, seconds: float) -> int:
    """The highest lag, in frames. Old frames are removed: they would fill the disk."""
    highest, trim_s = 0, began_s + TRIM_EVERY_S
    while time.monotonic() < began_s + seconds:
        recorder.wait(0.5)
        highest = max(highest, recorder.totals().lag_frames)
        if time.monotonic() >= trim_s:
            maintenance.retain(recorder.lake, max_bytes=KEPT_BYTES)
            maintenance.remove_unused(recorder.lake, grace_s=0.0)
            trim_s = time.monotonic() + TRIM_EVERY_S
    return highest


def targets(results: Sequence[Result]) -> Iterator[tuple[str, float, bool]]:
    """What is demanded, what was found, and whether it holds."""
    for result in results:
        case = result.case
        words = (
            f"{case.name}, {case.engine} {case.codec}, {result.offered_mib_s:.0f} MiB/s, ring of {result.ring_s:.1f} s"
        )
        yield f"{words}: frames lost, 0", result.lost, result.lost == 0 and result.adds_up
    cores = {(result.case.name, result.case.engine, result.case.codec): result.cores for result in results}
    ratios = [
        cores["fast", "spark", codec] / cores["fast", "direct", codec]
        for codec in ("zstd", "none")
        if ("fast", "spark", codec) in cores and ("fast", "direct", codec) in cores
    ]
    if ratios:
        ratio = statistics.median(ratios)
        yield "fast: CPU of Spark's query / CPU of --direct, at most 2", ratio, ratio <= 2
    for name, bound in (("small frames", 0.3), ("many streams", 0.6)):
        for engine in ("spark", "direct"):
            if (found := cores.get((name, engine, "zstd"))) is not None:
                yield f"{name}, {engine}: cores, at most {bound}", found, found <= bound


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--only", nargs="+", choices=sorted({case.name for case in CASES}))
    parser.add_argument("--to", type=Path, help="where files go; by default a temporary directory")
    parser.add_argument("--json", type=Path, help="also write everything to this file")
    options = parser.parse_args()
    spark = session("local[2]", "tensorpool benchmark", **{"spark.log.level": "ERROR"})
    results = []
    with tempfile.TemporaryDirectory(dir=options.to, prefix="tensorpool-recorders-") as name:
        for case in CASES:
            if options.only is None or case.name in options.only:
                results.append(measure(spark, case, Path(name), options.seconds))
                print(results[-1], flush=True)
    spark.stop()
    verdicts = list(targets(results))
    for words, value, holds in verdicts:
        print(f"{'holds ' if holds else 'MISSED'}  {words}: {value:.2f}")
    if options.json:
        options.json.write_text(json.dumps(msgspec.to_builtins(results), indent=2))
    return 0 if all(holds for *_, holds in verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
