# SPDX-License-Identifier: Apache-2.0
"""What a commit to a lake and opening it cost, by the number of commits that it has.

    python -m benchmarks.lake_log [FOLDER] [--commits 1000 10000 100000]

Every commit has one file and is synced; the frames themselves are not written. Earlier commits are made in /dev/shm,
where a sync costs nothing, and copied to FOLDER.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

from tensorpool.lake import Lake, LakeFile
from tensorpool.lake.lake import Change

MEASURED: Final = 200
OPENINGS: Final = 5
FRAMES: Final = 10
OPEN: Final = """
import sys, time
from tensorpool.lake import Lake
import tensorpool.lake.checkpoints
begin_s, cpu_s = time.perf_counter(), time.process_time()
count = len(Lake.open(sys.argv[1]).log.snapshot().files)
print(time.perf_counter() - begin_s, time.process_time() - cpu_s, count)
"""


def append(lake: Lake, number: int) -> float:
    """One commit; how long it took, in seconds."""
    lo, hi = number * FRAMES, (number + 1) * FRAMES
    path = f"stream_id=10000/epoch=1/part-{lo:010d}-{hi:010d}-0123456789ab.parquet"
    file = LakeFile(path, 10_000, 1, lo, hi, FRAMES, 6_553_600, lo, hi, 6_553_600, first_seq=lo, last_seq=hi - 1)
    begin_s = time.perf_counter()
    lake.append("record", lambda _: Change((file,)), query="q", batch=number)
    return time.perf_counter() - begin_s


def measure(folder: Path, lake: Lake, commits: int) -> None:
    """Copy a lake to a disk, commit to it there, and open it anew."""
    place = folder / str(commits)
    shutil.copytree(lake.path, place)
    on_disk = Lake.open(place)
    times = sorted(append(on_disk, commits + number) for number in range(MEASURED))
    on_disk.log.settle()
    opened = []
    for _ in range(OPENINGS):
        done = subprocess.run([sys.executable, "-c", OPEN, str(place)], capture_output=True, text=True, check=True)
        opened.append([float(value) for value in done.stdout.split()])
    wall_s, cpu_s = (statistics.median(one[index] for one in opened) for index in (0, 1))
    print(
        f"{commits:>7} commits: commit median {1000 * statistics.median(times):.1f} ms, "
        f"p99 {1000 * times[MEASURED * 99 // 100]:.1f} ms; "
        f"open in a new process {1000 * wall_s:.0f} ms ({1000 * cpu_s:.0f} ms of CPU)",
        flush=True,
    )
    shutil.rmtree(place)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("folder", nargs="?", type=Path, default=Path("."), help="on the disk to measure")
    parser.add_argument("--commits", nargs="+", type=int, default=[1_000, 10_000, 100_000])
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory, tempfile.TemporaryDirectory(dir=chosen.folder) as disk:
        lake, done = Lake.create(f"{memory}/lake"), 0
        for commits in sorted(chosen.commits):
            for number in range(done, commits):
                append(lake, number)
            lake.log.settle()
            done = commits
            measure(Path(disk), lake, commits)


if __name__ == "__main__":
    main()
