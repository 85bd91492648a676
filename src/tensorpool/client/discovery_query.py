# SPDX-License-Identifier: Apache-2.0
"""A question about streams, and what the answers say: filters, results and their checks, without IO.

Discovery §5, §7; decisions F10, F12, F15.
"""

from __future__ import annotations

import threading
from typing import Final, Self

import msgspec

from tensorpool._core import MAX_DIMS
from tensorpool.channel import Endpoint
from tensorpool.errors import DriverUnreachable, LocalProtocolError, RemoteProtocolError, TensorPoolError
from tensorpool.shm.layout import RingSpec
from tensorpool.wire import control
from tensorpool.wire.discovery import DiscoveryRequest, PayloadPool, Result, Tag

MAX_TEXT_BYTES: Final = 256  # of a name, an instance id or a tag
MAX_TAGS: Final = 64  # of one question


class DiscoveredPool(msgspec.Struct, frozen=True, kw_only=True):
    """A payload pool, for information."""

    pool_id: int
    pool_nslots: int
    stride_bytes: int
    region_uri: str

    @classmethod
    def of(cls, pool: PayloadPool | control.PayloadPool) -> Self:
        """As a provider or an announce describes it."""
        return cls(
            pool_id=pool.pool_id,
            pool_nslots=pool.pool_nslots,
            stride_bytes=pool.stride_bytes,
            region_uri=pool.region_uri,
        )


class DiscoveredStream(msgspec.Struct, frozen=True, kw_only=True):
    """A stream as a provider described it: a snapshot, and advice. Nothing here may be mapped without a lease."""

    driver_instance_id: str
    stream_id: int
    data_source_name: str | None
    tags: tuple[str, ...]
    data_source_id: int | None
    producer_id: int  # 0: it has no producer now
    epoch: int
    layout_version: int
    header_nslots: int
    header_slot_bytes: int
    max_dims: int
    header_region_uri: str
    payload_pools: tuple[DiscoveredPool, ...]
    driver_control_channel: str
    driver_control_stream_id: int

    @classmethod
    def of(cls, result: Result) -> DiscoveredStream:
        return cls(
            driver_instance_id=result.driver_instance_id,
            stream_id=result.stream_id,
            data_source_name=result.data_source_name or None,
            tags=tuple(tag.tag for tag in result.tags),
            data_source_id=result.data_source_id,
            producer_id=result.producer_id,
            epoch=result.epoch,
            layout_version=result.layout_version,
            header_nslots=result.header_nslots,
            header_slot_bytes=result.header_slot_bytes,
            max_dims=result.max_dims,
            header_region_uri=result.header_region_uri,
            payload_pools=tuple(map(DiscoveredPool.of, result.payload_pools)),
            driver_control_channel=result.driver_control_channel,
            driver_control_stream_id=result.driver_control_stream_id,
        )

    @property
    def control(self) -> Endpoint:
        """Where leases on it are granted."""
        return Endpoint(self.driver_control_channel, self.driver_control_stream_id)

    def __str__(self) -> str:
        return f"stream {self.stream_id} of driver {self.driver_instance_id} (epoch {self.epoch})"


def _utf8_bytes(text: str) -> int:
    return len(text.encode("utf-8", "surrogateescape"))


class Filters(msgspec.Struct, frozen=True, kw_only=True):
    """What is looked for; what is None filters nothing."""

    name: str | None = None
    tags: tuple[str, ...] = ()
    producer_id: int | None = None
    stream_id: int | None = None
    data_source_id: int | None = None
    driver_instance_id: str | None = None  # providers have no filter for it

    def check(self) -> Self:
        """Raises LocalProtocolError for what no request can carry."""
        for key in ("name", "driver_instance_id"):
            text = getattr(self, key)
            if text is not None and (type(text) is not str or not 1 <= _utf8_bytes(text) <= MAX_TEXT_BYTES):
                raise LocalProtocolError(f"{key} = {text!r:.80}: expected text of 1 to {MAX_TEXT_BYTES} bytes")
        for tag in self.tags:
            if type(tag) is not str or not tag or not tag.isascii() or len(tag) > MAX_TEXT_BYTES:
                raise LocalProtocolError(f"tag {tag!r:.80}: expected ASCII text of 1 to {MAX_TEXT_BYTES} characters")
        if len(self.tags) > MAX_TAGS:
            raise LocalProtocolError(f"{len(self.tags)} tags: expected at most {MAX_TAGS}")
        for key in ("producer_id", "stream_id", "data_source_id"):
            value, highest = getattr(self, key), 2**64 - 2 if key == "data_source_id" else 2**32 - 2
            if value is not None and (type(value) is not int or not 0 <= value <= highest):
                raise LocalProtocolError(f"{key} = {value!r}: expected 0 to {highest}")
        return self

    def fit(self, stream: DiscoveredStream) -> bool:
        """Names and tags byte for byte, whatever the provider thinks of them."""
        return (
            self.name in (None, stream.data_source_name)
            and set(self.tags) <= set(stream.tags)
            and self.producer_id in (None, stream.producer_id)
            and self.stream_id in (None, stream.stream_id)
            and self.data_source_id in (None, stream.data_source_id)
            and self.driver_instance_id in (None, stream.driver_instance_id)
        )

    def request(self, request_id: int, client_id: int, response: Endpoint) -> DiscoveryRequest:
        return DiscoveryRequest(
            request_id=request_id,
            client_id=client_id,
            response_stream_id=response.stream_id,
            response_channel=response.channel,
            stream_id=self.stream_id,
            producer_id=self.producer_id,
            data_source_id=self.data_source_id,
            tags=tuple(Tag(tag=tag) for tag in self.tags),
            data_source_name=self.name or "",
        )


class DiscoveryQuery:
    """One question to every provider. `is_done`, `streams` and `raise_for_silence` are for the caller."""

    is_closed: Final = False

    def __init__(self, filters: Filters) -> None:
        self.filters = filters
        self.changed = threading.Condition()
        self.is_done = False
        self.asked_ns = 0
        self.first_answer_ns: int | None = None
        self.answers = 0
        self.refusals: list[str] = []
        self.requeries = 0
        self._streams: dict[tuple[str, int], DiscoveredStream] = {}

    @property
    def streams(self) -> list[DiscoveredStream]:
        return sorted(self._streams.values(), key=lambda stream: (stream.driver_instance_id, stream.stream_id))

    def add(self, stream: DiscoveredStream) -> None:
        """F15: of two that tell of the same stream, the later epoch."""
        key = stream.driver_instance_id, stream.stream_id
        known = self._streams.get(key)
        if known is None or stream.epoch > known.epoch:
            self._streams[key] = stream

    def finish(self) -> None:
        with self.changed:
            self.is_done = True
            self.changed.notify_all()

    def raise_for_silence(self, endpoints: list[Endpoint], waited_ns: int) -> None:
        """Raise what kept us from an answer, if there is none at all."""
        if self.answers == 0 and self.refusals:
            raise TensorPoolError(f"discovery answered ERROR: {'; '.join(self.refusals)}")
        if self.answers == 0:
            places = ", ".join(f"{endpoint.channel} stream {endpoint.stream_id}" for endpoint in endpoints)
            words = "is a driver with discovery, or a registry, running there?"
            raise DriverUnreachable(places, waited_ns, words)


def flaw_in(result: Result) -> str | None:
    """§5.2: what a result must be; None when it is."""
    if not result.driver_control_channel:
        return "driver_control_channel is empty"
    if result.driver_control_stream_id == 0:
        return "driver_control_stream_id is 0"
    if result.max_dims != MAX_DIMS:
        return f"max_dims: expected {MAX_DIMS}, found {result.max_dims}"
    try:
        RingSpec.announced(result.header_nslots, result.header_slot_bytes, result.payload_pools)
    except RemoteProtocolError as error:
        return str(error)
    return None
