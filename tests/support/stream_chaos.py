# SPDX-License-Identifier: Apache-2.0
"""Kills and stops producers, consumers, the SHM driver and the media driver at random moments, while frames flow.

A killed process is started again; a stopped one goes on after 0.2 to 8 seconds, while others are hit. On each
stream one consumer is only ever stopped, so that one has seen every epoch. `settle` then waits until everybody receives
again, and audits the books.
"""

from __future__ import annotations

import heapq
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from tests.support.driver_process import DriverProcess
from tests.support.processes import wait_until
from tests.support.stream_processes import ClientProcess, Consuming, Producing, Site, audit

SHORTEST_S: Final = 0.2
LONGEST_S: Final = 8.0
WITHIN_S: Final = 90.0  # all have recovered: Aeron alone takes 10 s to believe that a stopped media driver is gone
KINDS: Final = {"producer": 4, "consumer": 4, "driver": 2, "media driver": 2}  # how often each is hit


class StreamChaos:
    """Every stream has two producers, of which one at a time has the lease, and three consumers, one of them slow."""

    def __init__(self, folder: Path, streams: Sequence[int], seed: int) -> None:
        self.hits: Counter[str] = Counter()
        self.recovered_s = 0.0
        self.history: list[str] = []  # what was done, to explain a failure
        self._chance = random.Random(seed)
        self._streams = streams
        self._started_s = time.monotonic()
        self._wakes: list[tuple[float, int, DriverProcess]] = []
        self._stopped: set[int] = set()  # pids
        self._immune: set[str] = set()
        self._site = Site(
            folder,
            streams,
            driver={"descriptor_channel": "aeron:ipc?term-length=64k"},  # who stops is soon passed over
            policies={"lease_expiry_grace_intervals": 5, "max_leases": 200},
        )
        try:
            for stream_id in streams:
                first = self._produce(stream_id)
                first.wait_for("state", state="ACTIVE")  # the others find everything compiled
                self._produce(stream_id)
                for kind in range(3):
                    consumer = self._consume(stream_id, nap_s=0.3 if kind == 2 else 0.0)
                    if kind != 1:
                        self._immune.add(consumer.name)
            self._wait_for_frames()
        except BaseException:
            self._site.close()
            raise

    @property
    def site(self) -> Site:
        return self._site

    def run(self, seconds: float) -> None:
        """Hit a process every second or so."""
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s:
            self._pass_time(self._chance.uniform(0.2, 2.2))
            self._tend_driver()
            self._hit(self._chance.choices(list(KINDS), list(KINDS.values()))[0])

    def settle(self) -> dict[str, Any]:
        """Wait until all receive again, the counts agree and no file is left. Returns figures."""
        begin_s = time.monotonic()
        wait_until(lambda: not self._wake_due(is_everybody=True), "all go on")
        self._wait_for_frames()
        self.recovered_s = time.monotonic() - begin_s
        site = self._site
        site.drain()
        drops: Counter[str] = Counter()
        received = audited = 0
        truths = {stream_id: site.truth(stream_id) for stream_id in self._streams}
        for consumer in self._alive(Consuming):
            ended = consumer.end()
            audit(consumer, truths[consumer.stream_id], ended)
            drops.update(ended["drops"])
            received += ended["received"]
            audited += len(consumer.mapped_epochs)
        detached: Counter[str] = Counter()
        for producer in self._alive(Producing):
            detached.update(producer.end().get("dropped", {}))
        self._hear_complaints()
        site.shut_down()
        return {
            "hits": dict(self.hits),
            "recovered_s": round(self.recovered_s, 1),
            "produced": {stream_id: sum(truth.frames.values()) for stream_id, truth in truths.items()},
            "epochs": {stream_id: len(truth.frames) for stream_id, truth in truths.items()},
            "killed amid a publish": sum(len(truth.one_more) for truth in truths.values()),
            "audited epochs": audited,
            "received": received,
            "drops": dict(drops),
            "not published": dict(detached),
        }

    def close(self) -> None:
        self._site.close()

    # --- inside

    def _hit(self, kind: str) -> None:
        site, chance = self._site, self._chance
        is_kill = chance.random() < 0.5
        victim: DriverProcess
        if kind == "driver":
            victim, again = site.driver, site.start_driver
        elif kind == "media driver":
            victim, again = site.media, site.start_media
        else:
            wanted = Producing if kind == "producer" else Consuming
            client = chance.choice(self._alive(wanted))
            victim, again = client, self._successor(client)
            is_kill = is_kill and client.name not in self._immune
        if victim.pid in self._stopped:
            is_kill = is_kill and chance.random() < 0.5  # a stopped process can be killed too
            if not is_kill:
                return
        name = victim.name if isinstance(victim, ClientProcess) else kind
        self.hits[f"{'kill' if is_kill else 'stop'} {kind}"] += 1
        if is_kill:
            self._note(f"kill {name} (pid {victim.pid})")
            victim.kill()
            self._pass_time(chance.choice((0.0, chance.uniform(0, 1.5))))
            again()
        else:
            duration_s = SHORTEST_S * (LONGEST_S / SHORTEST_S) ** chance.random()
            self._note(f"stop {name} (pid {victim.pid}) for {duration_s:.1f} s")
            victim.send(signal.SIGSTOP)
            self._stopped.add(victim.pid)
            heapq.heappush(self._wakes, (time.monotonic() + duration_s, victim.pid, victim))

    def _successor(self, client: ClientProcess) -> Callable[[], ClientProcess]:
        start = self._produce if isinstance(client, Producing) else self._consume
        return lambda: start(client.stream_id)

    def _produce(self, stream_id: int) -> Producing:
        return self._site.produce(stream_id, rate_hz=200, seed=self._chance.getrandbits(32))

    def _consume(self, stream_id: int, nap_s: float = 0.0) -> Consuming:
        return self._site.consume(stream_id, nap_s=nap_s)

    def _alive[P: ClientProcess](self, kind: type[P]) -> list[P]:
        return [client for client in self._site.clients if isinstance(client, kind) and not client.has_ended]

    def _pass_time(self, seconds: float) -> None:
        until_s = time.monotonic() + seconds
        wait_until(lambda: self._wake_due() or time.monotonic() > until_s, "time passes")
        self._hear_complaints()

    def _tend_driver(self) -> None:
        words = self._site.tend_driver()
        if words:
            self._note(f"the driver ended by itself: {words}")

    def _hear_complaints(self) -> None:
        for client in self._site.clients:
            assert not client.complaints(), f"{client.name}: {client.complaints()}"

    def _wake_due(self, *, is_everybody: bool = False) -> None:
        while self._wakes and (is_everybody or self._wakes[0][0] <= time.monotonic()):
            _, pid, process = heapq.heappop(self._wakes)
            self._stopped.discard(pid)
            self._note(f"continue pid {pid}")
            process.send(signal.SIGCONT)  # nothing, if it was killed since

    def _wait_for_frames(self) -> None:
        """Every consumer receives, and what it receives is what its stream's producers publish now."""
        before = {consumer.name: consumer.total for consumer in self._alive(Consuming)}
        late: list[str] = []

        def is_served(consumer: Consuming) -> bool:
            consumer.check()
            newest = max(
                producer.last[0] for producer in self._site.producers if producer.stream_id == consumer.stream_id
            )
            return consumer.total >= before[consumer.name] + 20 and consumer.last[0] == newest

        def is_everybody_served() -> bool:
            self._tend_driver()
            late[:] = [consumer.name for consumer in self._alive(Consuming) if not is_served(consumer)]
            return not late

        try:
            wait_until(is_everybody_served, "everybody receives", timeout_s=WITHIN_S)
        except AssertionError as error:
            error.add_note(f"not served: {late}")
            for client in self._site.clients:
                if client.name in late:
                    error.add_note("\n".join(map(str, client.journal()[-12:])))
            raise

    def _note(self, text: str) -> None:
        self.history.append(f"{time.monotonic():10.3f} {text}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, AssertionError):
            error.add_note("\n".join(self.history))
        self.close()
