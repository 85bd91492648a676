# SPDX-License-Identifier: Apache-2.0
"""Producers and consumers in processes of their own, whose books survive SIGKILL.

    Site            a media driver, an SHM driver and their clients, all of them processes that may be killed or stopped
    Producing       publishes frames whose bytes say which they are, and counts them per epoch in its book
    Consuming       loops over a consumer, checks every byte, and counts what it received per epoch in its book

`audit` compares the books (tests/support/frame_books.py) of a stream's producers with one consumer's: every frame that
was produced in an epoch that it mapped was received or counted as dropped, no more and no less.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

from tests.support.driver_process import Deployment, DriverProcess
from tests.support.frame_books import LARGEST, Book
from tests.support.processes import wait_until, whole_lines


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
        arguments = [
            str(deployment.config_path),
            deployment.aeron_dir,
            str(stream_id),
            str(book),
            str(self._journal_path),
        ]
        super().__init__(
            "-X", "faulthandler", "-m", "tests.support.stream_client", kind, *arguments, json.dumps(options)
        )

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
    may be late: a producer that learns of its epoch's end after the consumer did has published a few frames more, which
    are counted, and reported with a later frame. It is never too much.
    """
    mapped = consumer.mapped_epochs
    assert mapped == sorted(mapped), mapped
    received = consumer.book.frames()
    assert received.keys() <= set(mapped)
    for epoch, count in received.items():
        assert count < truth.of_epoch(epoch).stop, (epoch, count, truth.of_epoch(epoch))
    assert sum(received.values()) == consumer.total
    assert ended["received"] == consumer.total - consumer.book[Book.SPOILT]  # K3: those count as late

    unreported = 0
    for step in consumer.journal("crossed"):
        (epoch, seq), (next_epoch, next_seq) = step["from"], step["to"]
        between = [number for number in mapped if epoch < number < next_epoch]
        lost = truth.of_epochs([epoch, *between]).stop - 1 + next_seq - seq - 1
        unreported += lost - step["dropped"]
        assert unreported >= 0, (consumer.name, step, lost, between)
    unreported -= sum(step["dropped"] for step in consumer.journal("reported late"))
    assert unreported >= 0, consumer.name

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


@contextlib.contextmanager
def site(folder: Path, streams: Sequence[int], **options: Any) -> Iterator[Site]:
    """A site whose clients report, at the end of a test, whether they saw an error."""
    with Site(folder, streams, **options) as found:
        yield found
        for client in found.clients:
            assert not client.complaints(), f"{client.name}: {client.complaints()}"
