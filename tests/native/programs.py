# SPDX-License-Identifier: Apache-2.0
"""Builds torn_reads.cpp and litmus.cpp against the native headers or edited copies of them, and runs them.

Binaries are kept in build/torn_reads-<hash of all sources and flags>, so that nothing is built twice.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import time
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
COMPILER = os.environ.get("CXX", "g++")
FLAGS = ("-std=c++20", "-O2", "-pthread", "-w")
HEADERS = (
    "layout",
    "relaxed_counter",
    "drops",
    "local_protocol_error",
    "seqlock",
    "rep_movsb",
    "copy",
    "tensor",
    "wake",
    "ring",
    "mapping",
)


class Edit(NamedTuple):
    """One textual change of a native header; `old` must occur exactly once."""

    file: str
    old: str
    new: str


class Run(NamedTuple):
    code: int
    report: dict[str, Any]
    seconds: float


@cache
def compiler_version() -> str:
    return subprocess.run([COMPILER, "--version"], check=True, capture_output=True, text=True).stdout


def headers(edits: tuple[Edit, ...] = ()) -> dict[str, str]:
    """The text of every header that the programs include, with the edits applied."""
    paths = [ROOT / "native" / f"{name}.hpp" for name in HEADERS]
    texts = {path.name: path.read_text(encoding="utf-8") for path in paths}
    for edit in edits:
        found = texts[edit.file].count(edit.old)
        if found != 1:
            raise LookupError(f"{edit.file} holds {found} times, not once: {edit.old!r}")
        texts[edit.file] = texts[edit.file].replace(edit.old, edit.new)
    return texts


def build(program: str, edits: tuple[Edit, ...] = ()) -> Path:
    """The binary of tests/native/<program>.cpp; compiled unless the same sources were compiled before."""
    texts = headers(edits)
    sources = {name: (HERE / name).read_text(encoding="utf-8") for name in (f"{program}.cpp", "rings.hpp")}
    key = json.dumps([texts, sources, FLAGS, compiler_version()], sort_keys=True)
    folder = ROOT / "build" / f"torn_reads-{hashlib.sha256(key.encode()).hexdigest()[:16]}"
    binary = folder / program
    if binary.exists():
        return binary
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in {**texts, **sources}.items():
        (folder / name).write_text(text, encoding="utf-8")
    unfinished = folder / f"{program}.{os.getpid()}"
    command = [COMPILER, *FLAGS, f"-I{folder}", str(folder / f"{program}.cpp"), "-o", str(unfinished)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    unfinished.replace(binary)
    return binary


def run(binary: Path, *arguments: str, timeout: float = 60) -> Run:
    """Runs to the end; the last line that the program prints is its report."""
    start = time.monotonic()
    done = subprocess.run([binary, *arguments], capture_output=True, text=True, timeout=timeout, check=False)
    if not done.stdout:
        raise RuntimeError(f"{binary.name} ended with {done.returncode} and no report: {done.stderr}")
    return Run(done.returncode, json.loads(done.stdout.splitlines()[-1]), time.monotonic() - start)
