# SPDX-License-Identifier: Apache-2.0
"""A Spark session with everything set, or our formats for a session that is already there."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from pyspark import SparkConf, SparkContext
from pyspark.errors import AnalysisException
from pyspark.java_gateway import launch_gateway
from pyspark.sql import SparkSession

from tensorpool.errors import ConfigError
from tensorpool.spark.lake_source import LakeDataSource
from tensorpool.spark.pushdown import ENABLED
from tensorpool.spark.source import TensorpoolDataSource
from tensorpool.spark.stateful import ROCKS_DB, STATE_STORE

SETTINGS: Final = {
    "spark.sql.execution.arrow.maxRecordsPerBatch": "4096",
    "spark.sql.execution.arrow.maxBytesPerBatch": "16m",
    "spark.sql.execution.pythonUDF.arrow.enabled": "true",
    "spark.python.daemon.module": "tensorpool.spark.daemon",  # workers are forked with everything loaded
    ENABLED: "true",
    "spark.python.unix.domain.socket.enabled": "true",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.shuffle.partitions": "4",
    STATE_STORE: ROCKS_DB,  # the only one in which gaps and consumer_lag can remember anything
    "spark.driver.memory": "2g",
    # Spark looks for the end of a stopped query in its Python error with an expression that recurses for every letter.
    "spark.driver.extraJavaOptions": "-Xss16m",
}
LOOPBACK: Final = "127.0.0.1"
LOCAL_SETTINGS: Final = {
    "spark.driver.bindAddress": LOOPBACK,
    "spark.driver.host": LOOPBACK,
    "spark.ui.enabled": "true",
}
CLUSTER_SETTINGS: Final = {"spark.ui.enabled": "false"}  # which Spark would serve to the whole network
LOCAL: Final = "local[*,4]"  # a task is tried four times, as on a cluster; local[*] ends a query at its first failure
REMOTE: Final = "sc://"
UI_PORT: Final = 4040


def session(master: str = LOCAL, app_name: str = "tensorpool", **conf: str) -> SparkSession:
    """A session in which format("tensorpool") and format("tensorpool.lake") work.

    >>> spark = session()                                                                      # doctest: +SKIP
    >>> spark = session("spark://head:7077", **{"spark.executor.memory": "4g"})                # doctest: +SKIP
    >>> frames = spark.readStream.format("tensorpool").option("streams", "camera/front").load()   # doctest: +SKIP

    `master` is Spark's, or the address of a Spark Connect server (sc://…). Spark's pages of jobs and queries are at
    `spark.sparkContext.uiWebUrl` where Spark runs on this machine. Raises ConfigError when no Java is found, for a
    setting that is none of Spark's, and where a session with other settings runs already.
    """
    return _session(master, app_name, conf, keeps_interrupts=False)


def command_session(master: str, app_name: str, conf: dict[str, str]) -> SparkSession:
    """The same for a command, whose Ctrl-C stays its own: Spark's asks the JVM something in the midst of all else."""
    return _session(master, app_name, conf, keeps_interrupts=True)


def _session(master: str, app_name: str, conf: dict[str, str], *, keeps_interrupts: bool) -> SparkSession:
    for name, value in conf.items():
        if not name.startswith("spark."):
            raise ConfigError(name, value, 'a setting of Spark: session(**{"spark.driver.memory": "4g"})')
    if master.startswith(REMOTE):
        return _connected(master, app_name, conf)
    _refuse_other(master, conf)
    require_java()
    # Workers take the first python3 on PATH unless PYSPARK_PYTHON names one; it need not have our packages.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    is_local = master.startswith("local")
    own = SETTINGS | (LOCAL_SETTINGS if is_local else CLUSTER_SETTINGS)
    wanted = {"spark.master": master, "spark.app.name": app_name} | own | conf
    if wanted["spark.ui.enabled"] == "true":
        wanted.setdefault("spark.ui.port", str(ui_port()))
    with _on_loopback() if is_local else contextlib.nullcontext():
        _launch(wanted)
    at_interrupt = signal.getsignal(signal.SIGINT)
    SparkContext.getOrCreate(SparkConf().setAll(list(wanted.items())))
    if keeps_interrupts and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, at_interrupt)
    builder = SparkSession.builder
    for name, value in wanted.items():
        builder = builder.config(name, value)
    spark: SparkSession = builder.getOrCreate()
    register(spark)
    return spark


def _launch(conf: dict[str, str]) -> None:
    """Start a JVM in a session of its own: a signal to our process group is for us to obey. It ends with us.

    One whose start is interrupted has no reader for the port that it listens on, and would stay for ever: it is ended
    here.
    """
    if SparkContext._gateway is None:
        wanted = SparkConf().setAll(list(conf.items()))
        before = _children()
        try:
            gateway: Any = launch_gateway(wanted, {"start_new_session": True})  # type: ignore[no-untyped-call]
        except BaseException:
            for pid in _children() - before:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(pid, signal.SIGKILL)
            raise
        SparkContext._ensure_initialized(gateway=gateway)


@contextlib.contextmanager
def _on_loopback() -> Iterator[None]:
    """A JVM that is started here serves its pages to this machine only, unless the user says otherwise.

    Spark binds them to all addresses, and has no setting for it but the environment.
    """
    is_chosen = "SPARK_LOCAL_IP" in os.environ
    os.environ.setdefault("SPARK_LOCAL_IP", LOOPBACK)
    try:
        yield
    finally:
        if not is_chosen:
            del os.environ["SPARK_LOCAL_IP"]


def ui_port() -> int:
    """Where Spark's pages usually are, or 0, any port that is free: Spark tries others too, with a warning for each."""
    with socket.socket() as probe, contextlib.suppress(OSError):
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as Spark does
        probe.bind(("", UI_PORT))
        return UI_PORT
    return 0


def _children() -> set[int]:
    """The processes that this one has started."""
    found: set[int] = set()
    for path in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):  # a thread that has ended meanwhile
            found.update(map(int, path.read_text().split()))
    return found


def register(spark: SparkSession) -> None:
    """Add our formats to a session, and have it hand them the filters of batch reads."""
    spark.conf.set(ENABLED, "true")
    for source in (TensorpoolDataSource, LakeDataSource):
        try:
            spark.dataSource.register(source)
        except AnalysisException as error:
            if error.getCondition() != "DATA_SOURCE_ALREADY_EXISTS":
                raise  # what Spark has found by itself, or another session of it has, stays


def require_java() -> None:
    """Raises ConfigError with what to install where there is no Java."""
    home = os.environ.get("JAVA_HOME")
    if home and os.access(os.path.join(home, "bin", "java"), os.X_OK):
        return
    if not home and shutil.which("java"):
        return
    raise ConfigError(
        "JAVA_HOME",
        home,
        "a directory with bin/java of Java 17 or newer, which Spark needs, or a java on PATH; "
        "on Debian and Ubuntu: apt-get install openjdk-17-jre-headless",
    )


def _connected(url: str, app_name: str, conf: dict[str, str]) -> SparkSession:
    """Spark Connect: the JVM, the planner and the workers are the server's; only plans travel."""
    builder = SparkSession.builder.remote(url).appName(app_name)
    for name, value in ({STATE_STORE: ROCKS_DB} | conf).items():
        builder = builder.config(name, value)
    spark: SparkSession = builder.getOrCreate()
    register(spark)
    return spark


def _refuse_other(master: str, conf: dict[str, str]) -> None:
    """Spark gives out the session that there is, and drops what it would have to be started with."""
    active = SparkSession.getActiveSession()
    if active is None:
        return
    wanted = {"spark.master": master} | conf
    for name, value in wanted.items():
        found = active.conf.get(name, None)
        if found != value:
            raise ConfigError(
                name, value, f"{found!r}, as in the session that is running; stop it first, or use register(spark)"
            )
