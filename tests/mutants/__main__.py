# SPDX-License-Identifier: Apache-2.0
"""Proof that the tests which claim a requirement can fail: known mistakes, put into copies of the Python source.

    python -m tests.mutants                  every row of tests/mutants/mutants.tsv, two at a time
    python -m tests.mutants DRV-4.4-02 …     only the rows of these requirements

Each row is applied to a scratch copy of the source and the tests, never to the working tree; then the tests that claim
its requirement run there until the first one fails. A row is alive when none does. Whatever test killed a mutant runs
once more without it: a test that fails anyway proves nothing. Exit code 1 when a row is alive, or proves nothing.
The native headers have mutants of their own: tests/native/mutants.py.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Final, NamedTuple

from tensorpool import _core
from tests.mutants.table import ROWS, Row

ROOT: Final = Path(__file__).resolve().parents[2]
COPIES: Final = 2
TIMEOUT_S: Final = 240
FAILED: Final = re.compile(r"^(?:FAILED|ERROR) (tests/.*?)(?: - .*)?$", re.MULTILINE)
# Python imports this at its start, in every process that a test starts: the copy goes before the editable install.
SITE: Final = """
import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if type(finder).__name__ != "ScikitBuildRedirectingFinder"]
"""


class Verdict(NamedTuple):
    row: Row
    text: str  # killed, ALIVE, or why the row proves nothing
    killers: tuple[str, ...]  # ids of failed tests
    seconds: float

    @property
    def is_killed(self) -> bool:
        return self.text == "killed"


class Copy:
    """Source and tests in a directory of their own, with at most one mistake in them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._mtime_s = int(time.time()) + 10
        uncompiled = shutil.ignore_patterns("__pycache__")
        for name in ("tests", "benchmarks", "examples"):
            shutil.copytree(ROOT / name, folder / name, ignore=uncompiled)
        shutil.copytree(ROOT / "src", folder / "src", ignore=uncompiled)
        shutil.copy2(Path(_core.__file__), folder / "src" / "tensorpool")
        for package in (folder / "src").iterdir():
            (folder / package.name).symlink_to(package)
        shutil.copy2(ROOT / "pyproject.toml", folder)
        (folder / "sitecustomize.py").write_text(SITE)

    def judge(self, row: Row) -> Verdict:
        """Run the tests of a row with its mistake in the source."""
        path = self.folder / "src" / "tensorpool" / row.file
        text = path.read_text(encoding="utf-8")
        if text.count(row.old) != 1:
            return Verdict(row, f"{row.file} holds {text.count(row.old)} times, not once: {row.old!r}", (), 0.0)
        began_s = time.monotonic()
        self._write(path, text.replace(row.old, row.new))
        try:
            code, output = self.run(*row.arguments(self.folder))
        finally:
            self._write(path, text)
        killers = tuple(FAILED.findall(output))
        is_crash = code < 0  # by a signal: SIGBUS behind the end of a file
        other = "killed" if is_crash else f"pytest ended with {code}:\n{output}"
        verdict = {0: "ALIVE", 1: "killed", 5: "no test claims it"}.get(code, other)
        return Verdict(row, verdict, killers, time.monotonic() - began_s)

    def run(self, *arguments: str) -> tuple[int, str]:
        """pytest in this copy: exit code and output. Tests that hang have failed."""
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "tests.mutants.claims", "-p", "no:cacheprovider"]
        environment = os.environ | {"PYTHONPATH": str(self.folder)}
        try:
            done = subprocess.run(
                [*command, "--no-header", "--tb=no", f"--timeout={TIMEOUT_S}", *arguments],
                cwd=self.folder,
                env=environment,
                capture_output=True,
                text=True,
                timeout=4 * TIMEOUT_S,
            )
        except subprocess.TimeoutExpired as expired:
            return 3, str(expired)
        return done.returncode, done.stdout + done.stderr

    def _write(self, path: Path, text: str) -> None:
        """With a time of its own, so that no bytecode of another text counts as compiled from this one."""
        path.write_text(text, encoding="utf-8")
        self._mtime_s += 1
        os.utime(path, (self._mtime_s, self._mtime_s))


def main(wanted: list[str]) -> int:
    rows = [row for row in ROWS if not wanted or row.requirement in wanted]
    with tempfile.TemporaryDirectory(prefix="tensorpool-mutants-") as scratch, ThreadPoolExecutor(COPIES) as pool:
        free: SimpleQueue[Copy] = SimpleQueue()
        for number in range(COPIES):
            folder = Path(scratch, str(number))
            folder.mkdir()
            free.put(Copy(folder))

        def judge(row: Row) -> Verdict:
            copy = free.get()
            try:
                verdict = copy.judge(row)
            finally:
                free.put(copy)
            print(f"{verdict.seconds:5.1f} s  {row.requirement:<16} {row.mistake}: {verdict.text}", flush=True)
            return verdict

        verdicts = list(pool.map(judge, rows))
        killers = sorted({killer for verdict in verdicts for killer in verdict.killers})
        code, output = free.get().run(*killers) if killers else (0, "")
    killed = sum(verdict.is_killed for verdict in verdicts)
    print(f"{killed} of {len(rows)} mutants killed")
    if code != 0:
        print(f"without any mutant pytest ended with {code} as well:\n{output}")
    return 0 if code == 0 and killed == len(rows) > 0 else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
