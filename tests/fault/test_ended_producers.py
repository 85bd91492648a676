# SPDX-License-Identifier: Apache-2.0
"""A producer whose process was killed is replaced before its lease is over; one that lives never is.

Leases here last for minutes: a producer that attaches has not waited for one.
"""

from __future__ import annotations

import itertools
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

import tensorpool as tp
from tensorpool.driver.leases import Lease
from tensorpool.errors import AttachRefused
from tests.support.processes import Process, wait_until

HOLD = """
import sys
import tensorpool as tp
producer = tp.connect().producer(sys.argv[1], create=True)
print(producer.stream_id, flush=True)
sys.stdin.read()
"""
RUN = "import os, sys; os.execvp(sys.argv[1], sys.argv[1:])"
SLEEPER = "import sys; sys.stdin.read()"
SMALL = {"profiles.default": {"header_nslots": 8, "payload_pools": [{"pool_id": 1, "stride_bytes": 4096}]}}
MINUTE_MS = 60_000

_names = itertools.count()


@pytest.fixture(scope="module")
def pool() -> Iterator[tp.Local]:
    with tp.local(overrides=SMALL | {"policies.lease_keepalive_interval_ms": MINUTE_MS}) as pool:
        yield pool


@pytest.fixture
def name() -> str:
    """Of a stream that no other test has."""
    return f"ended/{next(_names)}"


def hold(pool: tp.Local, name: str, *command: str) -> Process:
    """A producer in a process of its own; `command` runs it otherwise than directly."""
    place = {"AERON_DIR": pool.aeron_dir, "SHM_BASE_DIR": pool.config.shm.base_dir}
    place["POLICIES_LEASE_KEEPALIVE_INTERVAL_MS"] = str(MINUTE_MS)
    run = ("-c", RUN, *command, sys.executable) if command else ()
    return Process(*run, "-c", HOLD, name, **place)


def identified(pool: tp.Local, process: Process) -> Lease:
    """The lease of the process, once the driver knows which process holds it."""
    stream_id = int(process.read_line())
    held = next(lease for lease in pool.conductor.lifecycle.leases if lease.stream_id == stream_id)
    wait_until(lambda: held.process is not None, "the client has declared its process")
    return held


def is_held(pool: tp.Local, lease: Lease) -> bool:
    return pool.conductor.lifecycle.leases.get(lease.lease_id) is lease


@pytest.mark.parametrize("is_reaped", [True, False])
def test_a_killed_producer_is_replaced_at_once(pool: tp.Local, name: str, is_reaped: bool) -> None:
    """Also one that its parent has not reaped. Frames flow, and a consumer that was there goes on."""
    with hold(pool, name) as process, pool.connect() as client:
        lease = identified(pool, process)
        consumer = client.consumer(name)
        process.send(signal.SIGKILL)
        if is_reaped:
            process.finish()
        started_s = time.monotonic()
        with client.producer(name, create=True, timeout=60) as producer:
            print(f"replaced after {time.monotonic() - started_s:.3f} s")
            assert producer.stream_id == lease.stream_id
            assert not is_held(pool, lease)
            assert producer.wait_for_consumers(1, 60)
            producer.publish(np.arange(10))
            frame = consumer.poll(60)
            assert frame is not None
            assert frame.copy().tolist() == list(range(10))
        consumer.close()


def test_a_larger_ring_is_made_for_the_producer_that_replaces_a_killed_one(pool: tp.Local, name: str) -> None:
    """The ring is asked for before the attach: there already the dead producer does not stand in the way."""
    with hold(pool, name) as process, pool.connect() as client:
        identified(pool, process)
        process.send(signal.SIGKILL)
        process.finish()
        with client.producer(name, create=True, slots=16, max_frame_bytes=10_000, timeout=60) as producer:
            assert producer.max_frame_bytes == 16_384


def test_a_stopped_producer_is_not_replaced(pool: tp.Local, name: str) -> None:
    """SIGSTOP is no death: the lease stays until it expires."""
    with hold(pool, name) as process, pool.connect() as client:
        lease = identified(pool, process)
        process.send(signal.SIGSTOP)
        with pytest.raises(AttachRefused, match="already has a producer"):
            client.producer(name, create=True, timeout=1)
        assert is_held(pool, lease)


def test_a_process_that_has_the_number_of_a_killed_producer_is_not_taken_for_it(pool: tp.Local, name: str) -> None:
    """The number was given again: the producer is gone all the same."""
    with hold(pool, name) as process, pool.connect() as client:
        lease = identified(pool, process)
        process.send(signal.SIGKILL)
        process.finish()
        with process_with_pid(process.pid) as other:
            with client.producer(name, create=True, timeout=60):
                assert not is_held(pool, lease)
            assert other.is_running


def process_with_pid(pid: int) -> Process:
    """Have the kernel give the number to a new process."""
    found: list[Process] = []

    def is_given() -> bool:
        Path("/proc/sys/kernel/ns_last_pid").write_text(str(pid - 1))
        process = Process("-c", SLEEPER)
        if process.pid == pid:
            found.append(process)
        else:  # another process of this machine was started in between
            process.reap()
        return bool(found)

    wait_until(is_given, f"process {pid}")
    return found[0]


def test_a_producer_of_another_pid_namespace_is_not_looked_for(pool: tp.Local, name: str) -> None:
    """Its number means another process here: the driver waits for its lease, also when it is gone."""
    unshare = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
    with hold(pool, name, *unshare) as process, pool.connect() as client:
        lease = identified(pool, process)
        assert lease.process is not None
        assert lease.process.pid != process.pid
        process.send(signal.SIGKILL)
        process.finish()
        with pytest.raises(AttachRefused, match="already has a producer"):
            client.producer(name, create=True, timeout=1)
        assert is_held(pool, lease)


def test_a_producer_that_declares_nothing_is_waited_for(pool: tp.Local, name: str) -> None:
    """As one of another implementation: its lease counts."""
    control = msgspec.structs.replace(pool.config.control, enabled=False)
    config = msgspec.structs.replace(pool.config, control=control)
    with (
        tp.connect(pool.aeron_dir, config=config) as silent,
        pool.connect() as client,
        silent.producer(name, create=True) as holder,
    ):
        (lease,) = (one for one in pool.conductor.lifecycle.leases if one.stream_id == holder.stream_id)
        with pytest.raises(AttachRefused, match="already has a producer"):
            client.producer(name, create=True, timeout=1)
        assert lease.process is None
        assert is_held(pool, lease)
