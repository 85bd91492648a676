# SPDX-License-Identifier: Apache-2.0
"""Announces, epochs and the files behind them. Driver Model §3, §6, §8, §9; Wire §7.1, §10.1.1, §15.14, §15.21a.

Files are read with `struct` at the offsets of the schema; nothing of the driver's own code looks at them.
"""

from __future__ import annotations

import os
import pwd
import stat
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tensorpool import aeron
from tensorpool.wire.control import ClockDomain, ShmPoolAnnounce
from tensorpool.wire.driver import ResponseCode, Role, ShmAttachResponse, ShmDetachResponse, ShmLeaseRevoked
from tests.support.driver_client import DriverClient
from tests.support.driver_process import NSLOTS, POOLS, Deployment, DriverProcess, path_of
from tests.support.listener import ReceivedMessage
from tests.support.processes import private_directory
from tests.support.region_bytes import MAGIC, superblock

STREAMS = range(12_000, 12_016)
IDLE = 12_000  # a producer never attaches to it
PERIOD_NS = 100_000_000
GC_MIN_AGE_NS = 3 * PERIOD_NS

_stream_ids = iter(STREAMS[1:])


@pytest.fixture(scope="module")
def running(shared_media_driver: aeron.MediaDriver) -> Iterator[tuple[Deployment, DriverProcess]]:
    """A driver whose environment lies about the user."""
    with private_directory() as folder:
        deployment = Deployment(
            folder,
            shared_media_driver.aeron_dir,
            streams=STREAMS,
            policies={"lease_expiry_grace_intervals": 100},
        )
        with deployment.start(USER="../../etc", LOGNAME="../../etc") as process, DriverClient(deployment) as client:
            client.meet(process)
            client.close()
            yield deployment, process
            assert not process.has_ended, process.finish()


@pytest.fixture
def deployment(running: tuple[Deployment, DriverProcess]) -> Deployment:
    return running[0]


@pytest.fixture
def process(running: tuple[Deployment, DriverProcess]) -> DriverProcess:
    return running[1]


@pytest.fixture
def stream_id() -> int:
    """A stream of the test's own."""
    return next(_stream_ids)


def region_paths(announce: ShmPoolAnnounce) -> dict[int, Path]:
    """Pool id to file; 0 is the header ring."""
    return {0: path_of(announce.header_region_uri)} | {
        pool.pool_id: path_of(pool.region_uri) for pool in announce.payload_pools
    }


def check_files(announce: ShmPoolAnnounce, pid: int) -> None:
    """Every announced file is whole, and its superblock says what the announce says."""
    for pool_id, path in region_paths(announce).items():
        stride = POOLS.get(pool_id, 0)
        found = superblock(path)
        assert found["start_timestamp_ns"] <= found["activity_timestamp_ns"] <= time.monotonic_ns()
        assert found | {"start_timestamp_ns": 0, "activity_timestamp_ns": 0} == {
            "magic": MAGIC,
            "layout_version": announce.layout_version,
            "epoch": announce.epoch,
            "stream_id": announce.stream_id,
            "region_type": 2 if pool_id else 1,
            "pool_id": pool_id,
            "nslots": NSLOTS,
            "slot_bytes": stride or 256,
            "stride_bytes": stride,
            "pid": pid,
            "start_timestamp_ns": 0,
            "activity_timestamp_ns": 0,
        }
        assert path.stat().st_size == 64 + NSLOTS * (stride or 256)


# --- announces


@pytest.mark.spec("WIRE-10.1.1-03", "WIRE-10.1.1-04", "WIRE-10.1.1-07", "DRV-8-04")
def test_an_announce_carries_the_profile_in_the_schemas_bytes(client: DriverClient) -> None:
    """Every field of a stream without producer, group and texts in order, as `struct` packs them."""
    received = client.next_announce(IDLE)
    announce = received.message
    expected = struct.pack(
        "<4H I I Q Q B I I H",
        *(35, 1, 900, 1),
        *(IDLE, 0, announce.epoch, announce.announce_timestamp_ns, 1, 1, NSLOTS, 256),
    )
    expected += struct.pack("<2H", 10, len(POOLS))
    for (pool_id, stride), pool in zip(POOLS.items(), announce.payload_pools, strict=True):
        uri = pool.region_uri.encode()
        expected += struct.pack("<H I I I", pool_id, NSLOTS, stride, len(uri)) + uri
    uri = announce.header_region_uri.encode()
    assert received.data == expected + struct.pack("<I", len(uri)) + uri
    assert announce.announce_clock_domain is ClockDomain.MONOTONIC


@pytest.mark.spec("WIRE-10.1.1-01", "WIRE-10.1.1-06", "DRV-8-01")
def test_every_stream_is_announced_again_and_again_with_fresh_times(client: DriverClient) -> None:
    """No stream is left out; stamps are of the monotonic clock, grow, and never run ahead of their arrival."""
    begin_ns = time.monotonic_ns()
    client.forget()

    def announces(stream_id: int) -> list[ReceivedMessage[ShmPoolAnnounce]]:
        return client.received(ShmPoolAnnounce, stream_id=stream_id)

    client.wait_until(lambda: all(len(announces(id)) >= 4 for id in STREAMS), "four announces of every stream")
    for id in STREAMS:
        stamps = [received.message.announce_timestamp_ns for received in announces(id)]
        assert stamps == sorted(set(stamps))
        assert all(received.message.announce_timestamp_ns <= received.received_ns for received in announces(id))
        assert stamps[0] > begin_ns
        # Not flooded either; a change may add an announce, and late ones may catch up.
        assert stamps[3] - stamps[0] >= PERIOD_NS


@pytest.mark.spec("DRV-8-03", "DRV-8-04", "DRV-6-01", "DRV-6-04", "DRV-6-07", "WIRE-15.2-01")
def test_the_announced_producer_and_epoch_follow_the_leases(client: DriverClient, stream_id: int) -> None:
    """Twice a producer comes and goes among consumers: producerId is its client or 0, and the epoch only grows."""
    epochs = [client.next_announce(stream_id, producer_id=0).message.epoch]
    for _ in range(2):
        consumer = client.attach(stream_id)
        assert consumer.epoch == epochs[-1]
        producer = client.attach(stream_id, Role.PRODUCER)
        announce = client.next_announce(stream_id).message
        assert (announce.producer_id, announce.epoch) == (producer.client_id, producer.epoch)
        assert client.detach(consumer).message.code is ResponseCode.OK
        assert client.next_announce(stream_id).message.epoch == producer.epoch
        client.detach(producer)
        after = client.announce_after(stream_id, announce.epoch)
        assert after.message.producer_id == 0
        epochs += [producer.epoch, after.message.epoch]
    assert epochs == sorted(set(epochs))


# --- files


@pytest.mark.spec("DRV-3-02", "DRV-3-04", "WIRE-7.1-01", "WIRE-7.1-02", "WIRE-7.1-09", "WIRE-7.1-10", "WIRE-7.1-11")
@pytest.mark.spec("WIRE-15.5-01")
def test_files_are_valid_before_any_client_has_attached(client: DriverClient, process: DriverProcess) -> None:
    """The superblock of every region holds what the announce says, the driver's pid, and nothing else."""
    check_files(client.next_announce(IDLE).message, process.pid)


@pytest.mark.spec("WIRE-15.14-04", "WIRE-15.21a.3-05")
def test_no_epoch_is_announced_before_its_files_are_whole(
    client: DriverClient, process: DriverProcess, stream_id: int
) -> None:
    """At each new epoch of a stream the files are complete when the first announce or grant arrives."""
    last = client.next_announce(stream_id).message
    for _ in range(5):
        lease = client.attach(stream_id, Role.PRODUCER)
        assert all(
            superblock(path_of(pool.region_uri))["epoch"] == lease.epoch for pool in lease.response.payload_pools
        )
        attached = client.wait_for(ShmPoolAnnounce, stream_id=stream_id, epoch=lease.epoch).message
        check_files(attached, process.pid)
        client.detach(lease)
        last = client.announce_after(stream_id, attached.epoch).message
        check_files(last, process.pid)


@pytest.mark.spec("DRV-3-05", "DRV-3-06", "WIRE-7.1-04", "WIRE-7.1-05")
def test_only_the_sign_of_life_changes_and_it_stays_fresh(client: DriverClient) -> None:
    """Without a producer every region's activity is refreshed with the announces; the other 56 bytes never change."""
    paths = region_paths(client.next_announce(IDLE).message)
    before = {pool_id: path.read_bytes()[:64] for pool_id, path in paths.items()}

    def activity(pool_id: int) -> int:
        return superblock(paths[pool_id])["activity_timestamp_ns"]

    for _ in range(3):
        now_ns = time.monotonic_ns()
        client.wait_until(lambda ns=now_ns: all(activity(id) > ns for id in paths), "all are refreshed")
    for pool_id, path in paths.items():
        assert path.read_bytes()[:56] == before[pool_id][:56]
        assert activity(pool_id) <= time.monotonic_ns()


@pytest.mark.spec("WIRE-15.21a.3-01", "WIRE-15.21a.3-02", "WIRE-15.21a.3-03", "WIRE-15.21a.3-04", "WIRE-15.21a.3-05")
@pytest.mark.spec("WIRE-15.21a.3-06", "WIRE-15.21a.4-01", "DRV-3-01", "DRV-9-01")
def test_files_lie_where_the_canonical_layout_has_them(
    client: DriverClient, deployment: Deployment, stream_id: int
) -> None:
    """base/tensorpool-user/namespace/stream/epoch, by the effective user whatever the environment says, every time."""
    user = pwd.getpwuid(os.geteuid()).pw_name
    for role in Role:
        lease = client.attach(stream_id, role)
        announce = client.wait_for(ShmPoolAnnounce, stream_id=stream_id, epoch=lease.epoch).message
        folder = deployment.base_dir / f"tensorpool-{user}" / "lab" / str(stream_id) / str(announce.epoch)
        names = {pool_id: path.name for pool_id, path in region_paths(announce).items()}
        assert {path.parent for path in region_paths(announce).values()} == {folder}
        assert names == {0: "header.ring"} | {pool_id: f"{pool_id}.pool" for pool_id in POOLS}
        assert {path.name for path in folder.iterdir()} == set(names.values())
        client.detach(lease)


@pytest.mark.spec("DRV-17-21")
def test_files_are_regular_closed_to_others_and_backed_for_a_producer(
    client: DriverClient, deployment: Deployment, stream_id: int
) -> None:
    """Mode 660 in setgid directories 750 by default; a producer's epoch has its memory, an idle one takes none."""
    idle = client.next_announce(stream_id).message
    lease = client.attach(stream_id, Role.PRODUCER)
    announce = client.wait_for(ShmPoolAnnounce, stream_id=stream_id, epoch=lease.epoch).message
    for path in region_paths(announce).values():
        status = path.lstat()
        assert stat.S_ISREG(status.st_mode)
        assert stat.S_IMODE(status.st_mode) == 0o660
        assert status.st_nlink == 1
        assert status.st_blocks * 512 >= status.st_size
        for folder in path.relative_to(deployment.base_dir).parents[:-1]:
            assert stat.S_IMODE((deployment.base_dir / folder).lstat().st_mode) == 0o2750
    sparse = region_paths(idle)[7].stat()
    assert sparse.st_blocks * 512 < sparse.st_size
    client.detach(lease)


@pytest.mark.spec("DRV-6-06")
def test_every_epoch_has_files_of_its_own(client: DriverClient, deployment: Deployment, stream_id: int) -> None:
    """Nothing is reused: who still has the old files mapped sees the old epoch, whatever happens in the new one."""
    lease = client.attach(stream_id, Role.PRODUCER)
    path = path_of(lease.response.header_region_uri)
    with path.open("rb") as old:
        client.detach(lease)
        again = client.attach(stream_id, Role.PRODUCER)
        assert again.epoch > lease.epoch
        new_path = path_of(again.response.header_region_uri)
        assert new_path != path
        assert new_path.parent.name == str(again.epoch)
        assert os.fstat(old.fileno()).st_ino != new_path.stat().st_ino
        assert struct.unpack_from("<Q", old.read(64), 12) == (lease.epoch,)
    client.detach(again)


@pytest.mark.spec("DRV-17-33", "DRV-17-34", "DRV-17-35")
def test_old_epochs_are_removed_but_for_the_newest_two(
    client: DriverClient, deployment: Deployment, stream_id: int
) -> None:
    """What is beyond the two newest goes when it is old enough, and not before; the current one stays."""
    retired: dict[int, int] = {}
    for _ in range(3):
        before = client.next_announce(stream_id).message.epoch
        retired[before] = time.monotonic_ns()
        lease = client.attach(stream_id, Role.PRODUCER)
        retired[lease.epoch] = time.monotonic_ns()
        client.detach(lease)
        client.announce_after(stream_id, lease.epoch)
    present = set(deployment.epochs(stream_id))
    for epoch, since_ns in retired.items():
        if epoch not in present:
            assert time.monotonic_ns() - since_ns >= GC_MIN_AGE_NS, "removed too young"
    client.wait_until(lambda: len(deployment.epochs(stream_id)) <= 2, "old epochs are removed")
    current = client.next_announce(stream_id).message
    client.next_announce(stream_id)
    client.next_announce(stream_id)
    assert deployment.epochs(stream_id)[-1] == current.epoch
    assert len(deployment.epochs(stream_id)) == 2
    assert all(path.exists() for path in region_paths(current).values())


# --- another clock, another stream


@pytest.mark.spec("WIRE-10.1.1-06", "WIRE-10.1.1-07", "DRV-4.5-01", "DRV-15-01", "DRV-17-21")
def test_announces_may_have_the_wall_clock_and_a_stream_of_their_own(
    client: DriverClient, deployment: Deployment, shm_dir: Path
) -> None:
    """As configured: REALTIME_SYNCED stamps, announces apart from leases, mode 600; in a namespace beside another's."""
    neighbour = client.next_announce(IDLE).message
    other = Deployment(
        shm_dir,
        deployment.aeron_dir,
        streams=[IDLE],
        driver={"announce_clock_domain": "REALTIME_SYNCED", "announce_stream_id": 39_999},
        shm={"base_dir": str(deployment.base_dir), "namespace": "other", "permissions_mode": "600"},
        policies={"lease_expiry_grace_intervals": 100},
    )
    with other.start() as process, DriverClient(other) as listener:
        listener.meet(process)
        begin_ns = time.time_ns()
        listener.next_announce(IDLE)
        announce = listener.next_announce(IDLE).message
        lease = listener.attach(IDLE, Role.PRODUCER)
        listener.detach(lease)
        revoked = listener.wait_for(ShmLeaseRevoked, lease_id=lease.lease_id).message
        bumped = listener.announce_after(IDLE, lease.epoch).message
        stamps = [
            announce.announce_timestamp_ns,
            (lease.response.lease_expiry_timestamp_ns or 0) - other.lease_ns,
            revoked.timestamp_ns,
            superblock(path_of(bumped.header_region_uri))["start_timestamp_ns"],
            superblock(path_of(bumped.header_region_uri))["activity_timestamp_ns"],
        ]
        assert announce.announce_clock_domain is ClockDomain.REALTIME_SYNCED
        assert all(begin_ns - PERIOD_NS <= stamp <= time.time_ns() for stamp in stamps), stamps
        control = other.control[1]
        assert {type(received.message): received.stream_id for received in listener.from_driver()} == {
            ShmPoolAnnounce: 39_999,
            ShmAttachResponse: control,
            ShmDetachResponse: control,
            ShmLeaseRevoked: control,
        }
        path = path_of(bumped.header_region_uri)
        assert path.parts[-4] == "other"
        assert stat.S_IMODE(path.lstat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.lstat().st_mode) == 0o700
        assert process.terminate()[0] == 0
    assert client.next_announce(IDLE).message.epoch == neighbour.epoch
    assert all(path.exists() for path in region_paths(neighbour).values())
