# SPDX-License-Identifier: Apache-2.0
"""Producers that are asked for twice, and producers and consumers that the program did not close."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import numpy as np
import pytest

import tensorpool as tp
from tensorpool.client import Client
from tensorpool.errors import LocalProtocolError
from tensorpool.wire.driver import Role
from tests.client.conftest import FRAME, leases, new_name
from tests.support.processes import wait_until


def test_asking_again_for_an_open_producer_returns_it(client: Client) -> None:
    """By name and by id, with or without create: the object is the same, and after close() it is another."""
    name = new_name()
    producer = client.producer(name, create=True)
    epoch = producer.epoch
    assert client.producer(name, create=True) is producer
    assert client.producer(name, timeout=1) is producer
    with client.producer(producer.stream_id, create=True, timeout=5) as same:
        assert same is producer
        assert same.epoch == epoch
        assert same.publish(FRAME) == 0
    with client.producer(name, create=True, timeout=20) as other:
        assert other is not producer
        assert other.epoch != epoch


@pytest.mark.parametrize(
    "changed", [{"on_state": print}, {"release_gil_from_bytes": 1}, {"with_publish_time": True}, {"is_relay": True}]
)
def test_an_open_producer_is_not_returned_for_other_arguments(client: Client, changed: dict[str, Any]) -> None:
    """The error names the stream and what differs; the producer goes on."""
    name = new_name()
    with client.producer(name, create=True) as producer:
        (key,) = changed
        with pytest.raises(LocalProtocolError, match=f'"{name}".* with {key}='):
            client.producer(name, create=True, **changed)
        assert producer.publish(FRAME) == 0


@pytest.mark.parametrize("role", [Role.PRODUCER, Role.CONSUMER])
def test_the_last_reference_gives_the_lease_back(patient: tp.Local, role: Role) -> None:
    """With a ResourceWarning that names the stream; the conductor does it, the thread that drops it does not wait."""
    name = new_name()
    with patient.connect() as client:
        producer = client.producer(name, create=True)
        consumer = client.consumer(name)
        assert producer.wait_for_consumers(1, 20)
        producer.publish(FRAME)
        frame = consumer.poll(20)
        assert frame is not None
        stream_id = producer.stream_id
        kept = consumer if role is Role.PRODUCER else producer
        gone = weakref.ref(producer if role is Role.PRODUCER else consumer)
        session = (producer if role is Role.PRODUCER else consumer)._session
        with pytest.warns(ResourceWarning, match=rf'the {role.name.lower()} of stream "{name}" \({stream_id}\)'):
            del producer, consumer
        assert gone() is None  # at once: nothing of ours refers to it, and it is in no cycle
        wait_until(lambda: leases(patient, stream_id, role) == 0, "the lease is given back")
        wait_until(lambda: session.is_closed, "the session ends")
        assert leases(patient, stream_id, Role.PRODUCER if role is Role.CONSUMER else Role.CONSUMER) == 1
        np.testing.assert_array_equal(frame.array, FRAME)
        kept.close()
        with client.producer(name, create=True, timeout=20) as again:  # no lease stands in its way
            assert again.publish(FRAME) == 0


def test_a_producer_may_be_destroyed_while_locks_are_held(patient: tp.Local) -> None:
    """The garbage collector runs anywhere: on the conductor's thread, and under the session's own locks."""
    with patient.connect() as client:
        producer, name = client.producer(new_name(), create=True), new_name()
        session = producer._session
        with session.changed, client._conductor._lock, pytest.warns(ResourceWarning, match="was not closed"):
            del producer
        wait_until(lambda: leases(patient, session.stream_id, Role.PRODUCER) == 0, "the lease is given back")

        other = [client.producer(name, create=True)]
        session = other[0]._session
        done = threading.Event()

        def drop(now_ns: int) -> None:
            with pytest.warns(ResourceWarning, match=name):
                other.clear()
            done.set()

        client._conductor.order(drop)
        assert done.wait(20)
        wait_until(lambda: leases(patient, session.stream_id, Role.PRODUCER) == 0, "the lease is given back")


@pytest.mark.filterwarnings("error")
def test_what_was_closed_is_destroyed_in_silence(client: Client) -> None:
    """By itself or with its client."""
    name = new_name()
    producer, consumer = client.producer(name, create=True), client.consumer(name)
    producer.close()
    client.close()
    del producer, consumer
    gc.collect()
