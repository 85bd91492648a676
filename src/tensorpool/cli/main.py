# SPDX-License-Identifier: Apache-2.0
"""The entry point: finds the command, imports only its module, and turns errors into exit codes.

Exit code 0: done. 1: failed, and one line on stderr says why. 2: the command line is wrong.
"""

from __future__ import annotations

import importlib
import sys
from typing import Final

import click

from tensorpool.errors import DISTRIBUTION, TensorPoolError

# name: (module, one line for --help); the click command is the module's attribute behind the colon, or `command`
COMMANDS: Final = {
    "demo": (
        "tensorpool.cli.demo",
        "Try it: a camera, two readers, a recording by Spark, and a check that every frame is accounted for.",
    ),
    "driver": ("tensorpool.cli.driver", "Run the SHM driver: it owns the memory, grants leases and announces streams."),
    "produce": ("tensorpool.cli.produce", "Publish synthetic frames of any shape, dtype, rate and pattern."),
    "consume": ("tensorpool.cli.consume", "Receive a stream: rates, ages, drops; --verify checks every byte."),
    "ingest": (
        "tensorpool.cli.ingest",
        "Publish a camera, a video or files: OpenCV, ffmpeg, GStreamer, images, numpy.",
    ),
    "limit": ("tensorpool.cli.limit", "Publish a stream again at a lower rate, as another stream."),
    "import": ("tensorpool.cli.import_file", "Publish the pictures of an MCAP file."),
    "ls": ("tensorpool.cli.ls", "List streams: names, tags, producers, epochs and drivers."),
    "inspect": ("tensorpool.cli.inspect", "Show one stream: layout, files, epochs, leases, slots, consumers."),
    "doctor": (
        "tensorpool.cli.doctor",
        "Find what is wrong on this host and how to fix it; --gc removes what ended processes left.",
    ),
    "leases": ("tensorpool.cli.leases", "Show who is attached: process, user, host, command; end leases."),
    "top": ("tensorpool.cli.top", "Watch all streams, consumers and services: rates, lag, drops, changes."),
    "console": (
        "tensorpool.cli.console",
        "Serve a page in the browser: streams with live pictures, recordings, services, this host.",
    ),
    "view": ("tensorpool.cli.view", "Show one stream live, in the browser or in the terminal."),
    "hz": ("tensorpool.cli.hz", "Measure how often a stream publishes: mean, shortest and longest interval, jitter."),
    "bridge": ("tensorpool.cli.bridge", "Carry streams to and from other hosts over UDP."),
    "discovery": ("tensorpool.cli.discovery", "Run a registry that answers for the streams of many drivers."),
    "supervisor": (
        "tensorpool.cli.supervisor",
        "Observe everything, serve it as JSON and Prometheus, limit consumers that lag.",
    ),
    "replay": ("tensorpool.cli.replay", "Publish a recording again, in its original timing."),
    "stats": (
        "tensorpool.cli.stats",
        "Show rates, gaps, latency and pixels of a lake, as tables and pictures.",
    ),
    "trace": ("tensorpool.cli.trace", "Show from which frames a frame was made, live or from a lake."),
    "qos": ("tensorpool.cli.qos", "Show how consumers kept up while a lake was recorded: lag and drops."),
    "record": ("tensorpool.cli.record", "Record streams to a lake of Parquet files, with Spark."),
    "export": ("tensorpool.cli.export", "Write frames as files: PNG, TIFF, NPY, MP4, Zarr, HDF5, MCAP."),
    "lake": ("tensorpool.cli.lake", "List, check, compact and trim a lake."),
    "tap": ("tensorpool.cli.tap", "Print the live messages of an Aeron directory."),
    "event": ("tensorpool.cli.event", "Send commands to running services, and watch their answers."),
    "drain": ("tensorpool.cli.service_commands:drain", "End a running service in order."),
    "reload": ("tensorpool.cli.service_commands:reload", "Have a running service read its configuration again."),
    "decode": ("tensorpool.cli.decode", "Decode SBE messages of the protocol to JSON."),
    "service": ("tensorpool.cli.service", "Run the services with systemd: write units, show how they are."),
    "media-driver": ("tensorpool.cli.media_driver", "Run an Aeron media driver alone."),
}


class LazyGroup(click.Group):
    """Lists every command but imports only the one that runs, so that `tensorpool --help` is fast."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, _, name = COMMANDS[cmd_name][0].partition(":")
        command = getattr(importlib.import_module(module), name or "command")
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in COMMANDS.items()])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name=DISTRIBUTION, message="%(version)s")
def group() -> None:
    """Zero-copy exchange of large tensors between processes."""


def main() -> None:
    """Run the command line and exit."""
    try:
        group(prog_name="tensorpool")
    except TensorPoolError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(1)
