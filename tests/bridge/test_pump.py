# SPDX-License-Identifier: Apache-2.0
"""All mappings of a bridge, and both directions, in one call of native code: what is sent and received, in turn."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tensorpool as tp
from tensorpool.bridge.bridge import Bridge
from tensorpool.bridge.config import BridgeConfig
from tests.bridge.sending import Rig, free_endpoint, pattern
from tests.support.processes import wait_until

FOREVER_NS = 2**62
BIG = 200_000  # more than the receiver's window


@pytest.fixture
def rigs(make: Callable[..., Rig]) -> list[Rig]:
    """Three streams of one bridge, each with a receiver of its own that knows its epoch."""
    rigs = [make(), make(crc32c=True), make(dialect="2026-01")]
    for rig in rigs:
        rig.on_chunk = lambda data: None
        rig.listen()
        rig.settle()
    for rig in rigs[1:]:
        rigs[0].streams.senders += (rig.sender,)
    return rigs


def test_one_call_sends_every_stream(rigs: list[Rig]) -> None:
    """No frame, nor its checksum, needs a turn of Python."""
    for rig in rigs:
        rig.sender._forwarder._sources.clear()  # nothing but the end of a producer ends it
    returned: list[int | None] = []
    thread = threading.Thread(target=lambda: returned.append(rigs[0].streams.pump(FOREVER_NS)))
    thread.start()
    for number in range(20):
        for rig in rigs:
            rig.publish(pattern(3000, number))
            wait_until(
                lambda: rig.hear() or rig.counters["frames_sent", ""] == number + 1,  # noqa: B023
                "the frame is sent",
            )
    wait_until(lambda: rigs[1].hear() or rigs[1].counters["messages_forwarded", "checksum"] == 20, "checksums are sent")
    assert thread.is_alive()
    rigs[0].producer.close()
    thread.join(60)
    assert returned == [60]
    assert not any(rig.counters.total("frames_dropped") for rig in rigs)


def test_a_stream_without_room_is_finished_before_another_one_begins(make: Callable[..., Rig]) -> None:
    """They share a log: two frames under way would only take longer, each of them."""
    first, second = make(), make()
    second.streams.close()
    section = first.config.bridge
    second.config = BridgeConfig.load(
        None,
        environ={},
        bridge={
            "instance_id": "test",
            "role": "sender",
            "assembly_timeout_ms": 60_000,
            "payload_channel": section.payload_channel,
            "payload_stream_id": section.payload_stream_id,
            "control_channel": section.control_channel,
            "control_stream_id": section.control_stream_id,
        },
        mappings=[{"source_stream_id": second.stream_id, "dest_stream_id": 30_001}],
    )
    second.sender = type(first.sender)(
        second.config.mappings[0],
        second.config,
        second.client,
        second.link,
        first.streams.publications,
        second.counters,
    )
    first.streams.senders += (second.sender,)
    second.streams = first.streams
    first.listen()
    for rig in (first, second):
        first.until(lambda: rig.sender.is_ready and rig.producer.wait_for_consumers(1, 0.001), "attached")  # noqa: B023
    first.until(lambda: len(set(first.announced_epochs)) and len(first.control) >= 2, "both epochs are announced")
    first.is_reading = False
    first.publish(pattern(BIG, 1))
    first.until(lambda: first.sender._is_sending, "the log is full")
    second.publish(pattern(BIG, 2))
    for _ in range(100):
        first.turn()
    assert not second.sender._is_sending
    assert second.counters["frames_taken", ""] == 0
    first.is_reading = True
    first.until(lambda: len(first.frames) == 2, "both frames have come")
    assert set(first.frames.values()) == {pattern(BIG, 1).tobytes(), pattern(BIG, 2).tobytes()}
    second.streams = type(first.streams)(first.streams.publications)  # closed with the first


# --- two bridges on one host: what one sends, the other receives


FRAMES = 40
POOL: dict[str, Any] = {
    "driver.stream_id_range": [20_000, 20_999],
    "policies.max_streams": 1000,
    "policies.lease_keepalive_interval_ms": 5_000,  # no lease ends when this machine pauses
    "profiles.default": {"header_nslots": 64, "payload_pools": [{"pool_id": 1, "stride_bytes": 65_536}]},
}


@pytest.fixture(scope="module")
def host() -> Iterator[tp.Local]:
    with tp.local(overrides=POOL) as pool:
        yield pool


def bridge_of(pool: tp.Local, name: str, there: list[str], here: list[str], mappings: Any, **keys: Any) -> Bridge:
    config = BridgeConfig.load(
        None,
        environ={},
        bridge={
            "instance_id": name,
            "assembly_timeout_ms": 60_000,
            "forward_metadata": False,
            **{
                f"{what}_channel": f"aeron:udp?endpoint={to}"
                for what, to in zip(("payload", "control"), there, strict=True)
            },
            **{
                f"receive_{what}_channel": f"aeron:udp?endpoint={at}"
                for what, at in zip(("payload", "control"), here, strict=True)
            },
            "payload_stream_id": 50_000,
            "control_stream_id": 50_001,
            **keys,
        },
        mappings=mappings,
    )
    return Bridge(config, driver=pool.config, aeron_dir=pool.aeron_dir)


@pytest.mark.parametrize(
    ("dialect", "protection"), [("specified", "none"), ("specified", "mac"), ("2026-01", "crc32c")]
)
def test_eight_mappings_in_each_direction_lose_nothing(
    host: tp.Local, tmp_path: Path, protection: str, dialect: str
) -> None:
    """Every frame arrives, with its trace id where the dialect carries one; one thread at each end does it all."""
    key = tmp_path / "key"
    key.write_bytes(b"a secret of both ends")
    key.chmod(0o600)
    keys: dict[str, Any] = {"dialect": dialect}
    keys |= {"crc32c": True} if protection == "crc32c" else {}
    keys |= {"mac_key_file": str(key)} if protection == "mac" else {}
    left, right = ([free_endpoint(), free_endpoint()] for _ in range(2))
    base = 100 * next(_bases)
    pairs = [(20_000 + base + number, 20_050 + base + number) for number in range(16)]
    mappings, turned = (
        [
            {"source_stream_id": source, "dest_stream_id": dest, "direction": directions[number % 2]}
            for number, (source, dest) in enumerate(pairs)
        ]
        for directions in (("send", "receive"), ("receive", "send"))
    )
    with ExitStack() as stack:
        client = stack.enter_context(host.connect())
        producers = [stack.enter_context(client.producer(source, create=True)) for source, _ in pairs]
        bridges = [
            stack.enter_context(bridge_of(host, "left", right, left, mappings, **keys).start()),
            stack.enter_context(bridge_of(host, "right", left, right, turned, **keys).start()),
        ]
        wait_until(lambda: all(bridge.is_ready for bridge in bridges), "both bridges are ready")
        consumers = [stack.enter_context(client.consumer(dest)) for _, dest in pairs]
        begin_together(producers, consumers)
        received: Counter[int] = Counter()
        for number in range(FRAMES):
            for index, producer in enumerate(producers):
                data = np.full(40_000, number + index, np.uint8)
                assert producer.publish(data, trace_id=1000 * number + index + 1) is not None
            for index, consumer in enumerate(consumers):
                while (frame := consumer.poll(timeout=60)) is not None and frame.nbytes == 10:
                    pass
                assert frame is not None
                assert (frame.array == number + index).all()
                assert frame.trace_id == (1000 * number + index + 1 if dialect == "2026-01" else 0)
                received[index] += 1
        assert set(received.values()) == {FRAMES}
        for mapping in bridges[0].counters.keys() - {""}:
            ends = [bridge.counters[mapping] for bridge in bridges]
            sent, received_there = sorted(ends, key=lambda counts: "frames_sent" not in counts)
            dropped = sum(n for name, n in received_there.items() if name.startswith("frames_dropped"))
            assert sent["frames_sent"] == received_there["frames_received"] + dropped >= FRAMES, ends
            assert sent.get("messages_forwarded.checksum", 0) == (sent["frames_sent"] if protection != "none" else 0)
            assert "chunks_dropped.crc" not in received_there


_bases = iter(range(9))


def begin_together(producers: list[tp.Producer], consumers: list[tp.Consumer]) -> None:
    """Publish small frames until each consumer has had one."""
    waiting = dict(enumerate(consumers))
    deadline_s = time.monotonic() + 90
    while waiting:
        assert time.monotonic() < deadline_s
        for index in waiting:
            producers[index].publish(np.full(10, 255, np.uint8))
        time.sleep(0.05)
        waiting = {index: consumer for index, consumer in waiting.items() if consumer.poll(timeout=0.05) is None}
