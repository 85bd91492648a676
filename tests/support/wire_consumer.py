# SPDX-License-Identifier: Apache-2.0
"""A consumer made of the codec, Aeron and read-only maps: what a producer says and writes, byte for byte.

It is a client of a real driver (`driver_client`) that also listens to the descriptor, QoS and metadata streams, in one
transcript, and reads slots with `struct`. Its hellos and QoS messages may say anything.
"""

from __future__ import annotations

import mmap
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from tensorpool import aeron
from tensorpool.wire import Message
from tensorpool.wire.attach import AttachResponse
from tensorpool.wire.control import ConsumerHello, MajorOrder, QosConsumer, ShmPoolAnnounce
from tests.support.driver_client import DriverClient, new_client_id
from tests.support.driver_process import IPC, Deployment, path_of
from tests.support.listener import Endpoint, ReceivedMessage
from tests.support.messages import consumer_qos, hello
from tests.support.processes import wait_until
from tests.support.region_bytes import DTYPES, SLOT, SLOT_FIELDS

HELLO_EVERY_S: Final = 0.1
NUMPY: Final = {int(number): dtype for dtype, number in DTYPES.items()} | {13: np.dtype(np.uint8)}


class Slot(NamedTuple):
    """The 256 bytes of a slot, taken apart."""

    fields: dict[str, Any]
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    data: bytes

    @classmethod
    def unpack(cls, data: bytes) -> Self:
        values = SLOT.unpack(data)
        fields = dict(zip(SLOT_FIELDS, values, strict=False))
        first = len(SLOT_FIELDS)
        return cls(fields, values[first : first + 8], values[first + 8 : first + 16], data)

    @property
    def seq(self) -> int:
        return int(self.fields["seq_commit"]) >> 1

    @property
    def is_committed(self) -> bool:
        return bool(self.fields["seq_commit"] & 1)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.dims[: self.fields["ndims"]]

    def __getattr__(self, name: str) -> Any:
        try:
            return self.fields[name]
        except KeyError:
            raise AttributeError(name) from None


class MappedStream:
    """The regions of one epoch, mapped for reading."""

    def __init__(self, source: AttachResponse | ShmPoolAnnounce) -> None:
        assert source.header_nslots is not None
        self.nslots = source.header_nslots
        self.epoch = source.epoch
        self.strides = {pool.pool_id: pool.stride_bytes for pool in source.payload_pools}
        self.paths = {0: path_of(source.header_region_uri)}
        self.paths |= {pool.pool_id: path_of(pool.region_uri) for pool in source.payload_pools}
        self._maps = {region: _mapped(path) for region, path in self.paths.items()}

    def word(self, seq: int) -> int:
        """The commit word of the slot that `seq` belongs to."""
        (word,) = struct.unpack_from("<Q", self._maps[0], 64 + (seq & (self.nslots - 1)) * 256)
        return int(word)

    def slot(self, seq: int) -> Slot:
        offset = 64 + (seq & (self.nslots - 1)) * 256
        return Slot.unpack(self._maps[0][offset : offset + 256])

    def payload(self, seq: int, length: int | None = None) -> bytes:
        """The bytes of a frame, or as many of its first ones."""
        slot = self.slot(seq)
        offset = 64 + slot.payload_slot * self.strides[slot.pool_id]
        return self._maps[slot.pool_id][offset : offset + (slot.values_len_bytes if length is None else length)]

    def array(self, seq: int) -> NDArray[Any]:
        """A frame with inferred strides, as its header describes it."""
        slot = self.slot(seq)
        flat = np.frombuffer(self.payload(seq), NUMPY[slot.dtype])[: int(np.prod(slot.shape))]
        if slot.major_order == MajorOrder.COLUMN:
            return flat.reshape(slot.shape[::-1]).T
        return flat.reshape(slot.shape)

    def close(self) -> None:
        for mapping in self._maps.values():
            mapping.close()


def separate(deployment: Deployment) -> Deployment:
    """Give a deployment that has not started descriptor, QoS and metadata streams of its own."""
    driver = deployment.tables["driver"]
    first = int(driver["control_stream_id"])
    driver |= {"descriptor_stream_id": first + 1, "qos_stream_id": first + 2, "metadata_stream_id": first + 3}
    return deployment


def endpoint_of(deployment: Deployment, name: str) -> Endpoint:
    driver = deployment.tables["driver"]
    return driver.get(f"{name}_channel", IPC), driver[f"{name}_stream_id"]


class WireConsumer(DriverClient):
    """A consumer of a deployment that `separate` prepared.

    >>> with WireConsumer(deployment) as peer:                           # doctest: +SKIP
    ...     mapped = peer.map(peer.attach(10_000))
    ...     seq = peer.wait_for(FrameDescriptor, stream_id=10_000).message.seq
    ...     mapped.array(seq)
    """

    def __init__(self, deployment: Deployment) -> None:
        super().__init__(deployment)
        self.consumer_id = new_client_id()
        self.observers: list[Callable[[ReceivedMessage[Any]], None]] = []  # called as each message comes
        self.repeated: list[ConsumerHello] = []  # said again and again while this consumer waits
        self._next_hello_s = 0.0
        self.endpoints = {name: endpoint_of(deployment, name) for name in ("descriptor", "qos", "metadata")}
        for endpoint in dict.fromkeys(self.endpoints.values()):
            self.listen(endpoint)
        self._qos = self._client.add_publication(*self.endpoints["qos"])
        self._maps: list[MappedStream] = []
        wait_until(lambda: self._qos.has_room, "the QoS stream is connected")

    def close(self) -> None:
        super().close()
        for mapped in self._maps:
            mapped.close()

    def map(self, source: AttachResponse | ShmPoolAnnounce) -> MappedStream:
        """The regions that a driver's message names."""
        self._maps.append(MappedStream(source))
        return self._maps[-1]

    # --- saying

    def say_hello(self, stream_id: int, **changed: Any) -> ConsumerHello:
        """One of this consumer's, with what the test wants otherwise."""
        message = hello(stream_id, **{"consumer_id": self.consumer_id} | changed)
        self.send(message)
        return message

    def say_qos(self, stream_id: int, **changed: Any) -> QosConsumer:
        message = consumer_qos(stream_id, **{"consumer_id": self.consumer_id} | changed)
        wait_until(lambda: self._qos.offer(message.encode()), "the QoS stream takes a message")
        return message

    # --- hearing

    def poll(self) -> None:
        if self.repeated and time.monotonic() >= self._next_hello_s:
            self._next_hello_s = time.monotonic() + HELLO_EVERY_S
            for message in self.repeated:
                self.send(message)
        super().poll()

    def received_on[M: Message](self, endpoint: Endpoint, kind: type[M], since: int = 0) -> list[M]:
        """The messages of a kind that came on one stream."""
        return [received.message for received in self.received(kind, since) if received.stream_id == endpoint[1]]

    def _on_message(self, data: bytes, info: aeron.MessageInfo) -> None:
        super()._on_message(data, info)
        for observer in self.observers:
            observer(self.transcript[-1])


def _mapped(path: Path) -> mmap.mmap:
    with open(path, "rb") as file:
        return mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
