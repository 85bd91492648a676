# SPDX-License-Identifier: Apache-2.0
"""Where answers go: response endpoints that strangers name, opened, kept and closed without ever being waited for.

Only addresses are taken from a request: how large the log is, and that it is ours alone, is decided here. Publications
are opened on a separate thread, at a bounded rate; as many are kept open as configured, and one without a subscriber
makes room before one that is in use. An answer without a subscriber is dropped after a while.
Discovery §4.3, §5.1; decisions A14, F2, F11, F13.
"""

from __future__ import annotations

import functools
import ipaddress
from collections import Counter, OrderedDict, deque
from collections.abc import Collection
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final

import msgspec

from tensorpool import aeron
from tensorpool.channel import ChannelUri, check_channel
from tensorpool.discovery.config import ProviderSection
from tensorpool.discovery.rates import Bucket
from tensorpool.errors import Closed, ConfigError, TransportError
from tensorpool.settings import MS

MAX_CHANNEL_BYTES: Final = 512
MAX_PARAMETERS: Final = 16
MAX_TERM_BYTES: Final = 16 << 20
DEFAULT_TERM_BYTES: Final = 8 << 20  # where the request leaves it to us: a thousand streams of three pools
MESSAGES_PER_TERM: Final = 8  # Aeron's longest message is an eighth of a term
OPENS_PER_S: Final = 32
OPENS_AT_ONCE: Final = 64
MAX_WAITING: Final = 64  # answers for one endpoint
MAX_WAITING_BYTES: Final = 16 << 20  # for all; one more may begin

_ADDRESS: Final = ("endpoint", "interface", "ttl", "mtu")


class Route(msgspec.Struct, frozen=True):
    """A response channel as it is opened, and the longest message that it carries."""

    channel: str
    media: str
    max_message_bytes: int


def route_to(channel: str, allowed: Collection[str], *, with_host_names: bool) -> Route | None:
    """How a response channel is opened; None where it must not be.

    >>> route_to("aeron:ipc?term-length=64k", ["aeron:ipc"], with_host_names=False).max_message_bytes
    8192
    """
    if len(channel) > MAX_CHANNEL_BYTES or channel.count("|") >= MAX_PARAMETERS:
        return None
    return _route_to(channel, tuple(allowed), with_host_names)


@functools.lru_cache(1024)
def _route_to(channel: str, allowed: tuple[str, ...], with_host_names: bool) -> Route | None:
    try:
        uri = check_channel("response_channel", channel)
    except ConfigError:
        return None
    if uri.is_spy or f"aeron:{uri.media}" not in allowed:
        return None
    if uri.media == "udp" and not _is_reachable(uri, with_host_names):
        return None
    term_bytes = min(int(uri.terms.get("term-length", DEFAULT_TERM_BYTES)), MAX_TERM_BYTES)
    address = uri.with_only(() if uri.is_ipc else _ADDRESS)
    rebuilt = address.with_parameters({"term-length": str(term_bytes), "linger": "0"})
    return Route(str(rebuilt), uri.media, term_bytes // MESSAGES_PER_TERM)


def _is_reachable(uri: ChannelUri, with_host_names: bool) -> bool:
    """Whether it names one host and port to send to, without a name server that could keep the media driver waiting."""
    if uri.parameters.keys() & {"control", "control-mode", "tags"}:
        return False
    host, _, port = uri.parameters.get("endpoint", "").rpartition(":")
    if not host or not port.isdecimal() or not 1 <= int(port) <= 65_535:
        return False
    try:
        address = ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))
    except ValueError:
        return host == "localhost" or with_host_names
    return not (address.is_multicast or address.is_unspecified or str(address) == "255.255.255.255")


class _Waiting(msgspec.Struct, frozen=True):
    data: bytes
    deadline_ns: int


class _Outlet:
    """One response endpoint: on its way, open, or given up."""

    def __init__(self, opening: Future[aeron.Publication]) -> None:
        self.opening: Future[aeron.Publication] | None = opening
        self.publication: aeron.Publication | None = None
        self.waiting: deque[_Waiting] = deque()
        self.used_ns = 0

    @property
    def is_connected(self) -> bool:
        try:
            return self.publication is not None and self.publication.is_connected
        except (Closed, TransportError):
            return False

    def close(self) -> None:
        if self.opening is not None and not self.opening.cancel():
            self.opening.add_done_callback(_close_opened)
        if self.publication is not None:
            self.publication.close()


def _close_opened(opening: Future[aeron.Publication]) -> None:
    if not opening.cancelled() and opening.exception() is None:
        opening.result().close()


class Responder:
    """The response endpoints of one connection to a media driver."""

    def __init__(self, settings: ProviderSection, client: aeron.Client, counts: Counter[str], now_ns: int) -> None:
        self._settings = settings
        self._client = client
        self._counts = counts
        self._opener = ThreadPoolExecutor(1, "tensorpool-discovery-responses")
        self._outlets: OrderedDict[tuple[str, int], _Outlet] = OrderedDict()  # those unused longest first
        self._busy: dict[tuple[str, int], _Outlet] = {}  # those that have something to send
        self._waiting_bytes = 0
        # By medium: strangers far away must not keep those at home from being answered.
        self._opens = {media: Bucket(OPENS_PER_S, now_ns, OPENS_AT_ONCE) for media in ("ipc", "udp")}

    def __len__(self) -> int:
        return len(self._outlets)

    def admits(self, route: Route, stream_id: int, now_ns: int) -> bool:
        """Whether an answer may be posted there; opens the endpoint. Ask before you make the answer."""
        key = route.channel, stream_id
        outlet = self._outlets.get(key) or self._open(key, route.media, now_ns)
        if outlet is None:
            self._counts["responses_not_opened"] += 1
        elif len(outlet.waiting) >= MAX_WAITING or self._waiting_bytes > MAX_WAITING_BYTES:
            self._counts["responses_beyond_queue"] += 1
        else:
            return True
        return False

    def post(self, route: Route, stream_id: int, data: bytes, now_ns: int) -> None:
        """Send it when its admitted endpoint is open and has a subscriber, or drop it after a while."""
        key = route.channel, stream_id
        outlet = self._outlets[key]
        outlet.waiting.append(_Waiting(data, now_ns + self._settings.response_connect_ms * MS))
        outlet.used_ns = now_ns
        self._waiting_bytes += len(data)
        self._outlets.move_to_end(key)
        self._busy[key] = outlet
        self._serve(key, outlet, now_ns)

    def do_work(self, now_ns: int) -> int:
        """Send what can be sent, drop what has waited too long. Returns the work done."""
        work = 0
        for key, outlet in list(self._busy.items()):
            work += self._serve(key, outlet, now_ns)
            if not outlet.waiting:
                self._busy.pop(key, None)
        idle_ns = self._settings.response_idle_ms * MS
        while self._outlets:
            key, outlet = next(iter(self._outlets.items()))
            if now_ns - outlet.used_ns <= idle_ns:
                break
            self._drop(key)
        return work

    def close(self) -> None:
        for key in list(self._outlets):
            self._drop(key)
        self._opener.shutdown(wait=False, cancel_futures=True)

    # --- inside

    def _open(self, key: tuple[str, int], media: str, now_ns: int) -> _Outlet | None:
        if not self._opens[media].take(now_ns):
            return None
        while len(self._outlets) >= self._settings.response_publication_limit:
            # F11: first those without a subscriber.
            idle = (known for known, outlet in self._outlets.items() if not outlet.is_connected)
            self._drop(next(idle, next(iter(self._outlets))))
        opening = self._opener.submit(self._client.add_publication, *key, exclusive=True)
        outlet = self._outlets[key] = _Outlet(opening)
        self._counts["responses_opened"] += 1
        return outlet

    def _serve(self, key: tuple[str, int], outlet: _Outlet, now_ns: int) -> int:
        if outlet.opening is not None and outlet.opening.done():
            opening, outlet.opening = outlet.opening, None
            if opening.exception() is not None:
                self._counts["responses_refused_by_aeron"] += 1
                self._drop(key)
                return 1
            outlet.publication = opening.result()
        work = 0
        while outlet.waiting:
            answer = outlet.waiting[0]
            is_sent = outlet.publication is not None and bool(outlet.publication.offer(answer.data))
            if not is_sent and now_ns < answer.deadline_ns:
                break
            outlet.waiting.popleft()
            self._waiting_bytes -= len(answer.data)
            self._counts["responses_sent" if is_sent else "responses_not_fetched"] += 1
            work += 1
        return work

    def _drop(self, key: tuple[str, int]) -> None:
        outlet = self._outlets.pop(key)
        self._busy.pop(key, None)
        self._waiting_bytes -= sum(len(answer.data) for answer in outlet.waiting)
        self._counts["responses_not_fetched"] += len(outlet.waiting)
        outlet.waiting.clear()
        outlet.close()
