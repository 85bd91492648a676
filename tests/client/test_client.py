# SPDX-License-Identifier: Apache-2.0
"""Clients: connections, streams by id and by name, conductors, closing and forking, with a driver in this process."""

from __future__ import annotations

import errno
import itertools
import math
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import tensorpool as tp
from tensorpool import aeron
from tensorpool.channel import Endpoint
from tensorpool.client import Client, Consumer, Producer, State, StateChange
from tensorpool.client.names import preferred_id
from tensorpool.driver import DriverConfig
from tensorpool.errors import (
    AttachRefused,
    Closed,
    ConfigError,
    DriverUnreachable,
    LocalProtocolError,
    RegionRejected,
    TensorPoolError,
    TransportError,
)
from tensorpool.shm import MappedRing
from tensorpool.wire.control import (
    DataSourceAnnounce,
)
from tensorpool.wire.driver import Role
from tests.client.conftest import FRAME, SMALL, STREAM, Outsider, Pair, leases, new_name, paired
from tests.support.processes import run_script, wait_until

# --- connecting


def test_without_a_media_driver_there_is_no_connection(shm_dir: Path) -> None:
    """At once, with words."""
    with pytest.raises(TransportError):
        tp.connect(str(shm_dir / "nobody"))


def test_a_configuration_that_is_made_takes_no_overrides(pool: tp.Local) -> None:
    """One or the other; the file's path goes with overrides."""
    with pytest.raises(ConfigError, match="overrides"):
        tp.connect(pool.aeron_dir, config=pool.config, overrides={"shm.namespace": "x"})


def test_a_client_reads_the_drivers_file(pool: tp.Local, tmp_path: Path) -> None:
    """Endpoints and directories are the same for both."""
    path = tmp_path / "pool.toml"
    path.write_text(
        f"""
        [driver]
        aeron_dir = "{pool.aeron_dir}"
        [shm]
        base_dir = "{pool.config.shm.base_dir}"
        [profiles.any]
        payload_pools = [{{ pool_id = 1, stride_bytes = 64 }}]
        [streams.front]
        stream_id = {STREAM}
        """
    )
    with tp.connect(config=path) as client, client.consumer(STREAM) as consumer:
        assert consumer.is_active


def test_a_conductor_is_a_thread_or_invoked(pool: tp.Local) -> None:
    """Nothing else."""
    with pytest.raises(LocalProtocolError, match="'thread' or 'invoked'"):
        pool.connect(conductor="fiber")  # type: ignore[arg-type]


def test_a_call_that_names_no_timeout_waits_as_configured(shared_media_driver: aeron.MediaDriver) -> None:
    """`[client]` has a time for attaching and one for discovery."""
    times = {"client.attach_timeout_ms": 120, "client.discover_timeout_ms": 80, "driver.control_stream_id": 34_568}
    with tp.connect(shared_media_driver.aeron_dir, config=DriverConfig.load(environ={}, overrides=times)) as client:
        calls = ((120, lambda: client.consumer(STREAM)), (120, lambda: client.producer(STREAM)), (80, client.discover))
        for wanted_ms, call in calls:
            with pytest.raises(DriverUnreachable) as caught:
                call()
            assert wanted_ms <= caught.value.waited_ns / 1e6 < 2_000


def test_with_a_media_driver_and_no_driver_it_is_unreachable(shared_media_driver: aeron.MediaDriver) -> None:
    """After the caller's own time, saying where it asked."""
    config = DriverConfig.load(environ={}, overrides={"driver.control_stream_id": 34_567})
    with tp.connect(shared_media_driver.aeron_dir, config=config) as client:
        with pytest.raises(DriverUnreachable) as caught:
            client.consumer(STREAM, timeout=0.1)
        assert caught.value.channel == config.driver.control.channel
        assert caught.value.waited_ns >= 100_000_000
        assert "is a driver running" in str(caught.value)


# --- streams


@pytest.mark.parametrize("stream", ["", "a\nb", "é", "x" * 257, 0, -1, 2**32 - 1, True, 1.0, None, b"x"])
def test_what_is_no_stream_is_refused(shared_client: Client, stream: Any) -> None:
    """A name, or an id from 1 to 2^32 - 2; nothing is asked of the driver."""
    for method in (shared_client.producer, shared_client.consumer):
        with pytest.raises(LocalProtocolError, match="stream"):
            method(stream)


def test_a_number_as_text_is_an_id(shared_client: Client) -> None:
    """As it comes from a command line."""
    with shared_client.consumer(str(STREAM)) as consumer:
        assert (consumer.stream_id, consumer.name) == (STREAM, None)


def test_a_configured_stream_needs_no_create(shared_client: Client) -> None:
    """For either role."""
    with shared_client.producer(STREAM) as producer, shared_client.consumer(STREAM) as consumer:
        assert producer.stream_id == consumer.stream_id == STREAM
        assert producer.epoch == consumer.epoch
        assert producer.max_frame_bytes == 65_536


@pytest.mark.parametrize("role", ["producer", "consumer"])
def test_an_unknown_stream_is_refused_in_the_drivers_words(shared_client: Client, role: str) -> None:
    """After the time that a producer on its way would have had."""
    with pytest.raises(AttachRefused) as caught:
        getattr(shared_client, role)(20_998, timeout=1.5)
    refusal = caught.value
    assert (refusal.code, refusal.stream, refusal.role) == ("REJECTED", 20_998, role.upper())
    assert refusal.words
    assert refusal.words in str(refusal)


@pytest.mark.parametrize("role", ["producer", "consumer"])
def test_a_request_that_can_never_be_granted_is_not_waited_for(shared_client: Client, role: str) -> None:
    """An id outside of the driver's range: refused at once, however much time there is."""
    with pytest.raises(AttachRefused) as caught:
        getattr(shared_client, role)(5, create=True, timeout=3600)
    assert caught.value.code == "INVALID_PARAMS"


def test_a_consumer_may_create_a_stream_too(shared_client: Client) -> None:
    """It is the driver's policy, and the caller's choice."""
    with shared_client.consumer(20_990, create=True) as consumer:
        assert consumer.stream_id == 20_990


@pytest.mark.parametrize("timeout", [0, -1, math.nan])
def test_a_time_that_is_none_is_refused(shared_client: Client, timeout: float) -> None:
    """Nothing is asked of the driver."""
    with pytest.raises(LocalProtocolError, match="timeout"):
        shared_client.consumer(STREAM, timeout=timeout)


@pytest.mark.parametrize(
    "options",
    [
        {"mode": "fast"},
        {"mode": "rate_limited"},
        {"mode": "rate_limited", "max_rate_hz": 0},
        {"max_rate_hz": -1},
        {"max_rate_hz": 2**32},
        {"max_rate_hz": 1.5},
        {"progress_interval_us": -1},
        {"progress_bytes_delta": 2**32 - 1},
        {"progress_major_delta_units": "3"},
        {"max_outstanding_seq_gap": -1},
        {"max_outstanding_seq_gap": 2**63},
        {"private_descriptors": Endpoint("", 5)},
        {"private_descriptors": Endpoint("aeron:ipc", -1)},
        {"private_control": Endpoint("aeron:ipc", 2**31)},
    ],
    ids=str,
)
def test_an_option_that_cannot_be_is_refused_by_name(shared_client: Client, options: dict[str, Any]) -> None:
    """With what is accepted; nothing is asked of the driver."""
    with pytest.raises(LocalProtocolError) as caught:
        shared_client.consumer(STREAM, **options)
    assert any(name in str(caught.value) for name in options)


@pytest.mark.parametrize("name", ["private_descriptors", "private_control"])
@pytest.mark.spec("WIRE-10.1.2-10", "WIRE-10.1.2-11")
def test_an_id_of_a_drivers_choosing_needs_a_driver_that_has_some(pool: tp.Local, name: str) -> None:
    """E22: without a range no driver would answer."""
    overrides = {**SMALL, "driver.descriptor_stream_id_range": [], "driver.control_stream_id_range": []}
    config = DriverConfig.load(environ={}, overrides=overrides | {"shm.base_dir": str(pool.config.shm.base_dir)})
    with tp.connect(pool.aeron_dir, config=config) as client, pytest.raises(LocalProtocolError, match=name):
        client.consumer(STREAM, **{name: Endpoint("aeron:ipc", 0)})  # type: ignore[arg-type]


# --- names


def test_a_stream_is_found_by_its_name(client: Client, shared_client: Client) -> None:
    """In this client and in another; its id is the name's own, so that it is the same after a restart."""
    name = new_name()
    with client.producer(name, create=True) as producer:
        assert producer.name == name
        assert producer.stream_id == preferred_id(name, client.config.driver.stream_id_range)
        for other in (client, shared_client):
            with other.consumer(name) as consumer:
                assert (consumer.stream_id, consumer.name) == (producer.stream_id, name)
                assert consumer.epoch == producer.epoch
        first = producer.stream_id
    with client.producer(name, create=True) as producer:
        assert producer.stream_id == first


def test_two_names_with_one_place_are_two_streams(client: Client, shared_client: Client) -> None:
    """The second goes to the next id that is free, and each is found by its name."""
    ids = client.config.driver.stream_id_range
    places: dict[int, str] = {}
    for number in itertools.count():
        name = f"clash/{number}"
        other = places.setdefault(preferred_id(name, ids), name)
        if other != name:
            break
    with client.producer(other, create=True) as one, client.producer(name, create=True, timeout=20) as two:
        assert one.stream_id != two.stream_id
        assert (one.name, two.name) == (other, name)
        with shared_client.consumer(name) as consumer:
            assert consumer.stream_id == two.stream_id


def test_an_error_names_the_stream_that_no_producer_announces(shared_client: Client) -> None:
    """With the name, and where to look."""
    with pytest.raises(TensorPoolError, match="no producer announces the name 'nobody/here'"):
        shared_client.consumer("nobody/here", timeout=0.2)


def test_a_name_that_two_streams_have_is_ambiguous(shared_client: Client, outsider: Outsider) -> None:
    """The error names both ids; either of them can be given."""
    name, is_over = new_name(), threading.Event()

    def announce() -> None:
        while not is_over.wait(0.05):
            for stream_id in (20_980, 20_981):
                outsider.say(
                    "metadata",
                    DataSourceAnnounce(stream_id=stream_id, producer_id=1, epoch=1, meta_version=0, name=name),
                )

    thread = threading.Thread(target=announce)
    with shared_client.consumer(STREAM):  # a consumer listens
        thread.start()
        with pytest.raises(TensorPoolError, match=r"20980, 20981|20981, 20980"):
            shared_client.consumer(name, timeout=2)
        is_over.set()
        thread.join()


def test_a_consumer_waits_for_a_producer_of_that_name(client: Client, shared_client: Client) -> None:
    """A consumer waits up to its timeout until a producer announces the name."""
    name = new_name()
    found: list[Consumer] = []
    waiter = threading.Thread(target=lambda: found.append(shared_client.consumer(name, timeout=30)))
    waiter.start()
    with client.producer(name, create=True) as producer:
        waiter.join(timeout=30)
        (consumer,) = found
        assert consumer.stream_id == producer.stream_id
        consumer.close()


# --- one producer


def test_a_stream_has_one_producer(client: Client, shared_client: Client) -> None:
    """The second is refused with who has it; when that one goes, it is granted."""
    name = new_name()
    first = client.producer(name, create=True)
    with pytest.raises(AttachRefused) as caught:
        shared_client.producer(first.stream_id, timeout=1.5)
    assert caught.value.code == "REJECTED"
    assert str(first.producer_id) in caught.value.words
    closing = threading.Thread(target=first.close)
    granted: list[Producer] = []
    asking = threading.Thread(target=lambda: granted.append(shared_client.producer(first.stream_id, timeout=30)))
    asking.start()
    closing.start()
    asking.join(timeout=30)
    (second,) = granted
    assert second.is_active
    second.close()


def test_a_refused_session_leaves_nothing_behind(client: Client) -> None:
    """Neither a lease nor a session that goes on asking."""
    for _ in range(3):
        with pytest.raises((AttachRefused, DriverUnreachable)):  # too little time even for a refusal, perhaps
            client.consumer(20_997, timeout=0.05)
    wait_until(lambda: not client._conductor._sessions, "the sessions are forgotten")


# --- conductors


def test_an_invoked_client_has_no_thread(pool: tp.Local) -> None:
    """Everything happens inside its own calls."""
    before = {thread for thread in threading.enumerate() if thread.name == "tensorpool-client"}
    with pool.connect(conductor="invoked") as client:
        producer = client.producer(new_name(), create=True)
        consumer = client.consumer(producer.stream_id)
        assert {thread for thread in threading.enumerate() if thread.name == "tensorpool-client"} == before
        assert producer.wait_for_consumers(1, 20)
        assert Pair(producer, consumer).publish().seq == 0
        assert isinstance(client.invoke(), int)
        producer.set_metadata({"a": 1})
        wait_until(lambda: client.invoke() is not None and consumer.metadata(), "the metadata are known")
        producer.close()
        consumer.close()
        assert (producer.state, consumer.state) == (State.CLOSED, State.CLOSED)


def test_an_invoked_consumer_that_always_has_frames_keeps_its_lease(shm_dir: Path) -> None:
    """Its polls turn the conductor, also when none of them has to wait."""
    overrides = SMALL | {"policies.lease_keepalive_interval_ms": 100}
    with tp.local(overrides=overrides) as pool, pool.connect() as client:
        producer = client.producer(new_name(), create=True)
        with pool.connect(conductor="invoked") as invoked:
            seen: list[StateChange] = []
            consumer = invoked.consumer(producer.stream_id, on_state=seen.append)
            lease = consumer.lease_id
            end_ns = time.monotonic_ns() + 2 * pool.config.lease_duration_ns
            while time.monotonic_ns() < end_ns:
                producer.publish(FRAME)
                producer.publish(FRAME)
                consumer.poll()
            assert consumer.lease_id == lease
            assert [change.state for change in seen] == [State.ACTIVE]


def test_a_client_with_a_thread_is_not_invoked(shared_client: Client) -> None:
    """One or the other."""
    with pytest.raises(LocalProtocolError, match="invoked"):
        shared_client.invoke()


# --- closing


@pytest.mark.parametrize("how", ["sessions", "client"])
def test_what_is_closed_is_given_back_to_the_driver(patient: tp.Local, how: str) -> None:
    """At once, not by expiry."""
    client = patient.connect()
    pair = paired(client)
    stream_id = pair.producer.stream_id
    assert [leases(patient, stream_id, role) for role in Role] == [1, 1]
    if how == "sessions":
        pair.consumer.close()
        pair.producer.close()
    else:
        client.close()
    wait_until(lambda: [leases(patient, stream_id, role) for role in Role] == [0, 0], "the leases are given back")
    client.close()


def test_who_is_interrupted_while_attaching_leaves_nothing_behind(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C included."""
    wait_for = client._wait_for

    def interrupted(session: object, *arguments: object) -> bool:
        monkeypatch.setattr(client, "_wait_for", wait_for)
        raise KeyboardInterrupt

    monkeypatch.setattr(client, "_wait_for", interrupted)
    with pytest.raises(KeyboardInterrupt):
        client.consumer(STREAM)
    wait_until(lambda: not client._conductor._sessions, "the session is forgotten")


def test_a_closed_client_gives_everything_back(pool: tp.Local, shared_client: Client) -> None:
    """Leases too: another may produce at once. Closing again is nothing."""
    client = pool.connect()
    pair = paired(client)
    stream_id = pair.producer.stream_id
    client.close()
    client.close()
    assert client.is_closed
    assert (pair.producer.state, pair.consumer.state) == (State.CLOSED, State.CLOSED)
    for make in (client.producer, client.consumer):
        with pytest.raises(Closed):
            make(stream_id)
    with shared_client.producer(stream_id, timeout=20) as other:
        assert other.is_active


def test_a_frame_outlives_its_client(pool: tp.Local) -> None:
    """Views keep their memory."""
    client = pool.connect()
    frame = paired(client).publish()
    view = frame.array
    client.close()
    np.testing.assert_array_equal(view, FRAME)
    np.testing.assert_array_equal(frame.copy(), FRAME)


FORKED = """
import os, signal, sys, warnings
import msgspec
import numpy as np
import tensorpool as tp

warnings.simplefilter("ignore")  # that a process with threads is forked

overrides = {
    "driver.stream_id_range": [20000, 20099],
    "profiles.default": {"header_nslots": 8, "payload_pools": [{"pool_id": 1, "stride_bytes": 256}]},
}

def outcome(act):
    try:
        return type(act()).__name__
    except Exception as error:
        return type(error).__name__

with tp.local(overrides=overrides) as pool, pool.connect() as client:
    producer = client.producer("a", create=True)
    consumer = client.consumer("a")
    producer.wait_for_consumers(1, 20)
    producer.publish(np.arange(4))
    frame = consumer.poll(20)
    view = frame.array
    pid = os.fork()
    if pid == 0:
        # a view is plain memory; everything that needs the parent's threads is closed
        assert list(view) == [0, 1, 2, 3] and frame.is_intact()
        signal.alarm(20)  # ends a child that hangs
        results = [
            outcome(lambda: producer.publish(np.arange(4) + 10)),
            outcome(lambda: producer.claim((4,))),
            outcome(lambda: consumer.poll(0.05)),
            outcome(lambda: consumer.latest()),
            outcome(lambda: list(consumer)),
            outcome(lambda: client.consumer("a", timeout=0.2)),
        ]
        consumer.close()
        producer.close()
        client.close()
        print("child", *results, flush=True)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    # the child touched neither the ring nor the leases
    assert producer.publish(np.arange(4) + 1) == 1
    frame = consumer.poll(20)
    assert frame.seq == 1 and list(frame.array) == [1, 2, 3, 4]
    assert consumer.stats.lost == 0
    print("parent", flush=True)
"""


def test_a_forked_child_uses_nothing_of_its_parents_but_views() -> None:
    """What was inherited is closed there and says so, and ends without harm to the parent."""
    code, output = run_script(FORKED)
    assert code == 0, output
    child, parent = [line for line in output.splitlines() if line.startswith(("child", "parent"))]  # not what is logged
    assert child.split() == ["child", *["Closed"] * 6]
    assert parent == "parent"


def test_memory_that_must_not_be_mapped_is_logged_once(
    pool: tp.Local, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The consumer tries again and again; its log says why once."""
    shm = msgspec.structs.replace(pool.config.shm, base_dir=str(tmp_path), allowed_base_dirs=(str(tmp_path),))
    config = msgspec.structs.replace(pool.config, shm=shm)
    with pool.connect() as owner, owner.producer("out of bounds", create=True):
        with tp.connect(pool.aeron_dir, config=config) as client, pytest.raises(RegionRejected, match="is not inside"):
            client.consumer("out of bounds", timeout=3)
        assert sum("regions_rejected" in record.message for record in caplog.records) == 1


# --- locked memory

LOCKED = {
    "policies.mlock_shm": True,
    "profiles.default": {"header_nslots": 4, "payload_pools": [{"pool_id": 1, "stride_bytes": 4096}]},
}


def locked_mappings(of: str) -> set[str]:
    """The permissions of this process's locked mappings of files below a directory."""
    permissions, found = "", set()
    with open("/proc/self/smaps", encoding="utf-8") as smaps:
        for line in smaps:
            if "-" in line.split()[0]:
                permissions = line.split()[1] if of in line else ""
            elif line.startswith("VmFlags:") and permissions and " lo" in line:
                found.add(permissions)
    return found


@pytest.mark.spec("DRV-17-31")
@pytest.mark.parametrize("is_locked", [False, True])
def test_clients_lock_what_they_map_where_the_policy_says_so(is_locked: bool) -> None:
    """mlock is per process: a consumer's read-only mappings are locked too, and only with policies.mlock_shm."""
    with tp.local(overrides=LOCKED | {"policies.mlock_shm": is_locked}) as pool, pool.connect() as client:
        producer = client.producer("camera", create=True)
        with client.consumer(producer.stream_id, timeout=20):
            assert locked_mappings(pool.config.shm.base_dir) == ({"rw-s", "r--s"} if is_locked else set())


def test_a_client_that_may_not_lock_is_warned_and_works(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its limit is its own: frames are worth more than locked pages."""

    def refuse(self: MappedRing) -> None:
        raise OSError(errno.ENOMEM, "mlock")

    monkeypatch.setattr(MappedRing, "lock", refuse)
    with tp.local(overrides=LOCKED) as pool, pool.connect() as client:
        producer = client.producer("camera", create=True)
        assert producer.publish(np.zeros(3, np.uint8)) == 0
    assert "mlock_failed" in caplog.text
    assert "ulimit -l" in caplog.text
