# SPDX-License-Identifier: Apache-2.0
"""How tensorpool is installed: its name on PyPI and its extras, and which Python `make setup` takes."""

from __future__ import annotations

import re
import runpy
from importlib.metadata import metadata
from typing import Final

import pytest

from tensorpool.errors import DISTRIBUTION
from tests.support.processes import ROOT

PAGES: Final = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")])
SOURCES: Final = sorted((ROOT / "src").glob("**/*.py"))
# pip install with our import's name, which is another project's on PyPI, with or without an extra
_WRONG: Final = re.compile(r"""pip install [^\n`]*(?<![\w-])tensorpool(?=[\[\s"'`.,)]|$)""", re.MULTILINE)


def requirements() -> list[str]:
    return metadata(DISTRIBUTION).get_all("Requires-Dist") or []


def required_by(extra: str) -> set[str]:
    """The names that an extra asks for."""
    return {
        re.split(r"[ <>=!;\[]", line)[0] for line in requirements() if re.search(f"""extra == ["']{extra}["']""", line)
    }


def test_the_distribution_and_its_extras() -> None:
    """The installed package has our name on PyPI; each extra brings what its parts import."""
    assert metadata(DISTRIBUTION)["Name"] == "aeron-tensorpool"
    assert set(metadata(DISTRIBUTION).get_all("Provides-Extra") or []) == {
        "console",
        "export",
        "ingest",
        "lake",
        "notebook",
        "spark",
        "torch",
        "all",
    }
    assert {"pyarrow", "obstore"} <= required_by("lake")
    assert {"pyspark", "pandas", "matplotlib", "aeron-tensorpool"} <= required_by("spark")
    assert required_by("console") == {"pillow", "starlette", "uvicorn", "websockets"}
    assert required_by("notebook") == {"anywidget", "pillow"}
    assert required_by("torch") == {"torch", "aeron-tensorpool"}
    (everything,) = [line for line in requirements() if re.search("""extra == ["']all""", line)]
    assert set(everything.partition("[")[2].partition("]")[0].split(",")) == {
        "console",
        "export",
        "ingest",
        "lake",
        "notebook",
        "spark",
        "torch",
    }


def test_aeron_comes_in_a_wheel_only_where_there_is_one() -> None:
    """On aarch64 `pip install` does not ask for pyaeron, which has no wheel there."""
    (line,) = [line for line in requirements() if line.startswith("pyaeron")]
    machines = {("x86_64", "linux"): True, ("aarch64", "linux"): False, ("arm64", "darwin"): True}
    for (machine, system), expected in machines.items():
        marker = line.partition(";")[2].strip()
        assert eval(marker, {"platform_machine": machine, "sys_platform": system}) is expected


def test_nothing_tells_to_install_the_other_project() -> None:
    """`pip install tensorpool` would install a stranger's package."""
    assert not [path for path in (*PAGES, *SOURCES) if _WRONG.search(path.read_text())]


def test_the_pattern_of_the_other_project_finds_it() -> None:
    """With an extra and without, at the end of a line and in the midst of one; our own name is not found."""
    for words in ("tensorpool", "'tensorpool[lake]'`", "tensorpool[spark] and", "-U tensorpool."):
        assert _WRONG.search(f"pip install {words}")
    for words in ("aeron-tensorpool", '"aeron-tensorpool[lake]"', "dist/aeron_tensorpool-0.2.0.whl"):
        assert not _WRONG.search(f"pip install {words}")


def python(version: str, variant: str = "default", implementation: str = "cpython") -> dict[str, str]:
    """An interpreter as uv lists it."""
    path = f"/opt/{implementation}-{version}-{variant}/python"
    return {"version": version, "variant": variant, "implementation": implementation, "path": path}


CHOOSE: Final = runpy.run_path(str(ROOT / ".ci/newest_python.py"))["choose"]


def test_the_newest_python_is_taken() -> None:
    """By number and not by letter, whatever the order; no release candidate, no free-threaded build, no PyPy."""
    found = [
        python("3.11.9"),
        python("3.12.1"),
        python("3.15.0rc1"),
        python("3.14.2", "freethreaded"),
        python("3.13.10"),
        python("3.13.9"),
        python("3.99.0", implementation="pypy"),
    ]
    assert CHOOSE(found) == "/opt/cpython-3.13.10-default/python"
    assert CHOOSE(found[:2]) == "/opt/cpython-3.12.1-default/python"


@pytest.mark.parametrize(
    ("found", "sentence"),
    [
        ([], "no CPython of version 3.12 or newer on PATH, in pyenv or in uv; "),
        ([python("3.11.9")], "no CPython of version 3.12 or newer on PATH, in pyenv or in uv; "),
        (
            [python("3.11.9"), python("3.13.1", "freethreaded")],
            "/opt/cpython-3.13.1-freethreaded/python is a free-threaded CPython, which tensorpool does not support; ",
        ),
    ],
)
def test_where_no_python_will_do_the_sentence_says_why(found: list[dict[str, str]], sentence: str) -> None:
    with pytest.raises(LookupError) as refusal:
        CHOOSE(found)
    hint = "install one, with its headers, or name it: make setup PYTHON=/path/to/python3"
    assert str(refusal.value) == sentence + hint
