# SPDX-License-Identifier: Apache-2.0
"""The driver as a service: what it answers and what it obeys beside the specified messages.

    status, ping, drain, reload, log-level   as of every service
    provision                                a client asks for a ring that fits, before it attaches
    identify                                 a client declares its process
    leases                                   who is attached; pages of it are published without being asked for, too
    revoke                                   an operator ends leases

Runs on the conductor. Service Control §4; decisions E47, K10.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final

import msgspec

from tensorpool import aeron
from tensorpool.clock import Clock
from tensorpool.control import Service, add_common_commands, identification, provisioning
from tensorpool.control.events import MAKING, Making
from tensorpool.control.identification import Declaration, LeaseFacts, LeasePage, LeaseQuery
from tensorpool.control.provisioning import Provisioned, ProvisionRequest
from tensorpool.driver.clients import Owner
from tensorpool.driver.config import DriverConfig
from tensorpool.driver.effects import Effect, Report
from tensorpool.driver.leases import Lease
from tensorpool.driver.lifecycle import Lifecycle
from tensorpool.driver.streams import NoStream
from tensorpool.errors import LocalProtocolError, TensorPoolError
from tensorpool.peer_text import printable
from tensorpool.process_description import seen

PAGE_BYTES: Final = 16 << 10
PAGE_EVERY_NS: Final = 500_000_000  # a page that no client asked for, for observers
MAX_REASON: Final = 200
MOST_NAMED: Final = 16  # leases in an answer

_PID: Final = re.compile(r"pid=(\d+)")


class DriverCommands:
    """Registers the commands at a service. `perform` performs effects, `counters` reads those of the media driver."""

    def __init__(
        self,
        config: DriverConfig,
        lifecycle: Lifecycle,
        clock: Clock,
        *,
        status: Callable[[], Mapping[str, object]],
        drain: Callable[[], object],
        reload: Callable[[], Iterable[str]],
        perform: Callable[[list[Effect]], object],
        look_for_producer: Callable[[int], object],
        name_of: Callable[[int], str],
        counters: Callable[[], list[aeron.CounterReading]],
    ) -> None:
        self._config = config
        self._lifecycle = lifecycle
        self._clock = clock
        self._perform = perform
        self._look_for_producer = look_for_producer
        self._name_of = name_of
        self._counters = counters
        self._next_page_ns = 0
        self._page_after = 0
        endpoints = config.driver
        tags = (identification.driver_tag(endpoints.control),)
        self.service: Final = Service("driver", endpoints.instance_id, config=config.control, aliases=tags, clock=clock)
        add_common_commands(self.service, status=status, drain=drain, reload=reload)
        command = self.service.command
        command(provisioning.KEY)(self._on_provision)
        # A note: it needs no record, so that clients need no subscription to the status stream.
        command(identification.KEY, is_note=True, refuse=self._refuse_identity)(self._on_identify)
        command(identification.LEASES, is_query=True)(self._on_leases)
        command(identification.REVOKE, authorised=True)(self._on_revoke)

    def report(self, report: Report) -> None:
        """An attach waits for memory."""
        value = Making(stream_id=report.stream_id, bytes=report.size_bytes, elapsed_ms=report.elapsed_ns // 1_000_000)
        self.service.status(MAKING, value, correlation_id=report.correlation_id)

    def publish_leases(self, now_ns: int) -> int:
        """A page of leases for observers, where there are some; all pages in turn."""
        if now_ns < self._next_page_ns:
            return 0
        self._next_page_ns = now_ns + PAGE_EVERY_NS
        if not self.service.has_listener or not (self._page_after or len(self._lifecycle.leases)):
            return 0
        page = self._page(LeaseQuery(after=self._page_after))
        self._page_after = page.next or 0
        return int(bool(page.leases) and self.service.status(identification.LEASES, page))

    # --- commands

    def _refuse_identity(self) -> str | None:
        if self._config.control.control.uri.is_ipc:
            return None
        return "control_channel is on the network, where anybody could declare any process"

    def _on_identify(self, declaration: str) -> bool:
        """Raises LocalProtocolError."""
        declared = _read_json(identification.KEY, declaration, Declaration)
        process, description = declared.process, seen(declared.process, declared.description)
        pid = _PID.search(self._client_names().get(declared.session_id, ""))
        is_other = pid is not None and int(pid[1]) != process.pid  # the media driver knows the client by another pid
        owner = Owner(
            process=process,
            description=description or declared.description.bounded(),
            place=process.place(),
            is_seen=description is not None and not is_other,
        )
        return self._lifecycle.on_identify(declared.session_id, owner)

    def _on_provision(self, request: str) -> str:
        """Raises TensorPoolError with the reason."""
        asked = _read_json(provisioning.KEY, request, ProvisionRequest)
        self._look_for_producer(asked.stream_id)
        try:
            stream = self._lifecycle.provision(asked, self._clock.monotonic_ns())
        except NoStream as refusal:
            raise TensorPoolError(str(refusal)) from None
        assert stream.ring is not None
        answer: bytes = msgspec.json.encode(Provisioned.of(stream.stream_id, stream.ring))
        return answer.decode()

    def _on_leases(self, query: str | None = None) -> str:
        """Raises LocalProtocolError."""
        asked = LeaseQuery() if query is None else _read_json(identification.LEASES, query, LeaseQuery)
        return msgspec.json.encode(self._page(asked)).decode()

    def _on_revoke(self, query: str | int) -> str:
        """End leases; each is named in the answer. Raises TensorPoolError."""
        text = f'{{"lease_id": {query}}}' if isinstance(query, int) else query
        asked = _read_json(identification.REVOKE, text, LeaseQuery)
        if asked.lease_id is None and asked.client_id is None and asked.stream_id is None:
            raise LocalProtocolError("revoke takes a lease_id, a client_id or a stream_id")
        found = list(self._matching(asked))
        if not found:
            numbers = {"lease": asked.lease_id, "client": asked.client_id, "stream": asked.stream_id}
            wanted = ", ".join(f"{name} {number}" for name, number in numbers.items() if number is not None)
            raise TensorPoolError(f"no lease of {wanted}; `tensorpool leases` shows what there is")
        reason = printable(asked.reason, MAX_REASON) or "revoked by the operator"
        for lease in found:
            self._perform(self._lifecycle.revoke(lease.lease_id, reason, self._clock.monotonic_ns()))
        more = [] if len(found) <= MOST_NAMED else [f"and {len(found) - MOST_NAMED} more"]
        return "\n".join([f"revoked {lease}, of stream {self._label(lease)}" for lease in found[:MOST_NAMED]] + more)

    # --- pages

    def _matching(self, asked: LeaseQuery) -> Iterator[Lease]:
        wanted = [
            (name, number)
            for name in ("lease_id", "client_id", "stream_id")
            if (number := getattr(asked, name)) is not None
        ]
        for lease in self._lifecycle.leases:  # in the order of their ids, as they were granted
            if lease.lease_id > asked.after and all(getattr(lease, name) == number for name, number in wanted):
                yield lease

    def _page(self, asked: LeaseQuery) -> LeasePage:
        names, now_ns, size = self._client_names(), self._clock.monotonic_ns(), 0
        found: list[LeaseFacts] = []
        limit = min(PAGE_BYTES, self.service.max_status_bytes)
        for lease in self._matching(asked):
            facts = self._facts(lease, names, now_ns)
            size += len(msgspec.json.encode(facts)) + 1
            if found and size > limit:
                return LeasePage(leases=tuple(found), total=len(self._lifecycle.leases), next=found[-1].lease_id)
            found.append(facts)
        return LeasePage(leases=tuple(found), total=len(self._lifecycle.leases))

    def _facts(self, lease: Lease, names: Mapping[int, str], now_ns: int) -> LeaseFacts:
        owner = lease.owner
        session_id = self._lifecycle.clients.session_of(lease.client_id)
        facts = LeaseFacts(
            lease_id=lease.lease_id,
            stream_id=lease.stream_id,
            stream_name=self._name_of(lease.stream_id),
            client_id=lease.client_id,
            role=lease.role.name,
            since_ns=lease.granted_utc_ns,
            keepalive_age_ms=(now_ns - lease.kept_ns) // 1_000_000,
            expires_in_ms=(lease.expiry_ns - now_ns) // 1_000_000,
            aeron_client="" if session_id is None else names.get(session_id, ""),
        )
        if owner is not None:
            facts = msgspec.structs.replace(
                facts,
                source="seen" if owner.is_seen else "declared",
                pid=owner.process.pid,
                user=owner.user,
                host=owner.description.host,
                place=owner.place,
                program=owner.description.program,
                command=owner.description.command,
            )
        return facts.bounded()

    def _client_names(self) -> dict[int, str]:
        """The clients that send requests, as the media driver calls them, by session."""
        return aeron.publishers(self._counters(), self._config.driver.control_stream_id)

    def _label(self, lease: Lease) -> str:
        name = printable(self._name_of(lease.stream_id))
        return f'"{name}" ({lease.stream_id})' if name else str(lease.stream_id)


def _read_json[T: msgspec.Struct](key: str, text: str, kind: type[T]) -> T:
    """The value of a command. Raises LocalProtocolError."""
    try:
        return msgspec.json.decode(text, type=kind)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        fields = ", ".join(kind.__struct_fields__)
        raise LocalProtocolError(f"{key} takes JSON with {fields}: {error}") from None
