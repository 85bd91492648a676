# SPDX-License-Identifier: Apache-2.0
"""Attaches that our own driver takes long to answer: real Aeron, a real driver, memory that comes when a test says so.

Only the creation of one stream's memory is held up; everything else is as in every deployment.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

import tensorpool as tp
from tensorpool import shm
from tensorpool.client import Client, Producer
from tests.client.conftest import FRAME, SMALL, STREAM
from tests.support.processes import wait_until

GRACE = {"policies.lease_expiry_grace_intervals": 1000}  # no lease expires during a test


class Gate:
    """Memory for producers of STREAM is made while it is open."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._is_open = threading.Event()
        self.waiting = 0
        real = shm.EpochTree.create

        def create(tree: shm.EpochTree, stream_id: int, *args: Any, **options: Any) -> Any:
            if stream_id == STREAM and options["reserve_space"]:
                self.waiting += 1
                assert self._is_open.wait(60)
            return real(tree, stream_id, *args, **options)

        monkeypatch.setattr(shm.EpochTree, "create", create)

    def open(self) -> None:
        self._is_open.set()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    return Gate(monkeypatch)


@pytest.fixture
def pool(gate: Gate) -> Iterator[tp.Local]:
    with tp.local(overrides=SMALL | GRACE) as pool:
        try:
            yield pool
        finally:
            gate.open()


@pytest.fixture
def client(pool: tp.Local) -> Iterator[Client]:
    with pool.connect() as client:
        yield client


class Attaching:
    """A producer of STREAM on another thread, as far as it came."""

    def __init__(self, client: Client, **options: Any) -> None:
        self.producer: Producer | None = None
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._attach, args=(client, options), daemon=True)
        self._thread.start()

    def _attach(self, client: Client, options: dict[str, Any]) -> None:
        try:
            self.producer = client.producer(STREAM, **options)
        except tp.TensorPoolError as error:
            self.error = error

    @property
    def is_done(self) -> bool:
        return not self._thread.is_alive()

    def finish(self) -> Producer:
        self._thread.join(60)
        assert self.producer is not None, self.error
        return self.producer


def is_creation_reported(client: Client) -> bool:
    """Whether a session of the client knows what the driver is making for it."""
    return any(session.attachment.creation is not None for session in client._sessions)


def test_a_caller_whose_time_is_over_reads_what_the_driver_is_making(client: Client) -> None:
    """How much, for which stream, since when; not that there is no driver."""
    attaching = Attaching(client, timeout=3)
    wait_until(lambda: is_creation_reported(client), "the driver's report has come")
    wait_until(lambda: attaching.is_done, "its time is over")
    assert isinstance(attaching.error, tp.AttachPending)
    text = str(attaching.error)
    assert f"the driver is making 0.5 MiB for stream {STREAM}, for " in text
    assert "longer timeout" in text


def test_without_a_timeout_a_caller_waits_for_as_long_as_the_driver_reports(pool: tp.Local, gate: Gate) -> None:
    """Beyond the time that it gives a driver which reports nothing."""
    times = msgspec.structs.replace(pool.config.client, attach_timeout_ms=2000)
    config = msgspec.structs.replace(pool.config, client=times)
    with tp.connect(pool.aeron_dir, config=config) as client:
        attaching = Attaching(client)

        def has_waited_longer() -> bool:
            reports = [session.attachment.creation for session in client._sessions]
            return any(report is not None and report.elapsed_ns > 2_500_000_000 for report in reports)

        wait_until(lambda: has_waited_longer() or attaching.is_done, "the driver reports after that time, too")
        assert not attaching.is_done, attaching.error
        gate.open()
        assert attaching.finish().publish(FRAME) == 0


def test_other_streams_are_served_meanwhile(client: Client, gate: Gate) -> None:
    """Producers and consumers of others attach, publish and read; a consumer of the same stream attaches too."""
    attaching = Attaching(client, timeout=60)
    wait_until(lambda: gate.waiting == 1, "its memory is being made")
    with client.producer("other", create=True) as producer, client.consumer(producer.stream_id) as consumer:
        producer.wait_for_consumers(1, 20)
        assert producer.publish(FRAME) == 0
        assert consumer.poll(20) is not None
    with client.consumer(STREAM):
        assert not attaching.is_done
    gate.open()
    attaching.finish().close()


def test_a_late_grant_leaves_the_stream_to_others(client: Client, pool: tp.Local, gate: Gate) -> None:
    """The caller gave up: the lease is given back long before it would expire, and another client gets the stream."""
    with pytest.raises(tp.DriverUnreachable):
        client.producer(STREAM, timeout=0.3)
    gate.open()
    with pool.connect() as other, other.producer(STREAM, timeout=30) as producer:
        assert producer.publish(FRAME) == 0
        assert len(pool.conductor.lifecycle.leases) == 1


def test_a_caller_that_tries_again_and_again_attaches_in_the_end(client: Client, pool: tp.Local, gate: Gate) -> None:
    """Each time goes on with the same request: the memory is made once."""
    for _ in range(4):
        with pytest.raises(tp.DriverUnreachable):
            client.producer(STREAM, timeout=0.1)
    gate.open()
    with client.producer(STREAM, timeout=30) as producer:
        assert producer.publish(FRAME) == 0
    assert gate.waiting == 1
    assert pool.conductor.lifecycle.counts["attaches_refused"] == 0
