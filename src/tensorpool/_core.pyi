"""
The native core of tensorpool: rings in shared memory and Aeron's C API.
"""

from collections.abc import Buffer, Callable, Iterable, Sequence
import enum
from typing import Any, Self

import numpy.typing

from tensorpool.client.frame import Frame
from tensorpool.client.trace_ids import Traced
from tensorpool.wire.control import Dtype


SUPERBLOCK_BYTES: int = 64

HEADER_SLOT_BYTES: int = 256

MAX_DIMS: int = 8

MAX_SEQ: int = 9223372036854775807

class DropReason(enum.IntEnum):
    """Why a frame was not delivered."""

    NOT_COMMITTED = 1
    """the producer is still writing this very frame"""

    OVERWRITTEN = 2
    """the slot moved on to a later frame, before or during the read"""

    STALE = 3
    """the slot still holds an earlier frame"""

    BAD_EMBEDDED_HEADER = 4

    BAD_PAYLOAD_OFFSET = 5

    BAD_PAYLOAD_SLOT = 6

    BAD_POOL = 7

    BAD_LENGTH = 8

    BAD_DTYPE = 9

    BAD_MAJOR_ORDER = 10

    BAD_NDIMS = 11

    BAD_DIMS = 12

    BAD_STRIDES = 13

    BAD_PROGRESS = 14

    NO_POOL = 15
    """larger than every pool of the stream"""

    DETACHED = 16
    """published while the producer had no lease"""

    ABANDONED = 17
    """given up after its progress was reported"""

    GAP = 18
    """its descriptor never came"""

    RESYNC = 19
    """skipped to catch up after max_outstanding_seq_gap"""

    UNMAPPED = 20
    """published while the consumer did not have its epoch mapped"""

    EPOCH_ENDED = 21
    """committed, but not yet seen when the epoch ended"""

    RATE_LIMITED = 22
    """skipped to keep to max_rate_hz"""

    SKIPPED = 23
    """skipped because the caller asked for the newest frame"""

    BAD_TIMESTAMP = 24
    """its capture or publish time went back, though it has both"""

def is_late(drop: DropReason) -> bool:
    """Whether QosConsumer.drops_late counts this reason."""

def is_gap(drop: DropReason) -> bool:
    """Whether QosConsumer.drops_gap counts this reason."""

class Mapping:
    """
    A mapped file; exports the buffer protocol and is unmapped with its last view. Made by tensorpool.shm only.
    """

    def __init__(self, fd: int, length: int, *, writable: bool) -> None: ...

    def __buffer__(self, flags: int, /) -> memoryview: ...

    def __len__(self) -> int: ...

    @property
    def is_writable(self) -> bool: ...

    def prefault(self, begin: int = 0, end: int = 18446744073709551615) -> None:
        """Bring the pages of [begin, end) in, without the GIL."""

    def collapse(self, begin: int = 0, end: int = 18446744073709551615) -> int:
        """
        Give [begin, end) of a new tmpfs file huge pages, as far as the kernel has any; the bytes in them.
        """

    def lock(self, *, on_fault: bool = False) -> None:
        """mlock the pages; with `on_fault` each from when it is first touched."""

    def load_u64(self, offset: int) -> int:
        """Load an aligned u64 with acquire ordering."""

    def store_u64(self, offset: int, value: int) -> None:
        """Store an aligned u64 with release ordering."""

class TensorLayout:
    """
    dtype, order, shape and strides of a payload, checked once. Strides of 0 are inferred.
    """

    def __init__(self, dtype: int, major_order: int, dims: Sequence[int], strides: Sequence[int] = [], progress_unit: int = 0, progress_stride_bytes: int = 0) -> None: ...

    @property
    def dtype(self) -> int: ...

    @property
    def major_order(self) -> int: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def byte_strides(self) -> tuple[int, ...]: ...

    @property
    def extent_bytes(self) -> int: ...

    @property
    def progress_unit(self) -> int: ...

    @property
    def progress_stride_bytes(self) -> int: ...

class SlotFrame:
    """A frame that passed every check when it was read."""

    @property
    def seq(self) -> int: ...

    @property
    def timestamp_ns(self) -> int: ...

    @property
    def meta_version(self) -> int: ...

    @property
    def trace_id(self) -> int:
        """0: none"""

    @property
    def slot(self) -> int: ...

    @property
    def pool(self) -> int:
        """Index into the reader's pools."""

    @property
    def values_len_bytes(self) -> int: ...

    @property
    def payload_offset(self) -> int:
        """Where the payload starts in its pool's mapping."""

    @property
    def layout(self) -> TensorLayout: ...

class RingWriter:
    """The producer's side of a ring, bound once to writable mappings."""

    def __init__(self, header: Mapping, pools: Sequence[tuple[int, int, Mapping]], nslots: int) -> None:
        """`pools` are (pool_id, stride_bytes, mapping)."""

    def write(self, seq: int, layout: TensorLayout, data: Buffer, timestamp_ns: int = 0, meta_version: int = 0) -> bool:
        """
        Copy a contiguous buffer into the slot of `seq` and commit it. False: no pool is large enough.
        """

    def begin(self, seq: int, layout: TensorLayout, timestamp_ns: int = 0, meta_version: int = 0, header_first: bool = False) -> tuple[Mapping, int] | None:
        """
        Open the slot of `seq` for writing in place: the pool's mapping and the payload's offset in it. None: no pool is large enough.
        """

    def commit(self, timestamp_ns: int = 0, meta_version: int = 0) -> None:
        """Commit the open claim."""

    def abandon(self, is_known: bool = False) -> None:
        """
        Give the open claim up: readers drop the slot. Its seq may be used again, unless consumers know of it.
        """

    def wake(self) -> None:
        """Wake readers that sleep on the newest frame's slot; rate-limited."""

    @property
    def next_seq(self) -> int: ...

    @property
    def is_claimed(self) -> bool: ...

    @property
    def written(self) -> int: ...

    @property
    def no_pool_drops(self) -> int: ...

    @property
    def nslots(self) -> int: ...

    @property
    def release_gil_from_bytes(self) -> int: ...

    @release_gil_from_bytes.setter
    def release_gil_from_bytes(self, arg: int, /) -> None: ...

class RingReader:
    """The consumer's side of a ring, bound once; read-only mappings suffice."""

    def __init__(self, header: Mapping, pools: Sequence[tuple[int, int, Mapping]], nslots: int) -> None:
        """`pools` are (pool_id, stride_bytes, mapping)."""

    def read(self, seq: int) -> SlotFrame | DropReason:
        """Validate the slot of `seq`; never waits."""

    def copy_into(self, frame: SlotFrame, out: Buffer) -> bool:
        """Copy the payload; True when it stayed whole."""

    def kept_view(self, frame: SlotFrame) -> numpy.typing.NDArray[Any] | None:
        """
        A new array over the payload, made from the view that was kept for its slot; None where none was.
        """

    def keep_view(self, frame: SlotFrame, view: numpy.typing.NDArray[Any], is_of_any_version: bool = True) -> None:
        """
        Keep a view of the frame's payload for later frames of its slot that have the same layout, and the same meta_version unless it is of any.
        """

    def intact(self, frame: SlotFrame) -> bool:
        """Whether the frame has not been overwritten so far."""

    def read_partial(self, seq: int) -> SlotFrame | DropReason:
        """Validate the header of a frame that may still be being written."""

    def is_held(self, frame: SlotFrame) -> bool:
        """
        Whether the slot still belongs to this frame, written to the end or not.
        """

    def newest(self, since: int | None = None) -> int | None:
        """
        The newest committed seq, or None. With `since`, a seq that the ring has had, a few looks from there on instead of one at every slot; a producer that left out more than 64 seqs may have later frames.
        """

    def is_committed(self, seq: int) -> bool:
        """Whether `seq` is committed, or its slot has moved on to a later frame."""

    def wait(self, seq: int, timeout_ns: int) -> bool:
        """Sleep until is_committed(seq); False on timeout."""

    @property
    def drops(self) -> dict[DropReason, int]:
        """How many reads failed, by reason."""

    @property
    def accepted(self) -> int: ...

    @property
    def pools(self) -> list[tuple[int, int, Mapping]]:
        """In the order that SlotFrame.pool indexes."""

    @property
    def nslots(self) -> int: ...

    @property
    def release_gil_from_bytes(self) -> int: ...

    @release_gil_from_bytes.setter
    def release_gil_from_bytes(self, arg: int, /) -> None: ...

def load_aeron(paths: Sequence[str]) -> None:
    """Resolve Aeron's C API from these shared objects; once per process."""

def aeron_version() -> str: ...

def aeron_default_dir() -> str:
    """The directory that Aeron uses when none is named."""

def is_driver_active(dir: str, timeout_ms: int) -> bool:
    """
    Whether a media driver has given a sign of life at `dir` within the timeout.
    """

def udp_offload_counts() -> tuple[int, int, int]:
    """
    Datagrams of this process's media drivers that left in segmented sends, that came coalesced, and that came so damaged that they were dropped.
    """

def udp_split(length: int, segment_bytes: int) -> list[tuple[int, int]]:
    """
    (offset, length) of the datagrams in a buffer that the kernel coalesced.
    """

def udp_groups(lengths: Sequence[int], most_segment_bytes: int = 65535) -> list[tuple[int, int]]:
    """
    (first, count) of the segmented sends that a batch of datagrams becomes.
    """

def monotonic_ns() -> int:
    """CLOCK_MONOTONIC."""

class MediaDriver:
    """Aeron's C media driver inside this process."""

    def __init__(self, settings: Sequence[tuple[str, int | str]], own_thread_dir: str = '', on_offload_refused: Callable[[str], object] | None = None) -> None:
        """
        `settings` are (name, value) for aeron_driver_context_set_<name>; with its directory as `own_thread_dir` its one shared thread is ours, which sleeps while nothing happens; `on_offload_refused` asks for the UDP offload, and is called with the reason where it cannot be had, once per process.
        """

    def close(self) -> None: ...

    @property
    def is_closed(self) -> bool: ...

class OfferResult:
    """
    What became of an offer: true when accepted, else why it should be tried again or dropped.
    """

    def __bool__(self) -> bool: ...

    def __repr__(self) -> str: ...

    @property
    def code(self) -> int:
        """1, or Aeron's own number."""

    @property
    def name(self) -> str: ...

    ACCEPTED: OfferResult = ...

    NOT_CONNECTED: OfferResult = ...

    BACK_PRESSURED: OfferResult = ...

    ADMIN_ACTION: OfferResult = ...

class Publication:
    def offer(self, message: Buffer) -> OfferResult:
        """Append a message to the log, fragmented where it exceeds the MTU."""

    def offerv(self, parts: Sequence[Buffer]) -> OfferResult:
        """Gather the parts into one message."""

    def try_claim(self, message: Buffer) -> OfferResult:
        """
        Write a message of one fragment straight into the log: claim, fill and commit in one call.
        """

    def offer_descriptor(self, stream_id: int, epoch: int, seq: int, timestamp_ns: int | None = None, meta_version: int | None = None, trace_id: int = 0) -> OfferResult:
        """Encode a FrameDescriptor straight into the log."""

    def close(self) -> None: ...

    def revoke(self) -> None:
        """
        Close it without waiting for subscribers that have not read its log; a plain close before Aeron 1.48.
        """

    @property
    def is_closed(self) -> bool: ...

    @property
    def is_connected(self) -> bool: ...

    @property
    def has_room(self) -> bool:
        """
        Whether a message would be accepted now: there is a subscriber, and the log is not full.
        """

    @property
    def position(self) -> int: ...

    @property
    def channel(self) -> str: ...

    @property
    def stream_id(self) -> int: ...

    @property
    def session_id(self) -> int: ...

    @property
    def max_message_length(self) -> int: ...

    @property
    def max_payload_length(self) -> int: ...

    @property
    def term_buffer_length(self) -> int: ...

class MessageInfo:
    """What a subscription saw of a message besides its bytes."""

    @property
    def session_id(self) -> int: ...

    @property
    def stream_id(self) -> int: ...

    @property
    def reserved_value(self) -> int: ...

    @property
    def position(self) -> int: ...

class ImageEvent:
    """An image came (available) or went."""

    @property
    def available(self) -> bool: ...

    @property
    def session_id(self) -> int: ...

    @property
    def correlation_id(self) -> int: ...

    @property
    def position(self) -> int: ...

    @property
    def monotonic_ns(self) -> int:
        """When Aeron's own thread learned of it."""

    @property
    def source(self) -> str: ...

class Subscription:
    def poll(self, handler: Callable[[bytes, MessageInfo], object], limit: int = 10) -> int:
        """
        Give whole messages to the handler; returns the number of fragments consumed. When the handler raises, the poll ends, what was not yet delivered stays in the log, and the exception is the caller's.
        """

    def has_news(self) -> bool:
        """Whether a poll would find a message, or an image that came or went."""

    def close(self) -> None: ...

    @property
    def is_closed(self) -> bool: ...

    @property
    def is_connected(self) -> bool: ...

    @property
    def image_count(self) -> int: ...

    @property
    def channel(self) -> str: ...

    @property
    def stream_id(self) -> int: ...

    @property
    def partial_sessions(self) -> int:
        """Sessions for which a fragment assembler is kept."""

class EventFilter:
    """
    The EventMessages that are for one service, by the exact bytes of their tag.
    """

    def __init__(self, schema_id: int, tags: Sequence[str]) -> None: ...

    def poll(self, subscription: Subscription, handler: Callable[[bytes, MessageInfo], object], limit: int) -> int:
        """
        As Subscription.poll, for messages to this service; all others are counted.
        """

    @property
    def counts(self) -> dict[str, int]: ...

class MessageFilter:
    """
    Which messages of several fragments are put together, by their kind and length.
    """

    def __init__(self, kinds: Sequence[tuple[int, int]], max_bytes: int) -> None:
        """Kinds are pairs of schema and template."""

    def poll(self, subscription: Subscription, handler: Callable[[bytes, MessageInfo], object], limit: int) -> int:
        """
        As Subscription.poll; what is not put together is counted, and takes no memory.
        """

    @property
    def counts(self) -> dict[str, int]: ...

class Counter:
    @property
    def value(self) -> int: ...

    @value.setter
    def value(self, arg: int, /) -> None: ...

    def add(self, delta: int) -> int:
        """Add and return the sum."""

    def close(self) -> None: ...

    @property
    def is_closed(self) -> bool: ...

class CounterReading:
    @property
    def counter_id(self) -> int: ...

    @property
    def type_id(self) -> int: ...

    @property
    def value(self) -> int: ...

    @property
    def owner_id(self) -> int:
        """
        The id of the client that the counter belongs to; -1 where Aeron does not say.
        """

    @property
    def label(self) -> str: ...

    @property
    def key(self) -> bytes: ...

class Client:
    """A connection to a media driver."""

    def __init__(self, dir: str, *, client_name: str = 'tensorpool', driver_timeout_ms: int = 10000, keepalive_interval_ns: int = 500000000, resource_linger_ns: int = 3000000000, idle_sleep_ns: int = 16000000, pre_touch: bool = False) -> None: ...

    def add_publication(self, channel: str, stream_id: int, exclusive: bool = False) -> Publication: ...

    def add_subscription(self, channel: str, stream_id: int, on_image: Callable[[ImageEvent], object] | None = None) -> Subscription:
        """`on_image` is called by poll, on the polling thread."""

    def add_counter(self, type_id: int, key: bytes, label: str) -> Counter: ...

    def counters(self) -> list[CounterReading]:
        """Every counter of the media driver."""

    def take_errors(self) -> list[tuple[int, str]]:
        """What Aeron reported since the last call: (code, message), at most 64."""

    def close(self) -> None:
        """
        Close all resources, then the client; waits for calls that other threads are inside of.
        """

    @property
    def is_closed(self) -> bool:
        """True after close, after a fork, and when the media driver is gone."""

    def ring(self, bell: int) -> None:
        """Wake those that sleep in wait_for_ring at this media driver."""

    def wait_for_ring(self, bell: int, timeout_ns: int) -> None:
        """
        Sleep until a process rings that bell, or the time is over. A ring that comes just before is missed.
        """

    def expect_polls(self) -> None:
        """
        Subscriptions are polled all the time from now on: after a pause of four seconds a poll raises.
        """

    @property
    def has_missed_events(self) -> bool:
        """
        True when this process was too slow for the media driver's events: connect anew.
        """

    @property
    def dir(self) -> str: ...

class ReceivedFrame(SlotFrame):
    """A frame with what its descriptor said about it."""

    @property
    def publish_timestamp_ns(self) -> int | None: ...

    @property
    def dropped_before(self) -> int:
        """Lost since the frame delivered before this one."""

class FrameBase:
    """What every loop touches of a frame."""

    def __init__(self, mapped: object, slot: ReceivedFrame) -> None: ...

    @property
    def array(self) -> numpy.typing.NDArray[Any]:
        """
        A read-only view of the payload, without a copy. BIT frames show their packed bytes.
        """

    def is_intact(self) -> bool:
        """
        Whether everything read from the view so far was this frame. One that is not counts as dropped.
        """

    def _copy_like(self, out: Buffer) -> bool | None:
        """
        Whether the copy is whole; None, and no copy, where `out` differs in shape, dtype or strides.
        """

    @property
    def nbytes(self) -> int: ...

    @property
    def seq(self) -> int: ...

    @property
    def meta_version(self) -> int:
        """Which metadata applies; 0 is none. See `Consumer.metadata`."""

    @property
    def trace_id(self) -> int:
        """0: not traced."""

    @property
    def dropped_before(self) -> int:
        """
        How many frames were lost between the one delivered before and this one.
        """

    @property
    def _mapped(self) -> Any: ...

    @property
    def _slot(self) -> ReceivedFrame: ...

class LateFrames:
    """
    How many delivered frames their readers found overwritten, in all epochs.
    """

    def __init__(self) -> None: ...

    @property
    def count(self) -> int: ...

class DescriptorFeed:
    """
    A consumer's stream in one epoch: descriptors in, validated frames out.
    """

    def __init__(self, reader: RingReader, stream_id: int, epoch: int, expected: int | None = None, max_outstanding: int = 0, late: LateFrames | None = None) -> None:
        """
        `expected` is the first seq that counts; without it the first descriptor decides. `received` and `drops` are as of each delivery; `late` counts the frames that moved from the one to the other since.
        """

    def next(self, subscription: Subscription) -> ReceivedFrame | None:
        """The next frame that can be delivered, or None. Never waits."""

    def latest(self, subscription: Subscription) -> ReceivedFrame | None:
        """The newest frame of the ring, delivered before or not. Never waits."""

    def wait(self, subscription: Subscription, timeout_ns: int) -> bool:
        """
        Sleep until there is something for next(), the owner is needed, or the time is over: then False.
        """

    def finish(self) -> int | None:
        """
        No more frames; the next seq that is not accounted for, or None where no frame was announced.
        """

    def discard(self, subscription: Subscription) -> None:
        """Skip every descriptor that was sent before now."""

    def refuse(self, frame: ReceivedFrame, reason: DropReason) -> None:
        """Count the frame, which was handed out last, as dropped instead."""

    def stop(self) -> None:
        """From any thread: no more frames; a wait returns."""

    def set_min_interval_ns(self, interval_ns: int) -> None:
        """Deliver at most one frame per interval; 0: all."""

    def set_throttled(self, is_throttled: bool) -> None:
        """
        Whether the publisher leaves descriptors out for this consumer: then they are no gaps.
        """

    def set_switching(self) -> None:
        """Skip seqs that are not higher, until the first that is."""

    def forget(self, attention: int) -> None: ...

    def carry_lost(self, lost: int) -> None:
        """Add to the next frame's dropped_before."""

    @property
    def attention(self) -> int:
        """Bits: 1 stopped, 2 newer epoch, 4 seq went back, 8 image lost."""

    @property
    def drops(self) -> dict[DropReason, int]: ...

    @property
    def received(self) -> int: ...

    @property
    def duplicates(self) -> int: ...

    @property
    def ignored(self) -> int:
        """Descriptors of other epochs."""

    @property
    def foreign(self) -> int:
        """Messages that are not version-1 FrameDescriptors."""

    @property
    def lost(self) -> int:
        """Lost since the last frame that was delivered."""

    @property
    def last_seq_seen(self) -> int | None: ...

class FrameSource:
    """What a consumer reads from, in one object: each frame costs one call."""

    def __init__(self, feed: DescriptorFeed, descriptors: Subscription, mapped: object, type: type[FrameBase]) -> None:
        """
        `mapped` is the epoch that the feed reads, `type` the class of its frames.
        """

    def next(self) -> Any:
        """The next frame that can be delivered, or None. Never waits."""

    @property
    def feed(self) -> DescriptorFeed: ...

    @property
    def descriptors(self) -> Subscription: ...

    @property
    def mapped(self) -> Any: ...

class ReceptionLock:
    """Held by the thread that reads a stream, or changes what is read."""

    def acquire(self, blocking: bool = True) -> bool: ...

    def release(self) -> None: ...

    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> None: ...

class ReceptionBase:
    """Where a consumer's frames come from now."""

    def __init__(self) -> None: ...

    @property
    def lock(self) -> ReceptionLock: ...

    @property
    def source(self) -> FrameSource | None:
        """What poll reads from; None: nothing is mapped."""

    @source.setter
    def source(self, source: FrameSource | None, /) -> None: ...

class ConsumerBase:
    """
    What every loop calls of a consumer; the subclass's `_poll` and `_next` wait for frames that have not arrived yet.
    """

    def __iter__(self) -> Self: ...

    def __next__(self) -> Frame: ...

    def __init__(self, reception: ReceptionBase, is_simple: bool) -> None:
        """`is_simple`: nothing has to run before each poll."""

    def poll(self, timeout: float = 0.0) -> Frame | None:
        """
        The next frame, waiting up to `timeout` seconds for it; None when there is none, or after close().
        """

    def _take_arrived(self, limit: int) -> list[Any]:
        """
        Up to `limit` frames that have arrived; none where something has to run before each poll.
        """

class Doorbell:
    """Ends a wait_any from another thread."""

    def __init__(self) -> None: ...

    def ring(self) -> None: ...

    @property
    def rings(self) -> int:
        """How often it has rung."""

def wait_any(consumers: list[Any], timeout_ns: int, bell: Doorbell | None = None, rings: int = 0) -> list[Any]:
    """
    Those that have frames or are closed. Sleeps without the GIL until there is one, one of them needs its conductor, the bell has rung more than `rings` times, or the time is over: then it may be none.
    """

class FramePublisher:
    """
    A producer's stream in one epoch: slot, copy, commit, descriptor, wake-up.
    """

    def __init__(self, writer: RingWriter, publication: Publication, stream_id: int, epoch: int, with_publish_time: bool = False) -> None: ...

    def publish(self, layout: TensorLayout, data: Buffer, timestamp_ns: int | None = None, meta_version: int = 0, trace_id: int = 0, seq: int | None = None, is_usual: bool = True) -> int | None:
        """
        Copy, commit and announce a frame; its seq, or None when no pool holds it. `is_usual`: `layout` is what every array of the shape and dtype of `data` has.
        """

    def forget_layout(self) -> None:
        """
        From now on the layout of the last array means something else: ask for it again.
        """

    def commit(self, timestamp_ns: int | None = None, meta_version: int = 0, trace_id: int = 0, bytes: int = 0) -> None:
        """Commit the writer's open claim and announce it."""

    def check_time(self, timestamp_ns: int) -> None:
        """
        Raise ValueError for a time before the last frame's, where descriptors carry a time too.
        """

    @property
    def until_ns(self) -> int:
        """
        When the lease may be over (CLOCK_MONOTONIC). The caller of publish and commit checks it.
        """

    @until_ns.setter
    def until_ns(self, arg: int, /) -> None: ...

    @property
    def bytes(self) -> int: ...

    @property
    def is_back_pressured(self) -> bool:
        """
        Whether a descriptor would be lost now though there are subscribers: the log is full, or not yet open.
        """

    @property
    def unheard(self) -> int:
        """Descriptors that were sent while there was no subscriber."""

    @property
    def back_pressured(self) -> int:
        """Descriptors that the log had no room for."""

    @property
    def is_broken(self) -> bool:
        """Whether the media driver is gone."""

class TraceIds:
    """Makes the trace ids of one producer: unique, and in the order of time."""

    def __init__(self) -> None: ...

    def set_node(self, node_id: int, is_derived: bool) -> None: ...

    def next(self) -> int:
        """A new id, from 1 to 2^63 - 1."""

class Route:
    """Where a producer's frames go: set by its session, used by publish."""

    def __init__(self) -> None: ...

    @property
    def publisher(self) -> FramePublisher | None:
        """Of the epoch that the producer has adopted; None: it has to look."""

    @publisher.setter
    def publisher(self, publisher: FramePublisher | None, /) -> None: ...

    @property
    def meta_version(self) -> int:
        """Of frames that name none."""

    @meta_version.setter
    def meta_version(self, arg: int, /) -> None: ...

    def new_trace_id(self) -> int:
        """Of a frame that names none; 0: it has none."""

    @property
    def is_plain(self) -> bool:
        """No consumer has a descriptor stream of its own."""

    @is_plain.setter
    def is_plain(self, arg: bool, /) -> None: ...

    @property
    def trace_ids(self) -> TraceIds | None:
        """Of frames that name none; None: they have none."""

    @trace_ids.setter
    def trace_ids(self, trace_ids: TraceIds | None, /) -> None: ...

class ProducerBase:
    """
    What every loop calls of a producer; other calls go to the subclass's `_publish`.
    """

    def __init__(self, route: Route) -> None: ...

    def publish(self, array: numpy.typing.ArrayLike, *, timestamp_ns: int | None = None, meta_version: int | None = None, trace_id: int | None = None, parents: Iterable[Traced | int] = (), seq: int | None = None, dtype: numpy.typing.DTypeLike | Dtype | None = None, shape: tuple[int, ...] | None = None, keep_strides: bool = False) -> int | None:
        """
        Copy an array into shared memory and announce it to all consumers; its seq, or None without a lease: dropped and counted.

        >>> producer.publish(result, parents=[left, right])     # frames, or their trace ids     # doctest: +SKIP

        `timestamp_ns` is when it was captured (CLOCK_MONOTONIC; now by default), `meta_version` the metadata that
        applies (what `set_metadata` set last). A frame with `parents` gets a `trace_id` and is linked to theirs. Strided and Fortran-ordered arrays go without an extra copy; strided
        ones arrive contiguous, or with `keep_strides` as they are, in one block with what lies between their rows.
        `dtype=Dtype.BIT` takes packed bytes and the `shape` of the bits, `dtype=Dtype.BYTES` any bytes. Raises
        FrameTooLarge for what no pool of the stream holds, LocalProtocolError for what no frame can carry, Closed after
        close().
        """

    def _publish_same(self, arrays: object, first: int) -> int:
        """
        Publish arrays like the one before, from number `first` on, up to one that differs; how many.
        """

class ChunkPlan:
    """
    How the bridge cuts payloads: chunk 0 is smaller, it carries the slot header too.
    """

    def __init__(self, first_bytes: int, next_bytes: int) -> None: ...

    def count(self, payload_bytes: int) -> int:
        """How many chunks a payload takes; 0: it cannot be carried."""

    def slice(self, index: int, payload_bytes: int) -> tuple[int, int]:
        """Offset and length of a chunk."""

    @property
    def largest_bytes(self) -> int:
        """The largest payload that can be carried."""

class StreamSender:
    """
    Sends the frames of one mapped epoch as BridgeFrameChunks; every loss counted.
    """

    def __init__(self, reader: RingReader, payload: Publication, control: Publication, stream_id: int, epoch: int, plan: ChunkPlan, *, max_payload_bytes: int, timeout_ns: int, is_traced: bool = False, with_digest: bool = False, mac_key: bytes = b"") -> None:
        """
        Chunks go to `payload`, digests to `control`. A frame that is not sent in `timeout_ns` is given up.
        """

    def set_announced(self, is_announced: bool) -> None:
        """Whether the receiver knows the epoch: before that no frame is sent."""

    def set_paused(self, is_paused: bool) -> None:
        """
        From any thread: whether frames are dropped and counted instead of sent.
        """

    def take_failure(self) -> bool:
        """Whether reading the descriptors failed since this was asked last."""

    def end(self) -> None:
        """The epoch is over: give up what is not sent."""

    @property
    def is_open(self) -> bool:
        """Whether a frame was begun and not finished."""

    @property
    def counts(self) -> dict[tuple[str, str], int]:
        """(what, reason): how many; for any thread."""

class BridgePump:
    """
    The payload of all mappings of a bridge, sent and received without Python.
    """

    def __init__(self) -> None: ...

    def pump(self, outflows: Sequence[tuple[StreamSender, DescriptorFeed, Subscription]], inflow: tuple[ChunkRouter, Subscription, Subscription] | None, others: Sequence[Subscription], for_ns: int) -> int:
        """
        Send the frames of the feeds, and take chunks and digests from the payload and the control stream, without the GIL; sleep while there are none. At least one round; until the time is over, the control stream or one of the others has a message for the owner, or a feed or a sender needs it. How many frames and fragments there were.
        """

class AllowedSources:
    """Addresses and networks; none allow every address."""

    def __init__(self, networks: Sequence[str]) -> None: ...

    def allows(self, address: str) -> bool: ...

class SessionPin:
    """One session of a subscription: messages of any other are not used."""

    def __init__(self) -> None: ...

    def set_origin(self, session_id: int | None, address: str = '') -> None:
        """
        The session whose announce counts, and where it comes from; no address is any.
        """

    def admits(self, session_id: int, address: str) -> bool:
        """
        Whether it is the session that is followed; where there is none yet, whether it becomes that.
        """

    def on_image_gone(self, session_id: int) -> None: ...

def address_of(source: str) -> str:
    """The address in an image's source, without port and scope."""

def crc32c(data: Buffer, before: int = 0) -> int:
    """CRC32C of a buffer, after bytes whose checksum is `before`."""

def blake2b(data: Buffer, key: bytes, digest_bytes: int = 16) -> bytes:
    """BLAKE2b of a buffer with a key."""

class Assembler:
    """One bridged stream: chunks in, whole frames out, every loss counted."""

    def __init__(self, stream_id: int, *, max_chunk_bytes: int, max_payload_bytes: int, max_inflight: int, timeout_ns: int, needs_digest: bool = False, mac_key: bytes = ...) -> None: ...

    def set_source(self, epoch: int, pools: Sequence[tuple[int, int]], *, epoch_limit: int = 18446744073709551615, max_jump: int = 0) -> None:
        """
        The latest announce of the source: its epoch, and (pool_id, stride_bytes) of its pools; the highest epoch that a chunk may have, and how many seqs a frame may be ahead of what is possible by time, 0: any.
        """

    def set_origin(self, session_id: int | None, address: str = '') -> None:
        """
        The session whose announce counts, and where it comes from: chunks of its session are taken, else those of the first session from its address. None: only the session that is followed already.
        """

    @property
    def session_id(self) -> int | None:
        """The session whose chunks are taken, or None."""

    def bind(self, target: FramePublisher | RingWriter | None, until_ns: int = 0) -> None:
        """Publish with this until then; None: there is nothing to publish with."""

    def set_paused(self, is_paused: bool) -> None: ...

    def expire(self, now_ns: int) -> int:
        """Drop frames that waited too long; how many there were."""

    def is_lost(self, seq: int) -> bool:
        """Whether this frame was dropped lately."""

    @property
    def stream_id(self) -> int: ...

    @property
    def epoch(self) -> int | None:
        """Of the latest announce, or None."""

    @property
    def newest_epoch(self) -> int:
        """The highest epoch of the announce and of all chunks."""

    @property
    def last_chunk_ns(self) -> int:
        """When the last chunk of the newest epoch came."""

    @property
    def published(self) -> int | None:
        """The last seq that was published, or None."""

    @property
    def inflight(self) -> int:
        """Frames under assembly."""

    @property
    def buffered_bytes(self) -> int:
        """Of frames that are not assembled in their slot."""

    @property
    def longest_assembly_ns(self) -> int: ...

    @property
    def counts(self) -> dict[tuple[str, str], int]:
        """(what, reason): how many; for any thread."""

class ChunkRouter:
    """
    The payload stream of a bridge: each chunk goes to the assembler of its stream.
    """

    def __init__(self, allow_from: Sequence[str] = []) -> None: ...

    def add(self, assembler: Assembler) -> None: ...

    def remove(self, stream_id: int) -> None: ...

    def take(self, message: Buffer, now_ns: int) -> None:
        """One message, as if it had arrived then."""

    def take_digest(self, message: Buffer, now_ns: int, session_id: int | None = None) -> bool:
        """
        A frame's checksum or authentication code, of the given session, or of the one that is followed. False for any other message.
        """

    @property
    def counts(self) -> dict[tuple[str, str], int]:
        """
        Chunks and digests that belong to no assembler: (what, reason): how many.
        """

def processor() -> str:
    """What copies depend on; the same text on every processor of one kind."""

def last_level_cache_bytes() -> int: ...

def copy_kinds() -> dict[str, str]:
    """The kind of copy of each use, in this process."""

def copy_candidates(use: str) -> list[str]:
    """The kinds that this processor has for a use."""

def set_copy_kind(use: str, kind: str) -> None:
    """
    From the next copy on. Raises ValueError for what the processor or the use cannot take.
    """

def reset_copy_kinds() -> None:
    """Back to what the processor is known for."""

def calibrate_copies(budget_ns: int) -> dict[str, str]:
    """Measures which kinds are fastest, and changes nothing."""
