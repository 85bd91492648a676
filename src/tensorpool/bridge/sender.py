# SPDX-License-Identifier: Apache-2.0
"""The sending end of one mapping: a consumer of the source stream whose frames leave as chunks.

Frames are taken, cut and sent by native code (`_core.StreamSender`, turned by `_core.BridgePump`), which also completes
no torn frame and counts what the link cannot carry. Here is what happens once in an epoch: the attach, the announce
that precedes the first chunk, and what is forwarded beside the frames.
Bridge §2.1, §5, §7.2, §8; decisions G1-G3, G10, G16, G26.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Final

from tensorpool import aeron
from tensorpool._core import ChunkPlan, DescriptorFeed, FrameSource, StreamSender
from tensorpool.bridge.background_attach import BackgroundAttach
from tensorpool.bridge.config import AERON_HEADER_BYTES, BridgeConfig, BridgeSection, MappingConfig
from tensorpool.bridge.forwarding import Forwarder
from tensorpool.bridge.metrics import Counters, Key
from tensorpool.bridge.publications import Publications
from tensorpool.channel import ChannelUri, check_channel
from tensorpool.client import Client, Consumer, Progress
from tensorpool.client.mapped_epoch import MappedEpoch
from tensorpool.errors import TensorPoolError
from tensorpool.logs import get_logger

ATTACH_TIMEOUT_S: Final = 2.0
MTU_ALIGNMENT_BYTES: Final = 32

type Outflow = tuple[StreamSender, DescriptorFeed, aeron.Subscription]  # what BridgePump sends


class Sender:
    """Sends one stream; a `bridge.Worker`. Raises TransportError when the media driver is gone or refuses."""

    def __init__(
        self,
        mapping: MappingConfig,
        config: BridgeConfig,
        client: Client,
        transport: aeron.Client,
        publications: Publications,
        counters: Counters,
        mac_key: bytes = b"",
    ) -> None:
        self._publication = publications.get(_payload_channel(config.bridge), config.bridge.payload_stream_id)
        section = config.bridge.at_mtu(self._publication.max_payload_length + AERON_HEADER_BYTES)
        self.mapping = mapping
        self._is_paused = False
        self._section = section
        self._counters = counters
        self._mac_key = mac_key
        self._plan = ChunkPlan(section.first_chunk_bytes, section.effective_chunk_bytes)
        self._log = get_logger("bridge", mapping=mapping.name, role="sender")
        stream_id = mapping.source_stream_id
        # Producers send progress only while a consumer asks for it; the forwarder takes it from the control stream.
        on_progress = _ignore_progress if section.forward_progress else None
        self._attach = BackgroundAttach(
            lambda: client.consumer(stream_id, timeout=ATTACH_TIMEOUT_S, on_progress=on_progress),
            stream=stream_id,
            role="consumer",
        )
        self._consumer: Consumer | None = None
        self._frames: _EpochSender | None = None
        self._forwarder = Forwarder(mapping, config, client.config, transport, publications, counters)

    @property
    def paused(self) -> bool:
        return self._is_paused

    @paused.setter
    def paused(self, is_paused: bool) -> None:
        self._is_paused = is_paused  # first: a sender that is made later looks here
        frames = self._frames
        if frames is not None:
            frames.sender.set_paused(is_paused)

    @property
    def is_ready(self) -> bool:
        """Whether it reads the source stream."""
        return self._consumer is not None and self._consumer.is_active

    @property
    def failure(self) -> TensorPoolError | None:
        """Why it does not."""
        return self._attach.failure

    def invoke(self, now_ns: int) -> int:
        """One turn, but for the frames. Raises TransportError, Closed."""
        consumer = self._consumer
        if consumer is None:
            consumer = self._consumer = self._attach.poll(now_ns)
            if consumer is not None:
                self._counters.include(self._source_counts)
        epoch = None if consumer is None else consumer.epoch
        if self._frames is not None and self._frames.epoch != epoch:
            self._leave_epoch()
        return self._forwarder.invoke(epoch, now_ns)

    @contextlib.contextmanager
    def lent(self) -> Iterator[Outflow | None]:
        """What native code sends meanwhile; None where frames wait in the ring. Raises TransportError, Closed."""
        consumer = self._consumer
        if consumer is None:
            yield None
            return
        with consumer.lent() as source:
            yield None if source is None else self._outflow(source)
        if self._frames is not None and self._frames.sender.take_failure():
            consumer.wait(0)  # it finds out, too, and asks for other descriptors

    @property
    def subscriptions(self) -> tuple[aeron.Subscription, ...]:
        """The sources of messages to forward."""
        return self._forwarder.subscriptions

    def close(self) -> None:
        self._attach.close()
        self._leave_epoch()
        if self._consumer is not None:
            self._consumer.close()
            self._counters.keep(self._source_counts)
            self._consumer = None
        self._forwarder.close()

    # --- inside

    def _outflow(self, source: FrameSource) -> Outflow | None:
        mapped: MappedEpoch = source.mapped
        is_announced = self._forwarder.has_announced(mapped.epoch)
        # Until the announce is sent frames wait in the ring; without a receiver, and in a pause, they are dropped.
        if not (is_announced or self._is_paused or not self._is_connected):
            return None
        sender = self._sender_of(mapped)
        sender.set_announced(is_announced)
        return sender, source.feed, source.descriptors

    @property
    def _is_sending(self) -> bool:
        return self._frames is not None and self._frames.sender.is_open

    @property
    def _is_connected(self) -> bool:
        return self._publication.is_connected and self._forwarder.is_connected

    def _sender_of(self, mapped: MappedEpoch) -> StreamSender:
        if self._frames is not None and self._frames.mapped is not mapped:
            self._leave_epoch()  # another epoch, or the same one mapped anew
        if self._frames is None:
            self._warn_of_large_frames(mapped)
            sender = StreamSender(
                mapped.reader,
                self._publication,
                self._forwarder.control,
                self.mapping.source_stream_id,
                mapped.epoch,
                self._plan,
                max_payload_bytes=self._section.max_payload_bytes,
                timeout_ns=self._section.assembly_timeout_ns,  # a receiver gives up a frame that takes longer
                is_traced=self._section.dialect == "2026-01",
                with_digest=self._section.has_digests,
                mac_key=self._mac_key,
            )
            sender.set_paused(self._is_paused)
            self._frames = _EpochSender(mapped, sender)
            self._counters.include(self._frames.counts)
        return self._frames.sender

    def _leave_epoch(self) -> None:
        frames, self._frames = self._frames, None
        if frames is not None:
            frames.sender.end()
            self._counters.keep(frames.counts)

    def _warn_of_large_frames(self, mapped: MappedEpoch) -> None:
        """G2: frames that fill a slot of this stream would need too many chunks."""
        stride_bytes = max(pool.stride_bytes for pool in mapped.ring.spec.pools)
        largest_bytes = self._section.largest_frame_bytes
        if stride_bytes > largest_bytes:
            self._log.warning(
                "frames_may_be_too_large",
                stride_bytes=stride_bytes,
                largest_frame_bytes=largest_bytes,
                advice="larger frames are dropped; raise bridge.mtu_bytes and the mtu of bridge.payload_channel, or "
                "bridge.max_payload_bytes",
            )

    def _source_counts(self) -> dict[Key, int]:
        """What the consumer counted: frames that it delivered, and those that were lost before."""
        assert self._consumer is not None
        stats = self._consumer.stats
        drops = {("frames_dropped", reason.name.lower()): count for reason, count in stats.drops.items()}
        return {("frames_taken", ""): stats.received, **drops}


class _EpochSender:
    """The native sender for one mapped epoch."""

    def __init__(self, mapped: MappedEpoch, sender: StreamSender) -> None:
        self.mapped: Final = mapped
        self.epoch: Final = mapped.epoch
        self.sender: Final = sender

    def counts(self) -> dict[Key, int]:
        return self.sender.counts


def _ignore_progress(progress: Progress) -> None: ...


def _payload_channel(section: BridgeSection) -> ChannelUri:
    """With room for a chunk in one datagram, where an MTU is configured and the channel names none (§5.2, §10; G1)."""
    channel = check_channel("bridge.payload_channel", section.payload_channel)
    if not section.mtu_bytes:
        return channel
    mtu_bytes = -(-section.mtu_bytes // MTU_ALIGNMENT_BYTES) * MTU_ALIGNMENT_BYTES
    return channel.with_defaults({"mtu": str(mtu_bytes)})
