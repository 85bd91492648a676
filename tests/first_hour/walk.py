# SPDX-License-Identifier: Apache-2.0
"""The first hour of a person who has found the repository: a clone, README.md and the tutorials, read literally.

    isolated    runs this module where every change outside the folder is kept apart, and lists it
    walk        clones, and does what the pages say, in a new home; writes how long each step took

The folder is the person's own. The rest of the machine is seen through an overlay, with a /dev/shm and a /tmp that only
the walk has: what the walk leaves there, or in the home directory, is what it leaves outside the clone.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec

from tests.support.page_reader import Reader
from tests.support.pages import Shell
from tests.support.processes import ROOT

PAGES: Final = (
    "README.md",
    "docs/tutorials/first-stream.md",
    "docs/tutorials/first-look.md",
    "docs/tutorials/first-recording.md",
    "docs/tutorials/training.md",
    "docs/tutorials/two-hosts.md",
)
KEPT: Final = re.compile(r"(PIP|UV|SSL|GIT_SSL|CURL|REQUESTS|https?|HTTPS?|no|NO)_\w+")  # how this machine downloads
# What others leave, or what a page says is left.
EXPECTED: Final = re.compile(
    r"""
    /dev/shm/tensorpool(/tensorpool-\w+(/default(/highest-epoch\.\d+)?)?)?  # docs/driver.md: all that a driver leaves
    | /tmp/\.[0-9a-f-]{36}\.sock  # of Spark, to its Python workers
    | .*/home/\.cache/matplotlib/fontlist-[\w.]+  # of matplotlib, when `stats` draws
    | .*/__pycache__/.*  # of the interpreter that was there before
    """,
    re.VERBOSE,
)
ISOLATE: Final = """
set -e
kept=$(mktemp -d)
mount -t tmpfs walk "$kept"
mkdir "$kept/changed" "$kept/work" "$kept/root"
mount -t overlay walk -o "lowerdir=/,upperdir=$kept/changed,workdir=$kept/work" "$kept/root"
for place in proc sys dev; do mount --rbind /$place "$kept/root/$place"; done
mount -t tmpfs walk "$kept/root/dev/shm"
mount --bind "$FOLDER" "$kept/root$FOLDER"
code=0
chroot "$kept/root" sh -c 'cd "$0" && exec "$@"' "$ROOT" "$@" || code=$?
(cd "$kept/changed" && find . ! -type d -printf '/%P\\n') > "$FOLDER/outside.txt"
(cd "$kept/root/dev/shm" && find . -mindepth 1 -printf '/dev/shm/%P\\n') >> "$FOLDER/outside.txt"
exit $code
"""


class Step(msgspec.Struct, frozen=True):
    """What was done, and how long it took."""

    page: str
    name: str
    seconds: float


class Walk(msgspec.Struct, frozen=True):
    """How it went: all steps until the first one that failed, and the files left outside the clone, but EXPECTED."""

    steps: list[Step]
    failure: str
    outside: list[str]

    def text(self) -> str:
        lines = [f"{step.seconds:8.1f} s  {step.page:<34} {step.name}" for step in self.steps]
        lines.append(f"{sum(step.seconds for step in self.steps):8.1f} s  in all")
        lines += [f"left outside the clone: {path}" for path in self.outside]
        return "\n".join([*lines, f"FAILED {self.failure}" if self.failure else "every step did what the page says"])


def isolated(folder: Path) -> Walk:
    """Walk in `folder`, an empty one. Needs root, for the overlay."""
    assert os.geteuid() == 0, "the walk mounts an overlay over /, which only root can"
    subprocess.run(
        ["unshare", "--mount", "sh", "-c", ISOLATE, "sh", sys.executable, "-B", "-m", "tests.first_hour.walk", folder],
        env=os.environ | {"FOLDER": str(folder), "ROOT": str(ROOT)},
        stdin=subprocess.DEVNULL,
        check=True,
    )
    found = msgspec.json.decode((folder / "walk.json").read_bytes(), type=Walk)
    outside = (folder / "outside.txt").read_text().splitlines()
    for left in (folder / "home", folder / "tmp"):
        outside += [str(path) for path in sorted(left.rglob("*")) if not path.is_dir()]
    return msgspec.structs.replace(found, outside=[path for path in outside if not EXPECTED.fullmatch(path)])


def _path() -> str:
    """The Python that this one was made of, and the programs of the machine: none of the old home directory."""
    old_home = str(Path.home())
    kept = [entry for entry in os.environ["PATH"].split(os.pathsep) if not entry.startswith((old_home, sys.prefix))]
    return os.pathsep.join([f"{sys.base_prefix}/bin", *kept])


def walk(folder: Path) -> None:
    """Write walk.json."""
    clone, home, tmp = folder / "tensorpool", folder / "home", folder / "tmp"
    home.mkdir()
    tmp.mkdir()
    environment = {name: value for name, value in os.environ.items() if KEPT.fullmatch(name)}
    environment.pop("UV_CACHE_DIR", None)
    environment |= {"PATH": _path(), "HOME": str(home), "TMPDIR": str(tmp), "LANG": "C.UTF-8"}
    steps: list[Step] = []
    page, failure = "", ""

    @contextlib.contextmanager
    def step(name: str) -> Iterator[None]:
        started_s = time.monotonic()
        try:
            yield
        finally:
            steps.append(Step(page, name, round(time.monotonic() - started_s, 2)))
            print(f"{steps[-1].seconds:8.1f} s  {page:<34} {name}", flush=True)

    with step("git clone"):
        subprocess.run(["git", "clone", "--quiet", ROOT, clone], check=True)
    shell = Shell(clone, environment)
    reader = Reader(shell, is_soak=True, step=step)
    try:
        for page in PAGES:
            reader.read(page)
            with step("Ctrl-C in each terminal"):
                shell.end()
                shell.quit_python()
    except (AssertionError, subprocess.SubprocessError) as error:
        failure = f"{page}: {steps[-1].name}: {error}"
    finally:
        shell.reap()
    (folder / "walk.json").write_bytes(msgspec.json.encode(Walk(steps, failure, [])))


if __name__ == "__main__":
    walk(Path(sys.argv[1]))
