# SPDX-License-Identifier: Apache-2.0
"""Who sleeps at a media driver, and what wakes them: bells, answers, and commands. Sleeps are long enough to tell."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tensorpool import _core, aeron
from tests.support.processes import Process, wait_until

IPC = "aeron:ipc?term-length=64k"
HOURS_NS = 10**13

RINGER = """
import sys, time
from tensorpool import aeron
client = aeron.connect(sys.argv[1])
while True:  # a ring that comes before the sleep is missed
    client.ring(int(sys.argv[2]))
    time.sleep(0.01)
"""


def sleeping(client: aeron.Client, bell: aeron.Bell) -> threading.Thread:
    thread = threading.Thread(target=client.wait_for_ring, args=(bell, HOURS_NS), daemon=True)
    thread.start()
    return thread


def test_a_bell_wakes_who_sleeps_on_it_in_another_process(media_driver: aeron.MediaDriver) -> None:
    """And nobody who sleeps on another one."""
    client = aeron.connect(media_driver.aeron_dir)
    called, other = sleeping(client, aeron.Bell.CONTROL), sleeping(client, aeron.Bell.DISCOVERY)
    with Process("-c", RINGER, media_driver.aeron_dir, str(int(aeron.Bell.CONTROL))):
        wait_until(lambda: not called.is_alive(), "the bell was heard")
        assert other.is_alive()
    wait_until(lambda: (client.ring(aeron.Bell.DISCOVERY), not other.is_alive())[1], "the other one was heard")
    client.close()


def test_the_media_driver_wakes_clients_that_wait_for_its_events(media_driver: aeron.MediaDriver) -> None:
    """A client that never looks by itself knows of publications and subscriptions of others as they come and go."""
    reader = _core.Client(media_driver.aeron_dir, idle_sleep_ns=HOURS_NS)
    writer = aeron.connect(media_driver.aeron_dir)
    subscription = reader.add_subscription(IPC, 60_000)
    for _ in range(3):
        publication = writer.add_publication(IPC, 60_000)
        wait_until(lambda: subscription.image_count == 1, "the image is there")
        publication.close()
        wait_until(lambda: subscription.image_count == 0, "the image is gone")
    writer.close()
    reader.close()


@pytest.mark.parametrize("settings", [{"shared_idle_strategy": "backoff"}, {"threading_mode": 0}])
def test_a_media_driver_that_wakes_nobody_serves_too(shm_dir: Path, settings: dict[str, str | int]) -> None:
    """With Aeron's own threads, or as another program: clients look for its answers and events."""
    with aeron.MediaDriver(str(shm_dir / "aeron"), **settings) as driver:
        reader, writer = aeron.connect(driver.aeron_dir), aeron.connect(driver.aeron_dir)
        subscription = reader.add_subscription(IPC, 60_001)
        publication = writer.add_publication(IPC, 60_001)
        received: list[bytes] = []
        wait_until(lambda: publication.offer(b"first"), "the publication is connected")
        wait_until(lambda: (subscription.poll(lambda data, _: received.append(data)), received)[1], "it arrives")
        publication.close()
        wait_until(lambda: subscription.image_count == 0, "the image is gone")
        writer.close()
        reader.close()


def test_news_are_messages_and_images(
    media_driver: aeron.MediaDriver, connect: Callable[[aeron.MediaDriver], aeron.Client]
) -> None:
    """Looking takes nothing away; what a poll has taken is no news."""
    client = connect(media_driver)
    subscription = client.add_subscription(IPC, 60_002, lambda event: None)
    received: list[bytes] = []
    assert not subscription.has_news()
    publication = client.add_publication(IPC, 60_002)
    wait_until(subscription.has_news, "the image is news")
    assert subscription.poll(lambda data, _: received.append(data)) == 0
    assert not subscription.has_news()
    wait_until(lambda: publication.offer(b"first"), "the publication is connected")
    assert subscription.has_news()
    assert subscription.has_news()
    assert subscription.poll(lambda data, _: received.append(data)) == 1
    assert received == [b"first"]
    assert not subscription.has_news()


def test_threads_of_ours_leave_signals_to_the_main_thread(media_driver: aeron.MediaDriver) -> None:
    """A signal ends the sleep of the thread that handles it: the others block all of them."""
    client = aeron.connect(media_driver.aeron_dir)
    blocked = {}
    for task in Path("/proc/self/task").iterdir():
        lines = dict(line.split(":\t") for line in (task / "status").read_text().splitlines() if ":\t" in line)
        blocked[lines["Name"]] = int(lines["SigBlk"], 16)
    interrupt = 1 << (2 - 1)
    assert blocked["aeron-client"] & interrupt
    assert blocked["aeron-driver"] & interrupt
    client.close()
