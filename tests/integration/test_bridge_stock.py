# SPDX-License-Identifier: Apache-2.0
"""Bridges between a media driver of ours, with the UDP offload, and one as Aeron's own program runs it; and IPv6."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import numpy as np
import pytest

import tensorpool as tp
from tensorpool import _core, aeron
from tensorpool.bridge.bridge import Bridge
from tensorpool.bridge.config import BridgeConfig
from tests.support.bridge_rig import Host, bridge_tables, new_dest_stream_id, serving_host
from tests.support.bridge_sender import Link, noise
from tests.support.processes import wait_until
from tests.support.stock_media import stock_media_driver
from tests.support.transfers import free_ports

POOLS: Final = {1: 4096, 2: 1 << 20}
SIZES: Final = (1, 1000, 4000, 70_000, 1 << 20)


@pytest.fixture(scope="module")
def ours(shared_media_driver: aeron.MediaDriver) -> Iterator[Host]:
    with serving_host(shared_media_driver.aeron_dir, pools=POOLS) as host:
        yield host


def cross(source: Host, target: Host, link: Link, **receives: list[str]) -> None:
    """Frames of all sizes, each compared byte for byte with what was published."""
    mapping = {"source_stream_id": new_dest_stream_id(), "dest_stream_id": new_dest_stream_id()}
    with ExitStack() as stack:
        clients = [stack.enter_context(tp.connect(it.aeron_dir, config=it.config)) for it in (source, target)]
        producer = stack.enter_context(clients[0].producer(mapping["source_stream_id"], create=True))
        for host, role, more in ((target, "receiver", receives), (source, "sender", {})):
            tables = bridge_tables(host.place, link, [mapping], role=role, **more)
            bridge = stack.enter_context(Bridge(BridgeConfig.load(environ={}, **tables)).start())
            wait_until(lambda it=bridge: it.is_ready, f"the {role} is ready")
        consumer = stack.enter_context(clients[1].consumer(mapping["dest_stream_id"]))
        for size in SIZES:
            sent = np.frombuffer(noise(size), np.uint8)

            def is_through(sent: np.ndarray = sent) -> bool:
                seq = producer.publish(sent)
                while (frame := consumer.poll(timeout=0.5)) is not None:
                    if frame.seq == seq:
                        assert np.array_equal(frame.copy(), sent)
                        return True
                return False

            wait_until(is_through, f"a frame of {size} bytes gets through")


@pytest.mark.parametrize("is_sender", [True, False], ids=["to stock Aeron", "from stock Aeron"])
def test_frames_cross_between_ours_and_a_stock_aeron(shm_dir: Path, ours: Host, is_sender: bool) -> None:
    """In both directions; what we send leaves in segmented sends all the same."""
    before = _core.udp_offload_counts()
    with (
        stock_media_driver(str(shm_dir / "stock")),
        Host(shm_dir / "host", str(shm_dir / "stock"), pools=POOLS) as theirs,
    ):
        source, target = (ours, theirs) if is_sender else (theirs, ours)
        cross(source, target, Link.unused())
    sent, _, dropped = (now - then for now, then in zip(_core.udp_offload_counts(), before, strict=True))
    assert sent > 50 if is_sender else sent == 0
    assert dropped == 0


def test_frames_cross_over_ipv6(shm_dir: Path, ours: Host) -> None:
    """To a receiver that allows this one address."""
    before = _core.udp_offload_counts()
    channels = [f"aeron:udp?endpoint=[::1]:{port}" for port in free_ports(3, address="::1")]
    with (
        aeron.MediaDriver(str(shm_dir / "aeron")) as driver,
        Host(shm_dir / "host", driver.aeron_dir, pools=POOLS) as other,
    ):
        cross(
            ours, other, Link.unused(payload=channels[0], control=channels[1], metadata=channels[2]), allow_from=["::1"]
        )
    assert _core.udp_offload_counts()[0] - before[0] > 50
