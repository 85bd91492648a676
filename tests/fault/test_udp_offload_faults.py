# SPDX-License-Identifier: Apache-2.0
"""The UDP offload on bad networks: whatever is lost, repeated or overtaken, what arrives is what was sent.

Loss is Aeron's own interceptor, which sees the datagrams that the offload took apart; a relay of the test repeats and
reorders real datagrams.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest

from tensorpool import _core, aeron
from tests.levels import SOAK
from tests.support.lossy_media import INTERCEPTORS, set_loss
from tests.support.processes import Process
from tests.support.transfers import free_ports, transfer

RATES: Final = (0.001, 0.01, 0.05)
SOAK_SECONDS: Final = 600.0
MIB: Final = 1 << 20


@contextmanager
def lossy_pair(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, str]]:
    """Two media drivers of this process with the offload; the second loses what `set_loss` says of what arrives."""
    with aeron.MediaDriver(str(folder / "one")) as one, monkeypatch.context() as patch:
        patch.setenv(INTERCEPTORS, "loss")
        set_loss(0.0)
        with aeron.MediaDriver(str(folder / "two")) as two:
            yield one.aeron_dir, two.aeron_dir


@contextmanager
def relay(duplicate: float, reorder: float) -> Iterator[tuple[str, str, Callable[[], dict[str, int]]]]:
    """Where to send, where to receive, and what the relay between them has done so far."""
    (port,) = free_ports(1, address="127.0.0.2")
    with Process("-m", "tests.support.udp_relay", "127.0.0.3", "127.0.0.2", str(port)) as process:
        assert process.read_line() == "relays"

        def order(rates: dict[str, float]) -> dict[str, int]:
            process.write_line(json.dumps(rates))
            counts: dict[str, int] = json.loads(process.read_line())
            return counts

        order({"duplicate": duplicate, "reorder": reorder})
        yield f"aeron:udp?endpoint=127.0.0.3:{port}", f"aeron:udp?endpoint=127.0.0.2:{port}", lambda: order({})


@pytest.mark.parametrize("rate", RATES)
def test_losses_are_made_good(shm_dir: Path, monkeypatch: pytest.MonkeyPatch, rate: float) -> None:
    """Of the datagrams in a buffer some are lost and the others used; Aeron sends the lost ones again."""
    with lossy_pair(shm_dir, monkeypatch) as (source, target):
        before = _core.udp_offload_counts()
        set_loss(rate)
        channel = f"aeron:udp?endpoint=127.0.0.1:{free_ports(1)[0]}"
        transfer(source, [target], channel, [channel], total_bytes=8 * MIB * SOAK)
        sent, received, dropped = (now - then for now, then in zip(_core.udp_offload_counts(), before, strict=True))
        assert sent > 3_000
        assert received > 3_000
        assert dropped == 0
        assert _counter(source, "NAKs received") > 0
        assert _counter(target, "Invalid packets") == 0


def test_datagrams_may_come_twice_and_out_of_order(shm_dir: Path) -> None:
    """Through a relay that repeats 5 % and delays 10 % of them."""
    with (
        aeron.MediaDriver(str(shm_dir / "one")) as one,
        aeron.MediaDriver(str(shm_dir / "two")) as two,
        relay(duplicate=0.05, reorder=0.1) as (sending, receiving, counts),
    ):
        before = _core.udp_offload_counts()
        transfer(one.aeron_dir, [two.aeron_dir], sending, [receiving], total_bytes=4 * MIB * SOAK)
        assert _core.udp_offload_counts()[0] - before[0] > 1_000
        assert counts()["duplicate"] > 20
        assert counts()["reorder"] > 50


@pytest.mark.soak
@pytest.mark.timeout(2 * SOAK_SECONDS)
def test_ten_minutes_of_a_bad_network(shm_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the time through changing loss, half of it through a relay that repeats and reorders besides."""
    rates = itertools.cycle(RATES)
    switched_s = -5.0

    def change(now_s: float) -> None:
        nonlocal switched_s
        if now_s - switched_s > 5:
            switched_s = now_s
            set_loss(next(rates))

    with lossy_pair(shm_dir, monkeypatch) as (source, target):
        channel = f"aeron:udp?endpoint=127.0.0.1:{free_ports(1)[0]}"
        (direct,) = transfer(source, [target], channel, [channel], seconds=SOAK_SECONDS / 2, meanwhile=change)
        switched_s = -5.0
        with relay(duplicate=0.02, reorder=0.02) as (sending, receiving, counts):
            (relayed,) = transfer(source, [target], sending, [receiving], seconds=SOAK_SECONDS / 2, meanwhile=change)
            print(f"{direct.bytes >> 20} MiB direct, {relayed.bytes >> 20} MiB by the relay: {counts()}")
        assert _core.udp_offload_counts()[2] == 0


def _counter(aeron_dir: str, label: str) -> int:
    client = aeron.connect(aeron_dir)
    try:
        return next(reading.value for reading in client.counters() if reading.label.startswith(label))
    finally:
        client.close()
