# SPDX-License-Identifier: Apache-2.0
"""`tensorpool lake`: what a lake holds, whether it is whole, and how it is kept in shape."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any, Final

import click
import msgspec

from tensorpool.cli import figures

_AGE: Final = re.compile(r"(?P<number>[0-9]+(\.[0-9]+)?)(?P<unit>[smhd])")
_UNITS: Final = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}


class _Age(click.ParamType[float]):
    """90s, 30m, 12h, 7d."""

    name = "AGE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        match = _AGE.fullmatch(str(value))
        if match is None:
            self.fail(f"{value!r}: give a number with s, m, h or d, such as 7d", param, ctx)
        return float(match["number"]) * _UNITS[match["unit"]]


class _Size(click.ParamType[int]):
    """512m, 20g."""

    name = "SIZE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        match = re.fullmatch(r"([0-9]+)([kmgt]?)", str(value).lower())
        if match is None or int(match[1]) == 0:
            self.fail(f"{value!r}: give a number of bytes, with k, m, g or t, such as 20g", param, ctx)
        return int(match[1]) << {"": 0, "k": 10, "m": 20, "g": 30, "t": 40}[match[2]]


lake_argument = click.argument("lake", type=click.Path(path_type=Path))
json_option = click.option("--json", "as_json", is_flag=True, help="As JSON.")


@click.group(name="lake")
def command() -> None:
    """Look at a lake of recordings, and keep it in shape."""


@command.command(name="ls")
@lake_argument
@json_option
def ls(lake: Path, as_json: bool) -> None:
    """What is in LAKE, by stream and epoch."""
    from tensorpool.spark.lake import Lake

    opened = Lake.open(lake)
    names = {stream: name for name, ids in opened.names().items() for stream in ids}
    keys = sorted({(file.stream_id, file.epoch) for file in opened.files()})
    rows = [_epoch_row(opened, *key) | {"name": names.get(key[0])} for key in keys]
    if as_json:
        click.echo(msgspec.json.encode({"lake": str(opened.path), "commits": opened.state.number, "epochs": rows}))
        return
    for row in rows:
        click.echo(
            f"stream {row['stream_id']}{_named(row['name'])}  epoch {row['epoch']}  "
            f"frames {row['lo']} to {row['hi'] - 1}: "
            f"{row['frames']} in {row['files']} files, {figures.size(row['bytes'])}, {row['lost']} lost"
        )
    click.echo(f"{opened.state.number} commits")


def _named(name: str | None) -> str:
    return "" if name is None else f" ({name})"


def _epoch_row(lake: Any, stream_id: int, epoch: int) -> dict[str, Any]:
    files, gaps = lake.files(stream_id, epoch), lake.gaps(stream_id, epoch)
    return {
        "stream_id": stream_id,
        "epoch": epoch,
        "lo": min(file.lo for file in files),
        "hi": max(file.hi for file in files),
        "frames": sum(file.frames for file in files),
        "files": len(files),
        "bytes": sum(file.bytes for file in files),
        "lost": sum(gap.hi - gap.lo for gap in gaps),
    }


@command.command(name="verify")
@lake_argument
@click.option("--deep", is_flag=True, help="Read every byte.")
@json_option
def verify(lake: Path, deep: bool, as_json: bool) -> None:
    """Check LAKE: every file is there and whole, every missing frame is explained. Exit code 1 where it is not."""
    from tensorpool.spark.lake import Lake, maintenance

    opened = Lake.open(lake)
    problems = maintenance.verify(opened, is_deep=deep)
    if as_json:
        click.echo(msgspec.json.encode({"files": len(opened.files()), "problems": problems}))
    else:
        for problem in problems:
            click.echo(problem)
        click.echo(f"{len(opened.files())} files, {len(problems)} problems")
    sys.exit(1 if problems else 0)


@command.command(name="compact")
@lake_argument
@click.option("--codec", type=click.Choice(["none", "lz4", "zstd"]), default="zstd", show_default=True)
@click.option("--size", type=_Size(), default="256m", show_default=True, help="Of the files that are made.")
@click.option("--master", default="local[*]", show_default=True, help="Spark's.")
@json_option
def compact(lake: Path, codec: str, size: int, master: str, as_json: bool) -> None:
    """Make few large files of many small ones. Those who read LAKE meanwhile are not disturbed."""
    from tensorpool.spark import session
    from tensorpool.spark.lake import Lake, maintenance

    opened = Lake.open(lake)
    spark = session(master, "tensorpool lake compact", **{"spark.log.level": "ERROR"})
    try:
        done = maintenance.compact(spark, opened, codec=codec, target_bytes=size)
    finally:
        spark.stop()
    if as_json:
        click.echo(msgspec.json.encode(done))
    else:
        before, after = figures.size(done.bytes_before), figures.size(done.bytes_after)
        click.echo(f"{done.files_before} files of {before} became {done.files_after} of {after}")


@command.command(name="retain")
@lake_argument
@click.option("--age", type=_Age(), help="Let go of what was recorded longer ago, such as 7d.")
@click.option("--bytes", "size", type=_Size(), help="Let go of the oldest beyond this size, such as 500g.")
@click.option("--grace", type=_Age(), default="1h", show_default=True, help="Delete files that left so long ago.")
@json_option
def retain(lake: Path, age: float | None, size: int | None, grace: float, as_json: bool) -> None:
    """Let go of the oldest frames of LAKE, and delete what nobody reads any more."""
    from tensorpool.spark.lake import Lake, maintenance

    opened = Lake.open(lake)
    gone = maintenance.retain(opened, max_age_s=age, max_bytes=size)
    deleted = maintenance.remove_unused(opened, grace_s=grace)
    if as_json:
        click.echo(msgspec.json.encode({"removed": gone, "deleted": deleted}))
    else:
        click.echo(f"removed {gone.files} files with {gone.frames} frames, {figures.size(gone.bytes)}")
        click.echo(f"deleted {deleted.files} files, {figures.size(deleted.bytes)}")
