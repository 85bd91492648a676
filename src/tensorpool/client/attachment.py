# SPDX-License-Identifier: Apache-2.0
"""A lease from the client's side: ask, keep alive, notice its loss, ask again.

The phases and what changes them are the table of `attachment_phases`, which docs/protocol/sequences.md draws.

One request at a time, repeated under the same ids until it is answered: the driver may take long to make the memory,
and an identical request gets the same lease. It has no end of its own; a caller may abandon it, and then a lease that
is granted late is given back at once. Where a driver does not answer, it is asked in the other dialect (K9).

Holds no clock and does no IO: methods take `now_ns` and return effects. The lease's own deadline slides with every
keepalive that was sent, never with one that was not (E4, E7); what comes too late fails closed.
Driver Model §4.2, §4.4, §4.7-§4.9, §4.12, §4.13, §10; decisions E1-E4, E7, E8, E18, E42-E44, K9.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import Any, ClassVar, Final

import msgspec

from tensorpool.client.attach_dialects import AttachDialects
from tensorpool.client.attachment_phases import TRANSITIONS, Event, Phase
from tensorpool.client.trace_ids import derived_node_id
from tensorpool.shm.announced import flaw_in
from tensorpool.wire import Message
from tensorpool.wire.attach import AttachRequest, AttachResponse, Dialect
from tensorpool.wire.control import ShmPoolAnnounce
from tensorpool.wire.driver import (
    ExtendedAttachRequest,
    ExtendedAttachResponse,
    HugepagesPolicy,
    LeaseRevokeReason,
    PublishMode,
    ResponseCode,
    Role,
    ShmAttachRequest,
    ShmDetachRequest,
    ShmDetachResponse,
    ShmLeaseKeepalive,
    ShmLeaseRevoked,
)

MS: Final = 1_000_000
FIRST_RETRY_NS: Final = 100 * MS
LONGEST_RETRY_NS: Final = 5_000 * MS
LONGEST_REPEAT_NS: Final = 1_000 * MS  # between identical requests: a driver that starts later hears one soon (E2)
REPORT_FRESH_NS: Final = 10_000 * MS  # a driver that makes memory says so every second, on a busy machine later
DETACH_NS: Final = 1_000 * MS
MOST_EARLIER: Final = 4  # requests in the other dialect that may be answered yet
LOST_RETRY_NS: Final = 10 * MS  # after a loss the first attempt comes soon


class LossReason(StrEnum):
    """Why a lease is gone."""

    EXPIRED = "EXPIRED"
    REVOKED = "REVOKED"
    DETACHED = "DETACHED"
    DRIVER_GONE = "DRIVER_GONE"
    PROTOCOL_ERROR = "PROTOCOL_ERROR"


class AttachSpec(msgspec.Struct, frozen=True):
    """What is asked of the driver."""

    stream_id: int
    role: Role
    create: bool = False
    hugepages: HugepagesPolicy = HugepagesPolicy.UNSPECIFIED
    expected_layout_version: int = 0


class SentRequest(msgspec.Struct, frozen=True):
    """How a request was sent, and under which ids."""

    dialect: Dialect
    client_id: int
    correlation_id: int


class CreationReport(msgspec.Struct, frozen=True):
    """What the driver reported of a request: how much memory it makes for it, since when, and when it said so."""

    size_bytes: int
    elapsed_ns: int
    heard_ns: int


class Send(msgspec.Struct, frozen=True):
    """Offer on the control stream; a request that did not get through is sent again by its timer."""

    message: Message


class Attached(msgspec.Struct, frozen=True):
    """A lease, with all that an OK must carry."""

    response: AttachResponse


class Refused(msgspec.Struct, frozen=True):
    """The driver's no. The attachment asks again after a while unless it is closed."""

    code: ResponseCode
    words: str


class Lost(msgspec.Struct, frozen=True):
    """Stop using the memory of this lease, now."""

    reason: LossReason
    words: str


class Detached(msgspec.Struct, frozen=True):
    """The lease was given back, or there was no driver to take it."""


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

    transitions: ClassVar = TRANSITIONS

    def __init__(
        self,
        spec: AttachSpec,
        *,
        new_client_id: Callable[[], int],
        new_correlation_id: Callable[[], int],
        keepalive_interval_ns: int,
        silence_ns: int,
        lease_ns: int = 0,
        dialects: AttachDialects | None = None,
    ) -> None:
        self.spec = spec
        self.phase = Phase.UNATTACHED
        self.response: AttachResponse | None = None
        self.client_id = 0
        self.granted_node_id: int | None = None  # the last one that the driver gave
        self._node_id_wish: int | None = None
        self._dialects = dialects or AttachDialects()
        self.dialect = self._dialects.first
        self._earlier: dict[int, SentRequest] = {}  # in the other dialect, by correlation id: may be answered yet
        self.creation: CreationReport | None = None  # while it waits for an answer
        self._asked: AttachSpec | None = None  # what the driver has not answered yet
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
        return response.stream_id if response is not None and response.stream_id is not None else self.spec.stream_id

    @property
    def node_id(self) -> int:
        """Who makes the trace ids: what the driver gave, or else some bits of the client id (K9)."""
        return derived_node_id(self.client_id) if self.granted_node_id is None else self.granted_node_id

    @property
    def is_node_id_derived(self) -> bool:
        """Whether another client may have the same node id: trace ids are marked so."""
        return self.granted_node_id is None

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
        if not self._may(Event.START):
            return []
        if self._asked != self.spec:
            self._renew_request(self._dialects.first, now_ns)
        self._go(Event.START)
        self._retry_ns = FIRST_RETRY_NS
        return self._ask(now_ns)

    def resume(self, abandoned: Attachment) -> None:
        """Go on with a request that its caller gave up, before anything else was asked (§4.8)."""
        self.client_id, self._correlation_id = abandoned.client_id, abandoned._correlation_id
        self.dialect, self._earlier = abandoned.dialect, abandoned._earlier
        self._asked, self._asked_ns, self.creation = self.spec, abandoned._asked_ns, abandoned.creation

    def detach(self, now_ns: int) -> list[Effect]:
        """Give the lease back for good, or give up a request: what is granted late is given back then (E18)."""
        event = Event.DETACH if self._asked is None else Event.ABANDON
        if not self._may(event):
            return []
        self._go(event)
        return self._give_back(now_ns) if self.phase is Phase.DETACHING else [Detached()]

    def request(self) -> AttachRequest:
        """What was asked for."""
        spec = self.spec
        fields: dict[str, Any] = {
            "correlation_id": self._correlation_id,
            "stream_id": spec.stream_id,
            "client_id": self.client_id,
            "role": spec.role,
            "expected_layout_version": spec.expected_layout_version,
            "publish_mode": PublishMode.EXISTING_OR_CREATE if spec.create else PublishMode.REQUIRE_EXISTING,
            "require_hugepages": spec.hugepages,
        }
        if self.dialect is Dialect.JANUARY_2026:
            return ExtendedAttachRequest(**fields, desired_node_id=self._node_id_wish)
        return ShmAttachRequest(**fields, max_dims=0)

    def ask_again(self) -> AttachRequest:
        """The request, to be sent while the lease is held: the driver answers what is current (E2, E40, K1)."""
        self._is_asking_again = True
        return self.request()

    def is_answered_again(self, response: AttachResponse) -> bool:
        """Whether a usable answer about the lease that we hold came once more, perhaps with a later epoch (E2)."""
        if not self.is_attached or response.correlation_id != self._correlation_id:
            return False
        if response.code is not ResponseCode.OK or response.lease_id != self.lease_id:
            return False
        return flaw_in(response, self.stream_id) is None

    # --- what the driver says

    def is_asking_since(self, since_ns: int) -> bool:
        """Whether a request has been without an answer since then, or longer."""
        return self.phase is Phase.ATTACHING and self._asked_ns <= since_ns

    def is_about(self, correlation_id: int) -> bool:
        """Whether a report of that correlation id is about our request."""
        return self.phase is Phase.ATTACHING and correlation_id == self._correlation_id

    def on_creation_report(self, size_bytes: int, elapsed_ns: int, now_ns: int) -> None:
        """The driver works on our request."""
        self.creation = CreationReport(size_bytes, elapsed_ns, now_ns)

    def is_creating(self, now_ns: int) -> bool:
        """Whether the driver reported so a moment ago."""
        creation = self.creation
        return creation is not None and now_ns - creation.heard_ns <= REPORT_FRESH_NS

    def on_attach_response(self, response: AttachResponse, now_ns: int, wall_ns: int) -> list[Effect]:
        """E3: only the answer to the pending request counts. The expiry is by either clock (C8): the nearer one."""
        if response.correlation_id in self._earlier and not self._take_up(response.correlation_id):
            return self._refuse_second(self._earlier.pop(response.correlation_id), response)
        if self.phase is Phase.ATTACHED and response.correlation_id == self._correlation_id:
            return self._on_other_lease(response, now_ns)
        if self.phase not in (Phase.ATTACHING, Phase.ABANDONED) or response.correlation_id != self._correlation_id:
            return []
        if self.spec.stream_id and response.stream_id not in (None, self.spec.stream_id):
            return []  # E3: another client chose the same number
        self._asked = self.creation = None
        if response.code not in (ResponseCode.INVALID_PARAMS, ResponseCode.UNSUPPORTED):
            self._dialects.on_answer(self.dialect)
        if self.phase is Phase.ABANDONED:
            if response.code is not ResponseCode.OK or response.lease_id is None:
                return self._close(Event.REFUSAL)
            self.response = response
            self._go(Event.GRANT)
            return self._give_back(now_ns)
        if response.code is not ResponseCode.OK:
            self._node_id_wish = None  # another client may have it: that is one of the reasons for a refusal
            self._back_off(Event.REFUSAL, now_ns)
            return [Refused(response.code, response.error_message)]
        flaw = flaw_in(response, self.spec.stream_id)
        if flaw is not None:
            effects: list[Effect] = []
            if response.lease_id is not None:  # E18: free it, else it blocks the next attempt
                self.response = response
                effects.append(Send(self._detach_request()))
                self.response = None
            return [*effects, *self._on_unusable(flaw, now_ns)]
        self.response = response
        self.granted_node_id = self._node_id_wish = _node_id_of(response)
        self._go(Event.GRANT)
        expiry_ns = response.lease_expiry_timestamp_ns
        self._duration_ns = None if expiry_ns is None else min(expiry_ns - now_ns, expiry_ns - wall_ns, key=abs)
        self._deadline_ns = now_ns + (self._duration_ns or 0)
        self._unsent_since_ns = None
        self._attached_ns = now_ns
        self._heard_ns = now_ns
        self._is_asking_again = False
        self._next_ns = now_ns  # the first keepalive goes at once: the grant itself took time
        return [Attached(response)]

    def on_unreadable_response(self, correlation_id: int, error: str, now_ns: int) -> list[Effect]:
        """The answer to our request has a layout that we do not know, or is malformed (K9)."""
        if self.phase is not Phase.ATTACHING or correlation_id not in (self._correlation_id, *self._earlier):
            return []
        self._asked = self.creation = None
        return self._on_unusable(error, now_ns)

    def on_detach_response(self, response: ShmDetachResponse) -> list[Effect]:
        """Whatever the code is: an unknown lease is as gone as one that was given back (E11)."""
        if self.phase is not Phase.DETACHING or response.correlation_id != self._correlation_id:
            return []
        return self._close(Event.RELEASE)

    def on_revoked(self, notice: ShmLeaseRevoked, now_ns: int) -> list[Effect]:
        """§4.9, for our own lease; E8: during a detach it is the confirmation."""
        if self.lease_id is None or notice.lease_id != self.lease_id:
            return []
        if (notice.stream_id, notice.client_id, notice.role) != (self.stream_id, self.client_id, self.spec.role):
            return []
        if self.phase is Phase.DETACHING:
            return self._close(Event.RELEASE)
        if self.phase is not Phase.ATTACHED:
            return []
        return self._lose(_LOSS[notice.reason], notice.error_message or "the driver ended the lease", now_ns)

    def on_announce(self, announce: ShmPoolAnnounce, now_ns: int) -> list[Effect]:
        """A fresh announce of our stream: the driver lives. E44: a producer also sees who it names."""
        if self.phase is not Phase.ATTACHED or announce.stream_id != self.stream_id:
            return []
        self._heard_ns = now_ns
        if self.spec.role is Role.PRODUCER:
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
        self._back_off(Event.LOSS, now_ns)
        return [Send(request)]

    def on_driver_shutdown(self, words: str, now_ns: int) -> list[Effect]:
        """§4.12, §4.13: every lease is invalid at once, and a request dies with the driver. What follows is new."""
        if self.phase in (Phase.DETACHING, Phase.ABANDONED):
            return self._close(Event.SHUTDOWN)
        if not self._may(Event.SHUTDOWN):
            return []
        effects: list[Effect] = []
        if self.phase is Phase.ATTACHED:
            effects = self._lose(LossReason.DRIVER_GONE, words or "the driver shut down", now_ns, Event.SHUTDOWN)
        elif self.phase is Phase.ATTACHING:
            self._back_off(Event.SHUTDOWN, now_ns)
        else:
            self._go(Event.SHUTDOWN)
        self._asked = self.creation = None
        return effects

    def on_connection_lost(self, words: str) -> list[Effect]:
        """The media driver is gone, and every message with it. Start again once connected."""
        if self.phase is Phase.DETACHING:
            return self._close(Event.DISCONNECTION)
        was_attached = self.phase is Phase.ATTACHED
        if self._may(Event.DISCONNECTION):
            self._go(Event.DISCONNECTION)
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
            if not self.is_creating(now_ns) and self._dialects.is_to_change(self._asked_ns, now_ns):
                self._change_dialect(now_ns)
            return self._ask(now_ns)
        if now_ns >= self._deadline_ns:
            return self._close(Event.RELEASE)
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
            role=self.spec.role,
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
        """E7: back pressure passes; no subscriber for more than an interval means that the driver is gone."""
        if is_connected:
            self._unsent_since_ns = None
            return []
        if self._unsent_since_ns is None:
            self._unsent_since_ns = now_ns
        if now_ns - self._unsent_since_ns <= self._keepalive_interval_ns:
            return []
        return self._lose(LossReason.DRIVER_GONE, "the control stream has no subscriber", now_ns)

    # --- inside

    def _renew_request(self, dialect: Dialect, now_ns: int) -> None:
        self.dialect = dialect
        self.client_id = self._new_client_id()
        self._correlation_id = self._new_correlation_id()
        self._asked, self._asked_ns = self.spec, now_ns

    def _change_dialect(self, now_ns: int) -> None:
        """K9: ask anew in the other dialect; the answer to what was asked before counts if it comes first."""
        self._remember_request()
        self._renew_request(self.dialect.other, now_ns)
        self._retry_ns = FIRST_RETRY_NS

    def _remember_request(self) -> None:
        self._earlier[self._correlation_id] = SentRequest(self.dialect, self.client_id, self._correlation_id)
        while len(self._earlier) > MOST_EARLIER:
            del self._earlier[next(iter(self._earlier))]

    def _take_up(self, correlation_id: int) -> bool:
        """Go on with an earlier request that is answered now, while nothing else is; whether that was possible."""
        if self.phase not in (Phase.ATTACHING, Phase.ABANDONED):
            return False
        earlier = self._earlier.pop(correlation_id)
        self._remember_request()
        self.dialect, self.client_id, self._correlation_id = earlier.dialect, earlier.client_id, correlation_id
        return True

    def _refuse_second(self, earlier: SentRequest, response: AttachResponse) -> list[Effect]:
        """E18: give back what was granted to an earlier request after another one was answered."""
        if response.code is not ResponseCode.OK or response.lease_id is None:
            return []
        give_back = ShmDetachRequest(
            correlation_id=self._new_correlation_id(),
            lease_id=response.lease_id,
            stream_id=self.spec.stream_id if response.stream_id is None else response.stream_id,
            client_id=earlier.client_id,
            role=self.spec.role,
        )
        return [Send(give_back)]

    def _on_unusable(self, flaw: str, now_ns: int) -> list[Effect]:
        self._back_off(Event.REFUSAL, now_ns)
        words = f"the attach response is unusable: {flaw}; bring driver and client to one version"
        return [Lost(LossReason.PROTOCOL_ERROR, words)]

    def _on_other_lease(self, response: AttachResponse, now_ns: int) -> list[Effect]:
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

    def _lose(self, reason: LossReason, words: str, now_ns: int, event: Event = Event.LOSS) -> list[Effect]:
        self.response = None
        if reason is not LossReason.DRIVER_GONE:
            self._node_id_wish = None  # it rests at the driver
        if now_ns - self._attached_ns < self._keepalive_interval_ns:
            self._back_off(event, now_ns)  # a lease that does not last is not asked for in a tight loop
        else:
            self._go(event)
            self._next_ns = now_ns + LOST_RETRY_NS
            self._backoff_ns = FIRST_RETRY_NS
        return [Lost(reason, words)]

    def _may(self, event: Event) -> bool:
        return (self.phase, event) in self.transitions

    def _go(self, event: Event) -> None:
        self.phase = self.transitions[self.phase, event]

    def _give_back(self, now_ns: int) -> list[Effect]:
        self._correlation_id = self._new_correlation_id()
        self._deadline_ns = now_ns + DETACH_NS
        self._retry_ns = FIRST_RETRY_NS
        self._next_ns = now_ns + self._retry_ns
        return [Send(self._detach_request())]

    def _close(self, event: Event) -> list[Effect]:
        self._go(event)
        self.response = self._asked = None
        return [Detached()]

    def _back_off(self, event: Event, now_ns: int) -> None:
        self._go(event)
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
            role=self.spec.role,
        )


def _node_id_of(response: AttachResponse) -> int | None:
    """0 is none: so one of the other implementations writes it."""
    return (response.node_id or None) if isinstance(response, ExtendedAttachResponse) else None
