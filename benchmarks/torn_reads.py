# SPDX-License-Identifier: Apache-2.0
"""The long form of tests/fault/test_torn_reads.py: at least ten million accepted reads, none of them torn.

    python -m benchmarks.torn_reads [--reads 10000000] [--seconds 600] [--seed 1]

Runs the stress as built, with streaming stores for every size, and with each kind of copy that this processor has; the
reads are shared out among them, and so are at least fifty thousand accepted reads of every size.
Exit code 1 when a torn read was accepted or a drop has no explanation.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

from tensorpool import _core
from tests.native.mutants import STREAM_ALWAYS
from tests.native.programs import Edit, build, run

LEAST_PER_SIZE = 50_000


def builds() -> Iterator[tuple[str, tuple[Edit, ...], tuple[str, ...]]]:
    """Name, edits and arguments of every form of the stress."""
    yield "as-built", (), ()
    yield "streaming-stores-only", (STREAM_ALWAYS,), ()
    for kind in sorted({kind for use in _core.copy_kinds() for kind in _core.copy_candidates(use)}):
        yield kind, (STREAM_ALWAYS,) if kind.startswith("stream-") else (), ("--copy", kind)


def stress(
    name: str, edits: tuple[Edit, ...], arguments: tuple[str, ...], reads: int, seconds: float, seed: int, least: int
) -> dict[str, Any]:
    """Repeats the stress with new seeds until enough was read; the sums of all rounds."""
    binary = build("torn_reads", edits)
    total: Counter[str] = Counter()
    by_size: dict[str, Counter[str]] = {}
    drops: Counter[str] = Counter()
    failed = False
    while not failed and total["seconds"] < seconds:
        rarest = min(by_size["accepted"].values(), default=0) if by_size else 0
        if total["accepted"] >= reads and rarest >= least:
            break
        limits = (
            "--seconds",
            str(min(30, seconds - total["seconds"])),
            "--seed",
            str(seed + total["rounds"]),
            *arguments,
        )
        result = run(binary, *limits, timeout=90)
        report = result.report
        failed = result.code != 0
        total["rounds"] += 1
        total.update({key: value for key, value in report.items() if type(value) in (int, float) and key != "seed"})
        drops.update(report["drops"])
        for kind in ("accepted", "raced", "written"):
            by_size.setdefault(kind, Counter()).update(report[f"{kind}_by_size"])
        print(f"{name}: {total['accepted']:,} accepted after {total['seconds']:.0f} s", file=sys.stderr)
    return {
        "name": name,
        **total,
        "drops": drops,
        **{f"{kind}_by_size": counts for kind, counts in by_size.items()},
        "failed": failed or total["accepted"] < reads,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reads", type=int, default=10_000_000, help="accepted reads, all forms together")
    parser.add_argument("--seconds", type=float, default=600, help="at most, all forms together")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    failed = False
    forms = list(builds())
    share = len(forms)
    for name, edits, arguments in forms:
        limits = options.reads // share, options.seconds / share, options.seed, LEAST_PER_SIZE // share
        summary = stress(name, edits, arguments, *limits)
        failed |= summary["failed"]
        print(json.dumps(summary))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
