# SPDX-License-Identifier: Apache-2.0
"""A client's Aeron streams: which channels they are made of, and when each publisher came into sight."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tensorpool import aeron
from tensorpool.channel import Endpoint, check_channel
from tensorpool.client.streams import ClientStreams
from tensorpool.driver.config import DriverConfig
from tensorpool.errors import ConfigError
from tests.support.processes import wait_until

_ids = itertools.count(91_000, 10)


def config(**overrides: Any) -> DriverConfig:
    """Streams that no other test has."""
    first = next(_ids)
    names = ("control", "descriptor", "qos", "metadata")
    ids = {f"driver.{name}_stream_id": first + index for index, name in enumerate(names)}
    return DriverConfig.load(environ={}, overrides=ids | overrides)


@pytest.fixture
def settings() -> DriverConfig:
    return config()


@contextlib.contextmanager
def opened(settings: DriverConfig, aeron_dir: str) -> Iterator[ClientStreams]:
    with contextlib.closing(aeron.connect(aeron_dir)) as client:
        yield ClientStreams(client, settings, aeron_dir)


@pytest.fixture
def streams(shared_media_driver: aeron.MediaDriver, settings: DriverConfig) -> Iterator[ClientStreams]:
    with opened(settings, shared_media_driver.aeron_dir) as streams:
        yield streams


def parameters(channel: str) -> dict[str, str]:
    return dict(check_channel("channel", channel).parameters)


def test_publications_have_small_logs_of_their_own(streams: ClientStreams, settings: DriverConfig) -> None:
    """So small that a client costs little, each exclusive; Aeron skips its slow untethered subscribers."""
    for publication, term, endpoint in (
        (streams.control.publication, 64 << 10, settings.driver.control),
        (streams.qos, 64 << 10, settings.driver.qos),
        (streams.metadata, 1 << 20, settings.driver.metadata),
    ):
        assert publication.term_buffer_length == term
        assert publication.stream_id == endpoint.stream_id
        assert parameters(publication.channel)["untethered-window-limit-timeout"] == "100ms"
    first, second = (streams.publish(settings.driver.qos, "64k") for _ in range(2))
    assert first.session_id != second.session_id


def test_a_blob_chunk_fits_the_metadata_stream_and_a_request_every_other(streams: ClientStreams) -> None:
    """With room for their headers."""
    assert streams.metadata.max_message_length > 65_536 + 64
    assert streams.control.max_message_length >= 4_096


def test_without_a_size_of_its_own_a_log_is_as_configured(streams: ClientStreams, settings: DriverConfig) -> None:
    """Descriptors are many."""
    configured = parameters(settings.driver.descriptor.channel)["term-length"]
    assert parameters(streams.publish(settings.driver.descriptor).channel)["term-length"] == configured


def test_subscriptions_let_themselves_be_passed_over(streams: ClientStreams, settings: DriverConfig) -> None:
    """And come back by themselves."""
    chosen = parameters(streams.subscribe(settings.driver.descriptor).channel)
    assert chosen["tether"] == "false"
    assert "rejoin" not in chosen


def test_udp_publications_are_as_configured(shared_media_driver: aeron.MediaDriver, streams: ClientStreams) -> None:
    """Terms of an IPC log mean something else there."""
    endpoint = Endpoint("aeron:udp?endpoint=127.0.0.1:40771", next(_ids))
    publication = streams.publish(endpoint, "64k")
    assert publication.channel == endpoint.channel
    assert parameters(streams.subscribe(endpoint).channel)["tether"] == "false"


@pytest.mark.parametrize("media", ["aeron:ipc?", "aeron:udp?endpoint=127.0.0.1:40772|"])
def test_a_private_publication_takes_little_memory_whatever_its_channel_says(
    streams: ClientStreams, media: str
) -> None:
    """Only where it leads is the consumer's choice: neither the size of the log nor how long it stays."""
    channel = f"{media}session-id={next(_ids)}|term-length=1g|linger=1h|sparse=false|alias=x"
    publication = streams.publish_private(Endpoint(channel, next(_ids)))
    assert publication.term_buffer_length == 64 << 10
    chosen = parameters(publication.channel)
    assert chosen["session-id"] == parameters(channel)["session-id"]
    assert chosen.keys() & {"linger", "sparse", "alias"} == set()
    publication.close()


def test_a_stream_is_opened_when_it_is_needed_and_once(streams: ClientStreams) -> None:
    """A client that only consumes publishes no metadata."""
    assert (streams._publications, streams._subscriptions) == ({}, {})
    assert streams.qos is streams.qos
    assert streams.metadata is streams.metadata
    streams.poll_qos(lambda *_: None, 1)
    streams.poll_qos(lambda *_: None, 1)
    streams.poll_metadata(lambda *_: None, 1)
    assert (list(streams._publications), list(streams._subscriptions)) == (["qos", "metadata"], ["qos", "metadata"])


@pytest.mark.parametrize("kind", ["control", "announce"])
def test_control_and_announces_are_received_with_their_join_time(
    shared_media_driver: aeron.MediaDriver, transport: aeron.Client, kind: str
) -> None:
    """C7: of each publisher, by the monotonic clock, on whichever of the two streams it is."""
    settings = config(**{"driver.announce_stream_id": next(_ids)})
    before_ns = time.monotonic_ns()
    received: list[tuple[bytes, int]] = []

    endpoint = getattr(settings.driver, kind)
    with opened(settings, shared_media_driver.aeron_dir) as streams:

        def handler(data: bytes, info: aeron.MessageInfo) -> None:
            received.append((data, streams.joined_ns(info)))

        publication = transport.add_publication(endpoint.channel, endpoint.stream_id)
        wait_until(lambda: publication.offer(b"a message"), "there is a subscriber")
        wait_until(lambda: streams.poll_control(handler, 10) or received, "the message is received")
        ((data, joined_ns),) = received
        assert data == b"a message"
        assert before_ns <= joined_ns <= time.monotonic_ns()
        publication.close()


def test_a_publisher_that_went_is_forgotten(
    shared_media_driver: aeron.MediaDriver, transport: aeron.Client, settings: DriverConfig, streams: ClientStreams
) -> None:
    """Publishers that come and go do not make the table grow."""
    endpoint = settings.driver.control
    publication = transport.add_publication(endpoint.channel, endpoint.stream_id)
    wait_until(lambda: streams.poll_control(lambda *_: None, 10) or len(streams._joined_ns) == 2, "both are in sight")
    publication.close()
    wait_until(lambda: streams.poll_control(lambda *_: None, 10) or len(streams._joined_ns) == 1, "one has gone")


def test_one_stream_for_control_and_announces_is_received_once(streams: ClientStreams) -> None:
    """Not twice when both have one endpoint."""
    received: list[bytes] = []
    wait_until(lambda: streams.control.offer(b"x"), "our own subscription listens")
    wait_until(lambda: streams.poll_control(lambda data, _: received.append(data), 10), "it is received")
    assert streams.poll_control(lambda data, _: received.append(data), 10) == 0
    assert received == [b"x"]


def test_a_listener_that_stops_polling_holds_no_other_up(streams: ClientStreams, settings: DriverConfig) -> None:
    """The log is full, and goes on without it to those who listen."""
    idle, publication = streams.subscribe(settings.driver.qos), streams.qos
    received: list[bytes] = []
    streams.poll_qos(lambda data, _: received.append(data), 10)
    wait_until(lambda: idle.is_connected and publication.has_room, "the streams are connected")

    def pass_on() -> bool:
        publication.offer(bytes(4000))
        streams.poll_qos(lambda data, _: received.append(data), 100)
        return len(received) > 130

    wait_until(pass_on, "half a megabyte passed through a log of 64 KiB")
    wait_until(lambda: idle.poll(lambda *_: None) is not None and idle.image_count == 0, "the idle one was let go")


def test_requests_pass_a_foreign_subscriber_that_never_polls(
    shared_media_driver: aeron.MediaDriver, settings: DriverConfig, streams: ClientStreams
) -> None:
    """Many windows of them: the control log is replaced, and every message is still known as our own."""
    endpoint = settings.driver.control
    foreign = aeron.connect(shared_media_driver.aeron_dir, client_name="foreign")
    idle = foreign.add_subscription(endpoint.channel, endpoint.stream_id)
    wait_until(lambda: streams.control.publication.has_room, "the log is connected")
    received: list[bool] = []

    def passed_on() -> bool:
        streams.control.offer(bytes(4000))
        streams.poll_control(lambda _, info: received.append(streams.is_own(info)), 100)
        return len(received) > 30

    wait_until(passed_on, "120 KB passed through a log of 64 KiB")
    assert all(received)
    assert idle.image_count > 0
    foreign.close()


def test_a_channel_that_is_none_is_refused_by_name(streams: ClientStreams) -> None:
    """Before Aeron sees it."""
    with pytest.raises(ConfigError, match="channel"):
        streams.publish(Endpoint("ipc", 1))
    with pytest.raises(ConfigError, match="channel"):
        streams.subscribe(Endpoint("aeron:tcp?endpoint=x", 1))
