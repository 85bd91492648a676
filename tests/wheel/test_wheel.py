# SPDX-License-Identifier: Apache-2.0
"""The wheel in dist/ as a user gets it: in fresh environments, far from the checkout, without a compiler on PATH.

`make wheel` builds it and runs this; `make soak` does, too. tests/test_distribution.py is the short form.
"""

from __future__ import annotations

import email
import os
import re
import runpy
import shutil
import subprocess
import tarfile
import zipfile
from email.message import Message
from functools import cache
from pathlib import Path
from typing import Final

import pytest

from tests.support.processes import ROOT

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1800)]

UV: Final = ROOT / ".uv/bin/uv"
COMPILERS: Final = re.compile(r"(.*-)?(cc|c\+\+|gcc|g\+\+|clang.*|cpp|ld|as|make|cmake|ninja|rustc|cargo)(-[\d.]+)?")
WITHOUT_EXTRA: Final = {
    "record cam --to lake": "spark",
    "record cam --to lake --direct": "lake",
    "replay lake": "lake",
    "lake ls lake": "lake",
    "stats lake": "spark",
    "qos lake": "spark",
}


def built(pattern: str) -> Path:
    found = sorted((ROOT / "dist").glob(pattern))
    assert len(found) == 1, f"dist/ has {len(found)} of {pattern}: `make wheel` makes it"
    return found[0]


@cache
def pythons() -> dict[str, str]:
    """The interpreters of this machine that we support, by their minor version."""
    script = runpy.run_path(str(ROOT / ".ci/newest_python.py"))
    minors: dict[str, str] = {}
    for python in script["installed"](str(UV)):
        try:
            path = script["choose"]([python])
        except LookupError:
            continue
        minors.setdefault(".".join(python["version"].split(".")[:2]), path)
    assert minors
    return minors


class Environment:
    """A folder of its own with a virtual environment in it: its own home, and no compiler on PATH."""

    def __init__(self, folder: Path, extra: str = "", python: str = "") -> None:
        self._folder = folder
        tools = folder / "tools"
        tools.mkdir()
        for directory in os.environ["PATH"].split(os.pathsep):
            for tool in sorted(Path(directory).glob("*")):
                if not COMPILERS.fullmatch(tool.name) and not (tools / tool.name).is_symlink():
                    (tools / tool.name).symlink_to(tool)
        self._variables = {
            "PATH": f"{folder}/venv/bin:{tools}",
            "HOME": str(folder),
            "LANG": "C.UTF-8",
            "SHM_BASE_DIR": str(folder / "shm"),
        }
        assert all(shutil.which(name, path=self._variables["PATH"]) is None for name in ("cc", "g++", "cmake"))
        self.uv("venv", "--python", python or max(pythons().items(), key=lambda item: _minor(item[0]))[1], "venv")
        self.uv("pip", "install", *self.install(extra))

    def install(self, extra: str) -> tuple[str, ...]:
        wheel = f"{built('*.whl')}[{extra}]" if extra else str(built("*.whl"))
        return "--python", f"{self._folder}/venv", wheel

    def uv(self, *words: str) -> str:
        """What uv prints. PySpark is a source archive of Python alone: it is built, but nothing can be compiled."""
        done = subprocess.run(
            [UV, *words],
            cwd=self._folder,
            env=os.environ | {"PATH": self._variables["PATH"]},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=1200,
        )
        assert done.returncode == 0, done.stdout
        return done.stdout

    def run(self, *words: str) -> tuple[int, str]:
        """A command of the environment: exit code and output."""
        done = subprocess.run(
            words,
            cwd=self._folder,
            env=self._variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=600,
        )
        return done.returncode, done.stdout

    def example(self, name: str) -> tuple[int, str]:
        """An example, copied out of the checkout."""
        copied = shutil.copytree(ROOT / "examples" / name, self._folder / name)
        return self.run("python", str(copied / "main.py"))


def _minor(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(".")))


def metadata() -> Message:
    with zipfile.ZipFile(built("*.whl")) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return email.message_from_bytes(archive.read(name))


def test_the_wheel_is_for_every_linux_and_every_python_from_3_12_on() -> None:
    """Its tags promise the stable ABI and a manylinux; it has the native module and the schemas, and no tests."""
    wheel = built("*.whl")
    assert re.fullmatch(r"aeron_tensorpool-[\d.]+-cp312-abi3-manylinux_2_\d+_x86_64(\.manylinux\w+)?\.whl", wheel.name)
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert {"tensorpool/_core.abi3.so", "tensorpool/py.typed", "pyspark_tensorpool/__init__.py"} <= names
    assert {f"tensorpool/wire/schemas/{path.name}" for path in (ROOT / "schemas").glob("*.xml")} <= names
    page = {
        path.relative_to(ROOT / "src") for path in (ROOT / "src/tensorpool/console/web").rglob("*") if path.is_file()
    }
    assert {"tensorpool/console/web/index.html", "tensorpool/console/web/vendor/LICENSES.txt"} <= set(map(str, page))
    assert set(map(str, page)) <= names
    assert {name.partition("/")[0] for name in names} == {
        "tensorpool",
        "pyspark_tensorpool",
        f"aeron_tensorpool-{metadata()['Version']}.dist-info",
    }


def test_the_source_archive_has_what_the_wheel_is_built_from() -> None:
    """The wheel is built from it; no environment, cache or build of the checkout is in it."""
    with tarfile.open(built("*.tar.gz")) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"CMakeLists.txt", "LICENSE", "README.md", "native/ring.hpp", "src/tensorpool/__init__.py"} <= names
    assert "src/tensorpool/console/web/vendor/preact.js" in names
    assert not [name for name in names if name.startswith((".venv", ".uv", "build", "dist", ".git/"))]


def test_the_wheel_alone_runs_the_quickstart_on_every_python_of_this_machine(tmp_path: Path) -> None:
    """Import, version, and the first example."""
    for minor, python in pythons().items():
        folder = tmp_path / minor
        folder.mkdir()
        fresh = Environment(folder, python=python)
        assert fresh.run("tensorpool", "--version") == (0, f"{metadata()['Version']}\n")
        where = "import sys, tensorpool; print(sys.version, tensorpool.__version__, tensorpool.__file__)"
        code, output = fresh.run("python", "-c", where)
        assert (code, output.startswith(f"{minor}.")) == (0, True), output
        assert f" {metadata()['Version']} {folder}/venv/" in output
        code, output = fresh.example("quickstart")
        assert code == 0, output


def test_the_wheel_alone_names_the_extra_that_a_command_needs(tmp_path: Path) -> None:
    """One line and exit code 1, where the packages really are not installed."""
    fresh = Environment(tmp_path)
    for line, extra in WITHOUT_EXTRA.items():
        code, output = fresh.run("tensorpool", *line.split())
        assert (code, output.count("\n")) == (1, 1), (line, output)
        assert output.endswith(f'pip install "aeron-tensorpool[{extra}]"\n'), (line, output)


def test_the_wheel_alone_runs_the_demo_without_spark(tmp_path: Path) -> None:
    """Camera and readers account for every frame."""
    code, output = Environment(tmp_path).run("tensorpool", "demo", "--no-spark")
    assert code == 0, output
    assert re.search(r"^OK +every frame is accounted for$", output, re.MULTILINE), output


def test_the_extra_lake_records_and_reads_without_spark(tmp_path: Path) -> None:
    """A recording by --direct, listed and checked; what needs Spark names its extra."""
    fresh = Environment(tmp_path, "lake")
    script = tmp_path / "record.py"
    script.write_text(RECORD)
    assert fresh.run("python", str(script), str(tmp_path / "lake")) == (0, "10 (4, 3)\n")
    code, output = fresh.run("tensorpool", "lake", "verify", str(tmp_path / "lake"))
    assert (code, output.splitlines()[-1:]) == (0, ["1 files, 0 problems"]), output
    code, output = fresh.run("tensorpool", "stats", str(tmp_path / "lake"))
    assert (code, output.endswith('pip install "aeron-tensorpool[spark]"\n')) == (1, True), output


def test_the_extra_spark_runs_the_whole_demo(tmp_path: Path) -> None:
    """With Java, the recording by Spark as well, and the pictures."""
    code, output = Environment(tmp_path, "spark").run("tensorpool", "demo")
    assert code == 0, output
    assert re.search(r"^recorder +\d+ recorded \+ \d+ lost", output, re.MULTILINE), output
    assert re.search(r"^OK +every frame is accounted for$", output, re.MULTILINE), output


def test_the_extras_torch_and_all_resolve(tmp_path: Path) -> None:
    """torch is gigabytes: this only finds out that there are versions of everything that fit together."""
    fresh = Environment(tmp_path)
    assert re.search(r"^ \+ torch==", fresh.uv("pip", "install", "--dry-run", *fresh.install("torch")), re.MULTILINE)
    everything = fresh.uv("pip", "install", "--dry-run", *fresh.install("all"))
    assert set(re.findall(r"^ \+ (torch|pyspark|pyarrow|obstore|matplotlib)==", everything, re.MULTILINE)) == {
        "torch",
        "pyspark",
        "pyarrow",
        "obstore",
        "matplotlib",
    }


RECORD: Final = """
import sys
import numpy as np
import tensorpool as tp
from tensorpool.lake.direct_recorder import DirectRecorder
from tensorpool.lake.recording_engine import Settings

with tp.local() as pool, pool.connect() as client, client.producer("cam", create=True) as producer:
    settings = Settings(aeron_dir=pool.aeron_dir, overrides={"shm.base_dir": pool.config.shm.base_dir})
    recorder = DirectRecorder(["cam"], sys.argv[1], settings=settings)
    recorder.start()
    for number in range(10):
        producer.publish(np.full((4, 3), number, np.uint8))
    recorder.stop()
    recorder.close()
frames = tp.open(sys.argv[1])["cam"][0:10].numpy()
print(len(frames), frames[0].shape)
"""
