# SPDX-License-Identifier: Apache-2.0
"""Producers and consumers in processes of their own, whose books survive SIGKILL.

    Site            a media driver, an SHM driver and their clients, all of them processes that may be killed or stopped
    Producing       publishes frames whose bytes say which they are, and counts them per epoch in its book
    Consuming       loops over a consumer, checks every byte, and counts what it received per epoch in its book

A book is a mapped file in which every entry is one store, a journal a file of JSON lines: both are true up to the very
instruction at which a process was killed. `audit` compares the books of a stream's producers with one consumer's: every
frame that was produced in an epoch that it mapped was received or counted as dropped, no more and no less.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import random
import signal
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal, NamedTuple, Self

import numpy as np
import numpy.typing as npt

import tensorpool as tp
from tensorpool.client import Consumer, Producer, StateChange
from tensorpool.errors import AttachRefused, DriverUnreachable, RegionRejected, TransportError
from tests.support.driver_process import Deployment, DriverProcess
from tests.support.processes import wait_until, whole_lines

type Bytes = npt.NDArray[np.uint8]

TAG: Final = struct.Struct("<QQQ")  # at the start of a frame: which, of whom, how long
PERIOD: Final = 4093  # of the patterns; a prime, so that no slot sees the same one twice in a row
LARGEST: Final = 16 << 10
LARGE: Final = 1 << 20  # frames of such a stream have all orders of magnitude
SMALLEST: Final = 1 << 10  # of those
GOLDEN: Final = 0.6180339887498949
NOT_YET: Final = (TransportError, DriverUnreachable, AttachRefused, RegionRejected)  # of a process that is starting
KEEP_EVERY: Final = 97
KEEP: Final = 150


# --- frames that say which they are


def frame_bytes(number: int, of: int, largest: int) -> Bytes:
    """Frame `number` of producer `of`: some length, some pattern."""
    nbytes = _frame_length(number, largest)
    data = _pattern(nbytes)[_start(number, of) :][:nbytes].copy()
    data[: TAG.size] = np.frombuffer(TAG.pack(number, of, nbytes), np.uint8)
    return data


def recognise(view: Bytes) -> tuple[int, int] | None:
    """Which frame these bytes are, and of whom; None when they are not exactly one frame."""
    if view.ndim != 1 or view.nbytes < TAG.size:
        return None
    number, of, nbytes = TAG.unpack(view[: TAG.size].tobytes())
    expected = _pattern(view.nbytes)[_start(number, of) :][: view.nbytes]
    is_whole = nbytes == view.nbytes and np.array_equal(view[TAG.size :], expected[TAG.size :])
    return (number, of) if is_whole else None


def _frame_length(number: int, largest: int) -> int:
    if largest < LARGE:
        return TAG.size + number * 7919 % (largest - TAG.size)
    return int(SMALLEST * (largest / SMALLEST) ** (number * GOLDEN % 1.0))


def _start(number: int, of: int) -> int:
    return (number * 61 + of) % PERIOD


def _pattern(nbytes: int) -> Bytes:
    """At least so long, behind any start; the same for all that have a frame of this length."""
    return _noise(LARGE if nbytes <= LARGE else -(-nbytes // (16 * LARGE)) * 16 * LARGE)


@functools.cache
def _noise(nbytes: int) -> Bytes:
    return np.frombuffer(np.random.default_rng(4711).bytes(nbytes + PERIOD), np.uint8)


# --- books and journals


class Book:
    """Counters, and a count for each epoch, in a mapped file."""

    BUSY, LINES, TOTAL, EPOCH, SEQ, HELD, LONGEST_NS, SPOILT, WAITING, OF, OBEYED = range(11)
    FIRST_LINE: Final = 16
    MAX_LINES: Final = 2000

    def __init__(self, path: Path, mode: Literal["r", "r+", "w+"]) -> None:
        shape = (self.FIRST_LINE + 2 * self.MAX_LINES,)
        self.words: npt.NDArray[np.uint64] = np.memmap(path, np.uint64, mode, shape=shape).view(np.ndarray)
        self._line = self.FIRST_LINE - 2

    def __getitem__(self, index: int) -> int:
        return int(self.words[index])

    def __setitem__(self, index: int, value: int) -> None:
        self.words[index] = value

    def enter(self, epoch: int, seq: int) -> None:
        """One more frame, of this epoch; a book is written by one thread."""
        words = self.words
        if self._line < self.FIRST_LINE or words[self._line] != epoch:
            self._line += 2
            words[self._line + 1] = 0
            words[self._line] = epoch
            words[self.LINES] += 1
        words[self._line + 1] += 1
        words[self.TOTAL] += 1
        words[self.EPOCH] = epoch
        words[self.SEQ] = seq  # who sees this one finds it counted

    def set_held(self, is_held: bool) -> None:
        """Of a producer that is still waiting for its lease; once it has one it says so itself."""
        if self[self.WAITING]:
            self[self.HELD] = is_held

    def frames(self) -> dict[int, int]:
        """How many of each epoch."""
        counts: dict[int, int] = {}
        for line in range(self[self.LINES]):
            epoch, count = (int(word) for word in self.words[self.FIRST_LINE + 2 * line :][:2])
            counts[epoch] = counts.get(epoch, 0) + count
        return counts


class Journal(logging.Handler):
    """What a process saw, line by line; it takes the warnings of the library too."""

    def __init__(self, path: Path) -> None:
        super().__init__(logging.INFO)
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def write(self, event: str, **fields: Any) -> None:
        entry = {"s": round(time.monotonic(), 3), "event": event, **fields}
        os.write(self._fd, json.dumps(entry).encode() + b"\n")

    def emit(self, record: logging.LogRecord) -> None:
        trace = "".join(traceback.format_exception(*record.exc_info)) if record.exc_info else ""
        self.write("log", level=record.levelname, text=f"{record.getMessage()}\n{trace}".strip())

    def state(self, change: StateChange) -> None:
        self.write("state", state=change.state.value, reason=change.reason, epoch=change.epoch)


# --- the processes, from outside


class ClientProcess(DriverProcess):
    """A producer's or a consumer's process."""

    def __init__(self, kind: str, site: Site, stream_id: int, name: str, **options: float) -> None:
        self.name = name
        self.stream_id = stream_id
        self._journal_path = site.folder / f"{name}.journal"
        self._journal_path.touch()
        book = site.folder / f"{name}.book"
        Book(book, "w+")
        self.book = Book(book, "r")
        deployment = site.deployment
        told = [str(deployment.config_path), deployment.aeron_dir, str(stream_id), str(book), str(self._journal_path)]
        super().__init__("-X", "faulthandler", "-m", __name__, kind, *told, json.dumps(options))

    @property
    def has_ended(self) -> bool:
        return self._popen.returncode is not None or super().has_ended

    @property
    def total(self) -> int:
        """How many frames so far."""
        return self.book[Book.TOTAL]

    @property
    def last(self) -> tuple[int, int]:
        """Epoch and seq of the last frame."""
        return self.book[Book.EPOCH], self.book[Book.SEQ]

    def journal(self, event: str | None = None) -> list[dict[str, Any]]:
        entries = [json.loads(line) for line in whole_lines(self._journal_path)]
        return [entry for entry in entries if event is None or entry["event"] == event]

    def wait_for(self, event: str, **wanted: Any) -> dict[str, Any]:
        """The first such entry in the journal."""
        found: list[dict[str, Any]] = []

        def is_there() -> bool:
            self.check()
            found.extend(entry for entry in self.journal(event) if wanted.items() <= entry.items())
            return bool(found)

        wait_until(is_there, f"{self.name}: {event} {wanted or ''}")
        return found[0]

    def wait_for_more(self, frames: int = 1) -> None:
        """So many more frames than now."""
        before = self.total
        wait_until(
            lambda: self.check() or self.total >= before + frames,
            f"{self.name}: {frames} more frames than {before}",
        )

    def stacks(self) -> str:
        """Where its threads are; ends it."""
        self.send(signal.SIGCONT)
        self.send(signal.SIGABRT)
        return self.finish()[1]

    def pause(self) -> None:
        """SIGSTOP; returns when it stands still."""
        self.send(signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WNOWAIT)

    def resume(self) -> None:
        self.send(signal.SIGCONT)

    def check(self) -> None:
        """Fails when the process has ended, or its user saw what no user may see."""
        if self.has_ended:
            raise AssertionError(f"{self.name} ended: {self.finish()}\n{self.complaints()}")
        complaints = self.complaints()
        assert not complaints, f"{self.name}: {complaints}"

    def complaints(self) -> list[dict[str, Any]]:
        """What may never happen: exceptions, torn frames, wrong counts."""
        bad = ("failed", "torn", "misplaced", "miscounted", "spoilt view")
        return [
            entry
            for entry in self.journal()
            if entry["event"] in bad or (entry["event"] == "log" and "turn_failed" in entry["text"])
        ]

    def end(self) -> dict[str, Any]:
        """Close in order; what it entered at its end, nothing if it never got so far as to attach."""
        code, output = self.finish(stdin="")
        assert code == 0, f"{self.name}: {code}: {output}\n{self.complaints()}"
        assert not self.complaints(), self.complaints()
        ended = self.journal("ended")
        return ended[-1] if ended else {}


class Producing(ClientProcess):
    """A producer at some rate, with the truth about what it published."""

    _singles = 0

    def hold(self) -> None:
        """Publish no more; returns when the book is final."""
        self.write_line("hold")
        try:
            wait_until(lambda: self.check() or self.book[Book.HELD] == 1, f"{self.name} holds")
        except AssertionError as error:
            error.add_note(self.stacks())
            raise

    def go_on(self) -> None:
        self.write_line("go")

    def once(self) -> None:
        """A single frame, while it holds."""
        self._singles += 1
        self.write_line("once")

    @property
    def is_still(self) -> bool:
        """While it holds: whether no single frame is to come."""
        return self.book[Book.OBEYED] == self._singles or bool(self.book[Book.WAITING])

    @property
    def was_killed_amid_a_publish(self) -> bool:
        return bool(self.book[Book.BUSY])


class Consuming(ClientProcess):
    """A consumer's loop."""

    @property
    def mapped_epochs(self) -> list[int]:
        """In the order in which they were first mapped."""
        states = self.journal("state")
        return list(dict.fromkeys(entry["epoch"] for entry in states if entry["state"] == "ACTIVE"))


class Site:
    """A media driver, an SHM driver and their clients. `Deployment`'s tables go through."""

    def __init__(
        self,
        folder: Path,
        streams: Sequence[int],
        *,
        nslots: int = 64,
        largest: int = LARGEST,
        media: Sequence[str] = (),
        **tables: Any,
    ) -> None:
        self.folder = folder
        self.deployment = Deployment(
            folder,
            str(folder / "aeron"),
            streams=streams,
            profiles={
                "small": {
                    "header_nslots": nslots,
                    "payload_pools": [
                        {"pool_id": 1, "stride_bytes": largest >> 3},
                        {"pool_id": 2, "stride_bytes": largest},
                    ],
                }
            },
            **tables,
        )
        self.clients: list[ClientProcess] = []
        self._media_settings = [word for setting in media for word in ("--set", setting)]
        self._undo = contextlib.ExitStack()
        with self._undo:
            self.media = self.start_media()
            self.driver = self.start_driver()
            self._undo = self._undo.pop_all()

    @property
    def producers(self) -> list[Producing]:
        return [client for client in self.clients if isinstance(client, Producing)]

    @property
    def consumers(self) -> list[Consuming]:
        return [client for client in self.clients if isinstance(client, Consuming)]

    def start_media(self) -> DriverProcess:
        """`tensorpool media-driver`; waits until it serves."""
        process, words = self._launch_media()
        if words:  # a driver that was starting found none, and embeds one: it goes, and comes again
            self.driver.kill()
            process, words = self._launch_media()
            assert not words, words
            self.start_driver()
        self.media = process
        return process

    def start_driver(self) -> DriverProcess:
        """`tensorpool driver`; does not wait."""
        self.driver = self._undo.enter_context(self.deployment.start())
        return self.driver

    def tend_driver(self) -> str:
        """Start it again if it ended by itself, as a service manager does; what it said.

        Of two that want to run a media driver at the same directory one must give up.
        """
        if not self.driver.has_ended:
            return ""
        code, words = self.driver.finish()
        assert "media driver" in words, (code, words)
        self.start_driver()
        return words

    def produce(self, stream_id: int, **options: float) -> Producing:
        """Options: rate_hz, largest, seed, patience_s."""
        return self._start(Producing("produce", self, stream_id, self._name("producer", stream_id), **options))

    def consume(self, stream_id: int, **options: float) -> Consuming:
        """Options: nap_s (of a slow reader, now and then), patience_s."""
        return self._start(Consuming("consume", self, stream_id, self._name("consumer", stream_id), **options))

    def truth(self, stream_id: int) -> Truth:
        """What was produced, by all that ever did."""
        return Truth.of([producer for producer in self.producers if producer.stream_id == stream_id])

    def drain(self, *consumers: Consuming) -> None:
        """Have the producers of their streams stop, and these consumers (all that live) see the last frame."""
        readers = consumers or tuple(consumer for consumer in self.consumers if not consumer.has_ended)
        streams = {consumer.stream_id for consumer in readers}
        writers = [producer for producer in self.producers if not producer.has_ended and producer.stream_id in streams]
        for producer in writers:
            producer.hold()
        for consumer in readers:
            mine = [producer for producer in writers if producer.stream_id == consumer.stream_id]
            again_s = time.monotonic() + 2.0

            def is_there(consumer: Consuming = consumer, mine: list[Producing] = mine) -> bool:
                nonlocal again_s
                consumer.check()
                is_still = all(producer.is_still for producer in mine)
                if is_still and consumer.last == max((producer.last for producer in mine), default=(0, 0)):
                    return True
                if time.monotonic() > again_s:  # the last descriptor was lost, or a new epoch came
                    again_s = time.monotonic() + 2.0
                    for producer in mine:
                        producer.once()
                return False

            try:
                wait_until(is_there, f"{consumer.name} sees the last frame of {[p.last for p in mine]}")
            except AssertionError as error:
                stories = [
                    f"{it.name}: {it.total} frames, last {it.last}, {it.journal()[-20:]}" for it in (consumer, *mine)
                ]
                raise AssertionError("\n".join([str(error), *stories])) from None

    def shut_down(self) -> None:
        """End the drivers in order; nothing is left in /dev/shm of what they and their clients made."""
        for process in (self.driver, self.media):
            process.send(signal.SIGTERM)
            code, output = process.finish()
            assert code == 0, output
        assert self.deployment.leftovers() == []
        assert not Path(self.deployment.aeron_dir).exists()
        ours = {path.name for path in self.folder.iterdir() if path.suffix in (".book", ".journal", ".toml")}
        assert {path.name for path in self.folder.iterdir()} - ours <= {"shm"}

    def close(self) -> None:
        self._undo.close()

    def _launch_media(self) -> tuple[DriverProcess, str]:
        """The process, and why it does not serve."""
        directory = self.deployment.aeron_dir
        process = self._undo.enter_context(
            DriverProcess("-m", "tensorpool", "media-driver", "--aeron-dir", directory, *self._media_settings)
        )
        line = process.read_line()
        return process, "" if line == f"media driver at {directory}" else f"{line} {process.finish()}"

    def _start[P: ClientProcess](self, client: P) -> P:
        self._undo.enter_context(client)
        self.clients.append(client)
        return client

    def _name(self, kind: str, stream_id: int) -> str:
        return f"{kind}-{stream_id}-{len(self.clients)}"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


# --- the audit


class Truth(NamedTuple):
    """What was produced in each epoch of a stream.

    A producer that was killed amid a publish may have committed one frame more than its book says: in the last epoch
    that it used, or as the first one of an epoch that its book does not know.
    """

    frames: dict[int, int]
    one_more: frozenset[int]  # epochs
    is_one_elsewhere: bool

    @classmethod
    def of(cls, producers: Sequence[Producing]) -> Truth:
        frames: dict[int, int] = {}
        one_more: set[int] = set()
        is_one_elsewhere = False
        for producer in producers:
            own = producer.book.frames()
            assert not own.keys() & frames.keys(), "an epoch has one producer"
            frames |= own
            if producer.was_killed_amid_a_publish:
                is_one_elsewhere = True
                one_more |= {max(own)} if own else set()
        return cls(frames, frozenset(one_more), is_one_elsewhere)

    def of_epoch(self, epoch: int) -> range:
        """How many frames it can have had: one number, save after a kill amid a publish."""
        low = self.frames.get(epoch, 0)
        extra = epoch in self.one_more or (self.is_one_elsewhere and epoch not in self.frames)
        return range(low, low + extra + 1)

    def of_epochs(self, epochs: Sequence[int]) -> range:
        counts = [self.of_epoch(epoch) for epoch in epochs]
        return range(sum(count.start for count in counts), sum(count.stop - 1 for count in counts) + 1)


def audit(consumer: Consuming, truth: Truth, ended: dict[str, Any]) -> None:
    """produced = received + dropped, over all epochs that a consumer mapped.

    Between two frames of an epoch `dropped_before` is exact, which the consumer checks itself. From epoch to epoch it
    may be late: a producer that hears of its epoch's end after the consumer did has published a few frames more, which
    are counted, and told with a later frame. It is never too much.
    """
    mapped = consumer.mapped_epochs
    assert mapped == sorted(mapped), mapped
    received = consumer.book.frames()
    assert received.keys() <= set(mapped)
    for epoch, count in received.items():
        assert count < truth.of_epoch(epoch).stop, (epoch, count, truth.of_epoch(epoch))
    assert sum(received.values()) == consumer.total
    assert ended["received"] == consumer.total - consumer.book[Book.SPOILT]  # K3: those count as late

    untold = 0
    for step in consumer.journal("crossed"):
        (epoch, seq), (next_epoch, next_seq) = step["from"], step["to"]
        between = [number for number in mapped if epoch < number < next_epoch]
        lost = truth.of_epochs([epoch, *between]).stop - 1 + next_seq - seq - 1
        untold += lost - step["dropped"]
        assert untold >= 0, (consumer.name, step, lost, between)
    untold -= sum(step["dropped"] for step in consumer.journal("told late"))
    assert untold >= 0, consumer.name

    if not mapped:
        return
    firsts = consumer.journal("first")
    total = ended["received"] + sum(ended["drops"].values())
    produced = truth.of_epochs(mapped)
    if firsts and firsts[0]["epoch"] == mapped[0]:
        before = firsts[0]["seq"] - firsts[0]["dropped"]  # published before the first descriptor that it saw
        assert before >= 0, firsts
        expected = range(produced.start - before, produced.stop - before)
    else:
        expected = range(truth.of_epochs(mapped[1:]).start, produced.stop)
    assert total in expected, f"{consumer.name}: {total} counted, {expected} produced: {ended}"


# --- the processes, from inside


def _serve(kind: str, config: str, aeron_dir: str, stream_id: str, book: str, journal: str, options: str) -> None:
    diary = Journal(Path(journal))
    logger = logging.getLogger("tensorpool")
    logger.addHandler(diary)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    roles: dict[str, Callable[..., None]] = {"produce": _produce, "consume": _consume}
    try:
        roles[kind](_connect(config, aeron_dir), int(stream_id), Book(Path(book), "r+"), diary, **json.loads(options))
    except Exception:
        diary.write("failed", text=traceback.format_exc())
        raise


def _patient[T](make: Callable[[], T], orders: _Orders | None = None) -> T:
    """Asks again while the driver is down or another producer has the stream, unless the process is to end."""
    while True:
        try:
            return make()
        except NOT_YET:
            time.sleep(0.05)
            if orders is not None and orders.is_over:
                sys.exit()


def _connect(config: str, aeron_dir: str) -> tp.Client:
    return _patient(lambda: tp.connect(aeron_dir, config=config))


class _Orders:
    """Lines from the parent; the end of the input is the order to end."""

    def __init__(
        self, on_hold: Callable[[bool], object] = lambda held: None, on_end: Callable[[], object] = lambda: None
    ) -> None:
        self.is_over = False
        self.is_held = False
        self.singles = 0
        self._on_hold = on_hold
        self._on_end = on_end
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in sys.stdin:
            order = line.strip()
            if order == "once":
                self.singles += 1
            else:
                self.is_held = order == "hold"
                self._on_hold(self.is_held)
        self.is_over = True
        self._on_end()


def _produce(
    client: tp.Client,
    stream_id: int,
    book: Book,
    journal: Journal,
    rate_hz: float = 200.0,
    largest: int = LARGEST,
    seed: int = 1,
    patience_s: float = 1.0,
) -> None:
    chance = random.Random(seed)
    of, number, period_s = os.getpid(), 0, 1 / rate_hz
    with client:
        book[Book.WAITING] = 1
        orders = _Orders(on_hold=book.set_held)
        producer = _patient(lambda: client.producer(stream_id, timeout=patience_s, on_state=journal.state), orders)
        book[Book.WAITING] = 0
        next_s = time.monotonic()
        while not orders.is_over:
            is_held = orders.is_held
            book[Book.HELD] = is_held
            if is_held and orders.singles == book[Book.OBEYED]:
                time.sleep(0.005)
                continue
            data = frame_bytes(number, of, largest)
            if _publish(producer, data, chance, book):
                number += 1
            book[Book.OBEYED] = min(book[Book.OBEYED] + 1, orders.singles)
            now_s = time.monotonic()
            next_s = max(next_s + period_s, now_s - 0.1)
            time.sleep(max(next_s - now_s, 0))
        stats = producer.stats
        producer.close()
        journal.write(
            "ended",
            published=stats.published,
            dropped={reason.name: count for reason, count in stats.dropped.items()},
            unheard=stats.descriptors_unheard,
            lost=stats.descriptors_lost,
            epochs=stats.epochs,
        )


def _publish(producer: Producer, data: Bytes, chance: random.Random, book: Book) -> bool:
    in_place = chance.random() < 0.25
    book[Book.BUSY] = 1
    begin_ns = time.monotonic_ns()
    if in_place:
        with producer.claim(data.shape, data.dtype) as slot:
            slot.array[:] = data
        seq = slot.seq
    else:
        seq = producer.publish(data)
    took_ns = time.monotonic_ns() - begin_ns
    if seq is not None:
        writer = producer._writer  # of the epoch that took it, whatever the conductor has done since
        assert writer is not None
        book.enter(writer.epoch, seq)
    book[Book.BUSY] = 0
    book[Book.LONGEST_NS] = max(book[Book.LONGEST_NS], took_ns)
    return seq is not None


def _consume(
    client: tp.Client, stream_id: int, book: Book, journal: Journal, nap_s: float = 0.0, patience_s: float = 1.0
) -> None:
    with client:
        consumer = _patient(lambda: client.consumer(stream_id, timeout=patience_s, on_state=journal.state))
        _Orders(on_end=consumer.close)
        _loop(consumer, book, journal, nap_s)
        stats = consumer.stats
        journal.write(
            "ended",
            received=stats.received,
            drops={reason.name: count for reason, count in stats.drops.items()},
            epochs=stats.epochs,
            duplicates=stats.duplicates,
            ignored=stats.descriptors_ignored,
        )


def _loop(consumer: Consumer, book: Book, journal: Journal, nap_s: float) -> None:
    last: tuple[int, int] | None = None
    offset = 0
    kept: list[tuple[tp.Frame, Bytes, tuple[int, int]]] = []
    spoilt: set[tuple[int, int]] = set()  # delivered, and found overwritten afterwards
    for frame in consumer:
        view = frame.array
        which = recognise(view)
        epoch, seq = frame.epoch, frame.seq
        if not frame.is_intact():
            spoilt.add((epoch, seq))  # the ring came round while we looked
            book[Book.SPOILT] = len(spoilt)
        elif which is None:
            journal.write("torn", epoch=epoch, seq=seq, bytes=view.nbytes, head=view[: TAG.size].tobytes().hex())
            which = (0, 0)
        else:
            number, _ = which
            if last is not None and epoch == last[0] and offset not in (0, number - seq + 1):
                journal.write("misplaced", epoch=epoch, seq=seq, number=number, expected=seq + offset - 1)
            offset = number - seq + 1
            if seq % KEEP_EVERY == 0 and len(kept) < KEEP:
                kept.append((frame, view, which))
            book[Book.OF] = which[1]
        book.enter(epoch, seq)
        if last is None:
            journal.write("first", epoch=epoch, seq=seq, dropped=frame.dropped_before)
        elif epoch != last[0]:
            journal.write("crossed", **{"from": last}, to=(epoch, seq), dropped=frame.dropped_before)
            offset = 0
            _look_at(kept, spoilt, journal)
        elif frame.dropped_before < seq - last[1] - 1:
            journal.write("miscounted", last=last, epoch=epoch, seq=seq, dropped=frame.dropped_before)
        elif frame.dropped_before > seq - last[1] - 1:  # the same epoch, mapped again after another
            journal.write("told late", epoch=epoch, seq=seq, dropped=frame.dropped_before - (seq - last[1] - 1))
        last = epoch, seq
        if nap_s and seq % 64 == 0:
            time.sleep(nap_s)
    _look_at(kept, spoilt, journal)
    book[Book.SPOILT] = len(spoilt)


def _look_at(
    kept: list[tuple[tp.Frame, Bytes, tuple[int, int]]], spoilt: set[tuple[int, int]], journal: Journal
) -> None:
    """Views of epochs long gone: readable, and unchanged where no producer has written since."""
    for frame, view, which in kept:
        found = recognise(view)
        if not frame.is_intact():
            spoilt.add((frame.epoch, frame.seq))
        elif found != which:
            journal.write("spoilt view", epoch=frame.epoch, seq=frame.seq, found=found, expected=which)


@contextlib.contextmanager
def site(folder: Path, streams: Sequence[int], **options: Any) -> Iterator[Site]:
    """A site whose clients report, at the end of a test, whether they saw an error."""
    with Site(folder, streams, **options) as found:
        yield found
        for client in found.clients:
            assert not client.complaints(), f"{client.name}: {client.complaints()}"


if __name__ == "__main__":
    _serve(*sys.argv[1:])
