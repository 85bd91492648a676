# SPDX-License-Identifier: Apache-2.0
"""How streams are opened: subscribers that Aeron may skip, publishers with logs of their own."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tensorpool import aeron
from tensorpool.channel import Endpoint, check_channel


@pytest.fixture
def client(
    shared_media_driver: aeron.MediaDriver, connect: Callable[[aeron.MediaDriver], aeron.Client]
) -> aeron.Client:
    return connect(shared_media_driver)


def parameters(channel: str) -> dict[str, str]:
    return dict(check_channel("channel", channel).parameters)


def test_a_subscription_is_untethered(client: aeron.Client) -> None:
    """And images come into sight."""
    images: list[aeron.ImageEvent] = []
    endpoint = Endpoint("aeron:ipc?term-length=64k", 4712)
    subscription = aeron.subscribe(client, endpoint, images.append)
    assert parameters(subscription.channel) == {"tether": "false", "term-length": "64k"}
    publication = aeron.publish(client, endpoint)
    while not publication.offer(b"12345678"):
        pass
    received: list[bytes] = []
    while not received:
        subscription.poll(lambda data, info: received.append(data), 10)
    assert [image.session_id for image in images] == [publication.session_id]


def test_a_publication_has_a_log_of_its_own_of_the_size_asked_for(client: aeron.Client) -> None:
    """Which a stalled untethered subscriber holds for 100 ms at most."""
    endpoint = Endpoint("aeron:ipc?term-length=4m", 4713)
    first, second = (aeron.publish(client, endpoint, "64k") for _ in range(2))
    assert first.session_id != second.session_id
    assert first.term_buffer_length == 64 << 10
    assert parameters(first.channel)["untethered-window-limit-timeout"] == "100ms"


def test_endpoints_of_one_place_are_one() -> None:
    """All IPC channels lead to the same place; the first endpoint is kept."""
    first, same = Endpoint("aeron:ipc?term-length=64k", 1), Endpoint("aeron:ipc", 1)
    far = Endpoint("aeron:udp?endpoint=localhost:40123", 1)
    assert aeron.distinct([first, same, far, Endpoint("aeron:ipc", 2)]) == [first, far, Endpoint("aeron:ipc", 2)]
