# SPDX-License-Identifier: Apache-2.0
"""The session: refuses what cannot work, with what to do."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from tensorpool.errors import ConfigError
from tensorpool.spark import register, session
from tensorpool.spark.sessions import require_java
from tests.support.processes import run_script


def test_without_java_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("JAVA_HOME", raising=False)
    with pytest.raises(ConfigError, match=r"Java 17 or newer.*apt-get install openjdk-17-jre-headless"):
        require_java()
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(ConfigError, match=f"JAVA_HOME = '{tmp_path}'"):
        require_java()
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "java").touch(0o755)
    require_java()


def test_settings_must_be_sparks() -> None:
    with pytest.raises(ConfigError, match="driver_memory = '4g' is not usable; accepted: a setting of Spark"):
        session(driver_memory="4g")


def test_the_session_that_runs_is_given_out_again_but_never_for_another(spark: SparkSession) -> None:
    assert session("local[2]") is spark
    with pytest.raises(ConfigError, match=r"spark.master = 'local\[7\]' is not usable; accepted: 'local\[2\]'"):
        session("local[7]")
    with pytest.raises(ConfigError, match=r"spark.driver.memory = '3g'"):
        session("local[2]", **{"spark.driver.memory": "3g"})


def test_formats_are_added_to_a_session_of_the_users_own(spark: SparkSession) -> None:
    register(spark.newSession())


def test_the_package_is_loaded_without_pyspark() -> None:
    """Lakes, rings and the commands' help need no JVM and wait for none."""
    script = "import sys, tensorpool.lake.ring_reader, tensorpool.spark.sink_process; print('pyspark' in sys.modules)"
    assert run_script(script) == (0, "False\n")


SESSIONS = """
import json, signal, socket, urllib.request
from tensorpool.spark.sessions import command_session, session, ui_port

def own(number, frame): ...

signal.signal(signal.SIGINT, own)
command_session("local[1]", "signals", {"spark.ui.enabled": "false", "spark.driver.memory": "512m"}).stop()
result = {"keeps signals": signal.getsignal(signal.SIGINT) is own}

with socket.create_server(("127.0.0.1", ui_port())) as taken:
    spark = session()
    result["master"] = spark.sparkContext.master
    result["taken"] = taken.getsockname()[1]
url = spark.sparkContext.uiWebUrl
result["url"] = url
result["page"] = urllib.request.urlopen(url + "/jobs/", timeout=60).status
try:
    socket.create_connection(("127.0.0.2", int(url.rpartition(":")[2])), timeout=60).close()
    result["elsewhere"] = "answers"
except ConnectionRefusedError:
    result["elsewhere"] = "refused"

def fails_once(batches):
    from pyspark import TaskContext
    if TaskContext.get().attemptNumber() == 0:
        raise RuntimeError("the first attempt")
    yield from batches

result["rows"] = spark.range(3, numPartitions=1).mapInArrow(fails_once, "id BIGINT").count()
print(json.dumps(result))
"""


@pytest.mark.usefixtures("quick_jvm")
def test_a_session_of_its_own_retries_tasks_and_serves_its_pages_to_this_machine() -> None:
    """Also where the usual port is taken, without a word about it; and a command keeps its own handling of signals.

    Spark's would ask the JVM something in the midst of another question, and the answers would get mixed up.
    """
    code, output = run_script(SESSIONS)
    assert code == 0, output
    result = json.loads(next(line for line in output.splitlines() if line.startswith("{")))
    assert result["keeps signals"]
    assert (result["master"], result["rows"]) == ("local[*,4]", 3)
    assert result["url"].startswith("http://127.0.0.1:")
    assert not result["url"].endswith(f":{result['taken']}")
    assert (result["page"], result["elsewhere"]) == (200, "refused")
    assert "SparkUI" not in output, output


def test_workers_run_our_interpreter(spark: SparkSession) -> None:
    assert os.environ["PYSPARK_PYTHON"]
    assert spark.conf.get("spark.sql.execution.arrow.maxBytesPerBatch") == "16m"
