# SPDX-License-Identifier: Apache-2.0
"""The long forms of tests/fault/test_driver_chaos.py, test_driver_hostile.py and test_client_chaos.py.

    python -m benchmarks.chaos kills [--rounds 1000] [--seconds 600] [--seed 1]
    python -m benchmarks.chaos lies [--seconds 60] [--seed 1]
    python -m benchmarks.chaos streams [--seconds 300] [--seed 1]

`kills`: SIGKILL of producers, consumers and the driver at random moments; afterwards no file, lease or zombie is left,
every stream can be attached to, and epochs only grew. `lies`: hostile control messages at full rate; no lease moves,
everybody is served, memory stays. `streams`: SIGKILL and SIGSTOP of producers, consumers, the driver and the media
driver while frames flow; every frame is received or counted as dropped, and all recover by themselves. Exit code 1 when
one of these does not hold.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time

import pytest

from tensorpool import aeron
from tests.support.chaos import TOKEN, Chaos
from tests.support.driver_process import Deployment
from tests.support.processes import ROOT, private_directory
from tests.support.stream_chaos import StreamChaos

STREAMS = range(35_000, 35_006)


def kill(rounds: int, seconds: float, seed: int) -> int:
    with private_directory("tensorpool-chaos-") as folder, aeron.MediaDriver(str(folder / "aeron")) as media_driver:
        deployment = Deployment(
            folder, media_driver.aeron_dir, streams=STREAMS, policies={"max_leases": 100, "shutdown_token": TOKEN}
        )
        with Chaos(deployment, STREAMS, seed) as chaos:
            started_s = time.monotonic()
            done = 0
            while done < rounds and time.monotonic() - started_s < seconds:
                left_s = seconds - (time.monotonic() - started_s)
                done += chaos.run(min(50, rounds - done), seconds=left_s)
                print(f"{done} kills after {time.monotonic() - started_s:.0f} s", file=sys.stderr)
            chaos.settle()
            figures = {
                "seed": seed,
                "kills": done,
                "by kind": dict(chaos.kills),
                "seconds": round(time.monotonic() - started_s),
                "epochs": chaos.bumps,
                "grants": chaos.grants,
                "clients": dict(chaos.diary()),
                "left behind": [str(path) for path in deployment.leftovers()],
            }
    print(json.dumps(figures, indent=2))
    return 0


def lie(seconds: float, seed: int) -> int:
    """The test itself, for longer."""
    os.environ["TENSORPOOL_FUZZ_SECONDS"] = str(seconds)
    os.environ["TENSORPOOL_FUZZ_SEED"] = str(seed)
    test = ROOT / "tests" / "fault" / "test_driver_hostile.py"
    return int(pytest.main(["-q", "-s", "-k", "no_message_moves", f"--rootdir={ROOT}", str(test)]))


def stream(seconds: float, seed: int) -> int:
    with private_directory("tensorpool-chaos-") as folder, StreamChaos(folder, STREAMS[:2], seed) as chaos:
        chaos.run(seconds)
        print(json.dumps({"seed": seed, "seconds": seconds, **chaos.settle()}, indent=2))
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    kills = commands.add_parser("kills")
    kills.add_argument("--rounds", type=int, default=1000)
    kills.add_argument("--seconds", type=float, default=600, help="at most")
    kills.add_argument("--seed", type=int, default=1)
    lies = commands.add_parser("lies")
    lies.add_argument("--seconds", type=float, default=60)
    lies.add_argument("--seed", type=int, default=1)
    streams = commands.add_parser("streams")
    streams.add_argument("--seconds", type=float, default=300)
    streams.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    if options.command == "kills":
        return kill(options.rounds, options.seconds, options.seed)
    if options.command == "streams":
        return stream(options.seconds, options.seed)
    return lie(options.seconds, options.seed)


if __name__ == "__main__":
    sys.exit(main())
