# SPDX-License-Identifier: Apache-2.0
"""Two hosts in one process: a bridge at each, frames of one in the memory of the other.

What the specification demands of each end is in tests/conformance; here is what both do together, and what is ours.
"""

from __future__ import annotations

import itertools
import json
import re
import signal
import socket
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import tensorpool as tp
from tensorpool.bridge.bridge import Bridge
from tensorpool.bridge.config import BridgeConfig
from tests.support.bridge_sender import Link
from tests.support.driver_process import DriverProcess
from tests.support.processes import ROOT, wait_until

PROFILE = {
    "header_nslots": 16,
    "payload_pools": [{"pool_id": 1, "stride_bytes": 4096}, {"pool_id": 2, "stride_bytes": 1 << 20}],
}
POLICIES = {"announce_period_ms": 1000, "lease_keepalive_interval_ms": 500}

_stream_ids = itertools.count(20_000)


class Hosts(NamedTuple):
    source: tp.Local
    dest: tp.Local


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    overrides = {"profiles.default": PROFILE} | {f"policies.{key}": value for key, value in POLICIES.items()}
    with tp.local(overrides=overrides) as source, tp.local(overrides=overrides) as dest:
        yield Hosts(source, dest)


def tables(link: Link, role: str, *mappings: dict[str, Any], **keys: Any) -> dict[str, Any]:
    patience = {"announce_period_ms": 1000, "assembly_timeout_ms": 60_000}  # with a machine that stands still
    section = {"instance_id": f"the-{role}", "role": role, **patience, **link.keys, **keys}
    return {"bridge": section, "mappings": list(mappings)}


def started(host: tp.Local, link: Link, role: str, *mappings: dict[str, Any], **keys: Any) -> Bridge:
    config = BridgeConfig.load(environ={}, **tables(link, role, *mappings, **keys))
    return Bridge(config, driver=host.config, aeron_dir=host.aeron_dir).start()


def new_mapping() -> dict[str, int]:
    return {"source_stream_id": next(_stream_ids), "dest_stream_id": next(_stream_ids)}


def wait_ready(*bridges: Bridge) -> None:
    wait_until(lambda: all(bridge.is_ready for bridge in bridges), "the bridges are ready")


class Crossing(NamedTuple):
    """A mapping at work: its producer, its bridges, a consumer on the other side."""

    producer: tp.Producer
    sender: Bridge
    receiver: Bridge
    consumer: tp.Consumer

    def carry(self, array: Any, **given: Any) -> tp.Frame:
        """Publish until a frame gets through, and return it: the first may be too early."""
        found: list[tp.Frame] = []

        def is_through() -> bool:
            seq = self.producer.publish(array, **given)
            while (frame := self.consumer.poll(timeout=0.2)) is not None:
                if frame.seq == seq:
                    found.append(frame)
                    return True
            return False

        wait_until(is_through, "a frame gets through")
        return found[0]

    def counts(self, bridge: Bridge) -> dict[str, int]:
        (name,) = (mapping.name for mapping in bridge.config.mappings)
        return bridge.counters[name]


@contextmanager
def crossing(
    hosts: Hosts, more: dict[str, Any] | None = None, receives: dict[str, Any] | None = None, **keys: Any
) -> Iterator[Crossing]:
    """`more` are keys of the mapping, `receives` those of the receiving bridge alone."""
    link, mapping = Link.unused(), new_mapping() | (more or {})
    with ExitStack() as stack:
        source, dest = (stack.enter_context(host.connect()) for host in hosts)
        producer = stack.enter_context(source.producer(mapping["source_stream_id"], create=True))
        receiver = stack.enter_context(started(hosts.dest, link, "receiver", mapping, **keys | (receives or {})))
        sender = stack.enter_context(started(hosts.source, link, "sender", mapping, **keys))
        wait_ready(sender, receiver)
        consumer = stack.enter_context(dest.consumer(mapping["dest_stream_id"]))
        yield Crossing(producer, sender, receiver, consumer)


def test_frames_of_every_size_arrive_byte_for_byte(hosts: Hosts) -> None:
    """Straight into their slots; seq, timestamp and meta_version are the source's, trace ids stay at home."""
    random = np.random.default_rng(7)
    with crossing(hosts) as it:
        it.carry(np.ones(10, np.uint8))  # from now on whatever is sent arrives
        before = [it.counts(bridge) for bridge in (it.receiver, it.sender)]
        it.producer.set_metadata({"exposure_ms": 4}, tags=["lab1"])
        for shape in [(1,), (1000,), (3, 700), (1063,), (64, 64, 8), (1 << 20,)]:
            sent = random.integers(0, 255, shape, np.uint8)
            frame = it.carry(sent, timestamp_ns=123, trace_id=9)
            assert np.array_equal(frame.copy(), sent)
            assert (frame.timestamp_ns, frame.meta_version, frame.trace_id) == (123, 1, 0)
        empty = it.carry(np.empty((0, 4), np.float32))
        assert (empty.shape, empty.dtype) == ((0, 4), np.float32)
        wait_until(lambda: it.consumer.metadata(1) is not None, "the metadata are published on this side")
        metadata = it.consumer.metadata(1)
        assert metadata is not None
        assert metadata.attributes["exposure_ms"] == 4
        after = [it.counts(bridge) for bridge in (it.receiver, it.sender)]
        assert after[0]["frames_in_place"] == after[0]["frames_received"]
        arrived = after[0]["bytes_received"] - before[0]["bytes_received"]
        assert arrived == after[1]["bytes_sent"] - before[1]["bytes_sent"]


def test_tables_of_a_producer_arrive(hosts: Hosts) -> None:
    """MetaBlob messages travel with the metadata."""
    with crossing(hosts) as it:
        it.carry(np.ones(10, np.uint8))
        table = bytes(range(256)) * 1000
        it.producer.publish_blob(table, blob_type=7)
        wait_until(lambda: it.consumer.blob(7) == table, "the table is here")


@pytest.mark.spec("BRG-7.1-02")
def test_tables_reach_who_comes_later(hosts: Hosts) -> None:
    """A receiver that starts after the source, one that restarts before Aeron notices, and consumers that come after
    the table: of the producer's present epoch, and with the metadata that the table belongs to."""
    link, mapping = Link.unused(), new_mapping()
    tables = {7: bytes(range(256)) * 3000, 8: b"small"}

    def wait_tables(consumer: tp.Consumer) -> None:
        wait_until(lambda: {it: consumer.blob(it) for it in tables} == tables, "the tables are here")
        wait_until(lambda: consumer.metadata(1) is not None, "and the metadata")

    with ExitStack() as stack:
        source, dest = (stack.enter_context(host.connect()) for host in hosts)
        producer = stack.enter_context(source.producer(mapping["source_stream_id"], create=True))
        wait_ready(stack.enter_context(started(hosts.source, link, "sender", mapping)))
        producer.set_metadata({"exposure_ms": 4})
        for blob_type, table in tables.items():
            producer.publish_blob(table, blob_type=blob_type)
        with source.consumer(mapping["source_stream_id"]) as neighbour:
            wait_tables(neighbour)
        for _ in range(2):
            with started(hosts.dest, link, "receiver", mapping) as receiver:
                wait_ready(receiver)
                for _ in range(2):
                    with dest.consumer(mapping["dest_stream_id"]) as consumer:
                        wait_tables(consumer)
                dropped = [name for counts in receiver.counters.values() for name in counts if "table" in name]
                assert dropped == []


def test_tables_of_an_epoch_that_is_over_are_not_published_as_current(hosts: Hosts) -> None:
    with crossing(hosts) as it:
        it.carry(np.ones(10, np.uint8))
        it.producer.publish_blob(b"old", blob_type=7)
        wait_until(lambda: it.consumer.blob(7) == b"old", "the table is here")
        it.producer.close()
        with (
            hosts.source.connect() as source,
            source.producer(it.sender.config.mappings[0].source_stream_id) as producer,
            hosts.dest.connect() as dest,
        ):
            again = it._replace(producer=producer)
            epoch = again.carry(np.ones(10, np.uint8)).epoch
            producer.publish_blob(b"new", blob_type=8)
            with dest.consumer(it.receiver.config.mappings[0].dest_stream_id) as consumer:
                wait_until(lambda: consumer.blob(8, epoch=epoch) == b"new", "the next epoch has its own table")
                assert consumer.blob(7, epoch=epoch) is None
            assert it.consumer.blob(7, epoch=epoch) is None


def test_a_source_that_starts_costs_no_frame(hosts: Hosts) -> None:
    """The epoch before its producer had no frames: the receiver keeps its lease, and every frame from the first on
    arrives."""
    link, mapping = Link.unused(), new_mapping()
    with ExitStack() as stack:
        source, dest = (stack.enter_context(host.connect()) for host in hosts)
        source.producer(mapping["source_stream_id"], create=True).close()  # the stream is there, its producer is not
        receiver = stack.enter_context(started(hosts.dest, link, "receiver", mapping))
        sender = stack.enter_context(started(hosts.source, link, "sender", mapping))
        wait_ready(sender, receiver)
        name = next(iter(receiver.destinations.keys()))
        wait_until(lambda: receiver.counters[name].get("announces_accepted"), "the empty epoch is announced")
        consumer = stack.enter_context(dest.consumer(mapping["dest_stream_id"]))
        epoch = consumer.epoch
        producer = stack.enter_context(source.producer(mapping["source_stream_id"]))
        assert producer.wait_for_consumers(1, 30.0)
        for number in range(5):
            producer.publish(np.full(10, number, np.uint8))
        frames = [consumer.poll(timeout=30.0) for _ in range(5)]
        assert [frame and int(frame.array[0]) for frame in frames] == list(range(5))
        assert {frame and frame.epoch for frame in frames} == {epoch}


def test_a_paused_bridge_counts_what_it_leaves_out(hosts: Hosts) -> None:
    with crossing(hosts) as it:
        it.carry(np.ones(10, np.uint8))
        for bridge in (it.receiver, it.sender):
            bridge.pause()
            assert bridge.is_paused

            def is_counted(bridge: Bridge = bridge) -> bool:
                it.producer.publish(np.ones(10, np.uint8))
                return it.counts(bridge).get("frames_dropped.paused", 0) > 0

            wait_until(is_counted, "frames are left out")
            bridge.resume()
            it.carry(np.ones(10, np.uint8))
        with pytest.raises(ValueError, match="expected one of"):
            it.sender.pause("absent")


def test_what_the_dashboard_shows_of_bridges_is_counted(hosts: Hosts) -> None:
    """Every metric and label of its queries, by a pair of bridges that have carried and dropped frames."""
    dashboard = json.loads((ROOT / "dashboards" / "tensorpool.json").read_text())
    targets = [target for panel in dashboard["panels"] for target in panel.get("targets", [])]
    wanted = {name for it in targets for name in re.findall(r"tensorpool_bridge_\w+", it["expr"])}
    labels = {
        name for it in targets if "_bridge_" in it["expr"] for name in re.findall(r"{{(\w+)}}", it["legendFormat"])
    }
    assert len(wanted) >= 6
    with crossing(hosts) as it:
        it.carry(np.ones(10, np.uint8))
        it.receiver.pause()

        def found() -> list[Any]:
            it.producer.publish(np.ones(10, np.uint8))
            collected = [*it.sender.collector.collect(), *it.receiver.collector.collect()]
            return [sample for family in collected for sample in family.samples]

        wait_until(lambda: wanted <= {sample.name for sample in found()}, f"{wanted} are counted")
        assert labels <= {label for sample in found() for label in sample.labels}


def test_a_frame_is_published_with_the_right_checksum_only(hosts: Hosts) -> None:
    """The private extension: both ends have to use it."""
    with crossing(hosts, crc32c=True) as it:
        assert it.carry(np.arange(500, dtype=np.uint16)).nbytes == 1000
        assert "frames_dropped.crc" not in it.counts(it.receiver)
    with crossing(hosts, receives={"crc32c": True}) as it:

        def is_counted() -> bool:
            it.producer.publish(np.ones(10, np.uint8))
            return it.counts(it.receiver).get("frames_dropped.crc", 0) > 0

        wait_until(is_counted, "frames without a checksum are dropped")
        assert it.consumer.poll() is None


def write_key(folder: Path, name: str, key: bytes) -> str:
    path = folder / name
    path.write_bytes(key)
    path.chmod(0o600)
    return str(path)


def test_a_frame_is_published_with_the_right_authentication_code_only(hosts: Hosts, tmp_path: Path) -> None:
    """Of the key that both ends have; frames of a sender without it, or with another, are dropped."""
    key = write_key(tmp_path, "key", b"0123456789abcdef0123456789abcdef\n")
    with crossing(hosts, mac_key_file=key) as it:
        for shape in ((500,), (1 << 18,)):
            sent = np.random.default_rng(3).integers(0, 255, shape, np.uint8)
            assert np.array_equal(it.carry(sent).copy(), sent)
        assert "frames_dropped.mac" not in it.counts(it.receiver)
    other = write_key(tmp_path, "other", b"another secret, of the same use")
    for receives in ({"mac_key_file": other}, {"mac_key_file": other, "crc32c": True}):
        for sends in ({}, {"mac_key_file": key}, {"crc32c": True}):
            with crossing(hosts, receives=receives, **sends) as it:

                def is_counted(it: Crossing = it) -> bool:
                    it.producer.publish(np.ones(10, np.uint8))
                    return it.counts(it.receiver).get("frames_dropped.mac", 0) > 0

                wait_until(is_counted, "frames without the code are dropped")
                assert it.consumer.poll() is None


@pytest.mark.spec("BRG-9-03", "BRG-9-04")
def test_progress_of_our_own_producers_is_forwarded_though_no_local_consumer_asks(hosts: Hosts) -> None:
    """A producer reports progress only to consumers whose hello asks for it: the sender's does."""
    controls = {"source_control_stream_id": 1000, "dest_control_stream_id": 1000}
    with crossing(hosts, controls, forward_progress=True) as it:
        it.carry(np.ones(10, np.uint8))

        def is_forwarded() -> bool:
            with it.producer.claim((4, 64), np.uint8, progress="rows") as slot:
                for row in range(4):
                    slot.array[row] = row
                    slot.progress(rows=row + 1)
            return it.counts(it.receiver).get("progress_forwarded", 0) > 0

        wait_until(is_forwarded, "progress is published at the destination")
        assert it.counts(it.sender)["messages_forwarded.progress"] > 0


def test_a_destination_that_stays_taken_is_left_for_the_next_one(hosts: Hosts) -> None:
    """Of the range, and only after a dead producer's lease would have ended."""
    link, ids = Link.unused(), [next(_stream_ids) for _ in range(3)]
    with hosts.dest.connect() as client, client.producer(ids[0], create=True):
        mapping = {"source_stream_id": next(_stream_ids)}
        with started(hosts.dest, link, "receiver", mapping, dest_stream_id_range=f"{ids[0]}-{ids[2]}") as bridge:
            wait_ready(bridge)
            assert list(bridge.destinations.values()) == [ids[1]]


def test_the_command_serves_metrics_and_ends_in_order(hosts: Hosts, tmp_path: Path) -> None:
    """One line when it is ready, one at the end with what it counted; exit code 0."""
    link, mapping = Link.unused(), new_mapping()
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    base_dirs = json.dumps([str(hosts.dest.config.shm.base_dir)])
    path = tmp_path / "bridge.toml"
    section = tables(link, "receiver")["bridge"] | {"aeron_dir": hosts.dest.aeron_dir}
    lines = [f"{key} = {json.dumps(value)}" for key, value in section.items()]
    lines += [
        f"allowed_base_dirs = {base_dirs}",
        "[[mappings]]",
        *(f"{key} = {value}" for key, value in mapping.items()),
    ]
    path.write_text("\n".join(["[bridge]", *lines]))
    arguments = ("-m", "tensorpool", "bridge", "--config", str(path), "--json", "--log-level", "error")
    with DriverProcess(*arguments, "--metrics", f":{port}") as process:
        events = [json.loads(process.read_line()) for _ in range(2)]
        assert [event["event"] for event in events] == ["started", "ready"]
        assert events[1]["destinations"] == {
            f"{mapping['source_stream_id']}->{mapping['dest_stream_id']}": mapping["dest_stream_id"]
        }
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
            text = answer.read().decode()
        assert "tensorpool_bridge_ready 1.0" in text
        with pytest.raises(ConnectionRefusedError):  # an address of this host, but not the one without a name
            socket.create_connection(("127.0.0.2", port)).close()
        process.send(signal.SIGTERM)
        code, output = process.finish()
    assert code == 0
    assert json.loads(output.splitlines()[-1])["event"] == "stopped"
