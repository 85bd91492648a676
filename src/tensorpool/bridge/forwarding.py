# SPDX-License-Identifier: Apache-2.0
"""Forwards to the other host what belongs to a stream beside its chunks: announces, metadata, QoS, progress, links.

Messages travel unchanged, under the id of the source stream; the receiver rewrites them. Announces and metadata are
state: the last one is kept until the network takes it and sent again to a receiver that connects later, metadata only
while their epoch lasts. Tables (MetaBlob*) are sent when they are complete, and are state as well. Aeron does not tell
of a receiver that restarts quickly, nor of a second one of a group: metadata and tables are repeated every few seconds.
QoS, progress and trace links are events: they are sent once or dropped. QosConsumer stays at home: the other host would
take our consumers for its own.
Bridge §7.1, §7.2, §9; decisions G10, G13, G16, K4.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable
from typing import Final

from tensorpool import aeron
from tensorpool.aeron.adapter import MessageAdapter
from tensorpool.bridge.config import BridgeConfig, MappingConfig
from tensorpool.bridge.metrics import Counters
from tensorpool.bridge.publications import Publications
from tensorpool.bridge.tables import REPEAT_NS, SECOND, TableMessage, Tables
from tensorpool.channel import Endpoint
from tensorpool.driver.config import DriverConfig
from tensorpool.errors import DecodeError
from tensorpool.soft_state import SoftStateTable
from tensorpool.wire import Message, decode
from tensorpool.wire.control import (
    DataSourceAnnounce,
    DataSourceMeta,
    FrameProgress,
    MetaBlobAnnounce,
    MetaBlobChunk,
    MetaBlobComplete,
    QosProducer,
    ShmPoolAnnounce,
)
from tensorpool.wire.trace import TraceLinkSet

FRAGMENT_LIMIT: Final = 64
MAX_DUE: Final = 256  # metadata that wait for room
MAX_EPOCHS: Final = 8  # whose announces are remembered
FRESH_PERIODS: Final = 3  # for so long an announce is sent to receivers that connect later

type Kinds = dict[type[Message], str]  # their names in counters
type Take = Callable[[str, bytes, Message], object]

_STREAM_ID: Final = struct.Struct("<8xI")  # the first field of everything that is forwarded
_EPOCH: Final = struct.Struct("<16xQ")  # of ShmPoolAnnounce and of DataSourceAnnounce
_ANNOUNCES: Final[Kinds] = {ShmPoolAnnounce: "announce"}
_TABLE: Final = "table"
_SOURCE: Final = "source"
_METADATA: Final[Kinds] = {DataSourceAnnounce: _SOURCE, DataSourceMeta: "metadata"}
_TABLES: Final[Kinds] = {MetaBlobAnnounce: _TABLE, MetaBlobChunk: _TABLE, MetaBlobComplete: _TABLE}
_TRACES: Final[Kinds] = {TraceLinkSet: "traces"}
_QOS: Final[Kinds] = {QosProducer: "qos"}
_PROGRESS: Final[Kinds] = {FrameProgress: "progress"}


class Forwarder:
    """Forwards for one mapping. Turned by its sender."""

    def __init__(
        self,
        mapping: MappingConfig,
        config: BridgeConfig,
        driver: DriverConfig,
        transport: aeron.Client,
        publications: Publications,
        counters: Counters,
    ) -> None:
        section = config.bridge
        self._stream_id = mapping.source_stream_id
        self._counters = counters
        self._announces = SoftStateTable[int, bytes](FRESH_PERIODS * driver.announce_period_ns, limit=MAX_EPOCHS)
        self._announced_epoch: int | None = None
        self._is_due = False  # the announced epoch was announced again by the driver
        self._now_ns = 0
        self._sources: list[tuple[aeron.Subscription, MessageAdapter]] = []
        self._control = _Outlet(publications, section.control, counters)
        self._metadata: _MetadataOutlet | None = None
        self._described_epoch: int | None = None
        try:
            self._listen(transport, driver.driver.announce, _ANNOUNCES, self._on_announce)
            if section.metadata is not None:
                self._metadata = _MetadataOutlet(publications, section.metadata, counters)
                source = Endpoint(driver.driver.metadata_channel, section.source_metadata_stream_id)
                self._listen(transport, source, _METADATA | _TABLES, self._on_metadata)
                if section.forward_traces:
                    links = self._metadata
                    self._listen(transport, source, _TRACES, lambda kind, data, *_: links.send(kind, data))
            wanted = (_QOS if section.forward_qos else {}) | (_PROGRESS if section.forward_progress else {})
            if wanted and mapping.source_control_stream_id:
                source = Endpoint(config.local_control_channel(driver), mapping.source_control_stream_id)
                self._listen(transport, source, wanted, lambda kind, data, _: self._control.send(kind, data))
        except BaseException:
            self.close()
            raise

    @property
    def is_connected(self) -> bool:
        """Whether a receiver is connected."""
        return self._control.is_connected

    @property
    def control(self) -> aeron.Publication:
        """Where announces go, and the checksums of frames."""
        return self._control.publication

    @property
    def subscriptions(self) -> tuple[aeron.Subscription, ...]:
        """The sources of messages to forward."""
        return tuple(subscription for subscription, _ in self._sources)

    def has_announced(self, epoch: int) -> bool:
        """G16: whether the announce of this epoch left before its first chunk may."""
        return self._announced_epoch == epoch

    def invoke(self, epoch: int | None, now_ns: int) -> int:
        """One turn. `epoch` is the one that the sender has mapped: it is announced before its first chunk."""
        self._now_ns = now_ns
        work = sum(subscription.poll(adapter.on_message, FRAGMENT_LIMIT) for subscription, adapter in self._sources)
        self._announce(epoch)
        if self._metadata is not None:
            work += self._metadata.flush(self._now_ns, is_announced=self._announced_epoch is not None)
        return work

    def close(self) -> None:
        for subscription, _ in self._sources:
            subscription.close()

    # --- inside

    def _listen(self, transport: aeron.Client, endpoint: Endpoint, kinds: Kinds, take: Take) -> None:
        """Call `take` with each message of these kinds about the mapped stream."""
        adapter = MessageAdapter(self._on_malformed)
        for kind, label in kinds.items():
            adapter.add_undecoded(kind, self._taking(label, take))
        self._sources.append((aeron.subscribe(transport, endpoint), adapter))

    def _taking(self, label: str, take: Take) -> Callable[[bytes, aeron.MessageInfo], None]:
        def on_message(data: bytes, info: aeron.MessageInfo) -> None:
            if len(data) >= _STREAM_ID.size and _STREAM_ID.unpack_from(data)[0] != self._stream_id:
                return
            take(label, data, decode(data))  # which raises for a malformed message: the receiver would only refuse it

        return on_message

    def _on_malformed(self, data: bytes, error: DecodeError) -> None:
        self._counters.add("messages_dropped", reason="malformed")

    def _on_announce(self, kind: str, data: bytes, message: Message) -> None:
        (epoch,) = _EPOCH.unpack_from(data)
        if self._announces.is_full and epoch not in self._announces:
            self._announces.pop_oldest()
        self._announces.add(epoch, data, self._now_ns)
        self._is_due |= epoch == self._announced_epoch

    def _on_metadata(self, kind: str, data: bytes, message: Message) -> None:
        assert self._metadata is not None
        if isinstance(message, MetaBlobAnnounce | MetaBlobChunk | MetaBlobComplete):
            self._metadata.take_table(message, data)
            return
        if kind == _SOURCE:
            (epoch,) = _EPOCH.unpack_from(data)
            if epoch != self._described_epoch:  # what was kept is of the previous epoch
                self._described_epoch = epoch
                self._metadata.forget()
        self._metadata.queue(kind, data)

    def _announce(self, mapped: int | None) -> None:
        """As often as the driver does; at once when there is another epoch, and when a receiver connects.

        §7.2: also of an epoch that the sender has not mapped, such as one without a producer; the newest that is fresh.
        """
        fresh = (it for it in self._announces if self._announces.get_fresh(it, self._now_ns) is not None)
        epoch = max(fresh, default=mapped)
        if self._control.is_newly_connected() or epoch != self._announced_epoch:
            self._announced_epoch = None
        if epoch is None or (epoch == self._announced_epoch and not self._is_due):
            return
        data = self._announces.get_fresh(epoch, self._now_ns)
        if data is not None and self._control.send("announce", data, is_last_try=False):
            self._announced_epoch, self._is_due = epoch, False


class _Outlet:
    """A publication over the network."""

    def __init__(self, publications: Publications, endpoint: Endpoint, counters: Counters) -> None:
        self.publication: Final = publications.get(endpoint.uri, endpoint.stream_id)
        self._counters = counters
        self._was_connected = False

    @property
    def is_connected(self) -> bool:
        return self.publication.is_connected

    def is_newly_connected(self) -> bool:
        """Whether a first receiver has connected since the last call."""
        is_connected = self.publication.is_connected
        is_new = is_connected and not self._was_connected
        self._was_connected = is_connected
        return is_new

    def send(self, kind: str, data: bytes, *, is_last_try: bool = True) -> bool:
        """Send now or never."""
        if len(data) > self.publication.max_message_length:
            self._counters.add("messages_dropped", reason=f"{kind}_too_long")
            return True
        is_accepted = bool(self.publication.offer(data))
        if is_accepted:
            self._counters.add("messages_forwarded", reason=kind)
        elif is_last_try:
            self._counters.add("messages_dropped", reason=kind)
        return is_accepted


class _MetadataOutlet(_Outlet):
    """With a queue; the last message of each kind, and the tables, are sent again to later receivers."""

    def __init__(self, publications: Publications, endpoint: Endpoint, counters: Counters) -> None:
        super().__init__(publications, endpoint, counters)
        self._kept: dict[str, bytes] = {}
        self._due: deque[tuple[str, bytes]] = deque()
        self._tables = Tables[bytes]()
        self._repeat_ns = 0

    def queue(self, kind: str, data: bytes) -> None:
        """Send when there is room, in order, and once more to a receiver that connects later."""
        self._kept[kind] = data
        if len(self._due) == MAX_DUE:
            self._counters.add("messages_dropped", reason=self._due.popleft()[0])
        self._due.append((kind, data))

    def take_table(self, message: TableMessage, data: bytes) -> None:
        """Send the table when it is complete."""
        reason = self._tables.take(message, data)
        if reason:
            self._counters.add("messages_dropped", reason=reason)

    def forget(self) -> None:
        """What is kept is not sent to later receivers."""
        self._kept.clear()
        self._tables.clear()

    def flush(self, now_ns: int, *, is_announced: bool) -> int:
        """Send what is due; returns how many messages were sent. A receiver takes tables of what is announced only."""
        is_time = is_announced and self.is_connected and now_ns >= self._repeat_ns and not self._due
        if self.is_newly_connected():
            self._repeat(now_ns, SECOND)  # by then it has the announce, without which it takes no tables
        elif is_time:
            self._repeat(now_ns, REPEAT_NS)
        sent = 0
        while self._due and self.send(*self._due[0], is_last_try=False):
            self._due.popleft()
            sent += 1
        if is_announced and not self._due:
            sent += self._tables.flush(lambda data: self.send(_TABLE, data, is_last_try=False))
        return sent

    def _repeat(self, now_ns: int, least_ns: int) -> None:
        self._due = deque(self._kept.items())
        self._tables.post()
        self._repeat_ns = now_ns + self._tables.period_ns(least_ns)
