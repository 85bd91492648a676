# SPDX-License-Identifier: Apache-2.0
"""A client of any SHM driver that knows nothing but the wire: the codec, Aeron, and the bytes it sends and hears.

It keeps a transcript of the control stream, in the order of the wire, with its own messages among the driver's.
Requests may be messages or bytes that no codec would write. Nothing runs in the background: leases in `kept` get
their keepalives while the client waits for something.
"""

from __future__ import annotations

import itertools
import secrets
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, NamedTuple, Self

import msgspec

from tensorpool.wire import Message
from tensorpool.wire.attach import AttachRequest
from tensorpool.wire.control import ConsumerConfig, ShmPoolAnnounce
from tensorpool.wire.driver import (
    ExtendedAttachRequest,
    ExtendedAttachResponse,
    HugepagesPolicy,
    PublishMode,
    ResponseCode,
    Role,
    ShmAttachRequest,
    ShmAttachResponse,
    ShmDetachRequest,
    ShmDetachResponse,
    ShmDriverShutdown,
    ShmDriverShutdownRequest,
    ShmLeaseKeepalive,
    ShmLeaseRevoked,
    ShutdownReason,
)
from tests.support.driver_process import Deployment, DriverProcess
from tests.support.listener import ReceivedMessage, Said, WireListener, encoded, has
from tests.support.processes import private_directory, wait_until

FROM_DRIVER: Final = (
    ShmAttachResponse,
    ExtendedAttachResponse,
    ShmDetachResponse,
    ShmLeaseRevoked,
    ShmDriverShutdown,
    ShmPoolAnnounce,
    ConsumerConfig,
)

_correlation_ids = itertools.count(secrets.randbits(62))
_client_ids = itertools.count(1_000_000 + secrets.randbits(24) * 64)


class Lease(NamedTuple):
    """What a client holds after an attach was granted."""

    client_id: int
    role: Role
    response: Any  # in either dialect
    sent_ns: int
    received: ReceivedMessage[Any]

    @property
    def lease_id(self) -> int:
        return int(self.response.lease_id)

    @property
    def stream_id(self) -> int:
        return int(self.response.stream_id)

    @property
    def epoch(self) -> int:
        return int(self.response.epoch)

    def keepalive(self, **changed: Any) -> ShmLeaseKeepalive:
        fields = self._names() | {"client_timestamp_ns": time.monotonic_ns()} | changed
        return ShmLeaseKeepalive(**fields)

    def detach(self, **changed: Any) -> ShmDetachRequest:
        return ShmDetachRequest(**{"correlation_id": next(_correlation_ids)} | self._names() | changed)

    def _names(self) -> dict[str, Any]:
        return {
            "lease_id": self.lease_id,
            "stream_id": self.stream_id,
            "client_id": self.client_id,
            "role": self.role,
        }


def new_client_id() -> int:
    """One that no other client of this run has."""
    return next(_client_ids)


def extended_request(stream_id: int, role: Role = Role.CONSUMER, **changed: Any) -> ExtendedAttachRequest:
    """The same in the dialect of other implementations."""
    fields = msgspec.structs.asdict(attach_request(stream_id, role))
    del fields["max_dims"]
    return ExtendedAttachRequest(**fields | changed)


def attach_request(stream_id: int, role: Role = Role.CONSUMER, **changed: Any) -> ShmAttachRequest:
    """An ordinary request, with what the test wants otherwise."""
    fields: dict[str, Any] = {
        "correlation_id": next(_correlation_ids),
        "stream_id": stream_id,
        "client_id": new_client_id(),
        "role": role,
        "expected_layout_version": 0,
        "max_dims": 0,
        "publish_mode": PublishMode.REQUIRE_EXISTING,
        "require_hugepages": HugepagesPolicy.UNSPECIFIED,
    }
    return ShmAttachRequest(**fields | changed)


def shutdown_request(token: str, reason: ShutdownReason = ShutdownReason.ADMIN, text: str = "") -> Message:
    return ShmDriverShutdownRequest(
        correlation_id=next(_correlation_ids), reason=reason, token=token, error_message=text
    )


def raw_attach(
    correlation_id: int,
    *,
    header: tuple[int, int, int, int] = (24, 1, 901, 1),
    stream_id: int = 1,
    client_id: int | None = None,
    role: int = 2,
    layout_version: int = 0,
    max_dims: int = 0,
    publish_mode: int = 255,
    hugepages: int = 0,
) -> bytes:
    """An attach request byte by byte, also with what no codec would write."""
    return struct.pack("<4H", *header) + struct.pack(
        "<q I I B I B B B",
        correlation_id,
        stream_id,
        new_client_id() if client_id is None else client_id,
        role,
        layout_version,
        max_dims,
        publish_mode,
        hugepages,
    )


def packed_text(text: str) -> bytes:
    """Var data: its length and its bytes."""
    return struct.pack("<I", len(text.encode())) + text.encode()


class DriverClient(WireListener):
    """One end of a deployment's control plane.

    >>> with DriverClient(deployment) as client:       # doctest: +SKIP
    ...     lease = client.attach(10_000, Role.PRODUCER)
    ...     client.wait_for(ShmPoolAnnounce, producer_id=lease.client_id)
    """

    def __init__(self, deployment: Deployment, *, driver_timeout_ms: int = 10_000) -> None:
        super().__init__(deployment.aeron_dir, driver_timeout_ms=driver_timeout_ms)
        self.kept: list[Lease] = []
        self._keepalive_every_ns = deployment.keepalive_interval_ns // 2
        self._next_keepalive_ns = 0
        self._publication = self._client.add_publication(*deployment.control)
        for endpoint in dict.fromkeys((deployment.control, deployment.announce)):
            self.listen(endpoint)
        wait_until(lambda: self._publication.has_room, "the control stream is connected")

    # --- sending

    def send(self, said: Said) -> int:
        """Put it on the control stream; the time before it was there."""
        data = encoded(said)
        sent_ns = time.monotonic_ns()
        wait_until(lambda: self._publication.offer(data), "the control stream takes a message")
        return sent_ns

    def attach(self, stream_id: int, role: Role = Role.CONSUMER, **changed: Any) -> Lease:
        """A lease; fails if the driver refuses."""
        return self.granted(attach_request(stream_id, role, **changed))

    def granted(self, request: AttachRequest) -> Lease:
        """The lease, of an answer in the dialect of the request."""
        sent_ns, since = self.send(request), len(self.transcript)
        kind: Any = ExtendedAttachResponse if isinstance(request, ExtendedAttachRequest) else ShmAttachResponse
        received: ReceivedMessage[Any] = self.wait_for(kind, since, correlation_id=request.correlation_id)
        assert received.message.code is ResponseCode.OK, received.message
        return Lease(request.client_id, request.role, received.message, sent_ns, received)

    def refused(self, request: AttachRequest | bytes, correlation_id: int | None = None) -> Any:
        """The refusal, in the dialect of the request; fails if the driver grants."""
        if not isinstance(request, bytes):
            correlation_id = request.correlation_id
        since = len(self.transcript)
        self.send(request)
        is_extended = encoded(request)[:2] == struct.pack("<H", ExtendedAttachRequest.BLOCK_LENGTH)
        kind: Any = ExtendedAttachResponse if is_extended else ShmAttachResponse
        response = self.wait_for(kind, since, correlation_id=correlation_id).message
        assert response.code is not ResponseCode.OK, response
        return response

    def detach(self, lease: Lease, **changed: Any) -> ReceivedMessage[ShmDetachResponse]:
        """The answer to a detach."""
        request = lease.detach(**changed)
        since = len(self.transcript)
        self.send(request)
        return self.wait_for(ShmDetachResponse, since, correlation_id=request.correlation_id)

    def fence(self) -> None:
        """Return when the driver has read everything that was sent: it has answered a request sent after it."""
        self.refused(attach_request(1, client_id=0))

    def forget(self) -> Self:
        """Begin the transcript anew: a subscription may first hear what was said shortly before it was there."""
        self.fence()
        self.transcript.clear()
        return self

    def meet(self, process: DriverProcess) -> Self:
        """Wait until the driver answers. Raises DriverEnded."""

        def ask() -> int:
            probe = attach_request(1, client_id=0)
            self.send(probe)
            return probe.correlation_id

        self.wait_served(process, ask, ShmAttachResponse, "correlation_id")
        return self.forget()

    # --- hearing

    def poll(self) -> None:
        """Take what has arrived; keep alive what is to be kept."""
        if self.kept and time.monotonic_ns() >= self._next_keepalive_ns:
            self._next_keepalive_ns = time.monotonic_ns() + self._keepalive_every_ns
            for lease in self.kept:
                self.send(lease.keepalive())
        super().poll()

    def from_driver(self, since: int = 0, **fields: Any) -> Iterator[ReceivedMessage[Any]]:
        """The driver's own messages with these fields, in the order of the wire."""
        for received in self.transcript[since:]:
            if isinstance(received.message, FROM_DRIVER) and has(received.message, fields):
                yield received

    def next_announce(self, stream_id: int, **fields: Any) -> ReceivedMessage[ShmPoolAnnounce]:
        """An announce that was not there before the call."""
        self.poll()
        return self.wait_for(ShmPoolAnnounce, len(self.transcript), stream_id=stream_id, **fields)

    def announce_after(self, stream_id: int, epoch: int) -> ReceivedMessage[ShmPoolAnnounce]:
        """The first announce of a higher epoch."""
        return self.wait_for(ShmPoolAnnounce, stream_id=stream_id, where=lambda it: it.epoch > epoch)


@contextmanager
def serving(deployment: Deployment) -> Iterator[None]:
    """A driver that serves, and still does at the end."""
    with deployment.start() as process:
        with DriverClient(deployment) as client:
            client.meet(process)
        yield
        assert not process.has_ended, process.finish()


@contextmanager
def deployed(aeron_dir: str, **tables: Any) -> Iterator[Deployment]:
    """A deployment in a directory of its own, with a driver that serves."""
    with private_directory() as folder:
        deployment = Deployment(folder, aeron_dir, **tables)
        with serving(deployment):
            yield deployment
