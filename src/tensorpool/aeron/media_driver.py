# SPDX-License-Identifier: Apache-2.0
"""The media driver, embedded in this process; `tensorpool media-driver` runs it alone.

Defaults are chosen for machines that do other work too: one shared thread that backs off when idle, and timers fine
enough that a subscriber that stopped polling is cut loose after a tenth of a second instead of seconds.
"""

from __future__ import annotations

import os
import struct
import time
from types import TracebackType
from typing import Final, Self

from tensorpool import _core
from tensorpool.aeron import library
from tensorpool.aeron.transport import DRIVER_TIMEOUT_MS, default_aeron_dir, is_driver_active
from tensorpool.errors import ConfigError, TransportError

THREADING_DEDICATED, THREADING_SHARED_NETWORK, THREADING_SHARED = 0, 1, 2

type Value = bool | int | str

_MS: Final = 1_000_000
_S: Final = 1_000_000_000

SILENCE_MS: Final = 2_000  # twice the heartbeat interval that Aeron ships with; ours is finer
_CNC_PID: Final = struct.Struct("<40xq")

DEFAULTS: Final[dict[str, Value]] = {
    "threading_mode": THREADING_SHARED,
    "shared_idle_strategy": "backoff",
    "shared_idle_strategy_init_args": "10-20-1us-2ms",  # spins, yields, shortest and longest park
    "timer_interval_ns": 50 * _MS,
    "client_liveness_timeout_ns": 5 * _S,
    "publication_unblock_timeout_ns": 6 * _S,  # Aeron: must exceed the client liveness timeout
    "term_buffer_sparse_file": True,
    "dir_delete_on_start": True,  # what a dead driver left; a live one is refused first
    "dir_delete_on_shutdown": True,
    "dir_warn_if_exists": False,
    "print_configuration": False,
}

# Every plain setting of the C media driver (aeron_driver_context_set_<name>) and its kind. Settings that take function
# pointers are not here: a number in their place would crash the process.
SETTINGS: Final[dict[str, type[Value]]] = {
    **dict.fromkeys(
        [
            "conductor_idle_strategy",
            "conductor_idle_strategy_init_args",
            "receiver_idle_strategy",
            "receiver_idle_strategy_init_args",
            "resolver_bootstrap_neighbor",
            "resolver_interface",
            "resolver_name",
            "sender_idle_strategy",
            "sender_idle_strategy_init_args",
            "shared_idle_strategy",
            "shared_idle_strategy_init_args",
            "sharednetwork_idle_strategy",
            "sharednetwork_idle_strategy_init_args",
        ],
        str,
    ),
    **dict.fromkeys(
        [
            "dir_delete_on_shutdown",
            "dir_delete_on_start",
            "dir_warn_if_exists",
            "perform_storage_checks",
            "print_configuration",
            "rejoin_stream",
            "reliable_stream",
            "spies_simulate_connection",
            "term_buffer_sparse_file",
            "tether_subscriptions",
        ],
        bool,
    ),
    **dict.fromkeys(
        [
            "client_liveness_timeout_ns",
            "counters_buffer_length",
            "counters_free_to_reuse_timeout_ns",
            "driver_timeout_ms",
            "error_buffer_length",
            "file_page_size",
            "flow_control_receiver_timeout_ns",
            "image_liveness_timeout_ns",
            "ipc_mtu_length",
            "ipc_publication_term_window_length",
            "ipc_term_buffer_length",
            "loss_report_buffer_length",
            "low_file_store_warning_threshold",
            "max_resend",
            "mtu_length",
            "nak_unicast_delay_ns",
            "publication_connection_timeout_ns",
            "publication_linger_timeout_ns",
            "publication_term_window_length",
            "publication_unblock_timeout_ns",
            "rcv_initial_window_length",
            "rcv_status_message_timeout_ns",
            "retransmit_unicast_delay_ns",
            "retransmit_unicast_linger_ns",
            "socket_multicast_ttl",
            "socket_so_rcvbuf",
            "socket_so_sndbuf",
            "term_buffer_length",
            "threading_mode",
            "timer_interval_ns",
            "to_clients_buffer_length",
            "to_conductor_buffer_length",
            "untethered_linger_timeout_ns",
            "untethered_resting_timeout_ns",
            "untethered_window_limit_timeout_ns",
        ],
        int,
    ),
}


class MediaDriver:
    """A running media driver in this process; its directory is removed when it is closed.

    >>> with MediaDriver("/dev/shm/aeron-example") as driver:      # doctest: +SKIP
    ...     client = connect(driver.aeron_dir)

    Raises `TransportError` when a live driver owns the directory or Aeron cannot start, `ConfigError` for a setting
    that does not exist or has the wrong kind.
    """

    def __init__(self, aeron_dir: str | None = None, **settings: Value) -> None:
        library.load()
        self.aeron_dir = aeron_dir or default_aeron_dir()
        chosen = DEFAULTS | {name: checked_setting(name, value) for name, value in settings.items()}
        _refuse_live_driver(self.aeron_dir)
        pairs: list[tuple[str, int | str]] = [("dir", self.aeron_dir)]
        # An idle strategy reads its arguments at the moment it is chosen: they have to be there first.
        for name, value in sorted(chosen.items(), key=lambda setting: not setting[0].endswith("_init_args")):
            pairs.append((name, value if isinstance(value, str) else int(value)))
        self._driver = _core.MediaDriver(pairs)
        library.close_at_exit(self._driver)

    def close(self) -> None:
        """Stop the driver and remove its directory. Clients that are still connected see it gone."""
        self._driver.close()

    @property
    def is_closed(self) -> bool:
        return self._driver.is_closed

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _refuse_live_driver(aeron_dir: str) -> None:
    """Raise if a driver lives at `aeron_dir`; a killed one is told apart in seconds, not after Aeron's timeout.

    The pid alone proves nothing (a driver in another container has one that we cannot see), and neither does a recent
    heartbeat (a killed driver had one too): a missing process that stays silent is dead.
    """
    pid = driver_pid(aeron_dir)
    deadline_ns = time.monotonic_ns() + 2 * SILENCE_MS * _MS
    timeout_ms = DRIVER_TIMEOUT_MS if pid is None or os.path.exists(f"/proc/{pid}") else SILENCE_MS
    while is_driver_active(aeron_dir, timeout_ms=timeout_ms):
        if timeout_ms != SILENCE_MS or time.monotonic_ns() > deadline_ns:
            raise TransportError(
                f"a media driver is already running at {aeron_dir} (pid {pid}); use it, stop it, or choose another "
                "directory"
            )
        time.sleep(0.05)


def driver_pid(aeron_dir: str) -> int | None:
    """The process that runs, or ran, the driver at `aeron_dir`, as its command-and-control file names it."""
    try:
        with open(os.path.join(aeron_dir, "cnc.dat"), "rb") as cnc:
            head = cnc.read(_CNC_PID.size)
    except OSError:
        return None
    return _CNC_PID.unpack(head)[0] if len(head) == _CNC_PID.size else None


def checked_setting(name: str, value: Value) -> Value:
    """`value` as it was given, if the media driver's setting `name` can take it; `ConfigError` otherwise."""
    kind = SETTINGS.get(name)
    if kind is None:
        raise ConfigError(f"media driver setting {name}", value, "one of " + ", ".join(sorted(SETTINGS)))
    if type(value) is not kind:
        raise ConfigError(f"media driver setting {name}", value, f"a value of type {kind.__name__}")
    if isinstance(value, int) and not 0 <= value < 2**63:
        raise ConfigError(f"media driver setting {name}", value, "0 to 2^63 - 1")
    return value


def parse_setting(text: str) -> tuple[str, Value]:
    """`NAME=VALUE` from a command line."""
    name, separator, value = text.partition("=")
    if not separator:
        raise ConfigError("media driver setting", text, "NAME=VALUE")
    kind = SETTINGS.get(name)
    if kind is bool and value in ("true", "false"):
        return name, value == "true"
    if kind is int and value.isascii() and value.isdecimal():
        return name, int(value)
    return name, checked_setting(name, value)
