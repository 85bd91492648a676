# SPDX-License-Identifier: Apache-2.0
"""`tensorpool lake`: lists and checks a lake, merges its small files, and removes what is too old."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click
import msgspec

from tensorpool.cli import format, options


@click.group(name="lake")
def command() -> None:
    """List, check, compact and trim a lake of recordings."""


@command.command(name="ls")
@options.lake_argument
@options.json_option()
def ls(lake: Path, as_json: bool) -> None:
    """List the frames of LAKE by stream and epoch."""
    from tensorpool.lake import Lake

    opened = Lake.open(lake)
    names = opened.names_by_id()
    keys = sorted({(file.stream_id, file.epoch) for file in opened.files()})
    rows = [_epoch_row(opened, *key) | {"name": names.get(key[0])} for key in keys]
    if as_json:
        click.echo(msgspec.json.encode({"lake": opened.uri, "version": opened.state.number, "epochs": rows}))
        return
    for row in rows:
        click.echo(
            f"{format.named(row['stream_id'], row['name'])}  epoch {row['epoch']}  "
            f"frames {row['lo']} to {row['hi'] - 1}: "
            f"{row['frames']} in {row['files']} files, {format.size(row['bytes'])}, {row['lost']} lost"
        )
    click.echo(f"version {opened.state.number}")


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
@options.lake_argument
@click.option("--deep", is_flag=True, help="Read every byte.")
@options.json_option()
def verify(lake: Path, deep: bool, as_json: bool) -> None:
    """Check that each file of LAKE exists and is complete, and that a gap explains each missing frame.

    Exit code 1: there is a problem.
    """
    from tensorpool.lake import Lake, maintenance

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
@options.lake_argument
@click.option("--codec", type=click.Choice(["none", "lz4", "zstd"]), default="zstd", show_default=True)
@click.option("--size", type=options.Size(), default="256m", show_default=True, help="Size of the new files.")
@options.json_option()
def compact(lake: Path, codec: str, size: int, as_json: bool) -> None:
    """Merge many small files into few large ones. LAKE can be read and recorded to meanwhile."""
    from tensorpool.lake import Lake, maintenance

    done = maintenance.compact(Lake.open(lake), codec=codec, target_bytes=size)
    if as_json:
        click.echo(msgspec.json.encode(done))
    else:
        before, after = format.size(done.bytes_before), format.size(done.bytes_after)
        click.echo(f"{done.files_before} files of {before} became {done.files_after} of {after}")


@command.command(name="retain")
@options.lake_argument
@click.option("--age", type=options.Age(), help="Remove what was recorded longer ago, such as 7d.")
@click.option("--bytes", "size", type=options.Size(), help="Remove the oldest frames beyond this size, such as 500g.")
@click.option(
    "--grace",
    type=options.Age(),
    default="1h",
    show_default=True,
    help="Delete files this long after they were removed.",
)
@click.option("--dry-run", is_flag=True, help="Say what would be removed and deleted, and change nothing.")
@options.json_option()
def retain(lake: Path, age: float | None, size: int | None, grace: float, dry_run: bool, as_json: bool) -> None:
    """Remove the oldest frames of LAKE, and delete files that no reader can need any more.

    By size, the newest file of every stream stays, however large it is.
    """
    from tensorpool.lake import Lake, maintenance

    opened = Lake.open(lake)
    gone = maintenance.retain(opened, max_age_s=age, max_bytes=size, is_dry=dry_run)
    deleted = maintenance.remove_unused(opened, grace_s=grace, is_dry=dry_run)
    if as_json:
        click.echo(msgspec.json.encode({"removed": gone, "deleted": deleted}))
    else:
        would = "would have " if dry_run else ""
        click.echo(f"{would}removed {gone.files} files with {gone.frames} frames, {format.size(gone.bytes)}")
        click.echo(f"{would}deleted {deleted.files} files, {format.size(deleted.bytes)}")
