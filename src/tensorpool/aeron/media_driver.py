# SPDX-License-Identifier: Apache-2.0
"""The media driver, embedded in this process; `tensorpool media-driver` runs it alone.

Defaults are chosen for machines that do other work too: one shared thread that sleeps while nothing happens, for up to
10 ms without traffic over UDP and 2 ms with it, and that our clients wake; and timers fine enough that a subscriber
that stopped polling is skipped after a tenth of a second instead of seconds. Logs take their memory when they are made,
on mounts of ALLOCATE_FROM_BYTES and more: a log that finds no room is refused, where a writer of a sparse one would be
killed by SIGBUS. With a `shared_idle_strategy`, or another threading mode, Aeron's own threads and idle strategies are
used.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from typing import Final

from tensorpool import _core
from tensorpool.aeron import library
from tensorpool.aeron.transport import (
    DRIVER_TIMEOUT_MS,
    default_aeron_dir,
    driver_pid,
    explain_denial,
    is_driver_active,
)
from tensorpool.closing import ClosesOnExit
from tensorpool.errors import ConfigError, TransportError
from tensorpool.file_access import FileAccess
from tensorpool.logs import get_logger

THREADING_DEDICATED, THREADING_SHARED_NETWORK, THREADING_SHARED = 0, 1, 2

type Value = bool | int | str

log = get_logger("media_driver")

_MS: Final = 1_000_000
_S: Final = 1_000_000_000

SEND_BUFFER_BYTES: Final = 2 << 20  # what a queue of a network card may hold before sends are refused
ALLOCATE_FROM_BYTES: Final = 2 << 30  # a driver's logs take 48 MiB, a client's 24, a producer's 12 more
SILENCE_MS: Final = 2_000  # twice the heartbeat interval that Aeron ships with; ours is finer
START_TIMEOUT_MS: Final = 15_000  # of another driver in the same folder

DEFAULTS: Final[dict[str, Value]] = {
    "threading_mode": THREADING_SHARED,
    "timer_interval_ns": 50 * _MS,
    "client_liveness_timeout_ns": 5 * _S,
    "publication_unblock_timeout_ns": 6 * _S,  # Aeron: must exceed the client liveness timeout
    "to_clients_buffer_length": (4 << 20) + 128,  # events for processes that stand still; Aeron's trailer has 128 bytes
    "receiver_io_vector_capacity": 16,  # the most that Aeron takes, of each of the three
    "sender_io_vector_capacity": 16,
    "network_publication_max_messages_per_send": 16,
    "dir_delete_on_start": True,  # what a dead driver left; a live one is refused first
    "dir_delete_on_shutdown": True,
    "dir_warn_if_exists": False,
    "print_configuration": False,
}

# Settings of ours, and what they accept, the default first.
CHOICES: Final[dict[str, tuple[str, ...]]] = {"udp_offload": ("auto", "off")}

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
            "conductor_cpu_affinity",
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
            "network_publication_max_messages_per_send",
            "publication_connection_timeout_ns",
            "publication_linger_timeout_ns",
            "publication_term_window_length",
            "publication_unblock_timeout_ns",
            "rcv_initial_window_length",
            "rcv_status_message_timeout_ns",
            "receiver_cpu_affinity",
            "receiver_io_vector_capacity",
            "retransmit_unicast_delay_ns",
            "retransmit_unicast_linger_ns",
            "send_to_status_poll_ratio",
            "sender_cpu_affinity",
            "sender_io_vector_capacity",
            "socket_multicast_ttl",
            "socket_so_rcvbuf",
            "socket_so_sndbuf",
            "stream_session_limit",
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


class MediaDriver(ClosesOnExit):
    """A running media driver in this process; its directory is removed when it is closed.

    >>> with MediaDriver("/dev/shm/aeron-example") as driver:      # doctest: +SKIP
    ...     client = connect(driver.aeron_dir)

    Raises `TransportError` when a live driver owns the directory or Aeron cannot start, `ConfigError` for a setting
    that does not exist or has the wrong kind. `access` is who may use it; without, the umask decides.
    """

    def __init__(self, aeron_dir: str | None = None, access: FileAccess | None = None, /, **settings: Value) -> None:
        library.load()
        self.aeron_dir = aeron_dir or default_aeron_dir()
        defaults = DEFAULTS | _buffers() | {"term_buffer_sparse_file": _is_small(os.path.dirname(self.aeron_dir))}
        chosen = defaults | {name: checked_setting(name, value) for name, value in settings.items()}
        udp_offload = chosen.pop("udp_offload", "auto")
        has_own_thread = chosen["threading_mode"] == THREADING_SHARED and not _idle_settings(chosen)
        own_thread_dir = self.aeron_dir if has_own_thread else ""
        pairs: list[tuple[str, int | str]] = [("dir", self.aeron_dir)]
        # An idle strategy reads its arguments at the moment it is chosen: they have to be there first.
        for name, value in sorted(chosen.items(), key=lambda setting: not setting[0].endswith("_init_args")):
            pairs.append((name, value if isinstance(value, str) else int(value)))
        with alone_in(os.path.dirname(self.aeron_dir)):
            _refuse_live_driver(self.aeron_dir)
            with _umask(None if access is None else 0o077) as umask:
                self._driver = _core.MediaDriver(
                    pairs, own_thread_dir, _on_offload_refused if udp_offload == "auto" else None
                )
        if access is not None:
            self._share(access, umask)
        library.close_at_exit(self._driver, library.ClosingTurn.MEDIA_DRIVER)

    def close(self) -> None:
        """Stop the driver and remove its directory. Clients that are still connected see it gone."""
        self._driver.close()

    @property
    def is_closed(self) -> bool:
        return self._driver.is_closed

    def _share(self, access: FileAccess, umask: int) -> None:
        """Give the new files, ours alone until now, their group and mode. Raises TransportError.

        The media driver makes files later on, on a thread of its own, by the umask of the process, which is not ours
        to change: a default ACL of its directories takes the umask's place. A file system without is logged.
        """
        try:
            for name in ("publications", "images", ""):  # the last one lets others in
                folder = os.path.join(self.aeron_dir, name)
                for entry in os.scandir(folder):
                    if entry.is_file(follow_symlinks=False):
                        access.set_file(entry.path)
                fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
                try:
                    is_set = access.set_default(fd)
                    access.set_directory(fd)
                finally:
                    os.close(fd)
        except OSError as error:
            self._driver.close()
            raise TransportError(f"the media driver's directory cannot be shared: {error}") from None
        if not is_set and 0o666 & ~umask != access.file_mode:
            remedy = f"start with umask {0o777 & ~access.file_mode & 0o077:04o}"
            get_logger("aeron").warning("aeron_modes_by_umask", aeron_dir=self.aeron_dir, remedy=remedy)


def _idle_settings(chosen: dict[str, Value]) -> set[str]:
    return chosen.keys() & {"shared_idle_strategy", "shared_idle_strategy_init_args"}


def _buffers() -> dict[str, Value]:
    """As large as this kernel allows: Aeron complains where it grants less than asked for."""
    try:
        with open("/proc/sys/net/core/wmem_max", "rb") as limit:
            return {"socket_so_sndbuf": min(SEND_BUFFER_BYTES, int(limit.read()))}
    except (OSError, ValueError):
        return {}


def _is_small(parent: str) -> bool:
    """Whether the mount is too small for logs that are mostly empty, such as the 64 MiB that Docker gives."""
    try:
        mount = os.statvfs(parent)
    except OSError:
        return True  # Aeron reports what is wrong with it
    return 0 < mount.f_blocks * mount.f_frsize < ALLOCATE_FROM_BYTES  # 0: without a limit


def _on_offload_refused(reason: str) -> None:
    log.warning("udp_offload_unavailable", reason=reason, effect="UDP as Aeron ships it, datagram by datagram")


def embed(aeron_dir: str, access: FileAccess | None = None) -> MediaDriver | None:
    """A media driver in this process, or None where another one is alive.

    Only an attempt to start one distinguishes a live driver from one just killed: both have a recent heartbeat.
    """
    try:
        return MediaDriver(aeron_dir, access)
    except TransportError:
        if is_driver_active(aeron_dir):
            return None
        raise


class DriverLiveness:
    """Sees at once when a media driver's process is gone, where Aeron waits for its timeout."""

    def __init__(self, aeron_dir: str) -> None:
        self._aeron_dir = aeron_dir
        self._adopted: int | None = None
        self._seen: int | None = None  # the pid of a driver whose process exists, or existed, in our pid namespace

    def adopt(self) -> None:
        """From now on another driver than the present one counts as dead."""
        self._adopted = None
        self.is_dead()  # notes whether its process is in our pid namespace
        self._adopted = driver_pid(self._aeron_dir)

    def forget(self) -> None:
        """From now on any living driver counts as alive."""
        self._adopted = None

    def is_dead(self) -> bool:
        """Whether the driver is gone, or another has taken its place.

        The process of a driver in another pid namespace is never seen here: such a driver is not called dead.
        """
        pid = driver_pid(self._aeron_dir)
        if pid is None:
            return True
        if os.path.exists(f"/proc/{pid}"):
            self._seen = pid
            return self._adopted is not None and pid != self._adopted
        return self._seen == pid


@contextlib.contextmanager
def alone_in(parent: str) -> Iterator[None]:
    """Lock the folder: two processes that start or remove a driver there would remove each other's files."""
    try:
        folder = os.open(parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        yield  # Aeron reports what is wrong with it
        return
    try:
        deadline_ns = time.monotonic_ns() + START_TIMEOUT_MS * _MS
        while not _is_locked(folder):
            if time.monotonic_ns() > deadline_ns:
                raise TransportError(
                    f"another media driver has been starting in {parent} for {START_TIMEOUT_MS // 1000} s; is its "
                    "process stopped?"
                )
            time.sleep(0.01)
        yield
    finally:
        os.close(folder)


@contextlib.contextmanager
def _umask(mask: int | None) -> Iterator[int]:
    """Another umask for a moment, unless it is None; gives the present one."""
    before = os.umask(0o077)
    try:
        if mask is None:
            os.umask(before)
        yield before
    finally:
        os.umask(before)


def _is_locked(folder: int) -> bool:
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _refuse_live_driver(aeron_dir: str) -> None:
    """Raise if a driver lives at `aeron_dir`; a killed one is recognized in seconds, not after Aeron's timeout.

    The pid alone proves nothing (a driver in another container has one that does not exist here), and neither does a
    recent heartbeat (a killed driver had one too): a driver without process and without new heartbeats is dead.
    """
    denial = explain_denial(aeron_dir)
    if denial is not None:
        raise TransportError(denial)
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


def checked_setting(name: str, value: Value) -> Value:
    """`value` as it was given, if the media driver's setting `name` can take it; `ConfigError` otherwise."""
    accepted = CHOICES.get(name)
    if accepted is not None:
        if value not in accepted:
            raise ConfigError(f"media driver setting {name}", value, " or ".join(accepted))
        return value
    kind = SETTINGS.get(name)
    if kind is None:
        raise ConfigError(f"media driver setting {name}", value, "one of " + ", ".join(sorted(SETTINGS | CHOICES)))
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
