# SPDX-License-Identifier: Apache-2.0
"""What is sent to systemd's socket, and what is not."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tensorpool.telemetry.systemd import Notifier


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as bound:
        bound.bind(str(tmp_path / "notify"))
        bound.setblocking(False)
        yield bound


def received(listener: socket.socket) -> list[str]:
    found = []
    while True:
        try:
            found.append(listener.recv(4096).decode())
        except BlockingIOError:
            return found


def test_each_message_has_the_words_of_the_protocol(listener: socket.socket) -> None:
    """A reload carries the time of CLOCK_MONOTONIC, by which systemd knows that it is newer than its request."""
    notifier = Notifier({"NOTIFY_SOCKET": listener.getsockname()})
    before_us = time.monotonic_ns() // 1000
    notifier.ready("serves /dev/shm/a")
    notifier.reloading()
    notifier.stopping()
    ready, reloading, stopping = received(listener)
    assert (ready, stopping) == ("READY=1\nSTATUS=serves /dev/shm/a", "STOPPING=1")
    word, _, stamp = reloading.partition("\nMONOTONIC_USEC=")
    assert word == "RELOADING=1"
    assert before_us <= int(stamp) <= time.monotonic_ns() // 1000


def test_the_watchdog_gets_no_beat_from_a_duty_cycle_that_stands_still(listener: socket.socket) -> None:
    """Beats come three in a period at most, and only while it turns."""
    environ = {"NOTIFY_SOCKET": listener.getsockname(), "WATCHDOG_USEC": "3000000000", "WATCHDOG_PID": str(os.getpid())}
    notifier = Notifier(environ)
    notifier.beat(is_alive=False)
    assert received(listener) == []
    notifier.beat(is_alive=True)
    notifier.beat(is_alive=True)  # not due for many minutes
    assert received(listener) == ["WATCHDOG=1"]
    assert environ == {}, "a child would report in our name"


@pytest.mark.parametrize(
    "environ", [{}, {"WATCHDOG_USEC": "0"}, {"WATCHDOG_USEC": "x"}, {"WATCHDOG_USEC": "1000000", "WATCHDOG_PID": "1"}]
)
def test_a_watchdog_that_is_not_ours_gets_nothing(listener: socket.socket, environ: dict[str, str]) -> None:
    """No period, or that of another process."""
    Notifier(environ | {"NOTIFY_SOCKET": listener.getsockname()}).beat(is_alive=True)
    assert received(listener) == []


def test_an_abstract_socket_is_found() -> None:
    """systemd writes its leading zero as @."""
    name = f"tp-test-notify-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as bound:
        bound.bind(f"\0{name}")
        Notifier({"NOTIFY_SOCKET": f"@{name}"}).ready()
        assert bound.recv(100) == b"READY=1"


def test_a_socket_that_is_gone_or_full_costs_nothing(tmp_path: Path, listener: socket.socket) -> None:
    """The service goes on; a beat that found no room is repeated."""
    Notifier({"NOTIFY_SOCKET": str(tmp_path / "gone")}).ready()
    notifier = Notifier({"NOTIFY_SOCKET": listener.getsockname(), "WATCHDOG_USEC": "3000000000"})
    for _ in range(10_000):
        notifier.status("x" * 1000)
    notifier.beat(is_alive=True)
    assert "WATCHDOG=1" not in received(listener)
    notifier.beat(is_alive=True)
    assert received(listener) == ["WATCHDOG=1"]
