# SPDX-License-Identifier: Apache-2.0
"""Publications that a subscriber that never polls cannot stop."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tensorpool import _core, aeron
from tensorpool.aeron import renewal
from tests.support.processes import Process, wait_until

CHANNEL, STREAM = "aeron:ipc?term-length=64k", 700
WINDOW = 32 << 10
MESSAGE = 1000

FOREIGN = """
import sys
from tensorpool import _core
from tensorpool.aeron import library
library.load()
client = _core.Client(sys.argv[1], client_name="foreign")
subscription = client.add_subscription(sys.argv[2], int(sys.argv[3]))
print("subscribed", flush=True)
sys.stdin.readline()
"""


def foreign_subscriber(aeron_dir: str, channel: str = CHANNEL, stream_id: int = STREAM) -> Process:
    """A process that subscribes as any Aeron program does, and never polls."""
    process = Process("-c", FOREIGN, aeron_dir, channel, str(stream_id))
    assert process.read_line() == "subscribed"
    return process


def test_messages_flow_past_a_subscriber_that_never_polls(
    media_driver: aeron.MediaDriver, connect: Callable[[aeron.MediaDriver], aeron.Client]
) -> None:
    """In order, many windows long; the log that is held is given back at once, and who holds it is named."""
    client, reader = connect(media_driver), connect(media_driver)
    subscription = reader.add_subscription(CHANNEL, STREAM)
    received: list[int] = []
    with foreign_subscriber(media_driver.aeron_dir) as foreign:
        outlet = aeron.RenewedPublication(client, media_driver.aeron_dir, CHANNEL, STREAM)

        def poll() -> None:
            subscription.poll(lambda data, _: received.append(int.from_bytes(data[:4], "little")), 1000)

        def sent(number: int) -> bool:
            poll()
            return bool(outlet.offer(number.to_bytes(4, "little") + bytes(MESSAGE - 4)))

        count = 5 * WINDOW // MESSAGE
        for number in range(count):
            wait_until(lambda number=number: sent(number), f"message {number} is taken")
        wait_until(lambda: (poll(), len(received) == count)[1], "all messages arrive")
        assert received == list(range(count))
        assert outlet.renewals >= 4
        (holder,) = outlet.holders
        assert (holder.client_name, holder.pids) == ("foreign", (foreign.pid,))
        assert str(holder).startswith(f"Aeron client {holder.subscriber.client_id} (foreign), pid {foreign.pid}: ")
        logs = Path(media_driver.aeron_dir, "publications")
        wait_until(lambda: len(os.listdir(logs)) == 1, "the logs that were given up are gone")
        foreign.reap()
    wait_until(lambda: (outlet.refresh_holders(), not outlet.holders)[1], "the holder is forgotten")


def test_without_revocation_the_number_of_logs_is_bounded(
    media_driver: aeron.MediaDriver,
    connect: Callable[[aeron.MediaDriver], aeron.Client],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An Aeron before 1.48 keeps each log until its holder is gone: after a few there is back pressure again."""
    monkeypatch.setattr(renewal, "SESSION_AT_LEAST_NS", 0)
    monkeypatch.setattr(renewal, "STANDS_STILL_NS", 0)
    monkeypatch.setattr(renewal, "SAMPLE_EVERY_NS", 1_000_000)
    monkeypatch.setattr(renewal, "SETTLE_NS", 0)
    monkeypatch.setattr(renewal, "MAX_LINGERING", 2)
    monkeypatch.setattr(aeron.RenewedPublication, "_give_up", lambda _, publication: publication.close())
    client = connect(media_driver)
    idle = client.add_subscription(CHANNEL, STREAM)
    outlet = aeron.RenewedPublication(client, media_driver.aeron_dir, CHANNEL, STREAM)
    wait_until(lambda: not outlet.offer(bytes(MESSAGE)) and outlet.renewals == 2, "the third log is full")
    for _ in range(200):
        outlet.offer(bytes(MESSAGE))
        time.sleep(0.002)
    assert outlet.renewals == 2
    wait_until(
        lambda: (idle.poll(lambda *_: None, 100), outlet.offer(bytes(MESSAGE)))[1], "there is room when it reads on"
    )


def test_a_slow_subscriber_is_waited_for(
    media_driver: aeron.MediaDriver, connect: Callable[[aeron.MediaDriver], aeron.Client]
) -> None:
    """One that polls now and then holds the log, as flow control wants it: no session is given up, nothing is lost."""
    client = connect(media_driver)
    subscription = client.add_subscription(CHANNEL, STREAM)
    outlet = aeron.RenewedPublication(client, media_driver.aeron_dir, CHANNEL, STREAM)
    received: list[bytes] = []
    sent = 0
    while sent < 3 * WINDOW // MESSAGE:
        if outlet.offer(bytes(MESSAGE)):
            sent += 1
        else:
            subscription.poll(lambda data, _: received.append(data), 3)
    assert outlet.renewals == 0
    assert outlet.holders == ()
    wait_until(lambda: (subscription.poll(lambda data, _: received.append(data), 99), len(received) == sent)[1], "all")


def test_a_name_carries_the_process(media_driver: aeron.MediaDriver) -> None:
    """Connections of ours are known by their process id without looking into /proc."""
    client = aeron.connect(media_driver.aeron_dir, client_name="n" * 200)
    client.add_publication(CHANNEL, STREAM)
    label = f"pid={os.getpid()} "
    wait_until(lambda: any(label in reading.label for reading in client.counters()), "the heartbeat carries the name")
    client.close()


def test_revoking_closes(media_driver: aeron.MediaDriver, connect: Callable[[aeron.MediaDriver], aeron.Client]) -> None:
    """Once, and also a log that all publishers share; further calls find it closed."""
    client = connect(media_driver)
    for exclusive in (True, False):
        publication: _core.Publication = client.add_publication(CHANNEL, STREAM, exclusive=exclusive)
        publication.revoke()
        publication.revoke()
        assert publication.is_closed
        with pytest.raises(Exception, match="closed"):
            publication.offer(b"x")
