# SPDX-License-Identifier: Apache-2.0
"""The provider: receives announces, keeps the directory, answers requests. Inside a driver or as a registry.

One agent with an Aeron connection of its own; it never waits for a client that it answers. It neither grants nor
forwards attaches. A provider inside a driver also sends that driver's announces on to registries.

A turn reads every log to its end, taking announces and queueing requests; then it answers, for a bounded time. A turn
that comes late costs no live stream its entry: an announce that it finds arrived after the previous turn, and entries
expire by the time until which everything was read.
Discovery §2.2, §4, §6.4, §8, §13; decisions C6, F2, F6, F13, F14, F16, J.
"""

from __future__ import annotations

import struct
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from typing import Final

import msgspec

from tensorpool import aeron
from tensorpool.aeron.adapter import MessageAdapter
from tensorpool.channel import MAX_AERON_STREAM_ID, Endpoint
from tensorpool.clock import Clock
from tensorpool.discovery.config import ProviderSection
from tensorpool.discovery.directory import Directory, DriverIdentity, refusal
from tensorpool.discovery.rates import Rates
from tensorpool.discovery.responses import Responder, route_to
from tensorpool.errors import Closed, DecodeError, LocalProtocolError, TransportError
from tensorpool.logs import get_logger
from tensorpool.wire import decode
from tensorpool.wire.control import ClockDomain, DataSourceAnnounce, DataSourceMeta, ShmPoolAnnounce
from tensorpool.wire.discovery import DiscoveryRequest

MAX_MESSAGE_BYTES: Final = 256 << 10
FRAGMENT_LIMIT: Final = 256
POLLS_PER_TURN: Final = 16  # of each subscription
ANSWERS_PER_TURN: Final = 64
ANSWERING_NS: Final = 5_000_000  # a turn's share for answers; as much as for reading, where that took longer
MAX_QUEUED_REQUESTS: Final = 1024
EXPIRE_EVERY_NS: Final = 100_000_000
TELL_AGAIN_NS: Final = 5_000_000_000  # to a registry that could not be opened
LOG_EVERY_NS: Final = 1_000_000_000  # §13: queries are sampled
MAX_REQUEST_BYTES: Final = 16_384

_ASKER: Final = struct.Struct("<8xQI")  # request_id and client_id, the first fields of a request
_STREAM_ID: Final = struct.Struct("<8xI")  # the first field of announces and metadata
_STAMP: Final = struct.Struct("<QB")  # its timestamp and clock domain
_STAMP_AT: Final = 24


class Source(msgspec.Struct, frozen=True):
    """A driver, the stream of its announces, and the stream of its producers' metadata."""

    identity: DriverIdentity
    announce: Endpoint
    metadata: Endpoint | None = None


class Provider:
    """The agent behind discovery. `counts` and `size` may be read from other threads."""

    role_name = "tensorpool-discovery"

    def __init__(
        self,
        settings: ProviderSection,
        sources: Sequence[Source],
        aeron_dir: str,
        clock: Clock,
        *,
        registries: Sequence[Endpoint] = (),
    ) -> None:
        self._settings = settings
        self._sources = sources
        self._registries = registries
        self._clock = clock
        self._log = get_logger("discovery", channel=settings.channel, stream_id=settings.stream_id)
        self.directory = Directory(
            (source.identity for source in sources),
            max_streams=settings.max_streams,
            max_results=settings.max_results,
            rules=settings.acl if settings.acl_enabled else None,
        )
        self._rates = Rates(
            client_per_s=settings.client_requests_per_s,
            total_per_s=settings.requests_per_s,
            now_ns=clock.monotonic_ns(),
        )
        self._connection = aeron.MediaDriverConnection(
            aeron_dir,
            f"tensorpool-discovery {settings.stream_id}",
            self._open_streams,
            self._log,
            close_streams=ProviderStreams.close,
            on_lost=self._on_connection_lost,
        )
        # What was taken last: of announces all but the timestamp, of metadata also the epoch that it was taken in.
        self._announced: dict[tuple[str, int], bytes] = {}
        self._descriptions: dict[tuple[str, int, int], tuple[bytes, int]] = {}
        self._unopened: list[Endpoint] = []  # registries whose publication is still to be opened
        self._requests: dict[bytes, None] = {}  # to be answered, in this order; one that is sent again is in it once
        self._expire_ns = self._log_ns = self._open_ns = 0
        self._now_ns = 0
        self._reloads: deque[tuple[Sequence[Source], Sequence[Endpoint]]] = deque()
        self._read_ns = 0  # when the latest turn began that read every log to its end

    @property
    def counts(self) -> Counter[str]:
        """What became of requests, announces and responses."""
        return self.directory.counts

    @property
    def size(self) -> int:
        """How many streams are known."""
        return len(self.directory)

    def reload(self, sources: Sequence[Source], registries: Sequence[Endpoint] = ()) -> None:
        """Follow these drivers and announce to these registries, from the next turn on; for other threads too."""
        self._reloads.append((sources, registries))

    # --- the agent

    def on_start(self) -> None:
        self._now_ns = self._clock.monotonic_ns()
        self._connection.open(self._now_ns)
        self._log.info("discovery_started", drivers=len(self._sources))

    def do_work(self) -> int:
        now_ns = self._now_ns = self._clock.monotonic_ns()
        work = 0
        try:
            self._connection.maintain(now_ns)
            streams = self._connection.streams
            while self._reloads:
                self._reload(*self._reloads.popleft())
            if streams is not None:
                self._open_tells(streams, now_ns)
                work += self._read(streams, now_ns)
                work += self._answer_requests(streams)
                work += streams.responder.do_work(now_ns)
        except (TransportError, Closed) as error:
            self._connection.lose(error, now_ns)
        if self._connection.streams is None:
            self._read_ns = now_ns
        if now_ns >= self._expire_ns:
            self._expire_ns = now_ns + EXPIRE_EVERY_NS
            self.directory.expire(self._read_ns)
            if len(self._announced) > 2 * len(self.directory) + 1024:
                self._announced.clear()
            if len(self._descriptions) > 4 * len(self.directory) + 1024:
                self._descriptions.clear()
        return work

    def on_close(self) -> None:
        self._connection.close()
        self._log.info("discovery_stopped", counts=dict(self.counts))

    # --- inside: the connection

    def _reload(self, sources: Sequence[Source], registries: Sequence[Endpoint]) -> None:
        self._sources, self._announced, self._descriptions = sources, {}, {}
        self.directory.replace_drivers(source.identity for source in sources)
        streams = self._connection.streams
        if streams is not None:
            streams.subscribe(self._adapters())
            if list(registries) != list(self._registries):
                streams.close_registries()
                self._unopened, self._open_ns = list(registries), 0
        self._registries = registries

    def _open_streams(self, client: aeron.Client, now_ns: int) -> ProviderStreams:
        streams = ProviderStreams(client, self._settings, self._adapters(), self.counts, now_ns)
        self._read_ns = now_ns
        self._unopened = list(self._registries)
        self._open_ns = 0
        return streams

    def nap(self, nanoseconds: int) -> None:
        """What its runner may do between turns: sleep until a client of ours asks, or the time is over."""
        self._connection.nap(aeron.Bell.DISCOVERY, nanoseconds)

    def _on_connection_lost(self, reason: str, now_ns: int) -> None:
        self._requests.clear()

    def _open_tells(self, streams: ProviderStreams, now_ns: int) -> None:
        """Open publications to registries; one that cannot be reached is tried again later."""
        if not self._unopened or now_ns < self._open_ns:
            return
        self._open_ns = now_ns + TELL_AGAIN_NS
        for endpoint in tuple(self._unopened):
            try:
                streams.add_registry(endpoint)
                self._unopened.remove(endpoint)
            except TransportError as error:
                self._log.warning("registry_unreachable", announce_channel=endpoint.channel, error=str(error))

    def _adapters(self) -> Collection[tuple[Endpoint, MessageAdapter]]:
        """One subscription for each place, whatever is published there."""
        found: dict[object, tuple[Endpoint, MessageAdapter]] = {}

        def at(endpoint: Endpoint) -> MessageAdapter:
            return found.setdefault(endpoint.place, (endpoint, MessageAdapter(self._on_malformed)))[1]

        for source in self._sources:
            at(source.announce).add_undecoded(ShmPoolAnnounce, self._announces_of(source))
            if source.metadata is not None:
                for kind in (DataSourceAnnounce, DataSourceMeta):
                    at(source.metadata).add_undecoded(kind, self._metadata_of(source, kind.TEMPLATE_ID))
        at(self._settings.endpoint).add_undecoded(DiscoveryRequest, self.on_discovery_request)
        return found.values()

    def _announces_of(self, source: Source) -> Callable[[bytes, aeron.MessageInfo], None]:
        identity, is_local = source.identity, source.announce.uri.is_ipc
        return lambda data, info: self.on_shm_pool_announce(identity, data, is_local=is_local)

    def _metadata_of(self, source: Source, template_id: int) -> Callable[[bytes, aeron.MessageInfo], None]:
        return lambda data, info: self.on_metadata(source.identity, template_id, data)

    # --- inside: announces and metadata

    def _read(self, streams: ProviderStreams, now_ns: int) -> int:
        """Take announces and metadata, queue requests. Returns the fragments read."""
        total = 0
        is_all_read = True
        for poll in streams.polls:
            fragments = FRAGMENT_LIMIT
            for _ in range(POLLS_PER_TURN):
                fragments = poll()
                total += fragments
                if fragments < FRAGMENT_LIMIT:
                    break
            is_all_read = is_all_read and fragments < FRAGMENT_LIMIT
        if is_all_read:
            self._read_ns = now_ns
        return total

    def _on_malformed(self, data: bytes, error: DecodeError) -> None:
        self.counts["malformed_messages"] += 1

    def _is_cut_short(self, data: bytes, needed_bytes: int) -> bool:
        if len(data) >= needed_bytes:
            return False
        self.counts["malformed_messages"] += 1
        return True

    def on_shm_pool_announce(self, identity: DriverIdentity, data: bytes, *, is_local: bool) -> None:
        """C6: a timestamp counts on its own host only; elsewhere the receipt does."""
        if self._is_cut_short(data, _STAMP_AT + _STAMP.size):
            return
        arrived_ns = self._arrival_ns(data, identity.expiry_ns) if is_local else self._now_ns
        if arrived_ns is None:
            self.counts["announces_too_old"] += 1
            return
        # Announces come again and again, the same but for the time: those are not decoded.
        (stream_id,) = _STREAM_ID.unpack_from(data)
        key = identity.instance_id, stream_id
        content = data[:_STAMP_AT] + data[_STAMP_AT + 8 :]
        if self._announced.get(key) == content and self.directory.on_repeat(*key, self._read_ns, arrived_ns):
            self._forward(data)
            self._announce_name(identity, stream_id)
            return
        announce = decode(data)
        assert isinstance(announce, ShmPoolAnnounce)
        if self.directory.on_pool_announce(identity.instance_id, announce, self._read_ns, arrived_ns):
            self._announced[key] = content
            self._forward(data)
            self._announce_name(identity, stream_id)

    def on_metadata(self, identity: DriverIdentity, template_id: int, data: bytes) -> None:
        """Metadata that equals the last, of the same epoch, changes nothing and is not decoded."""
        if self._is_cut_short(data, _STREAM_ID.size):
            return
        (stream_id,) = _STREAM_ID.unpack_from(data)
        key = identity.instance_id, stream_id, template_id
        epoch = self.directory.epoch_of(identity.instance_id, stream_id)
        if epoch is not None and self._descriptions.get(key) == (data, epoch):
            self._forward(data)
            return
        match decode(data):
            case DataSourceAnnounce() as announce:
                is_taken = self.directory.on_data_source_announce(identity.instance_id, announce, self._read_ns)
            case DataSourceMeta() as meta:
                is_taken = self.directory.on_data_source_meta(identity.instance_id, meta, self._read_ns)
            case _:
                return
        if is_taken:
            if epoch is not None:
                self._descriptions[key] = data, epoch
            self._forward(data)

    def _arrival_ns(self, data: bytes, window_ns: int) -> int | None:
        """When an announce of this host arrived; None where its stamp is not of that time.

        It was not there yet when the logs were last read to their end, and it did not come before it was made.
        """
        stamp_ns: int
        stamp_ns, domain = _STAMP.unpack_from(data, _STAMP_AT)
        if domain != ClockDomain.MONOTONIC:
            stamp_ns += self._now_ns - self._clock.realtime_ns()
        if not self._read_ns - window_ns <= stamp_ns <= self._now_ns + window_ns:
            return None
        return min(max(stamp_ns, self._read_ns), self._now_ns)

    def _forward(self, data: bytes) -> None:
        """Send it to registries; a message that is lost is sent again in the next period."""
        if self._connection.streams is not None:
            for publication in self._connection.streams.registries:
                publication.offer(data)

    def _announce_name(self, identity: DriverIdentity, stream_id: int) -> None:
        """Registries cannot read the driver's configuration: they get the name of a stream as a producer says it."""
        name = identity.names.get(stream_id)
        epoch = self.directory.epoch_of(identity.instance_id, stream_id)
        is_in_use = name is not None and self.directory.name_of(identity.instance_id, stream_id) == name
        if self._registries and name and epoch is not None and is_in_use:
            announce = DataSourceAnnounce(stream_id=stream_id, producer_id=0, epoch=epoch, meta_version=0, name=name)
            self._forward(announce.encode())

    # --- inside: requests

    def on_discovery_request(self, data: bytes, info: aeron.MessageInfo) -> None:
        """Queue a request for the part of the turn that answers."""
        counts = self.counts
        if self._is_cut_short(data, _ASKER.size):
            return
        if len(data) > MAX_REQUEST_BYTES:
            counts["requests_too_long"] += 1
            return
        _, client_id = _ASKER.unpack_from(data)
        if not self._rates.admits(client_id, self._now_ns):
            counts["requests_over_rate"] += 1
        elif data not in self._requests and len(self._requests) >= MAX_QUEUED_REQUESTS:
            counts["requests_beyond_queue"] += 1
        else:
            self._requests[data] = None

    def _answer_requests(self, streams: ProviderStreams) -> int:
        """Answer those that came first, for a bounded time; the rest waits for the next turn."""
        answered = 0
        read_ns = self._clock.monotonic_ns()
        until_ns = read_ns + max(ANSWERING_NS, read_ns - self._now_ns)
        while self._requests and answered < ANSWERS_PER_TURN:
            data = next(iter(self._requests))
            del self._requests[data]
            answered += 1
            try:
                self._answer_request(streams.responder, _decode_request(data))
            except DecodeError:
                self.counts["malformed_messages"] += 1
            if self._clock.monotonic_ns() >= until_ns:
                break
        return answered

    def _answer_request(self, responder: Responder, request: DiscoveryRequest) -> None:
        counts = self.counts
        if not request.response_channel:
            counts["requests_without_channel"] += 1
            return
        settings = self._settings
        route = route_to(
            request.response_channel,
            settings.response_channel_allow,
            with_host_names=settings.response_host_names,
        )
        if route is None or request.response_stream_id > MAX_AERON_STREAM_ID:
            counts["requests_to_refused_endpoints"] += 1
            return
        if not responder.admits(route, request.response_stream_id, self._now_ns):
            return
        if request.response_stream_id == 0:  # F2
            counts["requests_to_stream_0"] += 1
            answer = refusal(request.request_id, "response_stream_id is 0; give one from 1 to 2^31 - 1")
        else:
            counts["requests"] += 1
            answer = self._answer(request, route.max_message_bytes)
        responder.post(route, request.response_stream_id, answer, self._now_ns)
        if self._now_ns >= self._log_ns:
            self._log_ns = self._now_ns + LOG_EVERY_NS
            figures = {"requests": counts["requests"], "streams": len(self.directory)}
            self._log.info("query", client_id=request.client_id, **figures)

    def _answer(self, request: DiscoveryRequest, max_message_bytes: int) -> bytes:
        try:
            return self.directory.answer(request, self._read_ns, max_message_bytes)
        except LocalProtocolError as error:
            self._log.error("answer_failed", error=str(error))
            return refusal(request.request_id, "the provider failed to encode its answer; its log says why")


def _decode_request(data: bytes) -> DiscoveryRequest:
    """Raises DecodeError. J: other clients leave an empty name out altogether."""
    try:
        request = decode(data)
    except DecodeError as error:
        if error.field != "data_source_name" or error.offset != len(data):
            raise
        request = decode(data + bytes(4))
        if isinstance(request, DiscoveryRequest) and request.data_source_name:
            raise  # its length was there, the name was not
    assert isinstance(request, DiscoveryRequest)
    return request


class ProviderStreams:
    """The provider's publications and subscriptions at one media driver."""

    def __init__(
        self,
        client: aeron.Client,
        settings: ProviderSection,
        adapters: Collection[tuple[Endpoint, MessageAdapter]],
        counts: Counter[str],
        now_ns: int,
    ) -> None:
        self._client = client
        self._counts = counts
        self.responder: Final = Responder(settings, client, counts, now_ns)
        self.registries: Final[list[aeron.Publication]] = []
        self.polls: list[Callable[[], int]] = []
        self._subscriptions: dict[Endpoint, aeron.Subscription] = {}
        self.subscribe(adapters)

    def add_registry(self, endpoint: Endpoint) -> None:
        """Open the publication to a registry. Raises TransportError."""
        self.registries.append(self._client.add_publication(endpoint.channel, endpoint.stream_id, exclusive=True))

    def close_registries(self) -> None:
        for publication in self.registries:
            publication.close()
        self.registries.clear()

    def subscribe(self, adapters: Collection[tuple[Endpoint, MessageAdapter]]) -> None:
        """Receive at these endpoints only; nothing is missed where we did before. Raises TransportError."""
        for endpoint, _ in adapters:
            if endpoint not in self._subscriptions:
                self._subscriptions[endpoint] = aeron.subscribe(self._client, endpoint)
        for endpoint in self._subscriptions.keys() - {endpoint for endpoint, _ in adapters}:
            self._subscriptions.pop(endpoint).close()
        self.polls = [self._bounded_poll(self._subscriptions[endpoint], adapter) for endpoint, adapter in adapters]

    def close(self) -> None:
        self.responder.close()

    def _bounded_poll(self, subscription: aeron.Subscription, adapter: MessageAdapter) -> Callable[[], int]:
        """Anybody may send to a registry on the network: what is longer than any honest message takes no memory."""
        filter = adapter.make_filter(MAX_MESSAGE_BYTES)
        too_long = 0

        def poll() -> int:
            nonlocal too_long
            fragments = filter.poll(subscription, adapter.on_message, FRAGMENT_LIMIT)
            if fragments:
                before, too_long = too_long, filter.counts["too_long"]
                self._counts["messages_too_long"] += too_long - before
            return fragments

        return poll


class ThriftyIdle:
    """Sleeps between turns, and after a turn that took long so much longer that a flood leaves `share` of a core."""

    def __init__(
        self,
        *,
        share: float,
        shortest_ns: int = 1_000_000,
        longest_ns: int = 10_000_000,
        nap: Callable[[int], object] = lambda nanoseconds: time.sleep(nanoseconds / 1e9),
    ) -> None:
        self._rest = 1 / share - 1
        self._shortest_ns = shortest_ns  # also after work: many announces in one turn cost less than each in its own
        self._longest_ns = longest_ns
        self._nap = nap  # which may end early
        self._park_ns = 0
        self._began_ns = time.monotonic_ns()

    def idle(self, work_count: int) -> None:
        now_ns = time.monotonic_ns()
        took_ns = now_ns - self._began_ns
        longer_ns = 0 if work_count else 2 * self._park_ns
        self._park_ns = min(max(longer_ns, self._shortest_ns), self._longest_ns)
        rest_ns = int(took_ns * self._rest)
        if rest_ns >= self._shortest_ns:
            time.sleep(rest_ns / 1e9)
        if self._park_ns > rest_ns:
            self._nap(self._park_ns - rest_ns)
        self._began_ns = time.monotonic_ns()
