# SPDX-License-Identifier: Apache-2.0
"""Builds native_pair.cpp with g++ (or CXX) and runs it; without a compiler there are no such figures."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).with_suffix(".cpp")
ROOT = SOURCE.parent.parent
FLAGS = ("-std=c++20", "-O2", "-pthread", f"-I{ROOT / 'native'}")


@functools.cache
def binary() -> Path | None:
    """None where there is no compiler."""
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        return None
    sources = [SOURCE, *sorted((ROOT / "native").glob("*.hpp"))]
    key = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:16]
    built = ROOT / "build" / f"native_pair-{key}"
    if not built.exists():
        built.parent.mkdir(exist_ok=True)
        unfinished = built.with_suffix(f".{os.getpid()}")
        subprocess.run([compiler, *FLAGS, str(SOURCE), "-o", str(unfinished)], check=True)
        unfinished.replace(built)
    return built


def run(*arguments: object) -> dict[str, Any] | None:
    """The program's report. Raises CalledProcessError when it found a frame that is not whole."""
    program = binary()
    if program is None:
        return None
    words = [str(program), *map(str, arguments)]
    done = subprocess.run(words, check=True, capture_output=True, text=True, timeout=60)
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def line_ns() -> float | None:
    """Of a cache line from one core to another, one way; None with a single core or without a compiler."""
    if len(os.sched_getaffinity(0)) < 2:
        return None
    report = run("line")
    return None if report is None else float(report["ns"])
