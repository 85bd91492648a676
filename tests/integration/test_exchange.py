# SPDX-License-Identifier: Apache-2.0
"""Two processes exchange large messages through a media driver, by shared memory and by UDP."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from tensorpool import aeron
from tests.support.disc_client import unused_udp_channel
from tests.support.processes import Process, wait_until

MESSAGE_BYTES = 1_000_000
COUNT = 60

SENDER = """
import hashlib, os, sys, time
from tensorpool import aeron

directory, channel, count, size = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
client = aeron.connect(directory)
publication = client.add_publication(channel, 77)
digest = hashlib.sha256()
for n in range(count):
    message = n.to_bytes(8, "little") + os.urandom(4096) * (size // 4096)
    digest.update(message)
    while not publication.offer(message):
        time.sleep(0.0005)
print(digest.hexdigest(), flush=True)
sys.stdin.readline()  # stay until the receiver has everything
client.close()
"""


@pytest.mark.parametrize(
    ("media", "parameters"),
    [("ipc", ""), ("udp", ""), ("udp", "|mtu=8k|so-rcvbuf=2m|rcv-wnd=2m")],
    ids=["IPC", "UDP", "UDP in large datagrams"],
)
def test_two_processes_exchange_megabytes_without_loss(
    shared_media_driver: aeron.MediaDriver, media: str, parameters: str
) -> None:
    """Every message of 1 MB arrives once, in order and byte-identical."""
    channel = "aeron:ipc?term-length=16m" if media == "ipc" else f"{unused_udp_channel()}|term-length=16m{parameters}"
    client = aeron.connect(shared_media_driver.aeron_dir)
    subscription = client.add_subscription(channel, 77)
    digest = hashlib.sha256()
    order: list[int] = []

    def handler(message: bytes, _: aeron.MessageInfo) -> None:
        order.append(int.from_bytes(message[:8], "little"))
        digest.update(message)

    with Process("-c", SENDER, shared_media_driver.aeron_dir, channel, str(COUNT), str(MESSAGE_BYTES)) as sender:
        wait_until(lambda: subscription.poll(handler, 50) < 0 or len(order) == COUNT, "all messages arrive")
        assert sender.read_line() == digest.hexdigest()
        sender.write_line("done")
        assert sender.finish() == (0, "")
    assert order == list(range(COUNT))
    client.close()


def test_nothing_is_left_in_shared_memory(tmp_path: Path) -> None:
    """A whole life of a driver and a client in another process leaves /dev/shm as it was."""
    before = set(Path("/dev/shm").iterdir())
    script = (
        "from tensorpool import aeron; import os\n"
        "driver = aeron.MediaDriver(f'/dev/shm/tp-test-life-{os.getpid()}')\n"
        "client = aeron.connect(driver.aeron_dir)\n"
        "client.add_publication('aeron:ipc', 5)\n"
    )
    with Process("-c", script) as process:
        assert process.finish() == (0, "")
        name = Path(f"/dev/shm/tp-test-life-{process.pid}")
    assert name not in set(Path("/dev/shm").iterdir()) - before
