# SPDX-License-Identifier: Apache-2.0
"""The transports that `benchmarks.bridge` compares, over UDP or TCP, each as processes that run until they are stopped.

A frame is an array of uint64 whose first and last word are its number. Every reader counts the frames that it holds
whole in a counter that all processes share. A source is a camera that writes by DMA: its frames lie where the
transport needs them (in the ring, in arrays of its own), and only their stamps are written anew.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

STREAM_ID, DEST_ID = 10_000, 11_000
PAYLOAD_ID, CONTROL_ID = 50_000, 50_001
ROOT = Path(__file__).resolve().parents[1]
PATIENCE_S = 20.0


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What the channels and the media drivers are set to beyond their defaults."""

    sending: str = ""
    receiving: str = ""
    media_driver: dict[str, int | str] = {}


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """One measurement."""

    size: int
    mtu: int
    addresses: dict[str, str]  # of the hosts
    ports: list[int]  # payload and control, to host b and to host a
    folder: str
    settings: Settings
    lanes: str = "a"  # a mapping for each letter: the host that it comes from

    @property
    def depth(self) -> int:
        """Slots of the rings."""
        return 16 if self.size < 1 << 20 else 8

    def aeron_dir(self, host: str) -> str:
        return f"{self.folder}/{host}/aeron"

    def driver_config(self, host: str) -> str:
        return f"{self.folder}/{host}/driver.toml"

    def channel(self, port: int, *, sending: bool, to: str = "b") -> str:
        parameters = self.settings.sending if sending else self.settings.receiving
        number = self.ports[port + (0 if to == "b" else 2)]
        return f"aeron:udp?endpoint={self.addresses[to]}:{number}{parameters}"

    def sent_from(self, host: str) -> list[int]:
        """The lanes that begin there."""
        return [lane for lane, origin in enumerate(self.lanes) if origin == host]

    def received_at(self, host: str) -> list[int]:
        return [lane for lane, origin in enumerate(self.lanes) if origin != host]


class Shared:
    """What all processes of a measurement see: which frames came whole, which were wrong, and when it is over."""

    def __init__(self, context: Any, lanes: int = 1) -> None:
        self.frames = context.Array(ctypes.c_uint64, lanes, lock=False)
        self.next = context.Array(ctypes.c_uint64, lanes, lock=False)  # the number after the newest that came
        self.wrong = context.Array(ctypes.c_uint64, lanes, lock=False)
        self.stop = context.Value(ctypes.c_uint32, lock=False)

    @property
    def is_over(self) -> bool:
        return bool(self.stop.value)

    def see(self, first: int, last: int, lane: int = 0) -> None:
        self.frames[lane] += 1
        self.next[lane] = last + 1
        if first != last:
            self.wrong[lane] += 1


# --- hosts: a media driver and an SHM driver each


def run_host(job: Job, host: str, shared: Shared, ready: Connection) -> None:
    import tensorpool as tp

    folder = Path(job.folder, host)
    folder.mkdir()
    stride_bytes = 1 << (job.size - 1).bit_length()
    Path(job.driver_config(host)).write_text(
        f'[shm]\nbase_dir = "{folder}/regions"\n'
        f"[profiles.frames]\nheader_nslots = {job.depth}\n"
        f"payload_pools = [{{pool_id = 1, stride_bytes = {stride_bytes}}}]\n"
        + "".join(
            f"[streams.lane{lane}]\nstream_id = {(STREAM_ID if origin == host else DEST_ID) + lane}\n"
            for lane, origin in enumerate(job.lanes)
        )
    )
    config = tp.DriverConfig.load(job.driver_config(host), environ={})
    with _media_driver(job, host), tp.Driver(config, aeron_dir=job.aeron_dir(host)):
        ready.send("ready")
        while not shared.is_over:
            time.sleep(0.05)


def _media_driver(job: Job, host: str) -> contextlib.AbstractContextManager[object]:
    from tensorpool import aeron

    settings = job.settings.media_driver
    return aeron.MediaDriver(job.aeron_dir(host), **settings) if settings else contextlib.nullcontext()


# --- the bridge


def run_bridge(job: Job, host: str, shared: Shared, ready: Connection) -> None:
    from tensorpool.bridge.bridge import Bridge
    from tensorpool.bridge.config import BridgeConfig

    sent, received, other = job.sent_from(host), job.received_at(host), "a" if host == "b" else "b"
    channels: dict[str, object] = {}
    for port, name, stream_id in ((0, "payload", PAYLOAD_ID), (1, "control", CONTROL_ID)):
        receiving = job.channel(port, sending=False, to=host)
        channels |= {
            f"{name}_channel": job.channel(port, sending=True, to=other) if sent else receiving,
            f"{name}_stream_id": stream_id,
        }
        if sent and received:
            channels |= {f"receive_{name}_channel": receiving, f"receive_{name}_stream_id": stream_id}
    config = BridgeConfig.load(
        None,
        environ={},
        bridge={
            "instance_id": host,
            "role": "both" if sent and received else "sender" if sent else "receiver",
            **channels,
            "mtu_bytes": job.mtu,
            "forward_metadata": False,
            "assembly_timeout_ms": 2000,
            "driver_config": job.driver_config(host),
            "aeron_dir": job.aeron_dir(host),
        },
        mappings=[
            {
                "source_stream_id": STREAM_ID + lane,
                "dest_stream_id": DEST_ID + lane,
                "direction": "send" if origin == host else "receive",
            }
            for lane, origin in enumerate(job.lanes)
        ],
    )
    with Bridge(config).start() as bridge:
        _wait_for(lambda: bridge.is_ready, f"bridge {host}")
        ready.send("ready")
        while not shared.is_over:
            time.sleep(0.05)
        ready.send({name: dict(counts) for name, counts in bridge.counters.items()})


def run_producer(job: Job, host: str, shared: Shared, ready: Connection) -> None:
    """Three quarters of a ring ahead of what has arrived, as a camera is whose rate the link can carry.

    The bare publication has half a term of 16 MiB in flight; less than that would make the source the limit.
    """
    import tensorpool as tp

    def produce(lane: int, producer: Any) -> None:
        number, ahead, lost = 0, job.depth * 3 // 4, 0
        published_s = looked_s = time.monotonic()
        looked, frame_s = 0, 0.002
        while not shared.is_over:
            now_s, came = time.monotonic(), max(shared.next[lane], lost)
            if now_s - looked_s > 0.05 and came > looked:
                frame_s = (now_s - looked_s) / (came - looked)
                looked_s, looked = now_s, came
            if number - came >= ahead:
                if now_s - published_s < 0.1:
                    time.sleep(min(frame_s * ahead / 4, 0.01))  # so that it costs next to nothing, and never runs dry
                    continue
                lost = number  # all frames that were in flight
            with producer.claim((job.size // 8,), np.uint64) as slot:
                slot.array[0] = slot.array[-1] = number
            number += 1
            published_s = now_s

    with tp.connect(job.aeron_dir(host), config=job.driver_config(host)) as client:
        producers = {lane: client.producer(STREAM_ID + lane) for lane in job.sent_from(host)}
        _wait_for(lambda: all(producer.wait_for_consumers(1, 0.1) for producer in producers.values()), "the sender")
        ready.send("ready")
        _run_all([threading.Thread(target=produce, args=item) for item in producers.items()])


def run_consumer(job: Job, host: str, shared: Shared, ready: Connection) -> None:
    import tensorpool as tp

    def consume(lane: int, consumer: Any) -> None:
        while not shared.is_over:
            frame = consumer.poll(0.05)
            if frame is not None:
                words = frame.array
                first, last = words.item(0), words.item(-1)
                if frame.is_intact():
                    shared.see(first, last, lane)

    with tp.connect(job.aeron_dir(host), config=job.driver_config(host)) as client:
        consumers = {lane: client.consumer(DEST_ID + lane, timeout=PATIENCE_S) for lane in job.received_at(host)}
        ready.send("ready")
        _run_all([threading.Thread(target=consume, args=item) for item in consumers.items()])


def _run_all(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


# --- bare Aeron


def build_bare_aeron(folder: Path) -> Path:
    """benchmarks/bare_aeron.cpp as a shared object."""
    binary = folder / "bare_aeron.so"
    command = [
        os.environ.get("CXX", "g++"),
        "-std=c++20",
        "-O2",
        "-fPIC",
        "-shared",
        "-pthread",
        f"-I{ROOT / 'native'}",
    ]
    subprocess.run([*command, str(ROOT / "benchmarks" / "bare_aeron.cpp"), "-o", str(binary), "-ldl"], check=True)
    return binary


def run_bare(job: Job, host: str, shared: Shared, ready: Connection) -> None:
    from tensorpool.aeron import library

    is_sender = host == "a"
    call = ctypes.CDLL(f"{job.folder}/bare_aeron.so").bare_aeron
    call.argtypes = (*[ctypes.c_char_p] * 4, ctypes.c_int32, *[ctypes.c_uint64] * 4, ctypes.c_void_p, ctypes.c_void_p)
    channel = job.channel(0, sending=is_sender) + (f"|mtu={job.mtu}" if is_sender else "")
    texts = ("pub" if is_sender else "sub", str(library.library_paths()[0]), job.aeron_dir(host), channel)
    ready.send("ready")
    code = call(
        *(text.encode() for text in texts),
        PAYLOAD_ID + 7,
        job.size,
        job.depth,
        job.mtu - 128,
        job.mtu - 345,
        ctypes.addressof(shared.frames),
        ctypes.addressof(shared.stop),
    )
    sys.exit(code)


# --- TCP


def run_zmq(job: Job, host: str, shared: Shared, ready: Connection) -> None:
    """PUSH to PULL; from 1 MiB on a message is sent from the array itself."""
    import zmq

    with zmq.Context() as context:
        if host == "b":
            with context.socket(zmq.PULL) as socket:
                socket.set(zmq.RCVHWM, 4)
                socket.set(zmq.RCVTIMEO, 50)
                socket.bind(f"tcp://{job.addresses['b']}:{job.ports[0]}")
                ready.send("ready")
                while not shared.is_over:
                    with contextlib.suppress(zmq.Again):
                        words = np.frombuffer(socket.recv(copy=False), np.uint64)
                        shared.see(words.item(0), words.item(-1))
            return
        with context.socket(zmq.PUSH) as socket:
            socket.set(zmq.SNDHWM, 2)
            socket.set(zmq.SNDTIMEO, 50)
            socket.set(zmq.LINGER, 0)
            socket.connect(f"tcp://{job.addresses['b']}:{job.ports[0]}")
            arrays = [np.zeros(job.size // 8, np.uint64) for _ in range(8)]
            is_copied = job.size < 1 << 20
            ready.send("ready")
            number = 0
            while not shared.is_over:
                array = arrays[number % len(arrays)]
                array[0] = array[-1] = number
                with contextlib.suppress(zmq.Again):
                    socket.send(array, copy=is_copied)
                    number += 1


def run_zenoh(job: Job, host: str, shared: Shared, ready: Connection) -> None:
    """Peer to peer, blocking congestion control, a callback at the reader."""
    import zenoh

    zenoh.init_log_from_env_or("error")
    endpoint = [f"tcp/{job.addresses['b']}:{job.ports[0]}"]
    config = zenoh.Config()
    for key, value in {
        "mode": "peer",
        "listen/endpoints": endpoint if host == "b" else [],
        "connect/endpoints": endpoint if host == "a" else [],
        "scouting/multicast/enabled": False,
        "scouting/gossip/enabled": False,
        "transport/shared_memory/enabled": False,
    }.items():
        config.insert_json5(key, json.dumps(value))

    def on_sample(sample: Any) -> None:
        words = np.frombuffer(sample.payload.to_bytes(), np.uint64)
        shared.see(words.item(0), words.item(-1))

    with zenoh.open(config) as session:
        if host == "b":
            subscriber = session.declare_subscriber("bridge/frames", on_sample)
            ready.send("ready")
            while not shared.is_over:
                time.sleep(0.05)
            subscriber.undeclare()
            return
        publisher = session.declare_publisher("bridge/frames", congestion_control=zenoh.CongestionControl.BLOCK)
        _wait_for(lambda: bool(publisher.matching_status), "the zenoh subscriber")
        buffers = [bytearray(job.size) for _ in range(8)]
        arrays = [np.frombuffer(buffer, np.uint64) for buffer in buffers]
        ready.send("ready")
        number = 0
        while not shared.is_over:
            array = arrays[number % len(arrays)]
            array[0] = array[-1] = number
            publisher.put(buffers[number % len(buffers)])
            number += 1


def _wait_for(is_met: Callable[[], object], what: str) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not is_met():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"{what} did not come within {PATIENCE_S:.0f} s")
        time.sleep(0.005)
