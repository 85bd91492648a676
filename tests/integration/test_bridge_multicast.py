# SPDX-License-Identifier: Apache-2.0
"""One sender, two receivers on hosts of their own: multicast, and each receiver keeps its own books."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import pytest

from tests.support.crossing import ARRIVES_AS, STREAM, Way
from tests.support.hosts import SUBNET, Host, Network

FRAMES: Final = 20
LARGEST: Final = 1 << 20


def group(last: int) -> str:
    """With a port of its own: Aeron's sockets take every group of their port."""
    return f"aeron:udp?endpoint=224.20.30.{last}:{40_400 + last}|interface={SUBNET}.0/24|fc=min"


BRIDGE: Final[dict[str, Any]] = {
    "payload_channel": group(41),
    "payload_stream_id": 50_001,
    "control_channel": group(43),
    "control_stream_id": 50_002,
    "metadata_channel": group(45),
    "metadata_stream_id": 50_003,
    "assembly_timeout_ms": 2_000,
}
MAPPING: Final = {"source_stream_id": STREAM, "dest_stream_id": ARRIVES_AS}


@pytest.mark.spec("BRG-3-02", "BRG-3-03")
def test_two_hosts_receive_what_one_sends_once(shm_dir: Path) -> None:
    """Each has every frame, or counted it; one of them may be killed and the other does not notice."""
    with ExitStack() as undo:
        network = undo.enter_context(Network("source", "east", "west"))
        source, east, west = (
            undo.enter_context(Host(shm_dir, network, name, (stream_id,), nslots=16, largest=LARGEST))
            for name, stream_id in (("source", STREAM), ("east", ARRIVES_AS), ("west", ARRIVES_AS))
        )
        sender = source.bridge({"instance_id": "source", "role": "sender", **BRIDGE}, MAPPING)
        ends = [host.bridge({"instance_id": host.name, "role": "receiver", **BRIDGE}, MAPPING) for host in (east, west)]
        for end in (sender, *ends):
            end.start()
        for end in (sender, *ends):
            end.wait_ready()
        producer = source.produce(STREAM, largest=LARGEST, rate_hz=25)
        ways = [
            Way(producer, sender, end, host.consume(ARRIVES_AS)) for end, host in zip(ends, (east, west), strict=True)
        ]
        for way in ways:
            way.wait_for_frames()
        since = [(way.settle(), way.ledger())[1] for way in ways]
        producer.go_on()
        for way in ways:
            way.wait_for_frames(FRAMES)
        for way, before in zip(ways, since, strict=True):
            assert way.balance(before).received >= FRAMES

        to_east, to_west = ways
        assert to_east.receiver.process is not None
        producer.go_on()
        to_east.receiver.process.kill()
        to_west.wait_for_frames(FRAMES)
        to_east.receiver.start()
        to_east.receiver.wait_ready()
        to_east.wait_for_frames()
        producer.hold()
        to_west.balance(since[1])
        to_west.end_consumer()
