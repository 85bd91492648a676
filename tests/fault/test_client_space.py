# SPDX-License-Identifier: Apache-2.0
"""A full /dev/shm as clients see it: a refusal with the bill, no signal, and success once there is space."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import tensorpool as tp
from tensorpool import aeron
from tensorpool.aeron.media_driver import ALLOCATE_FROM_BYTES
from tensorpool.client import State
from tensorpool.errors import AttachRefused, TransportError
from tests.shm.by_hand import mounted
from tests.support.driver_process import Deployment
from tests.support.processes import Process, wait_until
from tests.support.processes import media_driver as media_process

MIB = 1 << 20
SMALL, LARGE = 44_000, 44_001


@pytest.fixture
def mount(shm_dir: Path) -> Iterator[Path]:
    with mounted(shm_dir / "mount", "tmpfs", "size=64m") as mount:
        yield mount


@pytest.fixture
def client(shared_media_driver: aeron.MediaDriver, shm_dir: Path, mount: Path) -> Iterator[tp.Client]:
    """Of a driver with 64 MiB, a stream that needs 16 and one that needs 256."""
    deployment = Deployment(
        shm_dir,
        shared_media_driver.aeron_dir,
        streams=[SMALL, LARGE],
        driver={"descriptor_stream_id": 44_100, "qos_stream_id": 44_200, "metadata_stream_id": 44_300},
        shm={"base_dir": str(mount / "shm")},
        policies={"epoch_gc_keep": 1, "announce_period_ms": 1000, "lease_keepalive_interval_ms": 1000},
        profiles={
            name: {"header_nslots": nslots, "payload_pools": [{"pool_id": 1, "stride_bytes": MIB}]}
            for name, nslots in {"of16": 16, "of256": 256}.items()
        },
    )
    deployment.tables["streams"][f"s{SMALL}"]["profile"] = "of16"
    deployment.tables["streams"][f"s{LARGE}"]["profile"] = "of256"
    with deployment.start() as process:
        assert process.read_line()
        with tp.connect(shared_media_driver.aeron_dir, config=deployment.config_path) as client:
            yield client
        gc.collect()  # the traceback of a refusal is a cycle, and has views
        assert process.terminate()[0] == 0
    assert deployment.leftovers() == []


def free_bytes(mount: Path) -> int:
    found = os.statvfs(mount)
    return found.f_bavail * found.f_frsize


def fill(mount: Path) -> Path:
    """Another program takes what is free."""
    hog = mount / "hog"
    with hog.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(1 << 16)):  # to the last byte, whatever the driver takes meanwhile
            pass
    return hog


def test_a_producer_that_does_not_fit_is_refused_with_the_sizes(client: tp.Client, mount: Path) -> None:
    """AttachRefused says how much is needed, how much there is, where, and what to do; others are served."""
    with pytest.raises(AttachRefused) as refused:
        client.producer(LARGE, timeout=4)
    assert refused.value.code == "INTERNAL_ERROR"
    assert refused.value.stream == LARGE
    words = refused.value.words
    for part in (f"needs {256 * MIB + 64 + 4032 + 65536 + 4096} bytes", f"{mount} has ", "remount,size="):
        assert part in words, words
    with client.producer(SMALL) as producer, client.consumer(SMALL) as consumer:
        assert producer.wait_for_consumers(1, timeout=60)
        assert producer.publish(np.ones(MIB, np.uint8)) == 0
        frame = consumer.poll(timeout=60)
        assert frame is not None
        assert frame.array.sum() == MIB


def test_a_producer_whose_memory_was_taken_meanwhile_waits_for_it(client: tp.Client, mount: Path) -> None:
    """Refused while another program has the space; the same call succeeds once that is gone, within its timeout."""
    hog = fill(mount)
    with pytest.raises(AttachRefused, match="needs"):
        client.producer(SMALL, timeout=4)
    hog.unlink()
    with client.producer(SMALL, timeout=60) as producer, client.consumer(SMALL) as consumer:
        wait_until(lambda: consumer.state is State.ACTIVE and consumer.epoch == producer.epoch, "mapped")
        assert producer.publish(np.ones(10, np.uint8)) == 0


def test_a_client_without_room_for_its_logs_names_the_mount(shm_dir: Path, mount: Path) -> None:
    """The error says that space is the cause, where, and what to do; the same call succeeds once there is room."""
    with aeron.MediaDriver(str(mount / "aeron")) as media_driver:
        deployment = Deployment(shm_dir, media_driver.aeron_dir, streams=[SMALL])
        with deployment.start() as process:
            assert process.read_line()
            with tp.connect(media_driver.aeron_dir, config=deployment.config_path) as client:
                hog = mount / "hog"
                with hog.open(
                    "wb"
                ) as file:  # a log of descriptors takes 12 MiB; those that are there have room to grow
                    os.posix_fallocate(file.fileno(), 0, free_bytes(mount) - 11 * MIB)
                words = rf"^{mount}, where Aeron's files are, has \d+ MiB free of 64 MiB: free some, or enlarge it"
                with pytest.raises(TransportError, match=words):
                    client.producer(SMALL, timeout=4)
                hog.unlink()
                with client.producer(SMALL, timeout=60) as producer:
                    assert producer.state is State.ACTIVE
            assert process.terminate()[0] == 0


PUBLISHING = """
import sys
import numpy as np
import tensorpool as tp
config = tp.DriverConfig.load(sys.argv[2], environ={})
with (
    tp.connect(sys.argv[1], config=config) as client,
    client.producer(int(sys.argv[3]), timeout=60) as producer,
    client.consumer(int(sys.argv[3]), timeout=60) as consumer,
):
    assert producer.wait_for_consumers(timeout=60)
    print("ready", flush=True)
    sys.stdin.readline()
    array = np.zeros(16, np.uint8)
    for number in range(300_000):  # the log of descriptors goes round
        producer.publish(array)
        if number % 100 == 0:
            while consumer.poll() is not None:
                pass
    print("published", flush=True)
"""


def test_a_program_that_fills_the_mount_kills_no_client(shm_dir: Path) -> None:
    """Logs that are there have their memory, and go on; a further client gets an error that names the place."""
    with (
        mounted(shm_dir / "mount", "tmpfs", f"size={ALLOCATE_FROM_BYTES}") as mount,
        media_process(str(mount / "aeron")) as media,
    ):
        aeron_dir = str(mount / "aeron")
        deployment = Deployment(shm_dir, aeron_dir, streams=[SMALL])
        with deployment.start() as driver:
            assert driver.read_line()
            config = str(deployment.config_path)
            with Process("-c", PUBLISHING, aeron_dir, config, str(SMALL)) as process:
                assert process.read_line() == "ready"
                hog = mount / "hog"
                with hog.open("wb") as file:
                    os.posix_fallocate(file.fileno(), 0, free_bytes(mount))
                process.write_line("")
                assert process.finish() == (0, "published\n")
            with pytest.raises(TransportError, match=f"insufficient usable storage .* in {aeron_dir}"):
                tp.connect(aeron_dir, config=config)
            hog.unlink()
            assert driver.terminate()[0] == 0
        assert media.is_running


def test_logs_on_a_small_mount_take_what_is_written(shm_dir: Path) -> None:
    """Such as in a container: a driver alone would take all that Docker gives."""
    size = f"size={ALLOCATE_FROM_BYTES - MIB}"
    with mounted(shm_dir / "mount", "tmpfs", size) as mount, aeron.MediaDriver(str(mount / "aeron")) as driver:
        client = aeron.connect(driver.aeron_dir)
        before = free_bytes(mount)
        client.add_publication("aeron:ipc?term-length=16m", 1)
        assert before - free_bytes(mount) < MIB
        client.close()
