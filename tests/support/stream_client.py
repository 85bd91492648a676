# SPDX-License-Identifier: Apache-2.0
"""The process that `stream_processes.ClientProcess` starts: a producer or consumer with a book and a journal."""

from __future__ import annotations

import json
import logging
import os
import random
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Final

import tensorpool as tp
from tensorpool.client import Consumer, Producer
from tensorpool.errors import AttachRefused, DriverUnreachable, RegionRejected, TransportError
from tests.support.frame_books import LARGEST, TAG, Book, Bytes, Journal, frame_bytes, recognise

NOT_YET: Final = (TransportError, DriverUnreachable, AttachRefused, RegionRejected)  # of a process that is starting
KEEP_EVERY: Final = 97
KEEP: Final = 150


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
            journal.write("reported late", epoch=epoch, seq=seq, dropped=frame.dropped_before - (seq - last[1] - 1))
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


if __name__ == "__main__":
    _serve(*sys.argv[1:])
