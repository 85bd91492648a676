# SPDX-License-Identifier: Apache-2.0
"""The entry point: finds the command, imports only its module, and turns our errors into exit codes.

Exit code 0: done. 1: it could not be done, one line on stderr says why. 2: the command line is wrong.
"""

from __future__ import annotations

import importlib
import sys
from typing import Final

import click

from tensorpool.errors import TensorPoolError

# name: (module, one line for --help); the module's attribute `command` is the click command
COMMANDS: Final = {
    "demo": (
        "tensorpool.cli.demo",
        "The main job on embedded defaults: a camera, readers, a summary that checks itself.",
    ),
    "driver": ("tensorpool.cli.driver", "The SHM driver: owns the memory, grants leases, announces streams."),
    "produce": ("tensorpool.cli.produce", "A synthetic producer: frames of any shape, dtype, rate and pattern."),
    "consume": ("tensorpool.cli.consume", "Receive a stream: rates, ages, drops, and a check of every byte."),
    "ls": ("tensorpool.cli.ls", "Which streams there are: names, tags, producers, epochs and their drivers."),
    "inspect": ("tensorpool.cli.inspect", "One stream from outside: layout, files, epochs, leases, slots, consumers."),
    "doctor": ("tensorpool.cli.doctor", "What is wrong here and how to mend it; --gc removes what the dead left."),
    "top": ("tensorpool.cli.top", "All streams, consumers and services, live: rates, lag, drops, changes."),
    "hz": ("tensorpool.cli.hz", "How often a stream really publishes: mean, shortest, longest, jitter."),
    "bridge": ("tensorpool.cli.bridge", "Streams to and from other hosts over UDP."),
    "discovery": ("tensorpool.cli.discovery", "A registry: answers which streams there are, for many drivers."),
    "supervisor": ("tensorpool.cli.supervisor", "One view over everything, as JSON and Prometheus; tells who lags."),
    "replay": ("tensorpool.cli.replay", "Publish a recording again, in its original timing, as the instrument did."),
    "stats": (
        "tensorpool.cli.stats",
        "What a lake holds: rates, gaps, latency and pixels per stream and window; pictures.",
    ),
    "qos": ("tensorpool.cli.qos", "How consumers kept up while a lake was recorded: lag and drops."),
    "record": ("tensorpool.cli.record", "Record streams to a lake of Parquet files, with Spark."),
    "lake": ("tensorpool.cli.lake", "What a lake holds; check it, compact it, trim it."),
    "tap": ("tensorpool.cli.tap", "The live messages of an Aeron directory, one line each."),
    "event": ("tensorpool.cli.event", "Command running services, and watch what they say."),
    "decode": ("tensorpool.cli.decode", "Any SBE message of the protocol as JSON."),
    "media-driver": ("tensorpool.cli.media_driver", "An Aeron media driver on its own."),
}


class LazyGroup(click.Group):
    """Lists every command but imports only the one that runs: `tensorpool --help` stays quick."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command = importlib.import_module(COMMANDS[cmd_name][0]).command
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in COMMANDS.items()])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="tensorpool", message="%(version)s")
def group() -> None:
    """Zero-copy exchange of large tensors between processes."""


def main() -> None:
    """Run the command line and exit."""
    try:
        group(prog_name="tensorpool")
    except TensorPoolError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(1)
