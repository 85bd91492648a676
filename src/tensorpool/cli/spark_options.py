# SPDX-License-Identifier: Apache-2.0
"""Options of commands that use Spark, the session that such a command starts, and rows as plain values."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Final

import click

from tensorpool.cli.options import overrides

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

SETTINGS: Final = {
    "spark.log.level": "ERROR",
    "spark.ui.enabled": "false",
    # The jobs are short and do their work in Python: a JVM that compiles less starts in half the time.
    "spark.driver.extraJavaOptions": "-Xss16m -XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
}


def spark_options[F: Callable[..., None]](command: F) -> F:
    """--master and --spark: where Spark runs, and how. See `started`."""
    for option in (
        click.option("--spark", "conf", metavar="KEY=VALUE", multiple=True, help="A setting of Spark."),
        click.option("--master", default="local[*,4]", show_default=True, help="Where Spark runs."),
    ):
        command = option(command)
    return command


def stream_option[F: Callable[..., None]](command: F) -> F:
    """--stream NAME|ID: which streams of a lake. See `Lake.resolve`."""
    text = "Only this stream; may be given several times."
    return click.option("--stream", "names", multiple=True, metavar="NAME|ID", help=text)(command)


@contextlib.contextmanager
def started(master: str, name: str, conf: tuple[str, ...]) -> Iterator[SparkSession]:
    """A session that ends with the command; where the process has one already, that one, which is left running."""
    from py4j.protocol import Py4JError  # type: ignore[import-untyped]
    from pyspark.sql import SparkSession

    from tensorpool.spark import register
    from tensorpool.spark.sessions import command_session

    logging.getLogger().addFilter(_is_not_py4js)
    active = SparkSession.getActiveSession()
    if active is not None:
        register(active)
        yield active
        return
    spark = command_session(master, f"tensorpool {name}", SETTINGS | overrides(conf, "--spark"))
    try:
        yield spark
    except BaseException:
        with contextlib.suppress(Py4JError, OSError):
            spark.sparkContext.setLogLevel("OFF")  # no errors of tasks that this cuts off
        raise
    finally:
        with contextlib.suppress(Py4JError, OSError):  # the JVM has ended already
            spark.stop()


def _is_not_py4js(record: logging.LogRecord) -> bool:
    """py4j logs every error that it raises, also an interrupt."""
    return record.module not in ("clientserver", "java_gateway")


def rows_of(frames: DataFrame) -> list[dict[str, Any]]:
    """Collected, with exact integers."""
    return [{name: _plain(value) for name, value in row.asDict().items()} for row in frames.collect()]


def _plain(value: Any) -> Any:
    return int(value) if isinstance(value, Decimal) else value
