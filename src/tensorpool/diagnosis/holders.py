# SPDX-License-Identifier: Apache-2.0
"""Does a process hold up the control plane? A tethered subscriber that does not poll stops every Aeron publisher that
cannot open a new session, and costs our driver and clients one for each half term.
"""

from __future__ import annotations

import time
from typing import Final

from tensorpool import aeron
from tensorpool.diagnosis.check_result import CheckResult, ok, warn
from tensorpool.driver.config import DriverConfig

CHECK: Final = "control stream"
STANDS_STILL_S: Final = 0.5


def check_holders(config: DriverConfig, aeron_dir: str) -> list[CheckResult]:
    """Each tethered subscriber of the control and announce streams that stands still behind a publisher."""
    stream_ids = {config.driver.control_stream_id, config.driver.announce_stream_id}
    client = aeron.connect(aeron_dir, client_name="tensorpool doctor")
    try:
        before = {stream_id: aeron.Sample(client.counters(), stream_id) for stream_id in stream_ids}
        time.sleep(STANDS_STILL_S)
        holders = [it for stream_id in sorted(stream_ids) for it in _standing(client, before[stream_id], aeron_dir)]
    finally:
        client.close()
    if not holders:
        return [ok(CHECK, "every subscriber reads it")]
    return [
        warn(
            CHECK,
            f"a subscriber does not read it: {holder}",
            "end that process, have it poll, or have it subscribe with tether=false",
        )
        for holder in holders
    ]


def _standing(client: aeron.Client, before: aeron.Sample, aeron_dir: str) -> list[aeron.Holder]:
    """One for each subscription, in the session in which it is furthest behind."""
    sample = aeron.Sample(client.counters(), before.stream_id)
    behind = sample.behind()
    kept = {key: behind[key] for key in sample.still(before) & behind.keys()}
    worst: dict[int, aeron.Holder] = {}
    for holder in sorted(sample.describe(aeron_dir, kept), key=lambda it: it.behind_bytes):
        if "tether=false" not in holder.subscriber.channel:
            worst[holder.subscriber.registration_id] = holder
    return list(worst.values())
