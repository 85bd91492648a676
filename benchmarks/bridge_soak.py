# SPDX-License-Identifier: Apache-2.0
"""The long form of tests/integration/test_bridge_hosts.py and tests/fault/test_bridge_faults.py. Needs root.

    python -m benchmarks.bridge_soak [--seconds 600] [--rate 30] [--seed 1]
    python -m benchmarks.bridge_soak --kills [--seconds 600] [--seed 1]

Frames of 1 KiB to 16 MiB between two hosts (network namespaces) whose weather changes every ten seconds: good, 0.1 %,
1 % and 5 % of all datagrams lost, one in twenty repeated and one in ten late. Every frame that arrives is compared byte
by byte; at each change produced = sent + dropped and sent = published + dropped have to hold exactly. `--kills` kills
bridges, SHM drivers, media drivers and the producer instead, and waits for frames to arrive again. The memory of both
bridges is shown as it was after the first and after the last change. Exit code 1 when something does not hold.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any, Final

from tests.support.bridge_chaos import POLICIES, BridgeChaos
from tests.support.crossing import Crossing, crossing
from tests.support.processes import private_directory

CHANGE_S: Final = 10.0
LOSSES: Final = (0.0, 0.001, 0.01, 0.05)


def soak(hosts: Crossing, seconds: float, chance: random.Random) -> dict[str, Any]:
    """Weather of all kinds, in turn; what it cost."""
    began_s = time.monotonic()
    repaired, memory = hosts.repaired(), [_memory_kib(hosts)]
    totals: Counter[str] = Counter()
    drops: Counter[str] = Counter()
    weathers: Counter[str] = Counter()
    while time.monotonic() - began_s < seconds:
        since = hosts.settle()
        loss = chance.choice(LOSSES)
        is_disorderly = chance.random() < 0.3
        hosts.set_loss(loss)
        hosts.set_disorder(duplicate=0.05 * is_disorderly, reorder=0.1 * is_disorderly)
        hosts.producer.go_on()
        hosts.wait_for_frames(10)
        _pass_time(hosts, CHANGE_S)
        found = hosts.balance(since)
        weather = f"{loss:.1%} lost{', disorder' if is_disorderly else ''}"
        print(f"{time.monotonic() - began_s:6.0f} s  {weather:<22} {found}", file=sys.stderr)
        weathers[weather] += 1
        drops.update({f"sender: {reason}": count for reason, count in found.sender_drops.items()})
        drops.update({f"receiver: {reason}": count for reason, count in found.receiver_drops.items()})
        for name in ("produced", "sent", "published", "received"):
            totals[name] += getattr(found, name)
        memory.append(_memory_kib(hosts))
    relayed = {name: count for name, count in hosts.set_disorder().items() if name != "messages"}
    hosts.set_loss(0.0)
    hosts.settle()
    ended = hosts.end_consumer()
    return {
        "seconds": round(time.monotonic() - began_s),
        "weather": dict(weathers),
        **totals,
        "drops": dict(drops),
        "consumer": {name: ended[name] for name in ("received", "drops")},
        "datagrams": {"sent again": hosts.repaired() - repaired, **relayed},
        "bridges' memory in KiB": [memory[1], memory[-1]],
    }


def kill(hosts: Crossing, seconds: float, chance: random.Random) -> dict[str, Any]:
    """Kills every process except the consumer, again and again."""
    chaos = BridgeChaos(hosts, chance)
    chaos.run(seconds)
    return chaos.settle()


def _pass_time(hosts: Crossing, seconds: float) -> None:
    until_s = time.monotonic() + seconds
    while time.monotonic() < until_s:
        hosts.check()
        time.sleep(0.2)


def _memory_kib(hosts: Crossing) -> dict[str, int]:
    found = {}
    for end in (hosts.sender, hosts.receiver):
        assert end.process is not None
        status = Path(f"/proc/{end.process.pid}/status").read_text()
        fields = dict(line.split(":", 1) for line in status.splitlines())
        found[end.instance_id] = int(fields["RssAnon"].split()[0])
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--rate", type=float, default=30, help="frames a second")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kills", action="store_true")
    options = parser.parse_args()
    chance = random.Random(options.seed)
    policies = POLICIES if options.kills else {}
    with (
        private_directory("tensorpool-soak-") as folder,
        crossing(folder, is_relayed=not options.kills, rate_hz=options.rate, policies=policies) as hosts,
    ):
        figures = (kill if options.kills else soak)(hosts, options.seconds, chance)
    print(json.dumps({"seed": options.seed, "rate_hz": options.rate, **figures}, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
