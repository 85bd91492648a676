# SPDX-License-Identifier: Apache-2.0
"""A bridge between two hosts with media drivers and SHM drivers of their own, over networks good and bad.

Frames have 1 KiB to 16 MiB. Every one that arrives is the one that was sent, byte for byte, and every one that does not
arrive was counted by the end that dropped it. `benchmarks/bridge_soak.py` is the long form.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import tensorpool as tp
from tensorpool.wire import Message
from tensorpool.wire.bridge import BridgeFrameChunk
from tensorpool.wire.control import DataSourceAnnounce, DataSourceMeta, ShmPoolAnnounce
from tests.support.crossing import BACK, BACK_ARRIVES_AS, Crossing, Ledger, crossing
from tests.support.processes import private_directory, wait_until

FRAMES = 30  # on each kind of network


@pytest.fixture(scope="module")
def hosts() -> Iterator[Crossing]:
    """Two hosts with a stretch of bad network between them, which is good until a test says otherwise."""
    with private_directory() as folder, crossing(folder, is_relayed=True) as made:
        yield made
        ended = made.end_consumer()
        print(ended)
        for host in (made.left, made.right):
            assert not host.driver.has_ended


def pass_frames(hosts: Crossing, since: Ledger) -> Ledger:
    hosts.producer.go_on()
    hosts.wait_for_frames(FRAMES)
    found = hosts.balance(since)
    print(found)
    return found


@pytest.mark.spec("BRG-2-02")
def test_every_frame_arrives_whole_or_was_counted(hosts: Crossing) -> None:
    """Sent = received + dropped, exactly, on both sides of the network."""
    found = pass_frames(hosts, hosts.settle())
    assert found.received >= FRAMES


@pytest.mark.parametrize("rate", [0.001, 0.01, 0.05])
def test_lost_datagrams_cost_no_byte(hosts: Crossing, rate: float) -> None:
    """Aeron's own loss interceptor in both media drivers; its counters show that datagrams were lost and sent again."""
    since, repaired = hosts.settle(), hosts.repaired()
    hosts.set_loss(rate)
    found = pass_frames(hosts, since)
    hosts.set_loss(0.0)
    assert found.received >= FRAMES
    assert hosts.repaired() > repaired


def test_datagrams_that_come_twice_or_late_cost_no_byte(hosts: Crossing) -> None:
    """A relay on the way repeats one in twenty and lets one in ten be overtaken."""
    since = hosts.settle()
    before = hosts.set_disorder(duplicate=0.05, reorder=0.1)
    found = pass_frames(hosts, since)
    after = hosts.set_disorder(duplicate=0.0, reorder=0.0)
    assert found.received >= FRAMES
    assert after["duplicate"] > before["duplicate"]
    assert after["reorder"] > before["reorder"]


@pytest.mark.spec("BRG-2.3-01")
def test_the_same_bridges_carry_a_stream_the_other_way(hosts: Crossing) -> None:
    """Each end sends one stream and receives another, at the same time."""
    hosts.settle()
    hosts.producer.go_on()
    producer = hosts.right.produce(BACK, rate_hz=50)
    consumer = hosts.left.consume(BACK_ARRIVES_AS)
    consumer.wait_for_more(20)
    hosts.wait_for_frames(5)
    producer.hold()
    for client in (producer, consumer):
        client.end()


def lens_of(consumer: tp.Consumer) -> object:
    metadata = consumer.metadata()
    return None if metadata is None else metadata.attributes.get("lens_mm")


@pytest.mark.spec("BRG-7.1-01")
def test_metadata_of_a_stream_are_found_on_the_other_host(hosts: Crossing) -> None:
    """The attributes and the tags that its producer set, under the id that it has over there."""
    with (
        tp.connect(hosts.right.deployment.aeron_dir, config=hosts.right.deployment.config_path) as source,
        tp.connect(hosts.left.deployment.aeron_dir, config=hosts.left.deployment.config_path) as reader,
        source.producer(BACK, timeout=30) as producer,
        reader.consumer(BACK_ARRIVES_AS, timeout=30) as consumer,
    ):
        producer.set_metadata({"lens_mm": 35}, tags=["lab1"])
        wait_until(lambda: lens_of(consumer) == 35, "the attributes are here")
        wait_until(lambda: BACK_ARRIVES_AS in {it.stream_id for it in reader.discover(tags=["lab1"])}, "so are tags")


@pytest.mark.spec("BRG-3-04", "BRG-7-02")
def test_only_chunks_announces_and_metadata_cross_the_network(hosts: Crossing) -> None:
    """What the relay saw: nothing of the driver's protocol, and no descriptors."""
    seen = {tuple(ids) for ids in hosts.set_disorder()["messages"]}
    wanted: set[type[Message]] = {BridgeFrameChunk, ShmPoolAnnounce}
    allowed: set[type[Message]] = wanted | {DataSourceAnnounce, DataSourceMeta}
    assert {(kind.SCHEMA_ID, kind.TEMPLATE_ID) for kind in wanted} <= seen
    assert seen <= {(kind.SCHEMA_ID, kind.TEMPLATE_ID) for kind in allowed}
