# SPDX-License-Identifier: Apache-2.0
"""`tensorpool stats` and `tensorpool qos`: tables, JSON and pictures of a lake."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from click.testing import CliRunner, Result
from pyspark.sql import SparkSession

from tensorpool.cli.main import group
from tensorpool.cli.progress import LiveLine
from tensorpool.cli.stats import choose_window, with_progress
from tensorpool.lake import Lake
from tensorpool.lake.manifest import Gap
from tensorpool.spark import analytics
from tests.support.frame_rows import SECOND_NS, make_lake, row, rows_over_time, source
from tests.support.processes import Process, wait_until

QOS = [
    (SECOND_NS, "producer", 10_000, 1, 1, 100, None, None, None),
    (SECOND_NS + 5, "consumer", 10_000, 77, 1, 90, 4, 0, "STREAM"),
]


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    """Of two streams and a gap, with reports."""
    rows = [one for one in rows_over_time(120) if one["seq"] not in (60, 61)]
    other = [row(np.array([2**64 - 1, 2**64 - 2], np.uint64), stream_id=7, seq=seq) for seq in range(2)]
    gaps = (Gap(10_000, 1, 60, 62, "OVERWRITTEN"),)
    return make_lake(tmp_path / "lake", rows + other, gaps=gaps, qos=QOS, metadata=[source(10_000, "camera/front")])


def run(*arguments: object) -> Result:
    """In this process, with the session that it has."""
    found = CliRunner().invoke(group, [str(argument) for argument in arguments], catch_exceptions=False)
    assert found.exit_code == 0, found.output
    return found


def test_stats_as_tables_and_pictures(spark: SparkSession, lake: Lake, tmp_path: Path) -> None:
    """Every stream, the windows that were asked for, the gaps with their reasons, and where the pictures are."""
    timeline, sheet = tmp_path / "t.png", tmp_path / "c.png"
    found = run(
        "stats", lake.path, "--window", "1s", "--plot", timeline, "--contact-sheet", sheet, "--stream", "camera/front"
    )
    lines = [line.split() for line in found.stdout.splitlines()]
    for line in (
        ["stream", "camera/front"],
        ["frames", "118"],
        ["lost", "2", "in", "1"],
        ["latency", "p99", "2.00", "ms"],
    ):
        assert line in lines
    assert 'stream "camera/front" (10000): 2 frames missing, overwritten' in found.stdout
    assert [line[1:6] for line in lines if line[:1] == ["camera/front"]] == [
        ["0", "s", "98", "98.0", "2"],
        ["1", "s", "20", "20.0", "0"],
    ]
    assert timeline.read_bytes()[:4] == sheet.read_bytes()[:4] == b"\x89PNG"


def test_stats_as_json(spark: SparkSession, lake: Lake, tmp_path: Path) -> None:
    """With exact integers, and what the manifest says of gaps; a plot chooses its own windows."""
    found = json.loads(run("stats", lake.path, "--json", "--plot", tmp_path / "t.png").stdout)
    small, large = found["streams"]
    assert (small["stream_id"], small["min"], small["max"]) == (7, 2**64 - 2, 2**64 - 1)
    assert (small["name"], large["name"]) == (None, "camera/front")
    assert (large["frames"], large["lost"], large["gaps"], large["p99_ms"]) == (118, 2, 1, 2.0)
    assert found["gaps"] == [{"stream_id": 10_000, "epoch": 1, "lo": 60, "hi": 62, "reason": "OVERWRITTEN"}]
    assert "windows" not in found
    assert (tmp_path / "t.png").exists()


def test_qos_as_table_json_and_picture(spark: SparkSession, lake: Lake, tmp_path: Path) -> None:
    """Who published and who listened."""
    found = json.loads(run("qos", lake.path, "--json").stdout)
    assert [(one["kind"], one["lag_max"], one["drops_gap"]) for one in found["clients"]] == [
        ("producer", None, None),
        ("consumer", 10, 4),
    ]
    assert [one["name"] for one in found["clients"]] == ["camera/front"] * 2
    drawn = run("qos", lake.path, "--window", "1s", "--plot", tmp_path / "q.png", "--stream", "camera/front")
    assert "wrote" in drawn.stdout
    lines = [line.split() for line in drawn.stdout.splitlines()]
    assert [line[:3] for line in lines if "consumer" in line] == [["camera/front", "1", "consumer"]]
    assert (tmp_path / "q.png").read_bytes()[:4] == b"\x89PNG"


class SeenLine(LiveLine):
    """The line at the bottom of a terminal, as a person sees it; the first text lets the work go on."""

    def __init__(self, release: Path) -> None:
        super().__init__()
        self._release = release
        self.texts: list[str] = []

    @property
    def is_due(self) -> bool:
        return True

    def show(self, text: str) -> None:
        self.texts.append(text)
        self._release.touch()


def test_the_work_is_seen_while_it_goes_on(spark: SparkSession, tmp_path: Path) -> None:
    """How many tasks are done, of how many; whatever goes wrong is raised."""
    release = str(tmp_path / "release")

    def wait_for_release(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        wait_until(lambda: os.path.exists(release), "the progress is seen")
        return batches

    line = SeenLine(tmp_path / "release")
    rows = spark.range(6, numPartitions=3).mapInArrow(wait_for_release, "id BIGINT")
    assert with_progress(line, lambda: len(rows.collect())) == 6
    assert line.texts[0] == "measuring frames: 0 of 3 tasks done"
    with pytest.raises(ZeroDivisionError):
        with_progress(line, lambda: 1 // 0)


def test_a_large_file_is_many_tasks(spark: SparkSession, lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that there is progress to see, and every core has something to do; the figures are the same."""
    monkeypatch.setattr(analytics, "BYTES_PER_TASK", lake.files()[-1].bytes // 2)
    measured = analytics.measured_frames(lake, (10_000,))
    assert len(measured.select("seq").collect()) == 118
    assert measured.rdd.getNumPartitions() > len([file for file in lake.files() if file.stream_id == 10_000])


def test_an_empty_lake_is_reported_as_empty(tmp_path: Path) -> None:
    """No frames, and no reports; nothing is started for that."""
    empty = make_lake(tmp_path / "empty", [])
    assert "has no frames" in run("stats", empty.path).stdout
    assert "has no reports" in run("qos", empty.path).stdout


@pytest.mark.parametrize("command", ["stats", "qos", "replay"])
def test_a_stream_that_was_not_recorded_is_refused_with_those_that_were(command: str, lake: Lake) -> None:
    """Before anything is started."""
    found = CliRunner().invoke(group, [command, str(lake.path), "--stream", "camera/rear"])
    assert "--stream = 'camera/rear' is not usable; accepted: a recorded stream: 7, camera/front (10000)" in str(
        found.exception
    )


@pytest.mark.parametrize("command", ["stats", "qos"])
def test_what_cannot_be_read_is_said_before_spark_starts(command: str, tmp_path: Path) -> None:
    """A directory that is no lake, and a window that is none; exit code 1, and one line."""
    with Process("-m", "tensorpool", command, str(tmp_path)) as process:
        code, output = process.finish()
    assert (code, output.count("\n")) == (1, 1)
    assert "record to it first" in output
    lake = make_lake(tmp_path / "lake", rows_over_time(2))
    found = CliRunner().invoke(group, [command, str(lake.path), "--window", "soon"])
    assert "such as 500ms" in str(found.exception)
    found = CliRunner().invoke(group, [command, str(lake.path), "--plot", str(tmp_path / "missing" / "t.png")])
    assert "can be written" in str(found.exception)


@pytest.mark.usefixtures("quick_jvm")
def test_the_command_starts_and_ends_a_spark_of_its_own(lake: Lake) -> None:
    """In a process that has none: nothing but JSON on its output."""
    with Process("-m", "tensorpool", "qos", str(lake.path), "--json", "--master", "local[1]") as process:
        status, output = process.finish(timeout_s=380)
    assert status == 0, output
    assert len(json.loads(output.splitlines()[-1])["clients"]) == 2


def test_windows_are_round_and_have_several_frames() -> None:
    """About a hundred of them, and never less than a few frames in each."""
    assert choose_window([{"seconds": 60.0, "frames": 6000}]) == "500ms"
    assert choose_window([{"seconds": 60.0, "frames": 61}]) == "5000ms"
    assert choose_window([{"seconds": None, "frames": 1}]) == "1ms"
