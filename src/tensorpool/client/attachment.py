# SPDX-License-Identifier: Apache-2.0
"""A lease from the client's side: ask, keep alive, notice its loss, ask again.

    UNATTACHED ──start──► ATTACHING ──OK──► ATTACHED ──detach──► DETACHING ──► CLOSED
        ▲                  │     ▲            │                      ▲           ▲
        │         refused  │     │ time       │ revoked, expired,    │ late OK   │ refused
        │                  ▼     │            ▼ driver gone          │           │
        └── link lost ──  BACKOFF ◄───────────┘     ATTACHING ──detach──► ABANDONED

    the driver shuts down: any ──► UNATTACHED, or CLOSED where the lease was being given back
One request at a time, repeated under the same ids until it is answered: the driver may take long to make the memory,
and an identical request gets the same lease. It has no end of its own; a caller may abandon it, and then a lease that
is granted late is given back at once.

Holds no clock and does no IO: methods take `now_ns` and return effects. The lease's own deadline slides with every
keepalive that was sent, never with one that was not (E4, E7); what comes too late fails closed.
Driver Model §4.2, §4.4, §4.7-§4.9, §4.12, §4.13, §10; decisions E1-E4, E7, E8, E18, E42-E44.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, StrEnum, auto
from typing import Final

import msgspec

from tensorpool.errors import RegionRejected
from tensorpool.wire import Message
from tensorpool.wire.control import ShmPoolAnnounce
from tensorpool.wire.driver import (
    HugepagesPolicy,
    LeaseRevokeReason,
    PublishMode,
    ResponseCode,
    Role,
    ShmAttachRequest,
    ShmAttachResponse,
    ShmDetachRequest,
    ShmDetachResponse,
    ShmLeaseKeepalive,
    ShmLeaseRevoked,
)
from tensorpool.wire.region_uri import RegionUri

MS: Final = 1_000_000
FIRST_RETRY_NS: Final = 100 * MS
LONGEST_RETRY_NS: Final = 5_000 * MS
LONGEST_REPEAT_NS: Final = 1_000 * MS  # between identical requests: a driver that starts later hears one soon (E2)
MAKING_FRESH_NS: Final = 10_000 * MS  # a driver that makes memory says so every second, on a busy machine later
DETACH_NS: Final = 1_000 * MS
LOST_RETRY_NS: Final = 10 * MS  # after a loss the first attempt comes soon
HEADER_SLOT_BYTES: Final = 256
MAX_DIMS: Final = 8


class Phase(Enum):
    """Where an attachment stands."""

    UNATTACHED = auto()
    ATTACHING = auto()
    ABANDONED = auto()
    ATTACHED = auto()
    DETACHING = auto()
    BACKOFF = auto()
    CLOSED = auto()


class LossReason(StrEnum):
    """Why a lease is gone."""

    EXPIRED = "EXPIRED"
    REVOKED = "REVOKED"
    DETACHED = "DETACHED"
    DRIVER_GONE = "DRIVER_GONE"
    PROTOCOL_ERROR = "PROTOCOL_ERROR"


class Wish(msgspec.Struct, frozen=True):
    """What is asked of the driver."""

    stream_id: int
    role: Role
    create: bool = False
    hugepages: HugepagesPolicy = HugepagesPolicy.UNSPECIFIED
    expected_layout_version: int = 0


class Making(msgspec.Struct, frozen=True):
    """What the driver reported of a request: how much memory it makes for it, since when, and when it said so."""

    size_bytes: int
    elapsed_ns: int
    heard_ns: int


class Send(msgspec.Struct, frozen=True):
    """Offer on the control stream; a request that did not get through is sent again by its timer."""

    message: Message


class Attached(msgspec.Struct, frozen=True):
    """A lease, with all that an OK must carry."""

    response: ShmAttachResponse


class Refused(msgspec.Struct, frozen=True):
    """The driver's no. The attachment asks again after a while unless it is closed."""

    code: ResponseCode
    words: str


class Lost(msgspec.Struct, frozen=True):
    """Stop using the memory of this lease, now."""

    reason: LossReason
    words: str


class Detached(msgspec.Struct, frozen=True):
    """The lease was given back, or nobody was there to take it."""


type Effect = Send | Attached | Refused | Lost | Detached

_LOSS: Final = {
    LeaseRevokeReason.DETACHED: LossReason.DETACHED,
    LeaseRevokeReason.EXPIRED: LossReason.EXPIRED,
    LeaseRevokeReason.REVOKED: LossReason.REVOKED,
}


class Attachment:
    """One lease at a time for one stream and role.

    `new_client_id` gives a fresh id for every request that repeats none: an earlier lease of ours that the driver still
    counts must not stand in the way (E1). `new_correlation_id` counts up from a random start (E3). `lease_ns` is
    how long the driver keeps a lease that is not renewed: pauses after refusals grow beyond it (E2).
    """

    def __init__(
        self,
        wish: Wish,
        *,
        new_client_id: Callable[[], int],
        new_correlation_id: Callable[[], int],
        keepalive_interval_ns: int,
        silence_ns: int,
        lease_ns: int = 0,
    ) -> None:
        self.wish = wish
        self.phase = Phase.UNATTACHED
        self.response: ShmAttachResponse | None = None
        self.client_id = 0
        self.making: Making | None = None  # while it waits for an answer
        self._asked: Wish | None = None  # what the driver has not answered yet
        self._asked_ns = 0
        self._longest_pause_ns = max(LONGEST_RETRY_NS, lease_ns * 5 // 4)
        self._new_client_id = new_client_id
        self._new_correlation_id = new_correlation_id
        self._keepalive_interval_ns = keepalive_interval_ns
        self._silence_ns = silence_ns  # without a fresh announce for so long the driver counts as gone (E42)
        self._correlation_id = 0
        self._next_ns = 0
        self._deadline_ns = 0
        self._retry_ns = FIRST_RETRY_NS
        self._backoff_ns = FIRST_RETRY_NS
        self._duration_ns: int | None = None
        self._unsent_since_ns: int | None = None
        self._heard_ns = 0
        self._attached_ns = 0
        self._is_asking_again = False

    @property
    def lease_id(self) -> int | None:
        return self.response.lease_id if self.response is not None else None

    @property
    def stream_id(self) -> int:
        """The stream that was asked for, or the one that the driver chose."""
        response = self.response
        return response.stream_id if response is not None and response.stream_id is not None else self.wish.stream_id

    @property
    def is_attached(self) -> bool:
        return self.phase is Phase.ATTACHED

    @property
    def deadline_ns(self) -> int:
        """When the lease ends unless a keepalive is sent before."""
        return 2**63 - 1 if self._duration_ns is None else self._deadline_ns

    @property
    def next_ns(self) -> int:
        """Nothing is due before."""
        return 2**63 if self.phase in (Phase.ABANDONED, Phase.CLOSED) else self._next_ns

    # --- what the owner wants

    def start(self, now_ns: int) -> list[Effect]:
        """Ask, unless a request is under way or the lease is there. What was asked and not answered is repeated."""
        if self.phase not in (Phase.UNATTACHED, Phase.BACKOFF):
            return []
        if self._asked != self.wish:
            self.client_id = self._new_client_id()
            self._correlation_id = self._new_correlation_id()
            self._asked, self._asked_ns = self.wish, now_ns
        self.phase = Phase.ATTACHING
        self._retry_ns = FIRST_RETRY_NS
        return self._ask(now_ns)

    def resume(self, abandoned: Attachment) -> None:
        """Go on with a request that its caller gave up, before anything else was asked (§4.8)."""
        self.client_id, self._correlation_id = abandoned.client_id, abandoned._correlation_id
        self._asked, self._asked_ns, self.making = self.wish, abandoned._asked_ns, abandoned.making

    def detach(self, now_ns: int) -> list[Effect]:
        """Give the lease back for good, or give up a request: what is granted late is given back then (E18)."""
        if self.phase is Phase.ATTACHED:
            self.phase = Phase.DETACHING
            self._correlation_id = self._new_correlation_id()
            self._deadline_ns = now_ns + DETACH_NS
            self._retry_ns = FIRST_RETRY_NS
            self._next_ns = now_ns + self._retry_ns
            return [Send(self._detach_request())]
        if self.phase in (Phase.DETACHING, Phase.ABANDONED, Phase.CLOSED):
            return []
        self.phase = Phase.CLOSED if self._asked is None else Phase.ABANDONED
        return [Detached()]

    def request(self) -> ShmAttachRequest:
        """What was asked for."""
        wish = self.wish
        return ShmAttachRequest(
            correlation_id=self._correlation_id,
            stream_id=wish.stream_id,
            client_id=self.client_id,
            role=wish.role,
            expected_layout_version=wish.expected_layout_version,
            max_dims=0,
            publish_mode=PublishMode.EXISTING_OR_CREATE if wish.create else PublishMode.REQUIRE_EXISTING,
            require_hugepages=wish.hugepages,
        )

    def ask_again(self) -> ShmAttachRequest:
        """The request, to be sent while the lease is held: the driver answers what is current (E2, E40, K1)."""
        self._is_asking_again = True
        return self.request()

    def is_answered_again(self, response: ShmAttachResponse) -> bool:
        """Whether a usable answer about the lease that we hold came once more, perhaps with a later epoch (E2)."""
        if not self.is_attached or response.correlation_id != self._correlation_id:
            return False
        if response.code is not ResponseCode.OK or response.lease_id != self.lease_id:
            return False
        return _flaw_in(response, self.stream_id) is None

    # --- what the driver says

    def is_asking_since(self, since_ns: int) -> bool:
        """Whether a request has been without an answer since then, or longer."""
        return self.phase is Phase.ATTACHING and self._asked_ns <= since_ns

    def is_about(self, correlation_id: int) -> bool:
        """Whether a report of that correlation id is about our request."""
        return self.phase is Phase.ATTACHING and correlation_id == self._correlation_id

    def on_making(self, size_bytes: int, elapsed_ns: int, now_ns: int) -> None:
        """The driver works on our request."""
        self.making = Making(size_bytes, elapsed_ns, now_ns)

    def is_being_made(self, now_ns: int) -> bool:
        """Whether the driver reported so a moment ago."""
        making = self.making
        return making is not None and now_ns - making.heard_ns <= MAKING_FRESH_NS

    def on_attach_response(self, response: ShmAttachResponse, now_ns: int, wall_ns: int) -> list[Effect]:
        """E3: only the answer to the pending request counts. The expiry is by either clock (C8): the nearer one."""
        if self.phase is Phase.ATTACHED and response.correlation_id == self._correlation_id:
            return self._on_other_lease(response, now_ns)
        if self.phase not in (Phase.ATTACHING, Phase.ABANDONED) or response.correlation_id != self._correlation_id:
            return []
        if self.wish.stream_id and response.stream_id not in (None, self.wish.stream_id):
            return []  # E3: somebody else chose the same number
        self._asked = self.making = None
        if self.phase is Phase.ABANDONED:
            if response.code is not ResponseCode.OK or response.lease_id is None:
                return self._closed()
            self.response, self.phase = response, Phase.ATTACHED
            return self.detach(now_ns)
        if response.code is not ResponseCode.OK:
            self._back_off(now_ns)
            return [Refused(response.code, response.error_message)]
        flaw = _flaw_in(response, self.wish.stream_id)
        if flaw is not None:
            effects: list[Effect] = []
            if response.lease_id is not None:  # E18: free it, else it blocks the next attempt
                self.response = response
                effects.append(Send(self._detach_request()))
                self.response = None
            self._back_off(now_ns)
            words = f"the attach response is unusable: {flaw}; bring driver and client to one version"
            return [*effects, Lost(LossReason.PROTOCOL_ERROR, words)]
        self.response = response
        self.phase = Phase.ATTACHED
        expiry_ns = response.lease_expiry_timestamp_ns
        self._duration_ns = None if expiry_ns is None else min(expiry_ns - now_ns, expiry_ns - wall_ns, key=abs)
        self._deadline_ns = now_ns + (self._duration_ns or 0)
        self._unsent_since_ns = None
        self._attached_ns = now_ns
        self._heard_ns = now_ns
        self._is_asking_again = False
        self._next_ns = now_ns  # the first keepalive goes at once: the grant itself took time
        return [Attached(response)]

    def on_detach_response(self, response: ShmDetachResponse) -> list[Effect]:
        """Whatever the code is: an unknown lease is as gone as one that was given back (E11)."""
        if self.phase is not Phase.DETACHING or response.correlation_id != self._correlation_id:
            return []
        return self._closed()

    def on_revoked(self, notice: ShmLeaseRevoked, now_ns: int) -> list[Effect]:
        """§4.9, for our own lease; E8: during a detach it is the confirmation."""
        if self.lease_id is None or notice.lease_id != self.lease_id:
            return []
        if (notice.stream_id, notice.client_id, notice.role) != (self.stream_id, self.client_id, self.wish.role):
            return []
        if self.phase is Phase.DETACHING:
            return self._closed()
        if self.phase is not Phase.ATTACHED:
            return []
        return self._lose(_LOSS[notice.reason], notice.error_message or "the driver ended the lease", now_ns)

    def on_announce(self, announce: ShmPoolAnnounce, now_ns: int) -> list[Effect]:
        """A fresh announce of our stream: the driver lives. E44: a producer also sees who it names."""
        if self.phase is not Phase.ATTACHED or announce.stream_id != self.stream_id:
            return []
        self._heard_ns = now_ns
        if self.wish.role is Role.PRODUCER:
            epoch = (self.response and self.response.epoch) or 0
            if announce.epoch > epoch:
                words = f"the driver announced epoch {announce.epoch}, ours is {epoch}"
                return self._lose(LossReason.REVOKED, words, now_ns)
            if announce.epoch == epoch and announce.producer_id != self.client_id:
                words = f"the driver announced client {announce.producer_id} as the producer of our epoch"
                return self._lose(LossReason.REVOKED, words, now_ns)
        return []

    def on_mapping_failed(self, now_ns: int) -> list[Effect]:
        """The memory of the lease cannot be used: give it back, and ask again after a while (E18)."""
        if self.phase is not Phase.ATTACHED:
            return []
        request = self._detach_request()
        self.response = None
        self._back_off(now_ns)
        return [Send(request)]

    def on_driver_shutdown(self, words: str, now_ns: int) -> list[Effect]:
        """§4.12, §4.13: every lease is invalid at once, and a request dies with the driver. What follows is new."""
        if self.phase in (Phase.DETACHING, Phase.ABANDONED):
            return self._closed()
        if self.phase is Phase.CLOSED:
            return []
        effects: list[Effect] = []
        if self.phase is Phase.ATTACHED:
            effects = self._lose(LossReason.DRIVER_GONE, words or "the driver shut down", now_ns)
        elif self.phase is Phase.ATTACHING:
            self._back_off(now_ns)
        self.phase = Phase.UNATTACHED
        self._asked = self.making = None
        return effects

    def on_link_lost(self, words: str) -> list[Effect]:
        """The media driver is gone, and every message with it. Start again once there is a link."""
        if self.phase is Phase.DETACHING:
            return self._closed()
        was_attached = self.phase is Phase.ATTACHED
        if self.phase not in (Phase.ABANDONED, Phase.CLOSED):
            self.phase = Phase.UNATTACHED
            self.response = None
            self._next_ns = 0
        return [Lost(LossReason.DRIVER_GONE, words)] if was_attached else []

    # --- time

    def on_tick(self, now_ns: int) -> list[Effect]:
        """What is due, except keepalives."""
        if self.phase is Phase.ATTACHED:
            return self._check_lease(now_ns)
        if self.phase is Phase.UNATTACHED or now_ns < self.next_ns:
            return []  # the owner knows whether there is anything to ask for
        if self.phase is Phase.BACKOFF:
            return self.start(now_ns)
        if self.phase is Phase.ATTACHING:
            return self._ask(now_ns)
        if now_ns >= self._deadline_ns:
            return self._closed()
        self._retry_ns = min(2 * self._retry_ns, LONGEST_RETRY_NS)
        self._next_ns = now_ns + self._retry_ns
        return [Send(self._detach_request())]

    def keepalive(self, now_ns: int, stamp_ns: int) -> ShmLeaseKeepalive | None:
        """The keepalive that is due now. Tell `on_keepalive_sent` or `on_keepalive_failed` what became of it.

        `stamp_ns` is the time by the clock of the driver's announces (C8).
        """
        if self.phase is not Phase.ATTACHED or now_ns < self._next_ns:
            return None
        return ShmLeaseKeepalive(
            lease_id=self._held_lease,
            stream_id=self.stream_id,
            client_id=self.client_id,
            role=self.wish.role,
            client_timestamp_ns=stamp_ns,
        )

    def on_keepalive_sent(self, now_ns: int) -> None:
        self._unsent_since_ns = None
        interval_ns = self._keepalive_interval_ns
        if self._duration_ns is not None:
            interval_ns = min(interval_ns, self._duration_ns // 3)  # §4.4: before the deadline, whatever is configured
            self._deadline_ns = now_ns + self._duration_ns
        self._next_ns = now_ns + interval_ns

    def on_keepalive_failed(self, is_connected: bool, now_ns: int) -> list[Effect]:
        """E7: back pressure passes; nobody listening for more than an interval means that the driver is gone."""
        if is_connected:
            self._unsent_since_ns = None
            return []
        if self._unsent_since_ns is None:
            self._unsent_since_ns = now_ns
        if now_ns - self._unsent_since_ns <= self._keepalive_interval_ns:
            return []
        return self._lose(LossReason.DRIVER_GONE, "nobody listens on the control stream", now_ns)

    # --- inside

    def _on_other_lease(self, response: ShmAttachResponse, now_ns: int) -> list[Effect]:
        """E40: a driver that answers our question with a lease of another id does not know the one that we hold."""
        was_asking, self._is_asking_again = self._is_asking_again, False
        other = response.lease_id
        if not was_asking or response.code is not ResponseCode.OK or other in (None, self.lease_id):
            return []
        self.response = response
        give_back = Send(self._detach_request())
        return [*self._lose(LossReason.DRIVER_GONE, "the driver does not know the lease", now_ns), give_back]

    def _check_lease(self, now_ns: int) -> list[Effect]:
        if self._duration_ns is not None and now_ns >= self._deadline_ns:
            return self._lose(LossReason.EXPIRED, "no keepalive could be sent in time", now_ns)
        if now_ns - self._heard_ns > self._silence_ns:
            return self._lose(LossReason.DRIVER_GONE, "the driver announces the stream no more", now_ns)
        return []

    def _lose(self, reason: LossReason, words: str, now_ns: int) -> list[Effect]:
        self.response = None
        if now_ns - self._attached_ns < self._keepalive_interval_ns:
            self._back_off(now_ns)  # a lease that does not last is not asked for in a tight loop
        else:
            self.phase = Phase.BACKOFF
            self._next_ns = now_ns + LOST_RETRY_NS
            self._backoff_ns = FIRST_RETRY_NS
        return [Lost(reason, words)]

    def _closed(self) -> list[Effect]:
        self.phase = Phase.CLOSED
        self.response = self._asked = None
        return [Detached()]

    def _back_off(self, now_ns: int) -> None:
        self.phase = Phase.BACKOFF
        self._next_ns = now_ns + self._backoff_ns
        self._backoff_ns = min(2 * self._backoff_ns, self._longest_pause_ns)

    def _ask(self, now_ns: int) -> list[Effect]:
        self._next_ns = now_ns + self._retry_ns
        self._retry_ns = min(2 * self._retry_ns, LONGEST_REPEAT_NS)
        return [Send(self.request())]

    @property
    def _held_lease(self) -> int:
        lease_id = self.lease_id
        assert lease_id is not None, "an OK without a lease id was refused"
        return lease_id

    def _detach_request(self) -> ShmDetachRequest:
        return ShmDetachRequest(
            correlation_id=self._correlation_id,
            lease_id=self._held_lease,
            stream_id=self.stream_id,
            client_id=self.client_id,
            role=self.wish.role,
        )


def _flaw_in(response: ShmAttachResponse, wanted_stream_id: int) -> str | None:
    """§4.2: what an OK must carry; None when it does."""
    required = ("lease_id", "stream_id", "epoch", "layout_version", "header_nslots", "header_slot_bytes", "max_dims")
    missing = [name for name in required if getattr(response, name) is None]
    if missing:
        return f"{', '.join(missing)} missing"
    if wanted_stream_id and response.stream_id != wanted_stream_id:
        return f"it is for stream {response.stream_id}, not {wanted_stream_id}"
    if response.header_slot_bytes != HEADER_SLOT_BYTES:
        return f"header_slot_bytes: expected {HEADER_SLOT_BYTES}, found {response.header_slot_bytes}"
    if response.max_dims != MAX_DIMS:
        return f"max_dims: expected {MAX_DIMS}, found {response.max_dims}"
    if not response.payload_pools:
        return "there is no payload pool"
    for pool in response.payload_pools:
        if pool.pool_nslots != response.header_nslots:
            return (
                f"pool {pool.pool_id}: nslots: expected the ring's {response.header_nslots}, found {pool.pool_nslots}"
            )
    for uri in (response.header_region_uri, *(pool.region_uri for pool in response.payload_pools)):
        if not uri.strip():
            return "a region URI is empty"
        try:
            RegionUri.parse(uri)
        except RegionRejected as rejected:
            return str(rejected)
    return None
