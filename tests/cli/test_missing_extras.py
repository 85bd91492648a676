# SPDX-License-Identifier: Apache-2.0
"""Without an extra: commands and the Python API say in one sentence what to install. tests/wheel has the real thing."""

from __future__ import annotations

from typing import Final

import pytest

from tests.support.processes import run_script

LAKE: Final = ("pyarrow", "obstore", "deltalake")
SPARK: Final = ("pyspark", "py4j", "pandas", "matplotlib")
CONSOLE: Final = ("starlette", "uvicorn")
# Runs each line of its arguments as a command, in an interpreter that lacks some packages.
COMMANDS: Final = """
import sys
missing, *lines = sys.argv[1:]
sys.modules.update(dict.fromkeys(missing.split(",")))  # None: as if it were not installed
from tensorpool.cli.main import main
for line in lines:
    sys.argv[1:] = line.split()
    try:
        main()
    except SystemExit as end:
        print(f"exit code {end.code}", file=sys.stderr)
"""
API: Final = """
import sys
sys.modules.update(dict.fromkeys(sys.argv[1].split(",")))
import tensorpool as tp
print([name for name in tp.__all__ if not getattr(tp, name)])  # help(tp) asks for all of them
for use in (
    lambda: tp.open("/nowhere"),
    lambda: __import__("tensorpool.lake"),
    lambda: __import__("tensorpool.spark"),
    lambda: __import__("tensorpool.spark.functions"),
):
    try:
        use()
    except ImportError as error:
        assert isinstance(error, tp.MissingExtra)
        print(error)
"""


def wants(part: str, extra: str, packages: str) -> str:
    return f'{part} needs {packages}, not installed here: pip install "aeron-tensorpool[{extra}]"\n'


def test_a_command_without_its_extra_names_it_in_one_line() -> None:
    """One sentence on stderr and exit code 1: no traceback, and of two extras the one that brings the other."""
    expected = {
        "record cam --to lake": wants("recording without --direct", "spark", "pyspark"),
        "record cam --to lake --direct": wants("a lake", "lake", "pyarrow and obstore"),
        "replay lake": wants("a lake", "lake", "pyarrow and obstore"),
        "lake ls lake": wants("a lake", "lake", "pyarrow and obstore"),
        "lake verify lake": wants("a lake", "lake", "pyarrow and obstore"),
        "lake compact lake": wants("a lake", "lake", "pyarrow and obstore"),
        "lake retain lake --age 1d": wants("a lake", "lake", "pyarrow and obstore"),
        "stats lake": wants("tensorpool stats", "spark", "pyspark"),
        "qos lake": wants("tensorpool qos", "spark", "pyspark"),
        "console": wants("the console", "console", "starlette and uvicorn"),
        "view cam": wants("the console", "console", "starlette and uvicorn"),
    }
    text = "".join(f"error: {sentence}exit code 1\n" for sentence in expected.values())
    assert run_script(COMMANDS, ",".join(LAKE + SPARK + CONSOLE), *expected) == (0, text)


def test_with_the_lake_alone_only_spark_is_missing() -> None:
    """What needs no Spark gets as far as the lake that is not there; the rest names the other extra."""
    code, output = run_script(COMMANDS, ",".join(SPARK), "lake ls /nowhere", "stats /nowhere", "record cam --to lake")
    assert code == 0
    lines = output.splitlines()
    assert [line for line in lines if line.startswith("exit")] == ["exit code 1"] * 3, output
    assert "/nowhere" in lines[0]
    assert lines[2:5:2] == [
        "error: " + wants("tensorpool stats", "spark", "pyspark").strip(),
        "error: " + wants("recording without --direct", "spark", "pyspark").strip(),
    ]


@pytest.mark.parametrize(
    ("missing", "lines"),
    [
        (
            LAKE + SPARK,
            [wants("a lake", "lake", "pyarrow and obstore")] * 2 + [wants("tensorpool.spark", "spark", "pyspark")] * 2,
        ),
        (("obstore",), [wants("a lake", "lake", "obstore")] * 3),
    ],
    ids=["no extra", "half of an extra"],
)
def test_the_api_without_an_extra_raises_an_error_that_names_it(missing: tuple[str, ...], lines: list[str]) -> None:
    """All names of the package are there in any case; MissingExtra is raised where one is used."""
    assert run_script(API, ",".join(missing)) == (0, "[]\n" + "".join(lines))


def test_a_picture_without_matplotlib_names_the_extra() -> None:
    """Drawing a lake needs no Spark, but matplotlib."""
    script = """
import sys
sys.modules["matplotlib"] = None
from tensorpool.lake import pictures
try:
    pictures.timeline([], "timeline.png", title="")
except ImportError as error:
    print(error)
"""
    assert run_script(script) == (0, wants("a picture", "spark", "matplotlib"))


def test_the_console_does_without_a_lake() -> None:
    """It runs; only the lake that it was given says what to install."""
    script = """
import sys
sys.modules.update(dict.fromkeys(sys.argv[1].split(",")))
from tensorpool.console.server import Console
from tensorpool.console.lakes import Lakes
print(Lakes(["/nowhere"]).about()[0]["error"])
"""
    assert run_script(script, ",".join(LAKE)) == (0, wants("a lake", "lake", "pyarrow and obstore"))
