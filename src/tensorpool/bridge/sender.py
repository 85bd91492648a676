# SPDX-License-Identifier: Apache-2.0
"""The sending end of one mapping: a consumer of the source stream whose frames leave as chunks.

    take a frame ──► begin ──SENT──► take the next in order
                       │ no room: go on in the next turn, while its slot and the receiver's patience last
                       └─given up (counted)──► take the newest

The source never waits for the network: frames that the link cannot carry are dropped as a whole, each with a reason.
A frame's bytes are gathered from shared memory straight into Aeron's log by native code, which also sees to it that no
torn frame completes. While all is well a whole turn is native: `wait` sends frame after frame until something else is
to be done. The first chunk of an epoch waits until Aeron has taken the announce of that epoch.
Bridge §2.1, §5, §7.2, §8; decisions G1-G3, G10, G16, G26.
"""

from __future__ import annotations

from typing import Final

from tensorpool import aeron
from tensorpool._core import ChunkPlan, FrameSender, FrameSource, SendResult, monotonic_ns
from tensorpool.bridge.background_attach import BackgroundAttach
from tensorpool.bridge.checksum import FrameChecksum
from tensorpool.bridge.config import BridgeConfig, BridgeSection, MappingConfig
from tensorpool.bridge.forwarding import Forwarder
from tensorpool.bridge.metrics import Counters, Key
from tensorpool.bridge.publications import Publications
from tensorpool.channel import ChannelUri, check_channel
from tensorpool.client import Client, Consumer, Frame, Progress
from tensorpool.client.mapped_epoch import MappedEpoch
from tensorpool.errors import TensorPoolError
from tensorpool.logs import get_logger

ATTACH_TIMEOUT_S: Final = 2.0
PATIENCE_NS: Final = 2_000_000  # for room in the log, natively and without the GIL, before others have their turn
TURN_FRAMES: Final = 64
TURN_BYTES: Final = 2 << 20
MTU_ALIGNMENT_BYTES: Final = 32


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
        section = config.bridge
        self.mapping = mapping
        self._is_paused = False
        self._section = section
        self._patience_ns = PATIENCE_NS // len(config.mappings)
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
        self._held: Frame | None = None  # the first of an epoch that was not announced yet
        self._wants_newest = False
        self._newest: tuple[int, int] = (0, -1)  # epoch and seq of the last frame that was taken
        self._began_ns = 0
        self._publication = publications.get(_payload_channel(section), section.payload_stream_id)
        self._forwarder = Forwarder(mapping, config, client.config, transport, publications, counters)

    @property
    def paused(self) -> bool:
        return self._is_paused

    @paused.setter
    def paused(self, is_paused: bool) -> None:
        self._is_paused = is_paused  # first: a wait that begins later looks here
        frames = self._frames
        if frames is not None:
            frames.sender.set_stopped(is_paused)

    @property
    def is_ready(self) -> bool:
        """Whether it reads the source stream."""
        return self._consumer is not None and self._consumer.is_active

    @property
    def failure(self) -> TensorPoolError | None:
        """Why it does not."""
        return self._attach.failure

    def invoke(self, now_ns: int) -> int:
        """One turn; at most PATIENCE_NS are spent waiting, by all senders together. Raises TransportError, Closed."""
        consumer = self._consumer
        if consumer is None:
            consumer = self._consumer = self._attach.poll(now_ns)
            if consumer is not None:
                self._counters.include(self._source_counts)
        epoch = None if consumer is None else consumer.epoch
        work = self._forwarder.invoke(epoch, now_ns)
        if consumer is None or not self._follow(epoch):
            return work
        if self._is_sending:
            work += self._go_on(now_ns)
        taken_bytes = 0
        for _ in range(TURN_FRAMES):
            if self._is_sending or taken_bytes >= TURN_BYTES:
                break
            frame = self._take(consumer)
            if frame is None:
                break
            taken_bytes += frame.nbytes
            self._begin(frame, now_ns)
            work += 1
            if self._held is not None:
                break
        return work

    def wait(self, timeout_ns: int) -> bool:
        """Send frames as they come, without Python, until something else is to be done; False where that is waited for.

        Raises TransportError, Closed.
        """
        consumer = self._consumer
        if consumer is None or self._held is not None or not self._follow(consumer.epoch):
            return False
        frames = self._frames
        if frames is not None and self._is_smooth:
            return consumer.lend(
                frames.mapped, lambda source, left_ns: self._pump(frames, source, left_ns), timeout_ns / 1e9
            )
        if self._is_sending:
            return False
        consumer.wait(timeout_ns / 1e9)
        return True

    def close(self) -> None:
        self._attach.close()
        self._leave_epoch()
        if self._consumer is not None:
            self._consumer.close()
            self._counters.keep(self._source_counts)
            self._consumer = None
        self._forwarder.close()

    # --- inside: which frame

    @property
    def _is_sending(self) -> bool:
        return self._frames is not None and self._frames.sender.is_open

    def _follow(self, epoch: int | None) -> bool:
        """Whether frames can be taken. What belongs to an epoch that is not mapped any more is not used any more."""
        if self._frames is not None and self._frames.epoch != epoch:
            self._leave_epoch()
        if self._held is not None and self._held.epoch != epoch:
            self._held = None
            self._drop("epoch_ended")
        if epoch is None:
            return False
        # Until the announce is sent frames wait in the ring; without a receiver they are skipped.
        return self._forwarder.has_announced(epoch) or self.paused or not self._is_connected

    @property
    def _is_connected(self) -> bool:
        return self._publication.is_connected and self._forwarder.is_connected

    def _take(self, consumer: Consumer) -> Frame | None:
        held, self._held = self._held, None
        if held is not None:
            return held
        if not self._wants_newest:
            frame = consumer.poll()
            if frame is None:
                consumer.wait(0)  # the consumer's own duties
        else:
            frame = consumer.latest()
            if frame is not None and (frame.epoch, frame.seq) == self._newest:
                return None
        if frame is not None:
            self._newest = frame.epoch, frame.seq
        return frame

    # --- inside: sending it

    def _begin(self, frame: Frame, now_ns: int) -> None:
        self._wants_newest = False
        if self.paused:
            self._drop("paused")
        elif not self._is_connected:
            self._drop("not_connected")
        elif not self._forwarder.has_announced(frame.epoch):
            self._held = frame  # the consumer has gone to another epoch just now
        else:
            self._began_ns = now_ns
            self._settle(self._sender_of(frame._mapped).send(frame._slot, self._patience_ns), now_ns)

    @property
    def _is_smooth(self) -> bool:
        """Whether frames need nothing but to be sent."""
        return not (self.paused or self._wants_newest or self._section.has_digests) and self._is_connected

    def _pump(self, frames: _EpochSender, source: FrameSource, timeout_ns: int) -> None:
        """Send frames natively for as long as Python has nothing to do."""
        sender, before = frames.sender, frames.sender.seq
        result = sender.pump(
            source.feed, source.descriptors, self._forwarder.subscriptions, self._patience_ns, timeout_ns
        )
        if sender.seq != before:
            self._newest = frames.epoch, sender.seq
            self._began_ns = sender.began_ns
        if result is not None:
            self._settle(result, monotonic_ns())

    def _go_on(self, now_ns: int) -> int:
        """A turn in which no chunk found room is none: let the host idle."""
        assert self._frames is not None
        sender = self._frames.sender
        before = sender.chunks
        self._settle(sender.resume(self._patience_ns), now_ns)
        return sender.chunks - before

    def _settle(self, result: SendResult, now_ns: int) -> None:
        assert self._frames is not None
        sender = self._frames.sender
        match result:
            case SendResult.SENT:
                if self._section.has_digests:
                    self._forwarder.send_checksum(self._frames.checksum(self._newest[1]))
            case SendResult.BACK_PRESSURED:
                # A receiver gives up a frame that takes longer; so do we.
                if now_ns - self._began_ns >= self._section.assembly_timeout_ns:
                    sender.abandon()
                    self._give_up("back_pressured")
            case SendResult.TORN:
                self._give_up("torn")
            case _:
                self._drop(result.name.lower())

    def _sender_of(self, mapped: MappedEpoch) -> FrameSender:
        if self._frames is not None and self._frames.mapped is not mapped:
            self._leave_epoch()  # the same epoch, mapped anew
        if self._frames is None:
            self._warn_of_large_frames(mapped)
            self._frames = _EpochSender(
                self.mapping.source_stream_id, mapped, self._publication, self._plan, self._section, self._mac_key
            )
            self._counters.include(self._frames.counts)
        return self._frames.sender

    def _leave_epoch(self) -> None:
        frames, self._frames = self._frames, None
        if frames is None:
            return
        if frames.sender.is_open:
            frames.sender.abandon()
            self._drop("epoch_ended")
        self._counters.keep(frames.counts)

    def _give_up(self, reason: str) -> None:
        self._drop(reason)
        self._wants_newest = True

    def _drop(self, reason: str) -> None:
        self._counters.add("frames_dropped", reason=reason)

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
    """The native sender for one mapped epoch, and what it counted."""

    def __init__(
        self,
        stream_id: int,
        mapped: MappedEpoch,
        publication: aeron.Publication,
        plan: ChunkPlan,
        section: BridgeSection,
        mac_key: bytes,
    ) -> None:
        self.mapped: Final = mapped
        self.epoch: Final = mapped.epoch
        self._stream_id = stream_id
        self._has_key = bool(mac_key)
        self.sender: Final = FrameSender(
            mapped.reader,
            publication,
            stream_id,
            mapped.epoch,
            plan,
            section.max_payload_bytes,
            with_digest=section.has_digests,
            mac_key=mac_key,
        )

    def checksum(self, seq: int) -> FrameChecksum:
        """Of the frame that was sent last."""
        sender = self.sender
        mac = sender.mac if self._has_key else b""
        return FrameChecksum(self._stream_id, self.epoch, seq, sender.payload_bytes, sender.crc32c, mac)

    def counts(self) -> dict[Key, int]:
        sender = self.sender
        return {
            ("frames_sent", ""): sender.frames,
            ("bytes_sent", ""): sender.bytes,
            ("chunks_sent", ""): sender.chunks,
        }


def _ignore_progress(progress: Progress) -> None: ...


def _payload_channel(section: BridgeSection) -> ChannelUri:
    """With room for a chunk in one datagram, where the channel itself names no MTU (Bridge §5.2, §10; G1)."""
    mtu_bytes = -(-section.mtu_bytes // MTU_ALIGNMENT_BYTES) * MTU_ALIGNMENT_BYTES
    channel = check_channel("bridge.payload_channel", section.payload_channel)
    return channel.with_defaults({"mtu": str(mtu_bytes)})
