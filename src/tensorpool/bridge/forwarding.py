# SPDX-License-Identifier: Apache-2.0
"""What goes to the other host beside the chunks of a stream: its announces, metadata, QoS and progress.

Messages travel as they were heard, under the id of the source stream; the receiver rewrites them. Announces and
metadata say what is, so the last one is kept until the network takes it and told again to whoever connects later; QoS
and progress say what was, so they are sent once or dropped. Checksums of frames leave by the same door.
Bridge §7.1, §7.2, §9; decisions G10, G13, G16.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable
from typing import Final

from tensorpool import aeron
from tensorpool.bridge.channels import listening
from tensorpool.bridge.checksum import FrameChecksum
from tensorpool.bridge.config import BridgeConfig, MappingConfig
from tensorpool.bridge.metrics import Counters
from tensorpool.channel import Endpoint
from tensorpool.driver.config import DriverConfig
from tensorpool.errors import DecodeError
from tensorpool.wire import control, decode, peek_header
from tensorpool.wire.control import (
    DataSourceAnnounce,
    DataSourceMeta,
    FrameProgress,
    QosConsumer,
    QosProducer,
    ShmPoolAnnounce,
)

FRAGMENT_LIMIT: Final = 64
MAX_CHECKSUMS: Final = 256
MAX_DUE: Final = 256  # metadata that wait for room
MAX_EPOCHS: Final = 8  # whose announces are remembered until the sender has mapped one of them
FRESH_PERIODS: Final = 3  # for so long an announce is told to who comes later

_STREAM_ID: Final = struct.Struct("<8xI")  # the first field of everything that is forwarded
_EPOCH: Final = struct.Struct("<16xQ")  # of ShmPoolAnnounce
_ANNOUNCES: Final = {ShmPoolAnnounce.TEMPLATE_ID: "announce"}
_METADATA: Final = {DataSourceAnnounce.TEMPLATE_ID: "source", DataSourceMeta.TEMPLATE_ID: "metadata"}
_QOS: Final = {QosProducer.TEMPLATE_ID: "qos", QosConsumer.TEMPLATE_ID: "qos"}
_PROGRESS: Final = {FrameProgress.TEMPLATE_ID: "progress"}


class Forwarder:
    """Forwards for one mapping. Turned by its sender."""

    def __init__(
        self,
        mapping: MappingConfig,
        config: BridgeConfig,
        driver: DriverConfig,
        link: aeron.Client,
        counters: Counters,
    ) -> None:
        section = config.bridge
        self._stream_id = mapping.source_stream_id
        self._counters = counters
        self._fresh_ns = FRESH_PERIODS * driver.announce_period_ns
        self._announces: dict[int, tuple[bytes, int]] = {}  # by epoch, with the time when it was heard
        self._told_epoch: int | None = None
        self._is_due = False  # the told epoch was announced again
        self._checksums: deque[bytes] = deque()
        self._now_ns = 0
        self._ears: list[_Ear] = []
        self._control = _Outlet(link, section.control, counters)
        self._metadata: _Outlet | None = None
        try:
            self._listen(link, driver.driver.announce, _ANNOUNCES, self._on_announce)
            if section.metadata is not None:
                self._metadata = _Outlet(link, section.metadata, counters)
                heard = Endpoint(driver.driver.metadata_channel, section.source_metadata_stream_id)
                self._listen(link, heard, _METADATA, self._metadata.keep)
            wanted = (_QOS if section.forward_qos else {}) | (_PROGRESS if section.forward_progress else {})
            if wanted and mapping.source_control_stream_id:
                heard = Endpoint(config.local_control_channel(driver), mapping.source_control_stream_id)
                self._listen(link, heard, wanted, self._control.send)
        except BaseException:
            self.close()
            raise

    @property
    def is_connected(self) -> bool:
        """Whether anybody hears the announces."""
        return self._control.is_connected

    @property
    def heard(self) -> tuple[aeron.Subscription, ...]:
        """Where something to forward may come from."""
        return tuple(ear.subscription for ear in self._ears)

    def has_told(self, epoch: int) -> bool:
        """G16: whether the announce of this epoch left before its first chunk may."""
        return self._told_epoch == epoch

    def send_checksum(self, checksum: FrameChecksum) -> None:
        """As soon as there is room; the receiver waits for it as long as for a chunk."""
        if len(self._checksums) == MAX_CHECKSUMS:
            self._checksums.popleft()
            self._counters.add("messages_dropped", reason="checksum")
        self._checksums.append(checksum.encode())

    def invoke(self, epoch: int | None, now_ns: int) -> int:
        """One turn. `epoch` is the one that the sender has mapped: only that one is announced."""
        self._now_ns = now_ns
        work = sum(ear.poll() for ear in self._ears)
        self._announce(epoch)
        while self._checksums and self._control.send("checksum", self._checksums[0], is_last_try=False):
            self._checksums.popleft()
        if self._metadata is not None:
            work += self._metadata.flush()
        return work

    def close(self) -> None:
        for ear in self._ears:
            ear.close()
        for outlet in (self._control, self._metadata):
            if outlet is not None:
                outlet.close()

    # --- inside

    def _listen(
        self, link: aeron.Client, endpoint: Endpoint, kinds: dict[int, str], take: Callable[[str, bytes], object]
    ) -> None:
        subscription = link.add_subscription(listening(endpoint.channel), endpoint.stream_id)
        self._ears.append(_Ear(subscription, self._stream_id, kinds, take, self._counters))

    def _on_announce(self, kind: str, data: bytes) -> None:
        (epoch,) = _EPOCH.unpack_from(data)
        self._announces.pop(epoch, None)
        self._announces[epoch] = data, self._now_ns
        if len(self._announces) > MAX_EPOCHS:
            del self._announces[next(iter(self._announces))]  # the one that was not heard of for longest
        self._is_due |= epoch == self._told_epoch

    def _announce(self, epoch: int | None) -> None:
        """As often as the driver does; at once when the sender goes to another epoch, and when somebody connects."""
        if self._control.is_newly_connected() or epoch != self._told_epoch:
            self._told_epoch = None
        if epoch is None or (epoch == self._told_epoch and not self._is_due):
            return
        data, heard_ns = self._announces.get(epoch, (b"", 0))
        if data and self._is_fresh(heard_ns) and self._control.send("announce", data, is_last_try=False):
            self._told_epoch, self._is_due = epoch, False

    def _is_fresh(self, heard_ns: int) -> bool:
        return self._now_ns - heard_ns <= self._fresh_ns


class _Outlet:
    """A publication over the network, with what is still to be told and the last of each kind for who comes later."""

    def __init__(self, link: aeron.Client, endpoint: Endpoint, counters: Counters) -> None:
        self._publication = link.add_publication(endpoint.channel, endpoint.stream_id, exclusive=True)
        self._counters = counters
        self._kept: dict[str, bytes] = {}
        self._due: deque[tuple[str, bytes]] = deque()
        self._was_connected = False

    @property
    def is_connected(self) -> bool:
        return self._publication.is_connected

    def is_newly_connected(self) -> bool:
        """Whether somebody has connected since the last time that it was asked, after nobody was."""
        is_connected = self._publication.is_connected
        is_new = is_connected and not self._was_connected
        self._was_connected = is_connected
        return is_new

    def keep(self, kind: str, data: bytes) -> None:
        """Tell when there is room, in order, and the last one again to whoever connects later."""
        self._kept[kind] = data
        if len(self._due) == MAX_DUE:
            self._counters.add("messages_dropped", reason=self._due.popleft()[0])
        self._due.append((kind, data))

    def send(self, kind: str, data: bytes, *, is_last_try: bool = True) -> bool:
        """Tell now or never."""
        if len(data) > self._publication.max_message_length:
            self._counters.add("messages_dropped", reason=f"{kind}_too_long")
            return True
        is_accepted = bool(self._publication.offer(data))
        if is_accepted:
            self._counters.add("messages_forwarded", reason=kind)
        elif is_last_try:
            self._counters.add("messages_dropped", reason=kind)
        return is_accepted

    def flush(self) -> int:
        """Tell what is due; returns how much was."""
        if self.is_newly_connected():
            self._due = deque(self._kept.items())
        told = 0
        while self._due and self.send(*self._due[0], is_last_try=False):
            self._due.popleft()
            told += 1
        return told

    def close(self) -> None:
        self._publication.close()


class _Ear:
    """Passes on what one stream of the source host says about the mapped stream; everything else is left out."""

    def __init__(
        self,
        subscription: aeron.Subscription,
        stream_id: int,
        kinds: dict[int, str],
        take: Callable[[str, bytes], object],
        counters: Counters,
    ) -> None:
        self.subscription: Final = subscription
        self._stream_id = stream_id
        self._kinds = kinds
        self._take = take
        self._counters = counters

    def poll(self) -> int:
        return self.subscription.poll(self._on_message, FRAGMENT_LIMIT)

    def close(self) -> None:
        self.subscription.close()

    def _on_message(self, data: bytes, info: aeron.MessageInfo) -> None:
        try:
            header = peek_header(data)
            if header.schema_id != control.schema.id or header.template_id not in self._kinds:
                return
            if len(data) >= _STREAM_ID.size and _STREAM_ID.unpack_from(data)[0] != self._stream_id:
                return
            decode(data)  # what is malformed here would only be refused over there
        except DecodeError:
            self._counters.add("messages_dropped", reason="malformed")
            return
        self._take(self._kinds[header.template_id], data)
