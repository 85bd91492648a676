# SPDX-License-Identifier: Apache-2.0
"""`tensorpool record` and `tensorpool lake` from the shell, as far as they need no Spark; runs are in fault/."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from tensorpool.cli.main import group
from tensorpool.errors import ConfigError
from tensorpool.lake import Lake, commits, ring_reader
from tensorpool.lake.file_policy import FilePolicy
from tensorpool.lake.staging import Staging
from tests.support.lakes import Ring


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(group, list(arguments))
    if isinstance(result.exception, ConfigError):
        return 1, str(result.exception)
    return result.exit_code, result.output


@pytest.fixture
def lake(shm_dir: Path, tmp_path: Path) -> Iterator[Lake]:
    """Of 12 frames in two files, after 4 that were lost."""
    lake, ring = Lake.create(tmp_path / "lake"), Ring(shm_dir)
    for batch, (lo, hi) in enumerate(((0, 12), (12, 16))):
        ring.write(hi - lo)
        staged = Staging(lake.path, "q", batch).stage(
            ring.part(lo, hi), ring.span(lo, hi), FilePolicy(is_durable=False)
        )
        commits.commit(lake, "q", batch, [staged])
    yield lake
    ring_reader.let_go(0)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "Missing argument 'STREAM...'"),
        (("cam",), "Missing option '--to'"),
        (("cam", "--to", "/lake", "--codec", "gzip"), "'gzip' is not one of 'none', 'lz4', 'zstd'"),
        (("cam", "--to", "/lake", "--trigger", "0"), "0.0 is not in the range"),
        (("cam", "--to", "/lake", "--frames", "0"), "0 is not in the range"),
    ],
)
def test_a_wrong_command_line_is_refused(arguments: tuple[str, ...], words: str) -> None:
    code, output = run("record", *arguments)
    assert code == 2
    assert words in output


def test_what_cannot_be_used_is_refused_before_spark_starts(tmp_path: Path) -> None:
    assert run("record", "cam", "--to", str(tmp_path), "--set", "shm.base_dri=x")[0] == 1
    code, output = run("record", "cam", "--to", str(tmp_path), "--file-size", "huge")
    assert (code, "with k, m or g" in output) == (1, True)


def test_a_lake_is_listed_and_checked(lake: Lake) -> None:
    code, output = run("lake", "ls", str(lake.path))
    assert code == 0
    assert "stream 10000  epoch 1  frames 0 to 15: 12 in 2 files" in output
    listed = msgspec.json.decode(run("lake", "ls", "--json", str(lake.path))[1])
    assert (listed["epochs"][0]["frames"], listed["epochs"][0]["lost"], listed["version"]) == (12, 4, 2)
    assert run("lake", "verify", "--deep", str(lake.path)) == (0, "2 files, 0 problems\n")
    lake.full_path(lake.files()[0].path).unlink()
    code, output = run("lake", "verify", "--json", str(lake.path))
    assert code == 1
    assert "it is missing" in msgspec.json.decode(output)["problems"][0]
    assert run("lake", "ls", str(lake.path / "no"))[0] == 1


def test_a_lake_is_trimmed_by_size_and_by_age(lake: Lake) -> None:
    code, output = run("lake", "retain", "--bytes", str(lake.files()[-1].bytes), "--grace", "0s", str(lake.path))
    assert code == 0
    assert "removed 1 files with 8 frames" in output
    assert "deleted 1 files" in output
    assert [file.lo for file in lake.files()] == [12]
    trimmed = msgspec.json.decode(run("lake", "retain", "--age", "0s", "--json", str(lake.path))[1])
    assert (trimmed["removed"]["files"], trimmed["deleted"]["files"]) == (1, 0)
    assert run("lake", "retain", "--age", "soon", str(lake.path))[0] == 2
    assert run("lake", "retain", "--bytes", "0", str(lake.path))[0] == 2
