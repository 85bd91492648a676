# SPDX-License-Identifier: Apache-2.0
"""The loop that kills clients and their driver at random moments, and checks what is left."""

from __future__ import annotations

import contextlib
import json
import os
import random
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from tensorpool.wire.control import ShmPoolAnnounce
from tensorpool.wire.driver import ResponseCode, Role, ShmAttachResponse, ShmLeaseRevoked
from tests.support import driver_client
from tests.support.client_nursery import Listener, Nursery, zombies_below
from tests.support.driver_client import DriverClient, attach_request
from tests.support.driver_process import Deployment, DriverProcess
from tests.support.processes import wait_until, whole_lines

TOKEN: Final = "open sesame"


def start_logged(deployment: Deployment, log: Path) -> DriverProcess:
    """The driver with its log at level info, in a file: a test does not read a pipe while it runs."""
    return deployment.start_limited(
        f"log = os.open({str(log)!r}, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)\n"
        "os.dup2(log, 1), os.dup2(log, 2)\n"
        "sys.argv[-1] = 'info'"
    )


def events_of(log: Path, name: str) -> list[dict[str, Any]]:
    """What a driver has logged under this name."""
    entries = [json.loads(line) for line in whole_lines(log) if line.startswith("{")]
    return [entry for entry in entries if entry["event"] == name]


def end(process: DriverProcess, client: DriverClient) -> None:
    """Have the driver of a deployment whose token is TOKEN end in order."""
    client.send(driver_client.shutdown_request(TOKEN))
    code, output = process.wait_for_end()
    assert code == 0, output


class Chaos:
    """Kills clients and their driver at random moments and starts others in their place.

    Every stream has a producer and two consumers, the first one also a rival who wants to be its producer. An observer
    listens all the time: epochs only grow, no lease id comes twice, no end is published twice. `settle` then checks
    what is left.
    """

    def __init__(self, deployment: Deployment, stream_ids: Sequence[int], seed: int) -> None:
        self.kills: Counter[str] = Counter()
        self.epochs: dict[int, int] = dict.fromkeys(stream_ids, 0)  # the highest that was announced or granted
        self.bumps = 0
        self.grants = 0
        self._deployment = deployment
        self._chance = random.Random(seed)
        self._granted: set[int] = set()
        self._ended: set[int] = set()
        self._producers: dict[int, int] = {}  # as announced last: stream, client
        roles = [(Role.PRODUCER, id) for id in (stream_ids[0], *stream_ids)]
        roles += [(Role.CONSUMER, id) for id in stream_ids for _ in range(2)]
        with contextlib.ExitStack() as undo:
            self._observer = undo.enter_context(Listener(deployment))
            self._nursery = undo.enter_context(Nursery(deployment))
            self._driver = undo.enter_context(deployment.start())
            self._holders = {self._nursery.hold(*task): task for task in roles}
            self._undo = undo.pop_all()

    def run(self, rounds: int, *, seconds: float = float("inf")) -> int:
        """So many kills, or as many as there is time for; how many there were."""
        until_s = time.monotonic() + seconds
        for round in range(rounds):
            if time.monotonic() > until_s:
                return round
            self._pass_time(self._chance.uniform(0, 0.3))
            assert not self._driver.has_ended, self._driver.finish()
            if self._chance.random() < 0.15:
                self.kills["driver"] += 1
                self._driver.kill()
                self._driver = self._undo.enter_context(self._deployment.start())
            else:
                pid = self._chance.choice(sorted(self._holders))
                role, stream_id = self._holders.pop(pid)
                self.kills[role.name.lower()] += 1
                self._nursery.kill(pid)
                self._holders[self._nursery.hold(role, stream_id)] = role, stream_id
        return rounds

    def settle(self) -> None:
        """Once the killing is over: every client has a lease again; then all clients die and leave nothing."""
        observer, deployment = self._observer, self._deployment
        wait_until(lambda: self._observe() or self._is_everybody_back(), "every client has a lease again")
        wait_until(lambda: self._observe() or all(self._producers.values()), "every stream has a producer")
        for pid in self._holders:
            self._nursery.kill(pid)
        wait_until(lambda: self._observe() or not any(self._producers.values()), "the producers' leases expire")
        self._pass_time(deployment.lease_ns / 1e9)

        most = int(deployment.tables["policies"]["max_leases"])
        before = dict(self.epochs)
        leases = observer.kept  # alive while others are asked for
        for stream_id in self.epochs:
            leases.append(observer.attach(stream_id, Role.PRODUCER))
        while len(leases) < most:
            leases.append(observer.attach(next(iter(self.epochs))))
        refusal = observer.refused(attach_request(next(iter(self.epochs))))
        assert "max_leases" in refusal.error_message, "as many as there may be: none was left"
        assert all(lease.epoch > before[lease.stream_id] for lease in leases[: len(before)])
        for lease in leases.copy():
            leases.remove(lease)
            assert observer.detach(lease).message.code is ResponseCode.OK
        self._pass_time(3 * int(deployment.tables["policies"]["announce_period_ms"]) / 1e3)
        wait_until(lambda: self._observe() or self._has_current_epochs_only(), "old epochs are removed by policy")
        assert zombies_below(os.getpid()) == []
        end(self._driver, observer)
        assert deployment.leftovers() == []
        self._check_diary()
        clients = self.diary()
        ghosts = self.grants - clients["granted"] - most
        killed = self.kills["producer"] + self.kills["consumer"]
        assert 0 <= ghosts <= killed + clients["unanswered"], (
            "leases were granted that no client had asked this driver for"
        )

    def diary(self) -> Counter[str]:
        """How often what happened to the clients."""
        return Counter(
            entry["event"] if "reason" not in entry else f"lost: {entry['reason']}" for entry in self._nursery.diary()
        )

    def close(self) -> None:
        self._undo.close()

    def _pass_time(self, seconds: float) -> None:
        until_s = time.monotonic() + seconds
        wait_until(lambda: self._observe() or time.monotonic() > until_s, "time passes")

    def _observe(self) -> None:
        """What was said since the last time, in order."""
        self._observer.poll()
        for received in self._observer.transcript:
            message = received.message
            match message:
                case ShmPoolAnnounce():
                    self._advance(message.stream_id, message.epoch)
                    self._producers[message.stream_id] = message.producer_id
                case ShmAttachResponse(code=ResponseCode.OK):
                    assert message.stream_id is not None
                    assert message.epoch is not None
                    assert message.lease_id is not None
                    assert message.lease_id not in self._granted, message
                    self._advance(message.stream_id, message.epoch)
                    self._granted.add(message.lease_id)
                    self.grants += 1
                case ShmLeaseRevoked():
                    assert message.lease_id in self._granted, message
                    assert message.lease_id not in self._ended, message
                    self._ended.add(message.lease_id)
        self._observer.transcript.clear()

    def _advance(self, stream_id: int, epoch: int) -> None:
        assert epoch >= self.epochs[stream_id], (stream_id, epoch, self.epochs)
        self.bumps += epoch > self.epochs[stream_id]
        self.epochs[stream_id] = epoch

    def _is_everybody_back(self) -> bool:
        """All but one of two rivals."""
        last = {entry["pid"]: entry["event"] for entry in self._nursery.diary()}
        granted = [pid for pid in self._holders if last.get(pid) == "granted"]
        return len(granted) >= len(self._holders) - 1

    def _has_current_epochs_only(self) -> bool:
        """One epoch to keep beside each current one, and nothing of another name."""
        keep = int(self._deployment.tables["policies"].get("epoch_gc_keep", 2))
        folders = list(self._deployment.base_dir.glob("*/*/*/*"))
        return all(folder.name.isdecimal() for folder in folders) and all(
            len(epochs := self._deployment.epochs(id)) <= keep and epochs[-1] == self.epochs[id] for id in self.epochs
        )

    def _check_diary(self) -> None:
        """Only rivals were refused, and no client was granted memory that could not be mapped, unless it was gone."""
        for entry in self._nursery.diary():
            assert entry["event"] != "failed", entry["text"]
            assert entry["event"] != "refused" or entry["code"] == "REJECTED", entry
            assert entry["event"] != "rejected" or entry["check"] == "missing", entry

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
