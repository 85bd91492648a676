# SPDX-License-Identifier: Apache-2.0
"""What holds for a client's lease under every schedule.

The machine plays the driver, the media driver, the clock and the owner. It keeps its own books of what a client may
believe, from messages and times alone.

    never more than one lease believed                 one series of requests at a time, all of it the same request
    never attached past the deadline or a silence      a client id and a correlation id of its own for every series
    no keepalive later than the interval               no tight loop of requests
    nothing more after the end                         good news in the end, and it is attached within bounded time
"""

from __future__ import annotations

import itertools

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tensorpool.client.attachment import (
    FIRST_RETRY_NS,
    LONGEST_RETRY_NS,
    LOST_RETRY_NS,
    Attached,
    Attachment,
    AttachSpec,
    Detached,
    Effect,
    LossReason,
    Lost,
    Refused,
    Send,
)
from tensorpool.client.attachment_phases import Phase
from tensorpool.wire.driver import (
    LeaseRevokeReason,
    ResponseCode,
    Role,
    ShmAttachRequest,
    ShmDetachRequest,
    ShmDetachResponse,
)
from tests.client.conftest import MS, SECOND_NS, STREAM, announced, granted, refused, revoked
from tests.levels import SOAK

KEEPALIVE_NS = SECOND_NS
SILENCE_NS = 3 * SECOND_NS
WALL_NS = 10**18
FLAWS = [{"epoch": None}, {"header_slot_bytes": 64}, {"payload_pools": ()}, {"header_region_uri": ""}]

durations = st.sampled_from([1, 5 * MS, 10 * MS, 100 * MS, 300 * MS, 999 * MS, SECOND_NS, 2 * SECOND_NS, 7 * SECOND_NS])
lease_times = st.sampled_from([None, 500 * MS, 2 * SECOND_NS, 3 * SECOND_NS, 10 * SECOND_NS])
around = st.sampled_from([-1, 0, 1])
seldom = st.integers(0, 4).map(lambda number: number == 4)


class Belief(msgspec.Struct):
    """A lease as the client was granted it."""

    lease_id: int
    epoch: int
    since_ns: int
    duration_ns: int | None
    deadline_ns: int
    received_ns: int
    sent_ns: int | None = None


class AttachmentMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now_ns = 1_000 * SECOND_NS
        self.client_ids = itertools.count(1)
        self.correlation_ids = itertools.count(1_000)
        self.lease_ids = itertools.count(77)
        self.believed: Belief | None = None
        self.requests: list[ShmAttachRequest] = []
        self.asked_ns: list[int] = []
        self.detaches: list[ShmDetachRequest] = []
        self.past_leases: list[tuple[int, int]] = []
        self.given_back: set[int] = set()
        self.listeners = "many"  # of the control stream: none, one whose log is full, or one that hears
        self.silent_since_ns: int | None = None
        self.not_before_ns = 0
        self.has_link = True
        self.is_wanted = True
        self.is_over = False

    @initialize(role=st.sampled_from(Role))
    def begin(self, role: Role) -> None:
        self.role = role
        self.attachment = Attachment(
            AttachSpec(STREAM, role),
            new_client_id=lambda: next(self.client_ids),
            new_correlation_id=lambda: next(self.correlation_ids),
            keepalive_interval_ns=KEEPALIVE_NS,
            silence_ns=SILENCE_NS,
        )
        self.perform(self.attachment.start(self.now_ns))

    # --- what the client does

    def perform(self, effects: list[Effect]) -> None:
        assert not (self.is_over and effects), "nothing more after the end"
        for effect in effects:
            match effect:
                case Send(message=ShmAttachRequest() as request):
                    self.note_request(request)
                case Send(message=ShmDetachRequest() as request):
                    self.detaches.append(request)
                    self.given_back.add(request.lease_id)
                    if self.believed is not None and self.attachment.phase is not Phase.DETACHING:
                        self.believed = None  # memory that could not be used
                        self.not_before_ns = self.now_ns + FIRST_RETRY_NS
                    elif self.believed is None and self.attachment.phase is Phase.DETACHING:
                        assert not self.is_wanted, "only what came after its caller gave up"
                        self.believed = Belief(request.lease_id, 0, self.now_ns, None, 0, self.now_ns)
                case Attached(response=response):
                    assert self.believed is None, "never two leases at once"
                    self.believed = self.granted_as(response.lease_id, response.epoch)
                case Lost(reason=reason):
                    assert (self.believed is None) == (reason is LossReason.PROTOCOL_ERROR)
                    if self.believed is None or self.now_ns - self.believed.since_ns < KEEPALIVE_NS:
                        self.not_before_ns = self.now_ns + FIRST_RETRY_NS
                    self.believed = None
                case Detached():
                    assert not self.is_wanted
                    self.believed = None
                    self.is_over = self.attachment.phase is Phase.CLOSED
                case Refused():
                    assert self.believed is None
                    self.not_before_ns = self.now_ns + FIRST_RETRY_NS

    def granted_as(self, lease_id: int | None, epoch: int | None) -> Belief:
        assert lease_id is not None
        assert epoch is not None
        duration_ns, self.offered_ns = self.offered_ns, None
        self.silent_since_ns = None
        return Belief(lease_id, epoch, self.now_ns, duration_ns, self.now_ns + (duration_ns or 0), self.now_ns)

    def note_request(self, request: ShmAttachRequest) -> None:
        assert self.believed is None
        assert self.has_link
        assert self.is_wanted
        assert self.now_ns >= self.not_before_ns or self.is_relinked, "no tight loop of requests"
        if self.requests and request.correlation_id == self.requests[-1].correlation_id:
            assert request == self.requests[-1], "a retry is the same request"
        else:
            assert all(request.client_id != other.client_id for other in self.requests)
            assert all(request.correlation_id > other.correlation_id for other in self.requests)
        if self.asked_ns:
            assert self.now_ns - self.asked_ns[-1] >= LOST_RETRY_NS or self.is_relinked
        self.is_relinked = False
        self.requests.append(request)
        self.asked_ns.append(self.now_ns)

    is_relinked = False
    offered_ns: int | None = None

    def turn(self) -> None:
        """As a session turns: what is due, then the keepalive."""
        if not self.has_link:
            return
        self.tick()
        if self.attachment.phase is Phase.UNATTACHED and self.now_ns >= self.attachment.next_ns:
            self.perform(self.attachment.start(self.now_ns))
        keepalive = self.attachment.keepalive(self.now_ns, self.now_ns)
        if self.believed is None or self.attachment.phase is not Phase.ATTACHED:
            assert keepalive is None
            return
        last_ns = self.believed.sent_ns
        if keepalive is None:
            assert last_ns is not None, "the first goes at once"
            assert self.now_ns - last_ns < KEEPALIVE_NS, "none is later than the interval"
            return
        assert keepalive.lease_id == self.believed.lease_id
        assert (keepalive.client_id, keepalive.role) == (self.attachment.client_id, self.role)
        if self.listeners == "many":
            self.attachment.on_keepalive_sent(self.now_ns)
            self.believed.sent_ns = self.now_ns
            self.silent_since_ns = None
            if self.believed.duration_ns is not None:
                self.believed.deadline_ns = self.now_ns + self.believed.duration_ns
            return
        is_connected = self.listeners == "full"
        if is_connected:
            self.silent_since_ns = None
        elif self.silent_since_ns is None:
            self.silent_since_ns = self.now_ns
        since_ns = self.now_ns if self.silent_since_ns is None else self.silent_since_ns
        self.perform(self.attachment.on_keepalive_failed(is_connected=is_connected, now_ns=self.now_ns))
        assert (self.believed is None) == (self.now_ns - since_ns > KEEPALIVE_NS), "back pressure passes, silence not"

    def tick(self) -> None:
        """What is due, and only then."""
        is_over = False
        if self.believed is not None and self.attachment.phase is Phase.ATTACHED:
            is_expired = self.believed.duration_ns is not None and self.now_ns >= self.believed.deadline_ns
            is_over = is_expired or self.now_ns - self.believed.received_ns > SILENCE_NS
        was_attached = self.attachment.phase is Phase.ATTACHED
        self.perform(self.attachment.on_tick(self.now_ns))
        if was_attached:
            assert (self.believed is None) == is_over, "not a moment too long, and not one too short"

    # --- time, the driver and the owner

    @rule(duration_ns=durations)
    def pass_time(self, duration_ns: int) -> None:
        self.now_ns += duration_ns
        self.turn()

    @precondition(lambda self: self.believed is not None)
    @rule(edge=st.sampled_from(["deadline", "silence", "keepalive"]), delta_ns=around, is_announced=st.booleans())
    def pass_to_an_edge(self, edge: str, delta_ns: int, is_announced: bool) -> None:
        """To where something ends, one way or the other."""
        assert self.believed is not None
        ends_ns = {
            "deadline": self.believed.deadline_ns,
            "silence": self.believed.received_ns + SILENCE_NS,
            "keepalive": (self.believed.sent_ns or self.now_ns) + KEEPALIVE_NS,
        }
        self.now_ns = max(self.now_ns, ends_ns[edge] + delta_ns)
        if is_announced:
            self.announce(0, True, 1)
        self.turn()

    @precondition(lambda self: self.believed is not None)
    @rule(listeners=st.lists(st.sampled_from(["many", "full", "none"]), min_size=2, max_size=6))
    def live_through(self, listeners: list[str]) -> None:
        """Some time with a driver that lives, and a control stream that does not always."""
        for each in listeners:
            self.listeners = each
            self.now_ns += 600 * MS
            self.announce(0, True, 1)
            self.turn()

    @precondition(lambda self: self.attachment.phase is not Phase.ATTACHED and self.is_wanted)
    @rule(lease_ns=lease_times)
    def come_to_a_lease(self, lease_ns: int | None) -> None:
        """By the shortest way: most of what can happen happens to those who have one."""
        if not self.has_link:
            self.find_link()
        while self.attachment.phase in (Phase.BACKOFF, Phase.UNATTACHED):
            self.now_ns = max(self.now_ns + 1, self.attachment.next_ns)
            self.turn()
        self.grant(lease_ns)
        self.listeners = "many"
        self.turn()

    @precondition(lambda self: self.attachment.phase is Phase.ATTACHING)
    @rule(lease_ns=lease_times)
    def grant(self, lease_ns: int | None) -> None:
        self.answer(lease_ns, False, None, False)
        assert self.believed is not None

    @precondition(lambda self: self.requests)
    @rule(lease_ns=lease_times, is_late=seldom, flaw=st.none() | st.sampled_from(FLAWS), by_wall=st.booleans())
    def answer(self, lease_ns: int | None, is_late: bool, flaw: dict[str, object] | None, by_wall: bool) -> None:
        """The last request, or one that is long over; the expiry by either clock."""
        request = self.requests[0 if is_late else -1]
        lease_id = next(self.lease_ids)
        self.offered_ns = lease_ns
        expiry_ns = None if lease_ns is None else self.now_ns + lease_ns + (WALL_NS if by_wall else 0)
        response = granted(
            request.correlation_id, lease_id=lease_id, lease_expiry_timestamp_ns=expiry_ns, **(flaw or {})
        )
        self.past_leases.append((lease_id, request.client_id))
        was_believed, before = self.believed, self.attachment.phase
        effects = self.attachment.on_attach_response(response, self.now_ns, WALL_NS + self.now_ns)
        self.perform(effects)
        if before is Phase.ABANDONED:
            assert self.attachment.phase in (Phase.ABANDONED, Phase.DETACHING, Phase.CLOSED)
            is_given_back = self.attachment.phase is Phase.DETACHING
            assert is_given_back == (lease_id in self.given_back), "a grant that comes late is given back"
            assert is_given_back or flaw is not None or is_late
        elif before is not Phase.ATTACHING or request.correlation_id != self.requests[-1].correlation_id:
            assert self.believed is was_believed, "an answer without a question is nothing"
        elif flaw is not None:
            assert self.believed is None
            assert lease_id in self.given_back, "what cannot be used is given back"
        else:
            assert self.believed is not None

    @precondition(lambda self: self.requests)
    @rule(code=st.sampled_from([code for code in ResponseCode if code is not ResponseCode.OK]))
    def refuse(self, code: ResponseCode) -> None:
        response = refused(self.requests[-1].correlation_id, code)
        self.perform(self.attachment.on_attach_response(response, self.now_ns, WALL_NS + self.now_ns))

    @precondition(lambda self: self.past_leases)
    @rule(
        pick=st.integers(0, 2),
        reason=st.sampled_from(LeaseRevokeReason),
        wrong=st.sampled_from([None, "lease_id", "stream_id", "client_id", "role"]),
    )
    def revoke(self, pick: int, reason: LeaseRevokeReason, wrong: str | None) -> None:
        """One of the last leases, or something that only looks like one."""
        lease_id, client_id = self.past_leases[-1 - min(pick, len(self.past_leases) - 1)]
        notice = revoked(lease_id, client_id, self.role, reason=reason)
        if wrong == "role":
            notice = msgspec.structs.replace(notice, role=next(role for role in Role if role is not self.role))
        elif wrong is not None:
            notice = msgspec.structs.replace(notice, **{wrong: getattr(notice, wrong) + 1_000})
        before = self.believed
        is_ours = before is not None and before.lease_id == lease_id and wrong is None
        self.perform(self.attachment.on_revoked(notice, self.now_ns))
        assert self.believed is (None if is_ours else before), "a revoked lease is not believed, and no other concerned"

    @rule(ahead=st.sampled_from([-1, 0, 0, 0, 1]), is_ours=st.booleans(), is_our_stream=st.integers(0, 4))
    def announce(self, ahead: int, is_ours: bool, is_our_stream: int) -> None:
        epoch = (self.believed.epoch if self.believed else 5) + ahead
        message = announced(
            epoch,
            producer_id=self.attachment.client_id if is_ours else 9_999,
            stream_id=STREAM if is_our_stream else STREAM + 1,
        )
        before = self.believed
        self.perform(self.attachment.on_announce(message, self.now_ns))
        is_replaced = self.role is Role.PRODUCER and (ahead > 0 or (ahead == 0 and not is_ours)) and is_our_stream
        if before is not None and self.attachment.phase is not Phase.DETACHING:
            assert (self.believed is None) == bool(is_replaced)
        if self.believed is not None and is_our_stream:
            self.believed.received_ns = self.now_ns

    @rule(is_so=seldom)
    def shut_down(self, is_so: bool) -> None:
        if not is_so:
            return
        self.perform(self.attachment.on_driver_shutdown("", self.now_ns))
        assert self.believed is None
        assert self.attachment.phase is (Phase.UNATTACHED if self.is_wanted else Phase.CLOSED)

    @rule(listeners=st.sampled_from(["many", "many", "full", "none"]))
    def listen(self, listeners: str) -> None:
        self.listeners = listeners

    @precondition(lambda self: self.has_link)
    @rule(is_so=seldom)
    def lose_link(self, is_so: bool) -> None:
        if not is_so:
            return
        self.has_link = False
        self.perform(self.attachment.on_connection_lost("gone"))
        assert self.believed is None

    @precondition(lambda self: not self.has_link)
    @rule()
    def find_link(self) -> None:
        self.has_link = self.is_relinked = True
        self.perform(self.attachment.start(self.now_ns))

    @precondition(lambda self: self.believed is not None)
    @rule(is_so=seldom)
    def fail_to_map(self, is_so: bool) -> None:
        if not is_so:
            return
        was = self.attachment.phase
        self.perform(self.attachment.on_mapping_failed(self.now_ns))
        assert (self.believed is None) == (was is Phase.ATTACHED)

    @rule(is_so=seldom, is_really_so=seldom)
    def detach(self, is_so: bool, is_really_so: bool) -> None:
        """Very seldom, else every story is short."""
        if is_so and is_really_so and self.is_wanted:
            self.is_wanted = False
            self.perform(self.attachment.detach(self.now_ns))

    @precondition(lambda self: self.detaches)
    @rule(code=st.sampled_from(ResponseCode))
    def answer_detach(self, code: ResponseCode) -> None:
        response = ShmDetachResponse(correlation_id=self.detaches[-1].correlation_id, code=code)
        self.perform(self.attachment.on_detach_response(response))

    # --- what holds always

    @invariant()
    def tells_the_truth(self) -> None:
        if not hasattr(self, "attachment"):
            return
        phase = self.attachment.phase
        assert self.attachment.is_attached == (phase is Phase.ATTACHED)
        lease_id = self.believed.lease_id if self.believed else None
        assert self.attachment.lease_id == lease_id
        assert (phase in (Phase.ATTACHED, Phase.DETACHING)) == (self.believed is not None)
        assert (phase is Phase.CLOSED) == self.is_over
        assert self.is_wanted or phase in (
            Phase.ABANDONED,
            Phase.DETACHING,
            Phase.CLOSED,
        ), "what was given back is not asked for"

    @invariant()
    def is_never_attached_too_long(self) -> None:
        """Looked at the way an owner does: by a turn."""
        if self.believed is None or not self.has_link or self.attachment.phase is not Phase.ATTACHED:
            return
        self.tick()

    def teardown(self) -> None:
        """Whatever was, good news in the end are enough."""
        if not hasattr(self, "attachment"):
            return
        if not self.has_link:
            self.find_link()
        self.listeners = "many"
        deadline_ns = self.now_ns + 2 * LONGEST_RETRY_NS + SECOND_NS
        while self.now_ns < deadline_ns:
            if self.attachment.phase in (Phase.ATTACHING, Phase.ABANDONED):
                self.grant(10 * SECOND_NS)
            if self.attachment.phase is Phase.DETACHING:
                self.answer_detach(ResponseCode.OK)
            self.announce(0, True, 1)
            self.now_ns += 50 * MS
            self.turn()
        assert self.attachment.phase is (Phase.ATTACHED if self.is_wanted else Phase.CLOSED)


AttachmentMachine.TestCase.settings = settings(max_examples=80 * SOAK, stateful_step_count=50)
TestAttachment = AttachmentMachine.TestCase
