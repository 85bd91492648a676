# SPDX-License-Identifier: Apache-2.0
"""The directory: soft state about streams, keyed by (driver_instance_id, stream_id), and what a query finds in it.

                 ShmPoolAnnounce                          no announce for the driver's expiry
    (unknown) ────────────────────► entry ───────────────────────────────────────────────────► (unknown)
                                    │   ▲ ShmPoolAnnounce: same or later epoch; an earlier one is ignored
                                    └───┘ DataSourceAnnounce, DataSourceMeta: its name, tags and id

Name, tags and id that arrive before the first announce are kept for as long as an entry would be. Each entry holds a
set of facts, (kind, value); a query is a set of facts too and finds the entries that hold them all. Holds no clock and
does no IO: callers pass `now_ns`, by which entries expire; a caller that reads late also passes when an announce
arrived, from which its entry lives. A message that is ignored is counted in `counts`, with a reason.
Discovery §5.1, §5.2, §6, §8, §12; decisions A13, C16, C17, F1, F3, F5-F8, F12, F15.
"""

from __future__ import annotations

import re
import struct
from collections import Counter
from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Final

import msgspec

from tensorpool._core import HEADER_SLOT_BYTES, MAX_DIMS
from tensorpool.channel import Endpoint
from tensorpool.discovery.config import ERROR_MESSAGE_MAX_BYTES, NAME_MAX_BYTES, AclRule
from tensorpool.errors import RemoteProtocolError
from tensorpool.shm.announced import has_epoch
from tensorpool.shm.layout import RingSpec
from tensorpool.soft_state import SoftStateTable
from tensorpool.wire.control import Attribute, DataSourceAnnounce, DataSourceMeta, ShmPoolAnnounce
from tensorpool.wire.discovery import (
    DiscoveryRequest,
    DiscoveryResponse,
    DiscoveryStatus,
    PayloadPool,
    Result,
    Tag,
)

MAX_POOLS: Final = 256
MAX_TAG_BYTES: Final = 4096  # all tags of a stream together
MAX_STREAM_ID: Final = 2**32 - 2

_DECIMAL: Final = re.compile(rb"[0-9]{1,20}")
_RESPONSE_HEAD_BYTES: Final = 8 + 9  # message header, and the block with request_id and status
_GROUP: Final = struct.Struct("<HH")  # bytes of one result without its groups and strings, and how many results follow
_RESULT_BLOCK_BYTES: Final = 39
_NO_ERROR_MESSAGE: Final = bytes(4)
NARROWER: Final = "filter by data_source_name, tags, stream_id or producer_id"

type Fact = tuple[str, int | str]


class DriverIdentity(msgspec.Struct, frozen=True):
    """The driver that announces on a stream, and where it grants leases.

    It comes from configuration, since announces name no driver (F6).
    """

    instance_id: str
    control: Endpoint
    expiry_ns: int
    names: dict[int, str] = {}  # of streams in its configuration; the name that a producer announces takes precedence


class _Description:
    """The name, tags and id that the metadata stream gives a stream, and the epochs that they are of."""

    __slots__ = ("data_source_id", "meta_epoch", "name", "name_epoch", "tags")

    def __init__(self) -> None:
        self.name = ""
        self.name_epoch = 0
        self.tags: tuple[str, ...] = ()
        self.data_source_id: int | None = None
        self.meta_epoch = 0

    def forget_before(self, epoch: int) -> None:
        """The stream has a later epoch: the description by a producer of an earlier one is void."""
        if self.name_epoch < epoch:
            self.name = ""
        if self.meta_epoch < epoch:
            self.tags, self.data_source_id = (), None


class _Entry:
    __slots__ = ("announce", "description", "driver", "encoded", "facts", "result")

    def __init__(self, driver: DriverIdentity, announce: ShmPoolAnnounce, description: _Description) -> None:
        self.driver = driver
        self.announce = announce
        self.description = description
        self.result = _result(driver, announce, description)
        self.encoded = b""  # the result as part of a response, made when the first response needs it
        self.facts: frozenset[Fact] = frozenset()

    @property
    def key(self) -> tuple[str, int]:
        return self.driver.instance_id, self.announce.stream_id


class _DriverStreams:
    """The streams of one driver: announced ones, and descriptions of streams that are not announced yet."""

    def __init__(self, identity: DriverIdentity) -> None:
        self.identity = identity
        self.entries = SoftStateTable[int, _Entry](identity.expiry_ns)
        self.unannounced = SoftStateTable[int, _Description](identity.expiry_ns)


class Directory:
    """Every stream that was announced lately.

    >>> directory.on_pool_announce("driver-01", announce, now_ns)       # doctest: +SKIP
    >>> directory.answer(request, now_ns, max_message_bytes=131_072)    # doctest: +SKIP

    `rules` are the ACL: None shows every stream to every client (F1).
    """

    def __init__(
        self,
        drivers: Iterable[DriverIdentity],
        *,
        max_streams: int = 100_000,
        max_results: int = 1000,
        rules: tuple[AclRule, ...] | None = None,
    ) -> None:
        self.counts: Counter[str] = Counter()
        self._drivers = {driver.instance_id: _DriverStreams(driver) for driver in drivers}
        self._index: dict[Fact, set[_Entry]] = {}
        self._max_streams = max_streams
        self._max_results = max_results
        self._rules = rules

    def __len__(self) -> int:
        return sum(len(driver.entries) for driver in self._drivers.values())

    # --- messages

    def on_pool_announce(
        self, instance_id: str, announce: ShmPoolAnnounce, now_ns: int, arrived_ns: int | None = None
    ) -> bool:
        """An announce of that driver's; whether it was accepted."""
        arrived_ns = now_ns if arrived_ns is None else arrived_ns
        flaw = _flaw_in(announce)
        if flaw is not None:
            self.counts[f"announces_{flaw}"] += 1
            return False
        driver = self._drivers[instance_id]
        self._expire(driver, now_ns)
        entry = driver.entries.get(announce.stream_id)
        if entry is None:
            return self._add(driver, announce, arrived_ns)
        known = entry.announce
        if announce.epoch < known.epoch:  # F8
            self.counts["announces_of_earlier_epochs"] += 1
            return False
        if announce.epoch > known.epoch:
            entry.description.forget_before(announce.epoch)
        if _content(announce) != _content(known):
            entry.announce = announce
            self._renew(entry)
        driver.entries.refresh(announce.stream_id, arrived_ns)
        return True

    def on_repeat(self, instance_id: str, stream_id: int, now_ns: int, arrived_ns: int | None = None) -> bool:
        """The same announce as last time but for its timestamp; whether the stream is still listed."""
        driver = self._drivers[instance_id]
        self._expire(driver, now_ns)
        is_listed = stream_id in driver.entries
        if is_listed:
            driver.entries.refresh(stream_id, now_ns if arrived_ns is None else arrived_ns)
        return is_listed

    def epoch_of(self, instance_id: str, stream_id: int) -> int | None:
        """The epoch of an entry, None where there is none."""
        entry = self._drivers[instance_id].entries.get(stream_id)
        return None if entry is None else entry.announce.epoch

    def name_of(self, instance_id: str, stream_id: int) -> str:
        """The name of an entry, "" for none."""
        entry = self._drivers[instance_id].entries.get(stream_id)
        return "" if entry is None else entry.result.data_source_name

    def on_data_source_announce(self, instance_id: str, announce: DataSourceAnnounce, now_ns: int) -> bool:
        """A producer's name for its stream; whether it was accepted. An empty name does not remove an earlier one."""
        if len(announce.name.encode("utf-8", "surrogateescape")) > NAME_MAX_BYTES:
            self.counts["names_too_long"] += 1
            return False
        description, entry = self._description(instance_id, announce.stream_id, now_ns)
        if description is None:
            return False
        if entry is not None and announce.epoch < entry.announce.epoch:
            self.counts["names_of_earlier_epochs"] += 1
            return False
        description.name_epoch = announce.epoch
        if announce.name and announce.name != description.name:
            description.name = announce.name
            if entry is not None:
                self._renew(entry)
        return True

    def on_data_source_meta(self, instance_id: str, meta: DataSourceMeta, now_ns: int) -> bool:
        """F5: tags and data_source_id are attributes; whether they were accepted."""
        description, entry = self._description(instance_id, meta.stream_id, now_ns)
        if description is None:
            return False
        tags, data_source_id = self._attributes(meta)
        # It carries no epoch: it belongs to the producer that announced itself last.
        description.meta_epoch = max(description.name_epoch, entry.announce.epoch if entry else 0)
        if (tags, data_source_id) != (description.tags, description.data_source_id):
            description.tags, description.data_source_id = tags, data_source_id
            if entry is not None:
                self._renew(entry)
        return True

    def expire(self, now_ns: int) -> None:
        """Remove the streams that were not announced for their driver's expiry."""
        for driver in self._drivers.values():
            self._expire(driver, now_ns)

    def replace_drivers(self, drivers: Iterable[DriverIdentity]) -> None:
        """Follow these drivers from now on: streams of one that is gone go, those that stay are named anew."""
        known, self._drivers = self._drivers, {}
        for identity in drivers:
            driver = known.pop(identity.instance_id, None)
            if driver is None or driver.identity.expiry_ns != identity.expiry_ns:
                if driver is not None:
                    known[identity.instance_id] = driver
                driver = _DriverStreams(identity)
            driver.identity = identity
            self._drivers[identity.instance_id] = driver
            for entry in driver.entries.values():
                entry.driver = identity
                self._renew(entry)
        for driver in known.values():
            for entry in driver.entries.values():
                self._unindex(entry)

    # --- queries

    def answer(self, request: DiscoveryRequest, now_ns: int, max_message_bytes: int) -> bytes:
        """The response to a request as it goes on the wire, never longer than that."""
        found = self._matches(request, now_ns)
        if len(found) > self._max_results:
            reason = f"{len(found)} streams match, at most {self._max_results} are returned (discovery.max_results)"
            return refusal(request.request_id, f"{reason}; {NARROWER}")
        if not found and self._rules is not None:
            return DiscoveryResponse(request_id=request.request_id, status=DiscoveryStatus.NOT_FOUND).encode()
        data = _response(request.request_id, found)
        if len(data) > max_message_bytes:
            reason = (
                f"{len(found)} streams match and take {len(data)} bytes, the response channel carries "
                f"{max_message_bytes}; {NARROWER}, or give a response channel with a larger term-length (up to 16m)"
            )
            return refusal(request.request_id, reason)
        return data

    def find(self, request: DiscoveryRequest, now_ns: int) -> list[Result]:
        """Every visible stream that fits all filters, by driver and id."""
        return [entry.result for entry in self._matches(request, now_ns)]

    # --- inside

    def _matches(self, request: DiscoveryRequest, now_ns: int) -> list[_Entry]:
        self.expire(now_ns)
        facts = _wanted(request)
        if facts:
            none: set[_Entry] = set()
            fewest = min((self._index.get(fact, none) for fact in facts), key=len)
            candidates = [entry for entry in fewest if facts <= entry.facts]
        else:
            candidates = [entry for driver in self._drivers.values() for entry in driver.entries.values()]
        if self._rules is not None:
            client_id = request.client_id
            candidates = [entry for entry in candidates if self._is_visible(entry, client_id)]
        return sorted(candidates, key=lambda entry: entry.key)

    def _is_visible(self, entry: _Entry, client_id: int) -> bool:
        return any(_fits(rule, entry, client_id) for rule in self._rules or ())

    def _add(self, driver: _DriverStreams, announce: ShmPoolAnnounce, arrived_ns: int) -> bool:
        if len(self) >= self._max_streams:
            self.counts["streams_beyond_max_streams"] += 1
            return False
        description = driver.unannounced.pop(announce.stream_id) or _Description()
        description.forget_before(announce.epoch)
        entry = _Entry(driver.identity, announce, description)
        driver.entries.add(announce.stream_id, entry, arrived_ns)
        self._renew(entry)
        return True

    def _description(self, instance_id: str, stream_id: int, now_ns: int) -> tuple[_Description | None, _Entry | None]:
        """The description of a stream and its entry, if it is announced; (None, None) where there is no room."""
        driver = self._drivers[instance_id]
        self._expire(driver, now_ns)
        entry = driver.entries.get(stream_id)
        if entry is not None:
            return entry.description, entry
        description = driver.unannounced.get(stream_id)
        if description is None:
            if len(self) + sum(len(each.unannounced) for each in self._drivers.values()) >= self._max_streams:
                self.counts["streams_beyond_max_streams"] += 1
                return None, None
            description = _Description()
        driver.unannounced.add(stream_id, description, now_ns)
        return description, None

    def _attributes(self, meta: DataSourceMeta) -> tuple[tuple[str, ...], int | None]:
        tags: tuple[str, ...] = ()
        data_source_id: int | None = None
        for attribute in meta.attributes:
            if attribute.key == "tags":
                given = _tags_of(attribute)
                tags = tuple(dict.fromkeys(tag for tag in given if tag.isascii() and len(tag) <= MAX_TAG_BYTES))
                if len(tags) < len(set(given)):
                    self.counts["tags_not_ascii"] += 1
                if sum(map(len, tags)) > MAX_TAG_BYTES:
                    self.counts["tags_too_long"] += 1
                    tags = ()
            elif attribute.key == "data_source_id" and _DECIMAL.fullmatch(attribute.value):
                number = int(attribute.value)
                data_source_id = number if number < 2**64 - 1 else None
        return tags, data_source_id

    def _renew(self, entry: _Entry) -> None:
        """Make the result and the index anew after announce or description changed."""
        self._unindex(entry)
        entry.result = _result(entry.driver, entry.announce, entry.description)
        entry.encoded = b""
        entry.facts = _facts(entry.result)
        for fact in entry.facts:
            self._index.setdefault(fact, set()).add(entry)

    def _unindex(self, entry: _Entry) -> None:
        for fact in entry.facts:
            holders = self._index[fact]
            holders.discard(entry)
            if not holders:
                del self._index[fact]

    def _expire(self, driver: _DriverStreams, now_ns: int) -> None:
        for _, entry in driver.entries.tick(now_ns).gone:
            self._unindex(entry)
            self.counts["streams_expired"] += 1
        driver.unannounced.tick(now_ns)


def _response(request_id: int, found: list[_Entry]) -> bytes:
    """An OK with these results. Each result is encoded once and copied into every response that contains it."""
    head = DiscoveryResponse(request_id=request_id, status=DiscoveryStatus.OK).encode()[:_RESPONSE_HEAD_BYTES]
    group = _GROUP.pack(_RESULT_BLOCK_BYTES, len(found))
    return b"".join((head, group, *(entry.encoded or _encode(entry) for entry in found), _NO_ERROR_MESSAGE))


def _encode(entry: _Entry) -> bytes:
    alone = DiscoveryResponse(request_id=0, status=DiscoveryStatus.OK, results=(entry.result,)).encode()
    entry.encoded = alone[_RESPONSE_HEAD_BYTES + _GROUP.size : -len(_NO_ERROR_MESSAGE)]
    return entry.encoded


def refusal(request_id: int, reason: str) -> bytes:
    """An ERROR, with a message that fits a datagram."""
    text = reason.encode("utf-8", "surrogateescape")[:ERROR_MESSAGE_MAX_BYTES].decode("utf-8", "ignore")
    return DiscoveryResponse(request_id=request_id, status=DiscoveryStatus.ERROR, error_message=text).encode()


def _flaw_in(announce: ShmPoolAnnounce) -> str | None:
    """C16, C17: why no client could attach to what is announced; None for a sound announce."""
    pools = announce.payload_pools
    if not 1 <= announce.stream_id <= MAX_STREAM_ID:
        return "without_a_stream_id"
    if not has_epoch(announce):
        return "without_an_epoch"
    if len(pools) > MAX_POOLS:
        return "of_unusable_rings"
    try:
        RingSpec.announced(announce.header_nslots, announce.header_slot_bytes, pools)
    except RemoteProtocolError:
        return "of_unusable_rings"
    if not all(uri and uri.isascii() for uri in (announce.header_region_uri, *(pool.region_uri for pool in pools))):
        return "of_unusable_uris"
    return None


def _content(announce: ShmPoolAnnounce) -> tuple[object, ...]:
    """The fields that a result repeats."""
    return (
        announce.epoch,
        announce.producer_id,
        announce.layout_version,
        announce.header_nslots,
        announce.header_region_uri,
        announce.payload_pools,
    )


def _result(driver: DriverIdentity, announce: ShmPoolAnnounce, description: _Description) -> Result:
    return Result(
        stream_id=announce.stream_id,
        producer_id=announce.producer_id,
        epoch=announce.epoch,
        layout_version=announce.layout_version,
        header_nslots=announce.header_nslots,
        header_slot_bytes=HEADER_SLOT_BYTES,
        max_dims=MAX_DIMS,
        data_source_id=description.data_source_id,
        driver_control_stream_id=driver.control.stream_id,
        payload_pools=tuple(
            PayloadPool(
                pool_id=pool.pool_id,
                pool_nslots=pool.pool_nslots,
                stride_bytes=pool.stride_bytes,
                region_uri=pool.region_uri,
            )
            for pool in announce.payload_pools
        ),
        tags=tuple(Tag(tag=tag) for tag in description.tags),
        header_region_uri=announce.header_region_uri,
        data_source_name=description.name or driver.names.get(announce.stream_id, ""),
        driver_instance_id=driver.instance_id,
        driver_control_channel=driver.control.channel,
    )


def _facts(result: Result) -> frozenset[Fact]:
    facts: set[Fact] = {("stream_id", result.stream_id), ("producer_id", result.producer_id)}
    if result.data_source_name:
        facts.add(("name", result.data_source_name))
    if result.data_source_id is not None:
        facts.add(("data_source_id", result.data_source_id))
    return frozenset(facts.union(("tag", tag.tag) for tag in result.tags))


def _wanted(request: DiscoveryRequest) -> frozenset[Fact]:
    """The filters of a request. F12: 0 is a value; only an absent field filters nothing."""
    facts: set[Fact] = {("tag", tag.tag) for tag in request.tags}
    for kind in ("stream_id", "producer_id", "data_source_id"):
        value: int | None = getattr(request, kind)
        if value is not None:
            facts.add((kind, value))
    if request.data_source_name:
        facts.add(("name", request.data_source_name))
    return frozenset(facts)


def _fits(rule: AclRule, entry: _Entry, client_id: int) -> bool:
    result = entry.result
    return (
        (not rule.client_ids or client_id in rule.client_ids)
        and (not rule.driver_instance_ids or result.driver_instance_id in rule.driver_instance_ids)
        and (not rule.stream_ids or result.stream_id in rule.stream_ids)
        and (not rule.names or any(fnmatchcase(result.data_source_name, name) for name in rule.names))
        and all(("tag", tag) in entry.facts for tag in rule.tags)
    )


def _tags_of(attribute: Attribute) -> list[str]:
    """F5: a JSON array, or text with commas."""
    try:
        if attribute.format == "application/json":
            given = msgspec.json.decode(attribute.value)
            return [tag for tag in given if isinstance(tag, str) and tag] if isinstance(given, list) else []
        text = attribute.value.decode() if attribute.format in ("text/plain", "") else ""
    except (UnicodeDecodeError, msgspec.DecodeError):
        return []  # not of the format that it names
    return [tag.strip() for tag in text.split(",") if tag.strip()]
