# SPDX-License-Identifier: Apache-2.0
"""Which Python, numpy, Aeron, Java and Spark are here, and do they suffice? Imports none of the large ones."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

from tensorpool import _core
from tensorpool.aeron import library
from tensorpool.diagnosis.check_result import CheckResult, fail, ok, warn
from tensorpool.errors import DISTRIBUTION, ConfigError, TransportError, install_command
from tensorpool.shm.copies import VARIABLE as COPIES_VARIABLE
from tensorpool.shm.copies import choose_copies

MIN_PYTHON: Final = (3, 12)
MIN_JAVA: Final = 17
MIN_SPARK: Final = (4, 2)
JAVA_TIMEOUT_S: Final = 10.0


def check_python() -> CheckResult:
    text = (
        f"tensorpool {_version(DISTRIBUTION)}, Python {platform.python_version()}, numpy {_version('numpy')}, "
        f"{platform.system()} {platform.release()} {platform.machine()}"
    )
    if sys.version_info < MIN_PYTHON:
        return fail("python", text, "install Python 3.12 or later")
    if sys.platform != "linux":
        return warn("python", text, "use Linux: elsewhere only file-backed memory is supported")
    return ok("python", text)


def check_aeron() -> CheckResult:
    """The shared object that we call, wherever it comes from."""
    try:
        paths = ", ".join(map(str, library.library_paths()))
        return ok("libaeron", f"{library.version()}, from {paths}")
    except TransportError as error:
        return fail("libaeron", str(error), "pip install pyaeron==0.1.0, or see docs/install.md where it has no wheel")


def check_copies() -> CheckResult:
    """Which instructions copy payloads on this processor, and who chose them."""
    try:
        origin = choose_copies(keep=False)
    except ConfigError as error:
        return fail("copies", str(error), f"unset {COPIES_VARIABLE}    (or give it one of the accepted values)")
    kinds = ", ".join(f"{use} {kind}" for use, kind in _core.copy_kinds().items())
    return ok("copies", f"{kinds} ({origin})")


def check_spark() -> CheckResult:
    if importlib.util.find_spec("pyspark") is None:
        return ok("spark", f"not installed; recording and analytics need it: {install_command('spark')}")
    version = _version("pyspark")
    if _numbers(version) < MIN_SPARK:
        return warn("spark", f'pyspark {version} is too old for format("tensorpool")', install_command("spark"))
    return ok("spark", f"pyspark {version}, pyarrow {_version('pyarrow')}, pandas {_version('pandas')}")


def check_java() -> CheckResult | None:
    """Only where Spark is installed: nothing else needs it."""
    if importlib.util.find_spec("pyspark") is None:
        return None
    home = os.environ.get("JAVA_HOME")
    java = os.path.join(home, "bin", "java") if home else shutil.which("java")
    if java is None or not os.path.exists(java):
        where = f"JAVA_HOME is {home}, where none is" if home else "none on the PATH"
        return warn("java", f"{where}; Spark needs one", "apt install openjdk-17-jre-headless")
    version = _java_version(java)
    if version is None:
        return warn("java", f"{java} does not report its version", f"{java} -version")
    if _numbers(version)[0] < MIN_JAVA:
        return warn("java", f"{java} is {version}, Spark needs 17 or later", "apt install openjdk-17-jre-headless")
    return ok("java", f"{version} at {java}")


def _java_version(java: str) -> str | None:
    """From the file beside it where there is one: starting a JVM takes half a second."""
    release = Path(os.path.realpath(java)).parent.parent / "release"
    try:
        found = re.search(r'^JAVA_VERSION="([^"]+)"', release.read_text("utf-8"), re.MULTILINE)
    except OSError:
        found = None
    if found is None:
        try:
            ran = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=JAVA_TIMEOUT_S)
        except (OSError, subprocess.TimeoutExpired):
            return None
        found = re.search(r'version "([^"]+)"', ran.stderr)
    return None if found is None else found[1]


def _numbers(version: str) -> tuple[int, ...]:
    """1.8.0 is Java 8, by its own way of counting."""
    numbers = tuple(map(int, re.findall(r"\d+", version))) or (0,)
    return numbers[1:] if numbers[:1] == (1,) and len(numbers) > 1 else numbers


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "missing"
