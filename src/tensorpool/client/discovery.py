# SPDX-License-Identifier: Apache-2.0
"""Asking which streams there are: the client's side of discovery, on the conductor.

Every provider is asked: the one inside the client's own driver and each configured registry. Requests are sent again
until they are answered; answers are merged, and of what two providers say about a stream the later epoch counts. What
they say is advice: attaching at the driver that an answer names is what decides.
Discovery §3, §4.3, §5, §7, §10; decisions F10, F12, F15.
"""

from __future__ import annotations

import secrets
import socket
from typing import TYPE_CHECKING, Final

import msgspec

from tensorpool import aeron
from tensorpool.aeron.adapter import MessageAdapter
from tensorpool.channel import Endpoint, check_channel
from tensorpool.client.discovery_query import DiscoveredStream, DiscoveryQuery, Filters, flaw_in
from tensorpool.client.names import Names, Source
from tensorpool.driver.config import DriverConfig
from tensorpool.errors import (
    DecodeError,
    TensorPoolError,
    TransportError,
)
from tensorpool.logs import get_logger
from tensorpool.wire.control import DataSourceAnnounce, ShmPoolAnnounce
from tensorpool.wire.discovery import DiscoveryResponse, DiscoveryStatus

if TYPE_CHECKING:
    from tensorpool.client.streams import ClientStreams

MS: Final = 1_000_000
FRAGMENT_LIMIT: Final = 64
ASK_AGAIN_NS: Final = 200 * MS
REPLICA_GRACE_NS: Final = 250 * MS  # once one provider has answered, so long for the others
PATIENCE_NS: Final = 300 * MS  # without an answer for so long, names are those that we hear ourselves
OPEN_AGAIN_NS: Final = 1_000 * MS
FORGET_NS: Final = 5_000 * MS  # a query that no caller waits for any more
MAX_REQUERIES: Final = 3
MAX_ANNOUNCED: Final = 100_000
REQUEST_TERM: Final = "64k"  # requests up to 8 KiB
RESPONSE_TERM: Final = "8m"  # answers up to 1 MiB: a thousand streams of three pools


class _Provider:
    """Where to ask, and what is open towards it on the current streams."""

    def __init__(self, endpoint: Endpoint, *, is_own_driver: bool) -> None:
        self.endpoint = endpoint
        self.is_own_driver = is_own_driver  # it answers for the driver that we are a client of, and for no other
        self.publication: aeron.Publication | aeron.RenewedPublication | None = None
        self.response: Endpoint | None = None
        self.open_ns = 0


class Discovery:
    """The conductor's asker. Everything here but `endpoints` is for the conductor's thread."""

    def __init__(self, config: DriverConfig) -> None:
        settings = config.discovery
        self._config = config
        self._window_ns = 3 * config.announce_period_ns
        self._log = get_logger("client")
        self._client_id = secrets.randbelow(2**32 - 2) + 1
        endpoints = [settings.endpoint] if settings.enabled else []
        endpoints += [registry.endpoint for registry in settings.registries]
        own = _place(config.driver.control)
        self._providers = [_Provider(each, is_own_driver=_place(each) == own) for each in dict.fromkeys(endpoints)]
        self._subscriptions: dict[Endpoint, aeron.Subscription] = {}
        self._responses = MessageAdapter(self._on_malformed)
        self._responses.add(DiscoveryResponse, self.on_discovery_response)
        self._pending: dict[int, tuple[DiscoveryQuery, _Provider]] = {}
        self._sent_ns: dict[int, int] = {}
        self._queries: list[DiscoveryQuery] = []
        self._announced: dict[int, tuple[int, int, int]] = {}  # stream: epoch, layout_version, when
        self._own_ids = {config.driver.instance_id}
        self._is_own_id_known = False
        self.malformed = 0  # messages and results that were not what they claim to be
        self._now_ns = 0

    @property
    def endpoints(self) -> list[Endpoint]:
        """Whom we ask."""
        return [provider.endpoint for provider in self._providers]

    def is_here(self, stream: DiscoveredStream) -> bool:
        """Whether the driver that we are a client of grants its leases.

        Two hosts have the same IPC endpoints: the same place is the same driver only under the same name.
        """
        return _place(stream.control) == _place(self._config.driver.control) and (
            stream.driver_instance_id in self._own_ids
        )

    def is_own_id(self, instance_id: str) -> bool:
        """Whether the driver that we are a client of has this name, as far as we know."""
        return instance_id in self._own_ids

    def is_other_host(self, stream: DiscoveredStream) -> bool:
        """Whether it is at our own driver's place but not our driver's: IPC of another host."""
        return _place(stream.control) == _place(self._config.driver.control) and not self.is_here(stream)

    # --- for the conductor

    def ask(self, query: DiscoveryQuery, now_ns: int) -> None:
        query.asked_ns = now_ns
        self._queries.append(query)
        for provider in self._providers:
            self._request(query, provider)
        if not self._providers:
            query.finish()

    def forget(self, query: DiscoveryQuery) -> None:
        """Its caller does not wait for it any more."""
        if query in self._queries:
            self._queries.remove(query)
        for request_id in [key for key, (asked, _) in self._pending.items() if asked is query]:
            self._drop(request_id)

    def on_announce(self, announce: ShmPoolAnnounce, now_ns: int) -> None:
        """§7: what our own driver announces is newer than what a provider says of it."""
        if announce.stream_id in self._announced or len(self._announced) < MAX_ANNOUNCED:
            self._announced[announce.stream_id] = announce.epoch, announce.layout_version, now_ns

    def on_connection_lost(self) -> None:
        self._subscriptions.clear()
        for provider in self._providers:
            provider.publication = provider.response = None
            provider.open_ns = 0

    def do_work(self, streams: ClientStreams | None, now_ns: int) -> int:
        self._now_ns = now_ns
        if not self._queries or streams is None:
            return 0
        work = self._send(streams, now_ns)
        for subscription in list(self._subscriptions.values()):
            work += subscription.poll(self._responses.on_message, FRAGMENT_LIMIT)
        for query in tuple(self._queries):
            if self._is_complete(query, now_ns):
                self.forget(query)
                query.finish()
                work += 1
        return work

    # --- inside

    def _is_complete(self, query: DiscoveryQuery, now_ns: int) -> bool:
        if now_ns - query.asked_ns > FORGET_NS:
            return True
        if not any(asked is query for asked, _ in self._pending.values()):
            return True
        first_ns = query.first_answer_ns
        return first_ns is not None and now_ns - first_ns > REPLICA_GRACE_NS

    def _request(self, query: DiscoveryQuery, provider: _Provider, not_before_ns: int = 0) -> None:
        request_id = secrets.randbits(63)
        self._pending[request_id] = query, provider
        self._sent_ns[request_id] = not_before_ns - ASK_AGAIN_NS

    def _drop(self, request_id: int) -> None:
        del self._pending[request_id]
        del self._sent_ns[request_id]

    def _send(self, streams: ClientStreams, now_ns: int) -> int:
        sent = 0
        for request_id, (query, provider) in self._pending.items():
            if now_ns - self._sent_ns[request_id] < ASK_AGAIN_NS or not self._is_open(provider, streams, now_ns):
                continue
            assert provider.publication is not None
            assert provider.response is not None
            request = query.filters.request(request_id, self._client_id, provider.response)
            if provider.publication.offer(request.encode()):
                self._sent_ns[request_id] = now_ns
                sent += 1
        if sent:
            streams.ring(aeron.Bell.DISCOVERY)
        return sent

    def _is_open(self, provider: _Provider, streams: ClientStreams, now_ns: int) -> bool:
        if provider.publication is not None:
            return True
        if now_ns < provider.open_ns:
            return False
        provider.open_ns = now_ns + OPEN_AGAIN_NS
        try:
            provider.response = self._response_for(provider, streams)
            is_control = provider.endpoint == self._config.driver.control
            provider.publication = streams.control if is_control else streams.publish(provider.endpoint, REQUEST_TERM)
        except (TransportError, OSError) as error:
            self._log.warning("provider_unreachable", channel=provider.endpoint.channel, error=str(error))
            return False
        return True

    def _response_for(self, provider: _Provider, streams: ClientStreams) -> Endpoint:
        """An endpoint of our own for its answers; one for all providers on IPC."""
        channel = self._config.discovery.response_channel or _response_channel(provider.endpoint.channel)
        for known in self._subscriptions:
            if known.channel == channel:
                return known
        response = Endpoint(channel, secrets.randbelow(2**31 - 1) + 1)
        self._subscriptions[response] = streams.subscribe(response)
        return response

    def _on_malformed(self, data: bytes, error: DecodeError) -> None:
        self.malformed += 1

    def on_discovery_response(self, response: DiscoveryResponse, info: aeron.MessageInfo) -> None:
        asked = self._pending.get(response.request_id)
        if asked is not None:
            self._drop(response.request_id)
            self._on_response(response, *asked)

    def _on_response(self, response: DiscoveryResponse, query: DiscoveryQuery, provider: _Provider) -> None:
        if response.status is DiscoveryStatus.ERROR:
            query.refusals.append(response.error_message or "without a reason")
            return
        results = response.results if response.status is DiscoveryStatus.OK else ()
        is_doubtful = False
        for result in results:
            flaw = flaw_in(result)
            stream = DiscoveredStream.of(result)
            if flaw is not None:
                self.malformed += 1
                self._log.warning("result_discarded", stream_id=result.stream_id, flaw=flaw)
                is_doubtful = is_doubtful or flaw.startswith("announced ring")
                continue
            if provider.is_own_driver and _place(stream.control) == _place(self._config.driver.control):
                self._learn_own_id(stream.driver_instance_id)
            if self._is_outdated(stream):
                is_doubtful = True
            elif query.filters.fit(stream):
                query.add(stream)
        if is_doubtful and query.requeries < MAX_REQUERIES:  # F10, §7
            query.requeries += 1
            self._request(query, provider, self._now_ns + ASK_AGAIN_NS)
            return
        query.answers += 1
        if query.first_answer_ns is None:
            query.first_answer_ns = self._now_ns

    def _learn_own_id(self, instance_id: str) -> None:
        """The provider inside our driver knows its name; what our configuration says may be the default."""
        if not self._is_own_id_known:
            self._is_own_id_known = True
            self._own_ids = {instance_id}
        self._own_ids.add(instance_id)

    def _is_outdated(self, stream: DiscoveredStream) -> bool:
        """Whether our own driver announced otherwise lately."""
        known = self._announced.get(stream.stream_id)
        if known is None or not self.is_here(stream) or self._now_ns - known[2] > self._window_ns:
            return False
        epoch, layout_version, _ = known
        return stream.epoch < epoch or (stream.epoch == epoch and stream.layout_version != layout_version)


class Lookup:
    """What providers answer about a name; the query is repeated for as long as `look` is called."""

    def __init__(self, discovery: Discovery, name: str, now_ns: int) -> None:
        self._discovery = discovery
        self._filters = Filters(name=name)
        self._since_ns = now_ns
        self._query: DiscoveryQuery | None = None
        self.looked_ns = now_ns
        self.found: list[DiscoveredStream] | None = None  # None: no provider has answered

    def look(self, now_ns: int) -> None:
        self.looked_ns = now_ns
        query = self._query
        if query is not None and query.is_done and query.answers:
            self.found = query.streams
        if query is None or (query.is_done and now_ns - query.asked_ns >= ASK_AGAIN_NS):
            self._query = DiscoveryQuery(self._filters)
            self._discovery.ask(self._query, now_ns)

    def is_pending(self, now_ns: int) -> bool:
        """Whether an answer may still come soon."""
        return self.found is None and now_ns - self._since_ns < PATIENCE_NS


class NameFinder:
    """Streams by name: as providers say, or where they know of none, as producers announce it to us."""

    def __init__(self, names: Names, discovery: Discovery) -> None:
        self._names = names
        self._discovery = discovery
        self._lookups: dict[str, Lookup] = {}

    def on_announce(self, announce: DataSourceAnnounce, now_ns: int) -> None:
        self._names.on_announce(announce, now_ns)

    def owner(self, stream_id: int, now_ns: int) -> str | None:
        return self._names.owner(stream_id, now_ns)

    def look_up(self, name: str, now_ns: int) -> Lookup | None:
        """What providers answer; None where none is configured."""
        if not self._discovery.endpoints:
            return None
        for stale in [key for key, lookup in self._lookups.items() if now_ns - lookup.looked_ns > FORGET_NS]:
            del self._lookups[stale]
        lookup = self._lookups.get(name)
        if lookup is None:
            lookup = self._lookups[name] = Lookup(self._discovery, name, now_ns)
        lookup.look(now_ns)
        return lookup

    def find(self, name: str, now_ns: int) -> list[Source]:
        """Every live stream of that name at our own driver; more than one is ambiguous."""
        lookup = self.look_up(name, now_ns)
        if lookup is None:
            return self._names.find(name, now_ns)
        if lookup.found:
            return [
                Source(stream.stream_id, name, stream.producer_id, stream.epoch)
                for stream in lookup.found
                if self._discovery.is_here(stream)
            ]
        return [] if lookup.is_pending(now_ns) else self._names.find(name, now_ns)

    def announced(self, name: str, now_ns: int) -> list[Source]:
        """Every stream of that name that a producer announces here, whatever providers say."""
        return self._names.find(name, now_ns)


def _place(endpoint: Endpoint) -> object:
    """Two endpoints of one place lead to the same driver, however they are written."""
    try:
        return endpoint.place
    except TensorPoolError:
        return endpoint


def _response_channel(channel: str) -> str:
    """Where a provider on `channel` reaches this host. Raises OSError."""
    uri = check_channel("discovery.channel", channel)
    if uri.is_ipc:
        return f"aeron:ipc?term-length={RESPONSE_TERM}"
    address = uri.parameters.get("endpoint") or uri.parameters["control"]
    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    family, kind, _, _, target = socket.getaddrinfo(host, int(port), type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as towards, socket.socket(family, kind) as free:
        towards.connect(target)  # sends nothing; chooses the address that faces it
        here = towards.getsockname()[0]
        free.bind((here, 0))
        shown = f"[{here}]" if family == socket.AF_INET6 else here
        return f"aeron:udp?endpoint={shown}:{free.getsockname()[1]}|term-length={RESPONSE_TERM}"


def config_for(config: DriverConfig, stream: DiscoveredStream) -> DriverConfig:
    """The settings of a client of the driver that serves a stream: as ours, but for where that driver is."""
    driver, control = config.driver, stream.control
    announce = control if driver.announce == driver.control else driver.announce
    return msgspec.structs.replace(
        config,
        driver=msgspec.structs.replace(
            driver,
            instance_id=stream.driver_instance_id,
            control_channel=control.channel,
            control_stream_id=control.stream_id,
            announce_channel=announce.channel,
            announce_stream_id=announce.stream_id,
        ),
    )
