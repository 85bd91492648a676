# SPDX-License-Identifier: Apache-2.0
"""`tensorpool demo`: a synthetic camera and two readers in processes of their own, and a summary that checks itself.

Everything is real and embedded: a media driver, a ring in shared memory, announces and descriptors over Aeron. One
reader keeps up, the other is slow on purpose; every frame must be accounted for in both.
"""

from __future__ import annotations

import multiprocessing as mp
import shutil
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Final

import click
import msgspec
import numpy as np

from tensorpool import aeron, shm
from tensorpool._core import RingReader, SlotFrame
from tensorpool.clock import SystemClock
from tensorpool.wire import decode
from tensorpool.wire.control import ClockDomain, PayloadPool, ShmPoolAnnounce

CONTROL: Final = ("aeron:ipc?term-length=64k", 1000)
DESCRIPTORS: Final = ("aeron:ipc?term-length=1m", 1100)
STREAM_ID: Final = 10_000
NSLOTS: Final = 16
ANNOUNCE_EVERY_S: Final = 0.1


class Tally(msgspec.Struct):
    """What became of the frames that the camera published."""

    name: str
    received: int = 0
    drops_gap: int = 0
    drops_late: int = 0
    wrong: int = 0
    next_seq: int = 0

    def finish(self, published: int) -> None:
        """Count what was published after the last frame that came."""
        self.drops_gap += published - self.next_seq

    def adds_up(self, published: int) -> bool:
        """Whether every frame is accounted for and none was wrong."""
        return self.wrong == 0 and self.received + self.drops_gap + self.drops_late == published


@click.command(name="demo")
@click.option("--seconds", default=5.0, show_default=True, type=click.FloatRange(min=0.5), help="How long to run.")
@click.option("--rate", default=60.0, show_default=True, type=click.FloatRange(min=1), help="Frames per second.")
@click.option("--shape", default="720,1280,3", show_default=True, help="Of a frame of bytes: up to 8 extents.")
@click.option("--keep", is_flag=True, help="Leave the files in place and print where they are.")
def command(seconds: float, rate: float, shape: str, keep: bool) -> None:
    """A camera, two readers, one of them slow, and a summary that checks itself."""
    extents = _parsed(shape)
    folder = Path(tempfile.mkdtemp(prefix="tensorpool-demo-", dir="/dev/shm"))
    try:
        correct = _run(folder, seconds, rate, extents)
        if keep:
            click.echo(f"kept: {folder}")
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)
    sys.exit(0 if correct else 1)


def _parsed(shape: str) -> tuple[int, ...]:
    parts = shape.split(",")
    if not all(part.isdecimal() and int(part) > 0 for part in parts) or not 1 <= len(parts) <= 8:
        raise click.BadParameter(f"{shape!r}: give 1 to 8 positive extents, such as 720,1280,3", param_hint="--shape")
    return tuple(int(part) for part in parts)


def _run(folder: Path, seconds: float, rate: float, shape: tuple[int, ...]) -> bool:
    pixels = np.zeros(shape, np.uint8)
    stride = max(64, 1 << (pixels.nbytes - 1).bit_length())
    spec = shm.RingSpec(NSLOTS, (shm.PoolSpec(1, stride),))
    clock = SystemClock()
    context = mp.get_context("spawn")
    readers: list[tuple[SpawnProcess, Connection]] = []
    with (
        aeron.MediaDriver(str(folder / "aeron")) as driver,
        shm.EpochTree.open(str(folder), clock=clock) as tree,
    ):
        epoch = tree.next_epoch(STREAM_ID)
        ring = tree.create(STREAM_ID, epoch, spec, clock.monotonic_ns(), prefault=True)
        for name, delay_s in (("fast reader", 0.0), ("slow reader", 2.5 / rate)):
            ours, theirs = context.Pipe()
            arguments = (name, delay_s, driver.aeron_dir, str(folder), theirs)
            readers.append((context.Process(target=_read, args=arguments, daemon=True), ours))
            readers[-1][0].start()
        client = aeron.connect(driver.aeron_dir)
        published = _publish(client, ring, pixels, seconds, rate, [pipe for _, pipe in readers])
        tallies: list[Tally] = []
        for reader, pipe in readers:
            pipe.send(published)
            tallies.append(pipe.recv())
            reader.join()
        client.close()
        tree.remove(STREAM_ID, epoch)
    return _summarise(published, pixels.nbytes, seconds, tallies)


def _publish(
    client: aeron.Client,
    ring: shm.MappedRing,
    pixels: np.ndarray[tuple[int, ...], np.dtype[np.uint8]],
    seconds: float,
    rate: float,
    readers: list[Connection],
) -> int:
    """Announce until every reader is there, then publish frames at the rate asked for."""
    control = client.add_publication(*CONTROL)
    descriptors = client.add_publication(*DESCRIPTORS)
    writer, layout = ring.writer(), shm.layout_of(pixels)
    waiting = list(readers)
    while waiting:
        control.offer(_announce(ring).encode())
        waiting = [reader for reader in waiting if not reader.poll()]
        time.sleep(ANNOUNCE_EVERY_S)
    for reader in readers:
        reader.recv()
    click.echo(f"camera: {'x'.join(map(str, pixels.shape))} bytes at {rate:g} Hz, ring of {NSLOTS} slots")
    started = time.monotonic()
    seq = 0
    while (elapsed := time.monotonic() - started) < seconds:
        if elapsed * rate < seq:
            time.sleep(min(0.01, seq / rate - elapsed))
            continue
        pixels.fill(seq & 0xFF)
        writer.write(seq, layout, pixels, time.monotonic_ns())
        descriptors.offer_descriptor(STREAM_ID, ring.epoch, seq)
        writer.wake()
        seq += 1
    return seq


def _announce(ring: shm.MappedRing) -> ShmPoolAnnounce:
    return ShmPoolAnnounce(
        stream_id=ring.stream_id,
        producer_id=1,
        epoch=ring.epoch,
        announce_timestamp_ns=time.monotonic_ns(),
        announce_clock_domain=ClockDomain.MONOTONIC,
        layout_version=ring.layout_version,
        header_nslots=ring.spec.nslots,
        header_slot_bytes=256,
        payload_pools=tuple(
            PayloadPool(
                pool_id=pool.spec.pool_id,
                pool_nslots=ring.spec.nslots,
                stride_bytes=pool.spec.stride_bytes,
                region_uri=pool.uri,
            )
            for pool in ring.pools
        ),
        header_region_uri=ring.header.uri,
    )


def _read(name: str, delay_s: float, aeron_dir: str, base_dir: str, pipe: Connection) -> None:
    """A reader's process: map what is announced, check every frame, report when the camera has stopped."""
    client = aeron.connect(aeron_dir)
    control = client.add_subscription(*CONTROL)
    descriptors = client.add_subscription(*DESCRIPTORS)
    announces: list[bytes] = []
    while not announces:
        if control.poll(lambda data, _: announces.append(data)) == 0:
            time.sleep(0.002)
    announce = decode(announces[0])
    assert isinstance(announce, ShmPoolAnnounce)
    spec = shm.RingSpec.announced(announce.header_nslots, announce.header_slot_bytes, announce.payload_pools)
    uris = [announce.header_region_uri, *(pool.region_uri for pool in announce.payload_pools)]
    ring = shm.map_ring(spec, uris, shm.AllowedBases([base_dir]), stream_id=announce.stream_id, epoch=announce.epoch)
    reader, sink, tally = ring.reader(), aeron.DescriptorSink(STREAM_ID), Tally(name)
    pipe.send("ready")
    while not pipe.poll():
        descriptors.poll_descriptors(sink, 100)
        if (descriptor := sink.take()) is None:
            reader.wait(tally.next_seq, 20_000_000)
        else:
            _take(descriptor.seq, reader, tally)
            time.sleep(delay_s)
    published: int = pipe.recv()
    while len(sink) or descriptors.poll_descriptors(sink, 1000):
        if (descriptor := sink.take()) is not None:
            _take(descriptor.seq, reader, tally)
    tally.finish(published)
    pipe.send(tally)
    client.close()


def _take(seq: int, reader: RingReader, tally: Tally) -> None:
    tally.drops_gap += seq - tally.next_seq
    tally.next_seq = seq + 1
    frame = reader.read(seq)
    if isinstance(frame, SlotFrame):
        pixels = np.empty(frame.layout.shape, np.uint8)
        if reader.copy_into(frame, pixels):
            tally.received += 1
            tally.wrong += not (pixels == (seq & 0xFF)).all()
            return
    tally.drops_late += 1


def _summarise(published: int, frame_bytes: int, seconds: float, tallies: list[Tally]) -> bool:
    rate = published / seconds
    click.echo(f"published {published} frames, {rate:.0f} Hz, {rate * frame_bytes / 2**20:.0f} MiB/s")
    correct = True
    for tally in tallies:
        adds_up = tally.adds_up(published)
        correct = correct and adds_up and tally.received > 0
        click.echo(
            f"{tally.name}: received {tally.received}, drops_gap {tally.drops_gap}, drops_late {tally.drops_late}, "
            f"wrong {tally.wrong}: {'every frame is accounted for' if adds_up else 'DOES NOT ADD UP'}"
        )
    return correct
