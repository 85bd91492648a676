# SPDX-License-Identifier: Apache-2.0
"""An hour of everything at once: streams, clients, large rings, and peers that do not keep to the rules.

    python -m benchmarks.scenario [--seconds 3600] [--streams 300] [--clients 60] [--seed 1]

One driver serves 300 streams: most have small rings, four have 256 MiB, one has 2.25 GiB. Twenty of the small ones have
a producer and two consumers at a time, in processes of their own, which are ended and replaced on another stream,
killed, and stopped for up to 20 s; a consumer that leaves is audited (produced = received + counted drops). The large
rings are attached, used and detached again and again. Beside them one client is stopped for minutes, a hostile one
sends what no client should (benchmarks.scenario_guests), and now and then a foreign program subscribes to the control
stream and never polls. Afterwards every stream is served, discovery lists all, the driver's memory has not grown, its
log has no failed turn, and nothing is left behind. Prints a line a minute and a summary; exit code 1 when something
does not hold.
"""

from __future__ import annotations

import argparse
import contextlib
import heapq
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import numpy as np

import tensorpool as tp
from tests.support.chaos import events_of, start_logged
from tests.support.driver_process import DriverProcess
from tests.support.processes import Process, own_bytes, private_directory, wait_until
from tests.support.stream_processes import ClientProcess, Consuming, Producing, Site, audit

FIRST_STREAM: Final = 36_000
LARGE_RINGS: Final = 4
CLIENTS_PER_LANE: Final = 3  # a producer and two consumers
RATE_HZ: Final = 4.0
MIB: Final = 1 << 20
SMALL: Final = {"header_nslots": 16, "payload_pools": [{"pool_id": 1, "stride_bytes": 16 << 10}]}
LARGE: Final = {"header_nslots": 64, "payload_pools": [{"pool_id": 1, "stride_bytes": 4 * MIB}]}
HUGE: Final = {
    "header_nslots": 128,
    "payload_pools": [{"pool_id": 1, "stride_bytes": 2 * MIB}, {"pool_id": 2, "stride_bytes": 16 * MIB}],
}
READY_WITHIN_S: Final = (
    180.0  # a lane exchanges frames: starts of Python, leases that expire, memory, a held control log
)
LARGE_STAY_S: Final = 40.0
LONG_STOP_S: Final = 240.0
MUTE_EVERY_S: Final = 300.0
MUTE_FOR_S: Final = 25.0
GROWTH_BYTES: Final = 48 * MIB
ACTIONS: Final = {"replace": 5, "kill producer": 2, "kill consumer": 2, "stop": 3}


class ScenarioSite(Site):
    """Streams of three sizes, and a driver that writes its log to a file."""

    def __init__(self, folder: Path, streams: int) -> None:
        self.log = folder / "driver.journal"
        self.small = range(FIRST_STREAM, FIRST_STREAM + streams - LARGE_RINGS - 1)
        self.large = range(self.small.stop, self.small.stop + LARGE_RINGS)
        self.huge = self.large.stop
        super().__init__(
            folder,
            (*self.small, *self.large, self.huge),
            driver={"descriptor_stream_id_range": "50000-59999", "control_stream_id_range": "60000-69999"},
            policies={
                "announce_period_ms": 1000,
                "lease_keepalive_interval_ms": 1000,
                "shutdown_timeout_ms": 2000,
            },
        )

    def start_driver(self) -> DriverProcess:
        tables = self.deployment.tables
        tables["profiles"] = {"small": SMALL, "large": LARGE, "huge": HUGE}
        for stream_id in (*self.large, self.huge):
            tables["streams"][f"s{stream_id}"]["profile"] = "huge" if stream_id == self.huge else "large"
        self.driver = self._undo.enter_context(start_logged(self.deployment, self.log))
        return self.driver


class Lane:
    """A stream with its clients of the moment."""

    def __init__(self, site: ScenarioSite, stream_id: int, consumers: int, seed: int, rate_hz: float = RATE_HZ) -> None:
        self.site = site
        self.stream_id = stream_id
        self.rate_hz = rate_hz
        self.began_s = time.monotonic()
        largest = {site.huge: 12 * MIB}.get(stream_id, 3 * MIB if stream_id in site.large else 12 << 10)
        self._produce: Callable[[], Producing] = lambda: site.produce(
            stream_id, rate_hz=rate_hz, largest=largest, seed=seed, patience_s=60.0
        )
        self.producer: Producing = self._produce()
        self.consumers: list[Consuming] = [self._consume() for _ in range(consumers)]

    @property
    def clients(self) -> list[ClientProcess]:
        return [self.producer, *self.consumers]

    @property
    def is_ready(self) -> bool:
        """Whether every consumer has received what the producer of now publishes."""
        epoch = self.producer.last[0]
        return self.producer.total > 0 and all(each.total > 0 and each.last[0] == epoch for each in self.consumers)

    def replace(self, client: ClientProcess) -> None:
        """Kill a client and start another in its place."""
        client.kill()
        self.began_s = time.monotonic()
        if client is self.producer:
            self.producer = self._produce()
        else:
            self.consumers[self.consumers.index(client)] = self._consume()  # type: ignore[arg-type]

    def leave(self) -> list[dict[str, Any]]:
        """All see the last frame and end in order; what the consumers counted, audited."""
        self.site.drain(*self.consumers)
        truth = self.site.truth(self.stream_id)
        endings = []
        for consumer in self.consumers:
            endings.append(consumer.end())
            try:
                audit(consumer, truth, endings[-1])
            except AssertionError as error:
                writers = [producer for producer in self.site.producers if producer.stream_id == self.stream_id]
                for each in (consumer, *writers):
                    error.add_note(f"{each.name}: {each.book.frames()}, {each.journal()[-40:]}")
                raise
        self.producer.end()
        return endings

    def _consume(self) -> Consuming:
        return self.site.consume(self.stream_id, patience_s=60.0)


class Scenario:
    """Acts about once a second, for as long as it is run; `settle` then looks at what is left."""

    def __init__(self, folder: Path, streams: int, clients: int, seed: int) -> None:
        self.counts: Counter[str] = Counter()
        self.drops: Counter[str] = Counter()
        self.history: list[str] = []
        self.memory: list[int] = []
        self._chance = random.Random(seed)
        self._wakes: list[tuple[float, int, ClientProcess]] = []
        self._stopped: set[int] = set()
        self._undo = contextlib.ExitStack()
        with self._undo:
            self._site = self._undo.enter_context(ScenarioSite(folder, streams))
            self._hostile = self._undo.enter_context(self._guest("hostile", str(seed)))
            self._mute: Process | None = None
            self._client = self._undo.enter_context(self._connect())
            self._lanes: list[Lane] = []
            self._stopper: Any = None  # a lane, once there is one
            for _ in range(clients // CLIENTS_PER_LANE):
                self._lanes.append(self._lane())
                self._pass_time(0.5)  # Python starts, one lane after the other
            self._stopper = self._lane()  # has the client that is stopped for minutes
            self._visits: dict[int, Lane | None] = {self._site.huge: None, **dict.fromkeys(self._site.large)}
            self._wait_for(self._is_everybody_ready, "all lanes exchange frames", READY_WITHIN_S)
            self._undo = self._undo.pop_all()

    def run(self, seconds: float) -> None:
        began_s = time.monotonic()
        minutes = 0
        next_mute_s = began_s + min(MUTE_EVERY_S, seconds / 3)
        next_long_s = began_s
        while (now_s := time.monotonic()) < began_s + seconds:
            self._pass_time(self._chance.uniform(0.5, 2.0))
            self._act(self._chance.choices(list(ACTIONS), list(ACTIONS.values()))[0])
            self._visit_large()
            if now_s > next_long_s:
                next_long_s = now_s + self._stop_long(min(LONG_STOP_S, seconds / 3))
            if now_s > next_mute_s:
                next_mute_s = now_s + MUTE_EVERY_S
                self._toggle_mute()
                next_mute_s = now_s + (MUTE_FOR_S if self._mute else MUTE_EVERY_S)
            self._look()
            if now_s - began_s >= 60 * minutes:
                minutes += 1
                self._report(now_s - began_s)

    def settle(self) -> dict[str, Any]:
        """All go on, are audited and leave; then every stream is served, and the driver ends without a trace."""
        if self._mute is not None:
            self._toggle_mute()
        self._wake_due(is_everybody=True)
        lanes = [*self._lanes, self._stopper, *filter(None, self._visits.values())]
        self._wait_for(lambda: all(lane.is_ready for lane in lanes), "all lanes exchange frames again", READY_WITHIN_S)
        for lane in lanes:
            self._end(lane)
        code, words = self._hostile.finish(stdin="")
        assert code == 0, words
        self._serve_every_stream()
        listed = {stream.stream_id for stream in self._client.discover(timeout=10.0)}
        expected = {*self._site.small, *self._site.large, self._site.huge}
        assert listed >= expected, f"discovery does not list {sorted(expected - listed)}"
        self.memory.append(own_bytes(self._site.driver.pid))
        assert self.memory[-1] - self.memory[0] < GROWTH_BYTES, f"the driver's memory: {self.memory}"
        assert not self._site.driver.has_ended, "the driver ended"
        self._client.close()
        self._site.shut_down()
        assert events_of(self._site.log, "turn_failed") == []
        (stopped,) = events_of(self._site.log, "driver_stopped")
        return {
            "counts": dict(self.counts),
            "drops": dict(self.drops),
            "driver's memory in MiB, first and last": [round(self.memory[i] / MIB, 1) for i in (0, -1)],
            "hostile": words.strip(),
            "driver": stopped["counts"],
        }

    # --- acting

    def _act(self, action: str) -> None:
        ready = [lane for lane in self._lanes if lane.is_ready and not self._stopped_of(lane)]
        if not ready:
            return
        lane = self._chance.choice(ready)
        if action == "replace":
            self._end(lane)
            self._lanes[self._lanes.index(lane)] = self._lane()
        elif action == "stop":
            client = self._chance.choice(lane.clients)
            self._stop(client, 0.2 * 100.0 ** self._chance.random())
        else:
            client = lane.producer if action == "kill producer" else self._chance.choice(lane.consumers)
            self._note(f"kill {client.name} (pid {client.pid})")
            lane.replace(client)
        self.counts[action] += 1

    def _stop(self, client: ClientProcess, seconds: float) -> None:
        self._note(f"stop {client.name} (pid {client.pid}) for {seconds:.1f} s")
        client.pause()
        self._stopped.add(client.pid)
        heapq.heappush(self._wakes, (time.monotonic() + seconds, client.pid, client))

    def _stop_long(self, seconds: float) -> float:
        """Stop a consumer for minutes, when it has recovered from the last time; how long until the next try."""
        lane = self._stopper
        if self._stopped_of(lane) or not lane.is_ready:
            self._check_patience(lane)
            return 5.0
        if self.counts["stop for minutes"]:
            self._end(lane)
            self._stopper = lane = self._lane()
            self._wait_for(lambda: lane.is_ready, "the next client to be stopped receives", READY_WITHIN_S)
        self.counts["stop for minutes"] += 1
        self._stop(lane.consumers[0], seconds)
        return seconds + 30.0

    def _toggle_mute(self) -> None:
        """Start the subscriber that never polls, or end it, in order or by SIGKILL."""
        if self._mute is None:
            self._note("the mute subscriber begins")
            self._mute = self._undo.enter_context(self._guest("mute"))
            self.counts["mute subscriber"] += 1
            return
        self._note("the mute subscriber ends")
        if self._chance.random() < 0.5:
            self._mute.send(signal.SIGKILL)
        self._mute.finish(stdin="" if self._mute.is_running else None)
        self._mute = None
        now_s = time.monotonic()
        for lane in (*self._lanes, self._stopper):
            lane.began_s = now_s  # leases may have expired meanwhile

    def _visit_large(self) -> None:
        """Attach to the large rings one after the other, exchange frames for a while, detach."""
        for stream_id, lane in self._visits.items():
            if lane is None and self._chance.random() < (0.05 if stream_id == self._site.huge else 0.02):
                self._visits[stream_id] = Lane(self._site, stream_id, 1, self._chance.getrandbits(32), 1.0)
            elif lane is not None and lane.is_ready and time.monotonic() - lane.began_s > LARGE_STAY_S:
                self._end(lane)
                self._visits[stream_id] = None
                self.counts["huge ring" if stream_id == self._site.huge else "large ring"] += 1

    def _end(self, lane: Lane) -> None:
        self._note(f"stream {lane.stream_id} is left")
        clients = lane.clients
        for ended in lane.leave():
            self.counts["consumers audited"] += 1
            self.counts["frames received"] += ended["received"]
            self.drops.update(ended["drops"])
        for client in clients:
            assert not client.complaints(), f"{client.name}: {client.complaints()}"

    def _lane(self) -> Lane:
        # A stream has one lane: leaving it holds all producers of the stream.
        used = {lane.stream_id for lane in (*self._lanes, self._stopper) if lane is not None}
        free = [stream_id for stream_id in self._site.small if stream_id not in used]
        return Lane(self._site, self._chance.choice(free), CLIENTS_PER_LANE - 1, self._chance.getrandbits(32))

    # --- looking

    def _look(self) -> None:
        """No process reported an error, no turn of the driver failed, and no lane has been silent for too long."""
        assert not self._site.driver.has_ended, "the driver ended"
        assert not events_of(self._site.log, "turn_failed"), events_of(self._site.log, "turn_failed")[:3]
        for lane in (*self._lanes, self._stopper, *filter(None, self._visits.values())):
            for client in lane.clients:
                client.check()
            self._check_patience(lane)

    def _check_patience(self, lane: Lane) -> None:
        if lane.is_ready or self._stopped_of(lane) or self._mute is not None:
            return
        if time.monotonic() - lane.began_s < READY_WITHIN_S:
            return
        words = [f"{each.name}: {each.total} frames, {each.journal()[-8:]}" for each in lane.clients]
        words += [line for line in self._site.log.read_text().splitlines() if str(lane.stream_id) in line][-20:]
        raise AssertionError(f"stream {lane.stream_id} is not served:\n" + "\n".join(words))

    def _serve_every_stream(self) -> None:
        """A new producer and a new consumer of every stream exchange a frame."""
        for stream_id in (*self._site.small, *self._site.large, self._site.huge):
            frame = np.full(64, stream_id % 251, np.uint8)
            with (
                self._client.producer(stream_id, timeout=90.0) as producer,
                self._client.consumer(stream_id, timeout=90.0) as consumer,
            ):
                self._exchange(producer, consumer, frame)
            self.counts["streams served at the end"] += 1

    def _exchange(self, producer: tp.Producer, consumer: tp.Consumer, frame: np.ndarray[Any, Any]) -> None:
        got: list[bool] = []

        def is_received() -> bool:
            producer.publish(frame)  # again and again: a descriptor before the consumer's image is lost
            received = consumer.poll()
            if received is not None:
                got.append(bool((received.array == frame).all()))
            return bool(got)

        wait_until(is_received, f"a frame on stream {consumer.stream_id}")
        assert all(got), f"stream {consumer.stream_id}: other bytes than were published"

    def _report(self, seconds: float) -> None:
        self.memory.append(own_bytes(self._site.driver.pid))
        alive = sum(not client.has_ended for client in self._site.clients)
        print(
            f"{seconds / 60:4.0f} min  {alive} clients, {dict(self.counts)}, driver {self.memory[-1] / MIB:.1f} MiB, "
            f"load {os.getloadavg()[0]:.1f}",
            file=sys.stderr,
            flush=True,
        )

    def _is_everybody_ready(self) -> bool:
        return all(lane.is_ready for lane in (*self._lanes, self._stopper))

    def _stopped_of(self, lane: Lane) -> list[int]:
        return [client.pid for client in lane.clients if client.pid in self._stopped]

    # --- waiting

    def _pass_time(self, seconds: float) -> None:
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s:
            self._wake_due()
            time.sleep(0.05)

    def _wait_for(self, condition: Callable[[], bool], what: str, timeout_s: float) -> None:
        until_s = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < until_s, f"not within {timeout_s:.0f} s: {what}"
            self._pass_time(0.2)
            self._look()

    def _wake_due(self, *, is_everybody: bool = False) -> None:
        while self._wakes and (is_everybody or self._wakes[0][0] <= time.monotonic()):
            _, pid, client = heapq.heappop(self._wakes)
            self._stopped.discard(pid)
            self._note(f"continue {client.name}")
            client.resume()
            for lane in (*self._lanes, self._stopper):
                if client in lane.clients:
                    lane.began_s = time.monotonic()

    # --- parts

    def _guest(self, kind: str, *arguments: str) -> Process:
        deployment = self._site.deployment
        guest = Process(
            "-m", "benchmarks.scenario_guests", kind, str(deployment.config_path), deployment.aeron_dir, *arguments
        )
        line = guest.read_line()
        assert line == "ready", (line, guest.finish())
        return guest

    def _connect(self) -> tp.Client:
        deployment = self._site.deployment
        return tp.connect(deployment.aeron_dir, config=deployment.config_path)

    def _note(self, text: str) -> None:
        self.history.append(f"{time.monotonic():10.3f} {text}")

    def close(self) -> None:
        self._undo.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            error.add_note("\n".join(self.history[-60:]))
            error.add_note("the driver's log ends with\n" + "\n".join(self._site.log.read_text().splitlines()[-20:]))
        self.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3600)
    parser.add_argument("--streams", type=int, default=300)
    parser.add_argument("--clients", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with (
        private_directory("tensorpool-scenario-") as folder,
        Scenario(folder, options.streams, options.clients, options.seed) as scenario,
    ):
        scenario.run(options.seconds)
        figures = scenario.settle()
    print(json.dumps({"seed": options.seed, "seconds": options.seconds, **figures}, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
