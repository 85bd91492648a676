# SPDX-License-Identifier: Apache-2.0
"""What producers and consumers have in common: a lease that is asked for, kept and replaced without their user's help.

A session belongs to the conductor; its user's side reads `state` and waits for `changed`. It performs what the
`Attachment` decides, and tells its subclass when there is a lease and when there is none.
Driver Model §4.12; decisions E40-E44.
"""

from __future__ import annotations

import os
import threading
import warnings
from abc import abstractmethod
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from enum import StrEnum
from typing import TYPE_CHECKING, Final

import msgspec

from tensorpool.client import attachment as lease
from tensorpool.client.attachment_phases import Phase
from tensorpool.errors import (
    AttachPending,
    AttachRefused,
    Closed,
    DriverUnreachable,
    LocalProtocolError,
    RemoteProtocolError,
    TensorPoolError,
    TransportError,
)
from tensorpool.logs import get_logger
from tensorpool.shm import MappedRing
from tensorpool.shm.announced import Regions, is_fresh
from tensorpool.wire import Message
from tensorpool.wire.attach import AttachResponse
from tensorpool.wire.control import ClockDomain, ShmPoolAnnounce
from tensorpool.wire.driver import (
    ExtendedAttachRequest,
    ResponseCode,
    ShmAttachRequest,
    ShmDetachResponse,
    ShmLeaseRevoked,
)

if TYPE_CHECKING:
    from tensorpool.client.conductor import ClientConductor
    from tensorpool.client.streams import ClientStreams

MAX_EVENTS: Final = 1_000


class State(StrEnum):
    """What a producer or consumer can do at the moment."""

    ATTACHING = "ATTACHING"  # no lease yet
    ACTIVE = "ACTIVE"  # frames flow
    WAITING = "WAITING"  # lease or memory lost; coming back by itself
    FALLBACK = "FALLBACK"  # ordered not to use shared memory: see fallback_uri
    CLOSED = "CLOSED"


class StateChange(msgspec.Struct, frozen=True):
    """A producer or consumer went to `state`, because of `reason`; `epoch` is the one it has mapped."""

    state: State
    reason: str
    epoch: int | None = None


class Session:
    """A lease with its duties. Everything but `state`, `failure`, `changed` and `take_events` is the conductor's."""

    attachment_type: type[lease.Attachment] = lease.Attachment

    def __init__(self, conductor: ClientConductor, spec: lease.AttachSpec, name: str | None) -> None:
        self.conductor = conductor
        self.name = name
        self.config = conductor.config
        self.attachment = self.attachment_type(
            spec,
            new_client_id=conductor.new_client_id,
            new_correlation_id=conductor.new_correlation_id,
            keepalive_interval_ns=self.config.lease_keepalive_interval_ns,
            silence_ns=3 * self.config.announce_period_ns,
            lease_ns=self.config.lease_duration_ns,
            dialects=conductor.dialects,
        )
        self.state = State.ATTACHING
        self._reason = ""
        self.failure: TensorPoolError | None = None  # why it is not ACTIVE, where that is known
        self.is_hopeless = False  # asking again would get the same answer
        self.is_ending = False
        self.changed = threading.Condition()
        self.events: deque[StateChange] = deque(maxlen=MAX_EVENTS)
        self.streams: ClientStreams | None = None
        self.clock_domain = ClockDomain[self.config.driver.announce_clock_domain]  # until an announce names it
        self._mappings_under_way: deque[tuple[Regions, Future[MappedRing]]] = deque()
        self._has_dropped = False
        self._pid = os.getpid()
        self.log = get_logger("client", role=spec.role.name, stream=name or spec.stream_id)

    # --- for the user's side

    @property
    def stream_id(self) -> int:
        return self.attachment.stream_id

    @property
    def is_closed(self) -> bool:
        return self.state is State.CLOSED

    def stamp_ns(self, now_ns: int) -> int:
        """The time for a message or region, by the clock of the driver's announces (C8)."""
        return now_ns if self.clock_domain is ClockDomain.MONOTONIC else self.conductor.clock.realtime_ns()

    def check_process(self) -> None:
        """Raises Closed in a process that was forked from the one that attached: the conductor runs there."""
        if os.getpid() != self._pid:
            raise Closed(
                f"stream {self.name or self.stream_id} was attached by process {self._pid}, which forked this one; "
                "connect() and attach again here, or start the process with multiprocessing's 'spawn'"
            )

    @property
    def is_usable(self) -> bool:
        """Whether its user gets it: it may have nothing to do yet."""
        return self.state in (State.ACTIVE, State.FALLBACK)

    @property
    def is_restless(self) -> bool:
        """Whether the conductor has to take its turns in quick succession."""
        return self.state is not State.ACTIVE

    def is_due(self, now_ns: int) -> bool:
        """Whether it has something to send that waits for a turn. Asked while it is ACTIVE."""
        return now_ns >= self.attachment.next_ns

    @property
    def stream_label(self) -> str:
        """The stream in an error: by the name that the user gave it, with its id where that is known."""
        stream_id = self.stream_id
        if self.name is None:
            return f"stream {stream_id}"
        return f'stream "{self.name}"' + (f" ({stream_id})" if stream_id else "")

    @property
    def is_mapping(self) -> bool:
        """Whether memory is being mapped at the moment."""
        return bool(self._mappings_under_way)

    def is_under_way(self, now_ns: int) -> bool:
        """Whether our memory is being mapped, or the driver has reported lately that it works on our request."""
        return self.is_mapping or self.attachment.is_creating(now_ns)

    def no_answer(self, waited_ns: int) -> TensorPoolError:
        """Why there is nothing to use after `waited_ns`: what the driver reported, or that there is no driver."""
        channel, creation = self.config.driver.control.channel, self.attachment.creation
        longer = "give it more time with a longer timeout="
        if creation is not None:
            size = _size(creation.size_bytes)
            seconds = f"{creation.elapsed_ns / 1e9:.1f}"
            words = f"the driver is making {size} for {self.stream_label}, for {seconds} s so far"
            return AttachPending(channel, waited_ns, f"{words}; {longer}")
        if self.conductor.has_driver(waited_ns):
            words = f"the driver is alive and has not answered yet about {self.stream_label}"
            dialect = self.config.driver.dialect
            if dialect != "auto":
                words += f', asked in driver.dialect = "{dialect}" ("auto" tries both)'
            return AttachPending(channel, waited_ns, f"{words}; {longer}")
        return DriverUnreachable(channel, waited_ns, "is a driver running there? (`tensorpool driver`)")

    def set_state(self, state: State, reason: str, epoch: int | None = None) -> None:
        """Change, queue the change for the user's callback, and wake the threads that wait."""
        if self.is_ending and state is not State.CLOSED:
            return
        with self.changed:
            is_news = state is State.WAITING and reason != self._reason
            if self.state is not state or (epoch is not None and state is State.ACTIVE) or is_news:
                self._reason = reason
                if self.state is State.CLOSED:
                    return
                self.state = state
                self.events.append(StateChange(state, reason, epoch))
                self.log.info("state_changed", state=state.value, reason=reason, epoch=epoch)
            self.changed.notify_all()

    def take_events(self, on_state: Callable[[StateChange], object] | None) -> None:
        """Hand the changes since last time to the user's callback, on the user's thread."""
        while self.events:
            event = self.events.popleft()
            if on_state is not None:
                on_state(event)

    # --- the conductor's turn

    def on_connected(self, streams: ClientStreams, now_ns: int) -> None:
        self.streams = streams
        self.open_streams(streams)
        if self.is_resolved(now_ns) and self._may_ask():
            self.conductor.resume_abandoned(self.attachment)
            self._perform(self.attachment.start(now_ns), now_ns)

    def on_connection_lost(self, words: str, now_ns: int) -> None:
        self.streams = None
        self.close_streams()
        if not self.attachment.is_attached:
            self.failure = TransportError(words)
        self._perform(self.attachment.on_connection_lost(words), now_ns)

    def on_attach_response(self, response: AttachResponse, now_ns: int, wall_ns: int) -> None:
        self._perform(self.attachment.on_attach_response(response, now_ns, wall_ns), now_ns)

    def on_unreadable_response(self, correlation_id: int, error: str, now_ns: int) -> None:
        self._perform(self.attachment.on_unreadable_response(correlation_id, error, now_ns), now_ns)

    def on_detach_response(self, response: ShmDetachResponse, now_ns: int) -> None:
        self._perform(self.attachment.on_detach_response(response), now_ns)

    def on_revoked(self, notice: ShmLeaseRevoked, now_ns: int) -> None:
        self._perform(self.attachment.on_revoked(notice, now_ns), now_ns)

    def on_driver_shutdown(self, words: str, now_ns: int) -> None:
        self._perform(self.attachment.on_driver_shutdown(words, now_ns), now_ns)

    def is_fresh(self, announce: ShmPoolAnnounce, joined_ns: int, now_ns: int, wall_ns: int) -> bool:
        return is_fresh(announce, joined_ns, now_ns, wall_ns, self.config.announce_period_ns)

    def on_announce(self, announce: ShmPoolAnnounce, now_ns: int, wall_ns: int) -> None:
        """A fresh announce of this session's stream."""
        self.clock_domain = announce.announce_clock_domain
        self._perform(self.attachment.on_announce(announce, now_ns), now_ns)

    def do_work(self, now_ns: int) -> int:
        """What is due. Returns the work done."""
        work = self._finish_mappings(now_ns)
        if self.streams is None:
            return work
        attachment = self.attachment
        if attachment.phase is Phase.BACKOFF:
            self.conductor.resume_abandoned(attachment)
        if attachment.phase is not Phase.BACKOFF or self._may_ask():
            work += self._perform(attachment.on_tick(now_ns), now_ns)
        is_due = attachment.phase is Phase.UNATTACHED and now_ns >= attachment.next_ns
        if is_due and self.is_resolved(now_ns) and self._may_ask():
            self.conductor.resume_abandoned(attachment)
            work += self._perform(attachment.start(now_ns), now_ns)
        keepalive = attachment.keepalive(now_ns, self.stamp_ns(now_ns))
        if keepalive is not None:
            result = self.streams.control.offer(keepalive.encode())
            if result:
                attachment.on_keepalive_sent(now_ns)
                work += 1
            else:
                is_connected = self.streams.control.is_connected
                self._perform(attachment.on_keepalive_failed(is_connected, now_ns), now_ns)
        return work

    def detach(self, now_ns: int) -> None:
        """Give the lease back; the session ends as CLOSED, without having been WAITING on the way."""
        self.is_ending = True
        self.on_lost("closed by its user")
        self._perform(self.attachment.detach(now_ns), now_ns)

    def on_unreferenced(self, user: object) -> None:
        """The user's object is being destroyed without close(): have the conductor give the lease back.

        A destructor may run on any thread in the middle of anything: it takes no lock and waits for nothing.
        """
        if self.is_closed or self.is_ending or os.getpid() != self._pid:
            return
        self.conductor.order(self.abandon)
        words = f"the {self.attachment.spec.role.name.lower()} of {self.stream_label} was not closed"
        warnings.warn(f"{words}; its lease is given back", ResourceWarning, stacklevel=2, source=user)

    def abandon(self, now_ns: int) -> None:
        """Conductor: give the lease back for a user who is gone."""
        self.detach(now_ns)

    def _may_ask(self) -> bool:
        return not self.conductor.is_asking(self.attachment.spec, besides=self)

    # --- for subclasses

    def is_resolved(self, now_ns: int) -> bool:
        """Whether the stream to attach to is known; a subclass may find out here."""
        return self.attachment.spec.stream_id != 0 or self.name is None

    @abstractmethod
    def open_streams(self, streams: ClientStreams) -> None:
        """Open what the session needs of a new streams."""

    @abstractmethod
    def close_streams(self) -> None:
        """Forget what belonged to the streams that is gone."""

    @abstractmethod
    def on_attached(self, response: AttachResponse, now_ns: int) -> None:
        """There is a lease."""

    @abstractmethod
    def on_lost(self, reason: str) -> None:
        """There is none any more: nothing of its memory may be used."""

    @abstractmethod
    def on_mapped(self, regions: Regions, ring: MappedRing, now_ns: int) -> None:
        """What `start_mapping` asked for is mapped."""

    @abstractmethod
    def on_mapping_failed(self, regions: Regions, error: TensorPoolError, now_ns: int) -> None:
        """It cannot be mapped, and nothing of it is."""

    # --- inside

    def start_mapping(self, regions: Regions, *, writable: bool) -> None:
        """Map them beside the duty cycle, after what is being mapped already; ends in one of the two above."""
        self._mappings_under_way.append((regions, self.conductor.mapper.submit(regions, writable=writable)))

    def stop_mapping(self) -> None:
        """What is being mapped is not wanted any more."""
        self._mappings_under_way.clear()

    def _finish_mappings(self, now_ns: int) -> int:
        """In the order in which they were begun, so that epochs follow each other."""
        work = 0
        while self._mappings_under_way and self._mappings_under_way[0][1].done():
            regions, future = self._mappings_under_way.popleft()
            work += 1
            try:
                ring = future.result()
            except TensorPoolError as error:
                self.on_mapping_failed(regions, error.with_traceback(None), now_ns)  # its frames hold the mapping
            else:
                self.on_mapped(regions, ring, now_ns)
        return work

    def send(self, message: Message) -> bool:
        """Offer on the control stream; a loss is made good by the next period.

        A message that no log takes, because a peer's texts in it are too long, is dropped and logged once.
        """
        if self.streams is None:
            return False
        if isinstance(message, ShmAttachRequest | ExtendedAttachRequest):
            self.conductor.declare_process()
        try:
            return bool(self.streams.control.offer(message.encode()))
        except TransportError:
            return False
        except (ValueError, LocalProtocolError) as error:
            if not self._has_dropped:
                self._has_dropped = True
                self.log.warning("message_not_sendable", kind=type(message).__name__, error=str(error))
            return False

    def _perform(self, effects: list[lease.Effect], now_ns: int) -> int:
        for effect in effects:
            match effect:
                case lease.Send():
                    self.send(effect.message)
                case lease.Attached():
                    self.failure = None
                    self.on_attached(effect.response, now_ns)
                case lease.Lost():
                    if effect.reason is lease.LossReason.PROTOCOL_ERROR:
                        self.failure = RemoteProtocolError(effect.words)
                    self.on_lost(f"{effect.reason}: {effect.words}")
                    self.set_state(State.WAITING, f"{effect.reason}: {effect.words}")
                case lease.Refused():
                    self._refused(effect)
                case lease.Detached():
                    self.set_state(State.CLOSED, "closed")
        return len(effects)

    def _refused(self, refusal: lease.Refused) -> None:
        spec = self.attachment.spec
        words = refusal.words.replace(f"stream {spec.stream_id}", self.stream_label, 1)
        self.failure = AttachRefused(refusal.code.name, self.name or spec.stream_id, spec.role.name, words)
        self.is_hopeless = refusal.code in (ResponseCode.INVALID_PARAMS, ResponseCode.UNSUPPORTED)
        with self.changed:
            self.changed.notify_all()


def _size(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.1f} GiB" if size_bytes >= 2**30 else f"{size_bytes / 2**20:.1f} MiB"
