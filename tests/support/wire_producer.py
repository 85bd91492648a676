# SPDX-License-Identifier: Apache-2.0
"""A producer, and the driver that its clients need, made of the codec, Aeron and plain files.

Honest unless a test falsifies it: it creates the regions of an epoch, grants leases, announces, keeps the superblocks
fresh and writes slots by the seqlock protocol. Every message is built from what is true, with whatever fields the test
wants otherwise; every byte of every file can be replaced. What clients say is kept in a transcript.

A thread serves: it records, answers and announces while the test waits for something.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

import msgspec
from numpy.typing import NDArray

from tensorpool import aeron
from tensorpool.client import Consumer
from tensorpool.wire import Message, driver
from tensorpool.wire.attach import AttachRequest, AttachResponse, Dialect, attach_refusal
from tensorpool.wire.control import (
    ClockDomain,
    ConsumerConfig,
    DataSourceAnnounce,
    DataSourceMeta,
    FrameDescriptor,
    FrameProgress,
    FrameProgressState,
    MetaBlobAnnounce,
    MetaBlobChunk,
    MetaBlobComplete,
    Mode,
    PayloadPool,
    QosProducer,
    ShmPoolAnnounce,
)
from tensorpool.wire.driver import (
    ExtendedAttachRequest,
    ExtendedAttachResponse,
    LeaseRevokeReason,
    ResponseCode,
    Role,
    ShmAttachRequest,
    ShmAttachResponse,
    ShmDetachRequest,
    ShmDetachResponse,
    ShmDriverShutdown,
    ShmLeaseRevoked,
    ShutdownReason,
)
from tests.shm.by_hand import mapped_files
from tests.support.driver_client import new_client_id
from tests.support.driver_process import IPC
from tests.support.listener import Endpoint, Said, WireServer, decoded, encoded
from tests.support.processes import wait_until
from tests.support.region_bytes import (
    committed,
    in_progress,
    slot_image,
)
from tests.support.regions import NSLOTS, POOLS, Regions

ANNOUNCE_EVERY_S: Final = 0.04
FENCE_EVERY_S: Final = 0.5
LEASE_NS: Final = 20_000_000_000

_aeron_stream_ids = itertools.count(60_000, 10)  # many peers share a media driver
_logical_stream_ids = itertools.count(30_000)
_lease_ids = itertools.count(secrets.randbits(40))

_node_ids = itertools.count(1)

type Lie = Callable[[AttachResponse], Said | Iterable[Said]]


class Endpoints(NamedTuple):
    """The Aeron streams of one deployment."""

    control: Endpoint
    descriptor: Endpoint
    qos: Endpoint
    metadata: Endpoint

    @classmethod
    def unused(cls) -> Self:
        """Streams that no other peer of this run has."""
        first = next(_aeron_stream_ids)
        return cls(*((IPC, first + index) for index in range(4)))

    @property
    def settings(self) -> dict[str, Any]:
        """The keys that tell a client of them."""
        settings: dict[str, Any] = {}
        for name, (channel, stream_id) in self._asdict().items():
            settings |= {f"driver.{name}_channel": channel, f"driver.{name}_stream_id": stream_id}
        return settings


class Grant(NamedTuple):
    """A lease that was granted."""

    lease_id: int
    request: AttachRequest
    response: AttachResponse


def new_stream_id() -> int:
    """A logical one that no other peer of this run has."""
    return next(_logical_stream_ids)


def altered(message: Said, offset: int, data: bytes) -> bytes:
    """A message with some of its bytes replaced, its header included in the count."""
    whole = encoded(message)
    assert offset + len(data) <= len(whole)
    return whole[:offset] + data + whole[offset + len(data) :]


class WireProducer(WireServer):
    """One stream with its driver.

    >>> with WireProducer(folder, aeron_dir) as peer:                    # doctest: +SKIP
    ...     consumer = tp.connect(aeron_dir, overrides=peer.settings).consumer(peer.stream_id)
    ...     peer.publish(np.arange(6), descriptor={"epoch": 99})         # a lie
    ...     peer.wait_for(ConsumerHello, consumer_id=consumer.consumer_id)

    `announces`, `breathes` and `answers` tell what it does by itself; requests that it does not answer are `held`.
    With a `dialect` it drops requests of the other one; else it answers each in its own.
    """

    def __init__(
        self,
        folder: Path,
        aeron_dir: str,
        *,
        stream_id: int | None = None,
        endpoints: Endpoints | None = None,
        epoch: int = 100,
        nslots: int = NSLOTS,
        pools: Mapping[int, int] = POOLS,
        clock_domain: ClockDomain = ClockDomain.MONOTONIC,
        dialect: Dialect | None = None,
    ) -> None:
        super().__init__(aeron_dir)
        self.dialect = dialect
        self.folder = folder
        self.stream_id = stream_id or new_stream_id()
        self.endpoints = endpoints or Endpoints.unused()
        self.nslots = nslots
        self.pools = pools
        self.clock_domain = clock_domain
        self.producer_id = new_client_id()
        self.producer_lease_id = next(_lease_ids)
        self.name: str | None = None  # announced on the metadata stream
        self.lease_ns: int | None = LEASE_NS
        self.next_seq = 0
        self.announces = True
        self.breathes = True
        self.answers = True
        self.lies: deque[Lie] = deque()  # one for each of the next answers
        self.held: deque[AttachRequest] = deque()
        self.grants: list[Grant] = []
        self.ended: list[Grant] = []
        self.mapped_at_attach: list[list[str]] = []  # what this process had mapped when each request came
        self._next_announce_s = 0.0
        self._made: list[Regions] = []
        self.regions = self.make_regions(epoch)
        self._publications: dict[Endpoint, aeron.Publication] = {
            endpoint: self._client.add_publication(*endpoint) for endpoint in self.endpoints
        }
        for endpoint in self._publications:
            self.listen(endpoint)
        for publication in self._publications.values():
            wait_until(functools.partial(_is_connected, publication), "the peer's streams are connected")
        self._thread.start()

    @property
    def settings(self) -> dict[str, Any]:
        """The settings with which a client finds this peer."""
        return self.endpoints.settings | {"shm.base_dir": str(self.folder)}

    @property
    def epoch(self) -> int:
        return self.regions.epoch

    def now_ns(self) -> int:
        return time.monotonic_ns() if self.clock_domain is ClockDomain.MONOTONIC else time.time_ns()

    def close(self) -> None:
        try:
            super().close()
        finally:
            for regions in self._made:
                regions.close()

    # --- memory

    def make_regions(self, epoch: int, *, exists: bool = True, **lies: int) -> Regions:
        """The regions of an epoch, beside those in use; `lies` are in their superblocks."""
        folder = self.folder / f"{self.stream_id}-{epoch}-{secrets.token_hex(3)}"
        regions = Regions(folder, self.stream_id, epoch, nslots=self.nslots, pools=self.pools)
        self._made.append(regions)
        return regions.create(self.now_ns(), **lies) if exists else regions

    def use(self, regions: Regions) -> Regions:
        """From now on these are announced, granted and written."""
        self.regions = regions
        self.next_seq = 0
        return regions

    def new_epoch(self, epoch: int | None = None) -> Regions:
        """Go on in new regions and say so."""
        regions = self.use(self.make_regions(self.epoch + 1 if epoch is None else epoch))
        self.say(ShmPoolAnnounce)
        return regions

    # --- saying

    def honest(self, kind: type[Message], **changed: Any) -> Message:
        """A message that tells what is so, with what the test wants otherwise."""
        source = {"producer_id": self.producer_id, "epoch": self.epoch}
        truths: dict[type[Message], dict[str, Any]] = {
            ShmPoolAnnounce: {
                "producer_id": self.producer_id,
                "announce_timestamp_ns": self.now_ns(),
                "announce_clock_domain": self.clock_domain,
                **self.regions.layout,
            },
            FrameDescriptor: {"epoch": self.epoch},
            FrameProgress: {"epoch": self.epoch, "state": FrameProgressState.PROGRESS},
            QosProducer: {**source, "current_seq": max(self.next_seq - 1, 0)},
            DataSourceAnnounce: {**source, "meta_version": 1},
            DataSourceMeta: {"meta_version": 1, "timestamp_ns": self.now_ns()},
            MetaBlobAnnounce: {"meta_version": 1, "checksum": 0},
            MetaBlobChunk: {"meta_version": 1},
            MetaBlobComplete: {"meta_version": 1, "checksum": 0},
            ConsumerConfig: {"use_shm": True, "mode": Mode.STREAM, "descriptor_stream_id": 0, "control_stream_id": 0},
            ShmLeaseRevoked: {
                "timestamp_ns": self.now_ns(),
                "lease_id": self.producer_lease_id,
                "client_id": self.producer_id,
                "role": Role.PRODUCER,
                "reason": LeaseRevokeReason.EXPIRED,
            },
        }
        return _built(kind, {"stream_id": self.stream_id} | truths[kind] | changed)

    def say(self, kind: type[Message], *, on: Endpoint | None = None, **changed: Any) -> int:
        """Tell the truth, or what the test makes of it, where it belongs; returns the time before it was sent."""
        return self.send(self.honest(kind, **changed), on or self._endpoint_of(kind))

    def _endpoint_of(self, kind: type[Message]) -> Endpoint:
        if kind is FrameDescriptor:
            return self.endpoints.descriptor
        if kind is QosProducer:
            return self.endpoints.qos
        if kind in (DataSourceAnnounce, DataSourceMeta, MetaBlobAnnounce, MetaBlobChunk, MetaBlobComplete):
            return self.endpoints.metadata
        return self.endpoints.control

    def fence(self, consumer: Consumer) -> None:
        """Return when a client has handled every message on the control stream: it obeyed one that was sent after them.

        That one is sent repeatedly: a consumer that has just lost its lease obeys none. Regions that the client maps
        because of a message are mapped, or rejected, afterwards.
        """
        for mode in (Mode.RATE_LIMITED, Mode.STREAM):
            next_s = 0.0

            def is_obeyed(mode: Mode = mode) -> bool:
                nonlocal next_s
                if time.monotonic() >= next_s:
                    next_s = time.monotonic() + FENCE_EVERY_S
                    self.say(ConsumerConfig, consumer_id=consumer.consumer_id, mode=mode)
                return consumer.mode is mode

            wait_until(is_obeyed, f"the consumer's mode is {mode.name}")
        wait_until(lambda: not consumer._session.is_mapping, "nothing is being mapped")

    def send(self, said: Said, on: Endpoint | None = None) -> int:
        """Put a message or bytes on a stream, the control stream by default."""
        data = encoded(said)
        publication = self._publications[on or self.endpoints.control]
        sent_ns = time.monotonic_ns()
        wait_until(lambda: publication.offer(data), "a stream takes a message")
        return sent_ns

    def open(self, endpoint: Endpoint) -> Endpoint:
        """A further stream to publish on, once it has a subscriber."""
        self._publications[endpoint] = self._client.add_publication(*endpoint)
        return endpoint

    def has_listener(self, endpoint: Endpoint) -> bool:
        return self._publications[endpoint].is_connected

    def revoke(self, grant: Grant, reason: LeaseRevokeReason = LeaseRevokeReason.REVOKED, **changed: Any) -> int:
        """Tell a client that its lease is over."""
        self._end(grant)
        return self.send(self.revoke_of(grant, reason=reason, **changed))

    def revoke_of(self, grant: Grant, **changed: Any) -> Message:
        """The notice of a lease's end."""
        names = {"lease_id": grant.lease_id, "client_id": grant.request.client_id, "role": grant.request.role}
        return self.honest(ShmLeaseRevoked, **{"reason": LeaseRevokeReason.REVOKED} | names | changed)

    def shut_down(self, reason: ShutdownReason = ShutdownReason.NORMAL, **changed: Any) -> int:
        """The notice of the driver's end; it still runs."""
        for grant in list(self.grants):
            self._end(grant)
        fields = {"timestamp_ns": self.now_ns(), "reason": reason} | changed
        return self.send(ShmDriverShutdown(**fields))

    # --- leases

    def answer(self, request: AttachRequest, **changed: Any) -> Grant:
        """Grant a lease, and say what the next lie makes of it. Asked again, say what is current (decision E2)."""
        held = next((grant for grant in self.grants if grant.request == request), None)
        if held is None and request.role is Role.PRODUCER:
            self.use(self.make_regions(self.epoch + 1))
            self.producer_id = request.client_id
        lease_id = next(_lease_ids) if held is None else held.lease_id
        fields: dict[str, Any] = {
            "correlation_id": request.correlation_id,
            "code": ResponseCode.OK,
            "lease_id": lease_id,
            "lease_expiry_timestamp_ns": None if self.lease_ns is None else self.now_ns() + self.lease_ns,
            "stream_id": self.stream_id,
            **self.regions.layout,
        }
        if isinstance(request, ExtendedAttachRequest):
            fields |= {"node_id": request.desired_node_id or next(_node_ids)}
            grant = Grant(lease_id, request, _built(ExtendedAttachResponse, fields | changed))
        else:
            grant = Grant(lease_id, request, _built(ShmAttachResponse, fields | {"max_dims": 8} | changed))
        if held is not None:
            self.send(grant.response)
            return held
        lie = self.lies.popleft() if self.lies else None
        if lie is None:
            self.grants.append(grant)
            self.send(grant.response)
        else:
            self.ended.append(grant)
            answers = lie(grant.response)
            for said in [answers] if isinstance(answers, (Message, bytes)) else answers:
                self.send(said)
        return grant

    def answer_held(self) -> None:
        """Answer what was held, and from now on everything."""
        self.answers = True
        while self.held:
            self.answer(self.held.popleft())

    def lie(self, **changed: Any) -> None:
        """The next answer is false in these fields."""
        self.lies.append(lambda honest: _built(type(honest), msgspec.structs.asdict(honest) | changed))

    def refuse(self, code: ResponseCode = ResponseCode.REJECTED, text: str = "no") -> None:
        """The next answer is a refusal."""
        self.lies.append(lambda honest: attach_refusal(Dialect.of(honest), honest.correlation_id, code, text))

    def grant_of(self, client_id: int) -> Grant:
        """The active lease of a client."""
        return next(grant for grant in reversed(self.grants) if grant.request.client_id == client_id)

    def _end(self, grant: Grant) -> None:
        with contextlib.suppress(ValueError):
            self.grants.remove(grant)
            self.ended.append(grant)

    def _on_detach(self, request: ShmDetachRequest) -> None:
        ours = [*self.grants, *self.ended]
        found = [grant for grant in ours if grant.lease_id == request.lease_id]
        if not found:
            return
        code = ResponseCode.OK if found[0] in self.grants else ResponseCode.REJECTED
        self.send(ShmDetachResponse(correlation_id=request.correlation_id, code=code))
        if code is ResponseCode.OK:
            self.revoke(found[0], LeaseRevokeReason.DETACHED)
            if request.role is Role.PRODUCER:
                self.producer_id = 0
                self.new_epoch()

    # --- frames

    def write(
        self,
        seq: int,
        array: NDArray[Any] | bytes,
        *,
        regions: Regions | None = None,
        slot: int | None = None,
        word: int | None = None,
        raw: Mapping[int, bytes] | None = None,
        **changed: Any,
    ) -> None:
        """A slot and its payload by the protocol: in-progress, payload, header, committed.

        `word` is the last commit word, `raw` are bytes of the header by their offset in the slot, and everything else
        is a field of the header, `dims` and `strides` included.
        """
        regions = regions or self.regions
        at = seq & (regions.nslots - 1) if slot is None else slot
        self.begin(seq, array, regions=regions, slot=at, raw=raw, **changed)
        data = array if isinstance(array, bytes) else array.tobytes("A")
        pool_id = regions.pool_for(len(data))
        regions.set_payload(pool_id, at, data[: regions.pools[pool_id]])
        regions.set_word(at, committed(seq) if word is None else word)

    def begin(
        self,
        seq: int,
        array: NDArray[Any] | bytes,
        *,
        regions: Regions | None = None,
        slot: int | None = None,
        raw: Mapping[int, bytes] | None = None,
        **changed: Any,
    ) -> None:
        """A slot in progress, its header already there and its payload not."""
        regions = regions or self.regions
        at = seq & (regions.nslots - 1) if slot is None else slot
        regions.set_word(at, in_progress(seq))
        nbytes = len(array) if isinstance(array, bytes) else array.nbytes
        places = {"pool_id": regions.pool_for(nbytes), "slot": at}
        regions.set_header(at, slot_image(array, raw=raw, **places | changed))

    def fill(self, seq: int, data: bytes, offset: int = 0, *, length: int | None = None) -> None:
        """Some of the payload of a frame of `length` bytes (its own by default) that was begun."""
        slot = seq & (self.nslots - 1)
        self.regions.set_payload(self.regions.pool_for(length or len(data)), slot, data, offset)

    def commit(self, seq: int) -> None:
        self.regions.set_word(seq & (self.nslots - 1), committed(seq))

    def publish(
        self,
        array: NDArray[Any] | bytes,
        *,
        seq: int | None = None,
        slot: Mapping[str, Any] | None = None,
        descriptor: Mapping[str, Any] | None = None,
        on: Endpoint | None = None,
    ) -> int:
        """Write a frame and describe it; `slot` and `descriptor` are what to lie about."""
        seq = self.next_seq if seq is None else seq
        self.next_seq = max(self.next_seq, seq + 1)
        self.write(seq, array, **slot or {})
        self.say(FrameDescriptor, on=on, **{"seq": seq} | dict(descriptor or {}))
        return seq

    # --- the thread

    def _act(self) -> None:
        if time.monotonic() >= self._next_announce_s:
            self._next_announce_s = time.monotonic() + ANNOUNCE_EVERY_S
            if self.breathes:
                self.regions.breathe(self.now_ns())
            if self.announces:
                self.say(ShmPoolAnnounce)
            if self.name is not None:
                self.say(DataSourceAnnounce, name=self.name)

    def _on_message(self, data: bytes, info: aeron.MessageInfo) -> None:
        message = decoded(data)
        is_request = isinstance(message, ShmAttachRequest | ExtendedAttachRequest)
        if is_request and message.stream_id == self.stream_id:
            self.mapped_at_attach.append(mapped_files(self.folder))
        super()._on_message(data, info)
        if is_request and message.stream_id == self.stream_id:
            if self.dialect not in (None, Dialect.of(message)):
                return
            if self.answers:
                self.answer(message)
            else:
                self.held.append(message)
        elif isinstance(message, ShmDetachRequest):
            self._on_detach(message)


def _is_connected(publication: aeron.Publication) -> bool:
    return publication.has_room


def _built[M: Message](kind: type[M], fields: dict[str, Any]) -> M:
    """A message; each schema has a type of its own for pools."""
    if "payload_pools" in fields:
        pool = PayloadPool if kind is ShmPoolAnnounce else driver.PayloadPool
        fields = fields | {
            "payload_pools": tuple(pool(**msgspec.structs.asdict(given)) for given in fields["payload_pools"])
        }
    return kind(**fields)
