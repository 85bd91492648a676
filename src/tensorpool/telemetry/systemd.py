# SPDX-License-Identifier: Apache-2.0
"""What a service reports to systemd: ready, reloading, alive, stopping (sd_notify). Without systemd it does nothing.

The environment names a datagram socket (NOTIFY_SOCKET), and how often systemd expects a sign of life (WATCHDOG_USEC,
of the process WATCHDOG_PID). Both are taken out of the environment, so that no child reports in our name.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import MutableMapping
from typing import Final

from tensorpool.logs import get_logger

BEATS_PER_PERIOD: Final = 3  # of the watchdog: two may be late


class Notifier:
    """Sends to systemd's socket, from one thread. A socket that does not answer is logged once and left alone.

    >>> notifier = Notifier({})      # no systemd: nothing is sent
    >>> notifier.ready("serving")
    """

    def __init__(self, environ: MutableMapping[str, str] | None = None) -> None:
        environ = os.environ if environ is None else environ
        self._address = environ.pop("NOTIFY_SOCKET", "")
        period_us, pid = environ.pop("WATCHDOG_USEC", ""), environ.pop("WATCHDOG_PID", "")
        is_watched = period_us.isdecimal() and int(period_us) > 0 and pid in ("", str(os.getpid()))
        self._beat_every_ns: Final = int(period_us) * 1000 // BEATS_PER_PERIOD if is_watched else None
        self._next_beat_ns = 0
        self._has_failed = False

    def ready(self, status: str = "") -> None:
        """It serves; also the end of a reload."""
        self._send("READY=1", *([f"STATUS={status}"] if status else []))

    def status(self, text: str) -> None:
        """One line for `systemctl status`."""
        self._send(f"STATUS={text}")

    def reloading(self) -> None:
        """It reads its configuration again; `ready` ends that."""
        self._send("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def stopping(self) -> None:
        self._send("STOPPING=1")

    def beat(self, *, is_alive: bool) -> None:
        """For every turn of the main loop: a sign of life where one is due and the duty cycle turns."""
        now_ns = time.monotonic_ns()
        if self._beat_every_ns is not None and is_alive and now_ns >= self._next_beat_ns:
            self._next_beat_ns = now_ns + self._beat_every_ns
            self._send("WATCHDOG=1")

    def _send(self, *lines: str) -> None:
        if not self._address or self._has_failed:
            return
        address = "\0" + self._address[1:] if self._address.startswith("@") else self._address
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
                sender.setblocking(False)  # a service never waits for systemd
                sender.sendto("\n".join(lines).encode(), address)
        except BlockingIOError:
            self._next_beat_ns = 0  # full: the next beat is due at once
        except OSError as error:
            self._has_failed = True
            get_logger("systemd").warning("notify_failed", socket=self._address, error=str(error))
