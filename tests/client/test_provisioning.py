# SPDX-License-Identifier: Apache-2.0
"""Rings that clients ask for: made by the driver before the attach, or refused in words that help."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

import tensorpool as tp
from tensorpool.client import Client
from tensorpool.errors import LocalProtocolError, RingRefused
from tests.client.conftest import SMALL

_names = itertools.count()


def new_name() -> str:
    """Of a stream that no other test of this file has."""
    return f"ring/{next(_names)}"


@pytest.fixture
def client() -> Iterator[Client]:
    """Of a driver that has no other streams: one that lingers under the id of a new name would be used as it is."""
    with tp.local(overrides=SMALL) as pool, pool.connect() as client:
        yield client


def ring_of(producer: tp.Producer) -> tuple[int, int]:
    writer = producer.epoch_writer
    assert writer is not None
    return writer.ring.spec.nslots, producer.max_frame_bytes


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({"frame": (100, 100, 3), "slots": 5}, (8, 32_768)),
        ({"frame": (100, 100), "dtype": "complex64", "slots": 1}, (1, 131_072)),
        ({"frame": (100, 100), "dtype": np.float16, "seconds": 0.1, "rate_hz": 30}, (4, 32_768)),
        ({"max_frame_bytes": 100_000, "seconds": 0.1}, (8, 131_072)),
        ({"max_frame_bytes": 1}, (128, 64)),
    ],
)
def test_the_driver_makes_a_ring_that_fits(client: Client, asked: dict[str, Any], expected: tuple[int, int]) -> None:
    """Two seconds at 60 Hz unless the call says otherwise, in the next powers of two."""
    with client.producer(new_name(), create=True, **asked) as producer:
        assert ring_of(producer) == expected
        frame = np.zeros(asked.get("frame", (1,)), asked.get("dtype", "uint8"))
        assert producer.publish(frame) == 0


def test_a_stream_that_fits_is_used_and_a_larger_ring_comes_with_the_next_producer(client: Client) -> None:
    """Its consumers follow to it; while a producer writes, the error says what there is."""
    name = new_name()
    with client.producer(name, create=True, slots=8, max_frame_bytes=1000) as producer:
        assert ring_of(producer) == (8, 1024)
        assert client.producer(name, create=True, slots=8, max_frame_bytes=1000) is producer
        with pytest.raises(LocalProtocolError, match="with ring="):
            client.producer(name, create=True, slots=9, max_frame_bytes=1000)
        consumer = client.consumer(name)
    with client.producer(name, create=True, slots=4, max_frame_bytes=100) as producer:
        assert ring_of(producer) == (8, 1024)
    with (
        client.producer(name, create=True, slots=16, max_frame_bytes=100_000) as producer,
        tp.connect(client.aeron_dir, config=client.config) as other,
    ):
        assert ring_of(producer) == (16, 131_072)
        with pytest.raises(RingRefused, match=r"16 slots of up to 131072 bytes, less than the 32 slots.*a producer"):
            other.producer(name, create=True, slots=32, max_frame_bytes=10)
        assert producer.wait_for_consumers(1, 60)
        producer.publish(np.full(100_000, 7, np.uint8))
        frame = consumer.poll(60)
        assert frame is not None
        assert frame.copy().tolist() == [7] * 100_000
    consumer.close()


def test_a_ring_beyond_the_drivers_limits_is_refused(client: Client) -> None:
    """With the limit by its name; nothing is made."""
    with pytest.raises(RingRefused, match=r"policies\.max_provisioned_stream_bytes is 2147483648") as caught:
        client.producer("too/large", create=True, frame=(4096, 4096, 3), slots=64)
    assert caught.value.stream == "too/large"
    assert client.discover("too/large") == []


def test_a_client_need_not_know_the_instance_of_the_driver(pool: tp.Local) -> None:
    """The only one that is alive there is asked."""
    driver = msgspec.structs.replace(pool.config.driver, instance_id="elsewhere")
    config = msgspec.structs.replace(pool.config, driver=driver)
    with (
        tp.connect(pool.aeron_dir, config=config) as client,
        client.producer(new_name(), create=True, slots=8, max_frame_bytes=1000) as producer,
    ):
        assert ring_of(producer) == (8, 1024)


@pytest.mark.parametrize("is_asked", [True, False])
def test_a_driver_without_the_command_is_named_with_its_profiles(is_asked: bool) -> None:
    """One that does not answer, and a client that knows of no control plane."""
    with tp.local(overrides=SMALL | {"control.enabled": False, "control.command_timeout_ms": 200}) as pool:
        config = pool.config
        if is_asked:
            control = msgspec.structs.replace(config.control, enabled=True)
            config = msgspec.structs.replace(config, control=control)
        with tp.connect(pool.aeron_dir, config=config) as client:
            with pytest.raises(
                RingRefused, match=r"makes no ring of 8 slots of 10 bytes .*default: \d+ slots of up to"
            ):
                client.producer("here", create=True, slots=8, max_frame_bytes=10)
            with client.producer("here", create=True) as producer:
                assert producer.publish(np.zeros(10, np.uint8)) == 0
