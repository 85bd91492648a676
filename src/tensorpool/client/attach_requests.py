# SPDX-License-Identifier: Apache-2.0
"""Attach requests without an answer yet: what the driver reports of them, and those whose caller has given up.

A driver may take long to make memory. Ours says so on the status stream of the service control plane, with the
correlation id of the request; others say nothing, and nothing depends on it. A request whose caller gave up is kept for
as long as the client lives: a grant that comes late is given back, so that it blocks no other client, unless the same
stream is asked for again meanwhile, which then goes on with that request.
Driver Model §4.2, §4.8; Service Control §4; decisions E2, E18.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from tensorpool import aeron
from tensorpool.aeron.adapter import MessageAdapter
from tensorpool.client.attachment import Attachment, AttachSpec, Effect, Send
from tensorpool.client.attachment_phases import Phase
from tensorpool.client.streams import ClientStreams
from tensorpool.control.config import ControlConfig
from tensorpool.control.events import read_alive, read_making
from tensorpool.wire import Message, event
from tensorpool.wire.attach import AttachResponse
from tensorpool.wire.driver import ShmDetachResponse, ShmLeaseRevoked
from tensorpool.wire.event import EventMessage

FRAGMENT_LIMIT: Final = 64
LISTEN_AFTER_NS: Final = 100_000_000  # most attaches are answered before that
MOST_ABANDONED: Final = 256


class AbandonedRequests:
    """Requests whose caller has given up, until they are answered, given back, or resumed."""

    def __init__(self, send: Callable[[Message], object]) -> None:
        self._send = send
        self._requests: list[Attachment] = []

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, attachment: Attachment) -> None:
        """The oldest goes where there are too many: its lease, if it is ever granted, expires by itself."""
        self._requests = [*self._requests[-MOST_ABANDONED + 1 :], attachment]

    def take(self, spec: AttachSpec) -> Attachment | None:
        """The one that asked for this stream and role, if the driver may still be working on it."""
        for attachment in self._requests:
            asked = attachment.spec
            if attachment.phase is Phase.ABANDONED and (asked.stream_id, asked.role) == (spec.stream_id, spec.role):
                self._requests.remove(attachment)
                return attachment
        return None

    def on_attach_response(self, response: AttachResponse, now_ns: int, wall_ns: int) -> None:
        self._each(lambda attachment: attachment.on_attach_response(response, now_ns, wall_ns))

    def on_detach_response(self, response: ShmDetachResponse) -> None:
        self._each(lambda attachment: attachment.on_detach_response(response))

    def on_revoked(self, notice: ShmLeaseRevoked, now_ns: int) -> None:
        self._each(lambda attachment: attachment.on_revoked(notice, now_ns))

    def on_driver_shutdown(self) -> None:
        """What it had promised is gone with it."""
        self._requests.clear()

    def do_work(self, now_ns: int) -> int:
        return self._each(lambda attachment: attachment.on_tick(now_ns))

    def _each(self, act: Callable[[Attachment], list[Effect]]) -> int:
        done = 0
        for attachment in tuple(self._requests):
            for effect in act(attachment):
                done += 1
                if isinstance(effect, Send):
                    self._send(effect.message)
            if attachment.phase is Phase.CLOSED:
                self._requests.remove(attachment)
        return done


class CreationReports:
    """Listens to the driver's status stream while attachments wait for an answer, and hands on what concerns them.

    `on_driver` is called when a driver says there that it is alive.
    """

    def __init__(self, config: ControlConfig, on_driver: Callable[[], object]) -> None:
        self._config = config
        self._on_driver = on_driver
        self._adapter = MessageAdapter(on_malformed=lambda data, error: None)
        self._adapter.add(EventMessage, self._on_event, event.schema.with_id(config.schema_id))
        self._subscription: aeron.Subscription | None = None
        self._waiting: list[Attachment] = []
        self._now_ns = 0

    def do_work(self, attachments: Iterable[Attachment], streams: ClientStreams | None, now_ns: int) -> int:
        """Returns how many messages were read. Raises TransportError."""
        self._now_ns = now_ns
        if streams is None or not self._config.enabled:
            self._subscription = None
            return 0
        self._waiting = [
            attachment for attachment in attachments if attachment.is_asking_since(now_ns - LISTEN_AFTER_NS)
        ]
        if not self._waiting:
            if self._subscription is not None:
                self._subscription.close()
                self._subscription = None
            return 0
        if self._subscription is None:
            self._subscription = streams.subscribe(self._config.status)
        return self._subscription.poll(self._adapter.on_message, FRAGMENT_LIMIT)

    def _on_event(self, message: EventMessage, info: aeron.MessageInfo) -> None:
        alive = read_alive(message)
        if alive is not None and alive.service == "driver":
            self._on_driver()
        for attachment in self._waiting:
            if attachment.is_about(message.correlation_id) and (creation := read_making(message)) is not None:
                attachment.on_creation_report(creation.bytes, creation.elapsed_ms * 1_000_000, self._now_ns)
