# SPDX-License-Identifier: Apache-2.0
"""`tensorpool import`: publishes the pictures of an MCAP file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from tensorpool.cli.ingest import publish, publishing_options


@click.command(name="import")
@click.argument("file", metavar="FILE", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.argument("stream")
@click.option("--topic", metavar="TOPIC", help="Which topic of the file.  [default: the one with pictures]")
@publishing_options
def command(file: Path, stream: str, topic: str | None, **how: Any) -> None:
    """Publish the pictures of an MCAP FILE on STREAM: images of ROS 2 and Foxglove, raw or compressed.

    Record it meanwhile, and it is in a lake: `tensorpool record STREAM --to LAKE --direct`.
    """
    from tensorpool.sources import McapSource

    publish(stream, McapSource(file, topic), **how)
