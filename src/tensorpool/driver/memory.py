# SPDX-License-Identifier: Apache-2.0
"""The driver's memory: epochs made and retired beside the duty cycle.

Allocating and prefaulting gigabytes takes seconds, so threads of a small pool do it; the conductor submits, collects
what is finished, and never waits; all books are kept on its thread. Each stream has at most one creation under way, so
its epochs come in order. The driver keeps the regions of live epochs mapped, to refresh their sign of life. Retired
epochs lose their names by policy while readers keep their mappings.
Wire §15.14, §15.21a.7; Driver Model §3, §9, §14; decisions C2-C4, C8, C9, C11, D10, E37.
"""

from __future__ import annotations

import os
from collections import deque
from concurrent.futures import ThreadPoolExecutor

import msgspec

from tensorpool import shm
from tensorpool.clock import Clock
from tensorpool.driver.config import DriverConfig
from tensorpool.driver.lifecycle import CreateEpoch
from tensorpool.driver.streams import Epoch
from tensorpool.errors import ConfigError, RegionRejected, TensorPoolError
from tensorpool.logs import get_logger
from tensorpool.shm.containment import huge_page_bytes

CREATORS = 4
SWEEP_EVERY_NS = 60_000_000_000
LIVENESS_PERIODS = 4  # wire §15.14: 3 to 5 announce periods without a sign of life


class Created(msgspec.Struct, frozen=True):
    """An epoch that is ready to be announced."""

    epoch: Epoch
    reserved: bool


class Failed(msgspec.Struct, frozen=True):
    """An epoch that could not be made, and why: the bill where space was missing. `is_fatal`: the driver must end."""

    stream_id: int
    reserved: bool
    text: str
    is_fatal: bool = False


class Retired(msgspec.Struct):
    """An epoch that is not the current one any more."""

    stream_id: int
    epoch: int
    since_ns: int


class Memory:
    """Creates, refreshes and removes the epochs of one namespace. Close it to remove everything it made."""

    def __init__(self, config: DriverConfig, clock: Clock) -> None:
        self._config = config
        self._clock = clock
        self._log = get_logger("driver", namespace=config.shm.namespace)
        self._tree = shm.EpochTree.open(
            config.shm.base_dir, config.shm.namespace, clock=clock, file_mode=config.file_mode
        )
        huge_bytes = _huge_page_bytes(self._tree.path)
        self.is_hugepages = huge_bytes is not None
        try:
            _check_pages(config, huge_bytes)
        except ConfigError:
            self._tree.close()
            raise
        self._rings: dict[int, shm.MappedRing] = {}
        self._retired: list[Retired] = []
        self._finished: deque[tuple[Created, shm.MappedRing] | Failed] = deque()
        self._pool = ThreadPoolExecutor(CREATORS, thread_name_prefix="epochs")
        self._sparse = ThreadPoolExecutor(1, thread_name_prefix="epochs-sparse")  # quick, and never behind gigabytes
        self._next_sweep_ns = 0
        self._take_stock()

    @property
    def path(self) -> str:
        """The namespace's directory."""
        return self._tree.path

    def submit(self, order: CreateEpoch) -> None:
        """Have an epoch made; its outcome appears in `finished`."""
        (self._pool if order.reserve else self._sparse).submit(self._create, order)

    def take_finished(self) -> Created | Failed | None:
        """The next outcome, if there is one."""
        if not self._finished:
            return None
        outcome = self._finished.popleft()
        if isinstance(outcome, Failed):
            return outcome
        created, ring = outcome
        self.drop(ring.stream_id)
        self._rings[ring.stream_id] = ring
        return created

    def drop(self, stream_id: int) -> None:
        """The stream's epoch is retired, and goes by policy."""
        if stream_id not in self._rings:
            return
        holder = [self._rings.pop(stream_id)]  # the only reference: unmapping gigabytes is not for this thread
        self._retired.append(Retired(stream_id, holder[0].epoch, self._clock.monotonic_ns()))
        self._pool.submit(holder.clear)

    def refresh_activity(self) -> None:
        """The sign of life in every region that is announced (C9)."""
        stamp_ns = self._clock.monotonic_ns() + self.stamp_offset_ns()
        for ring in self._rings.values():
            ring.refresh_activity(stamp_ns)

    def stamp_offset_ns(self) -> int:
        """What to add to the monotonic clock for stamps that others read: they are in the announces' domain (C8)."""
        if self._config.driver.announce_clock_domain == "MONOTONIC":
            return 0
        return self._clock.realtime_ns() - self._clock.monotonic_ns()

    def collect(self, now_ns: int) -> int:
        """Remove retired epochs by policy: those beyond `epoch_gc_keep` that are old enough. Returns how many."""
        policies = self._config.policies
        if not policies.epoch_gc_enabled:
            return 0
        if now_ns >= self._next_sweep_ns:
            self._next_sweep_ns = now_ns + SWEEP_EVERY_NS
            self._pool.submit(self._sweep)
        if not self._retired:
            return 0
        kept: dict[int, int] = {}
        remaining: list[Retired] = []
        removed = 0
        for retired in reversed(self._retired):  # the newest first
            kept[retired.stream_id] = kept.get(retired.stream_id, 0) + 1
            # The current epoch counts too; a stream that nobody serves any more keeps nothing.
            is_spare = kept[retired.stream_id] >= policies.epoch_gc_keep or retired.stream_id not in self._rings
            if is_spare and now_ns - retired.since_ns >= policies.epoch_gc_min_age_ns:
                self._pool.submit(self._remove, retired.stream_id, retired.epoch)
                removed += 1
            else:
                remaining.append(retired)
        self._retired = remaining[::-1]
        return removed

    def close(self) -> None:
        """Wait for what is under way, then remove every epoch of the namespace and release it."""
        for pool in (self._pool, self._sparse):
            pool.shutdown(wait=True, cancel_futures=True)
        self._rings.clear()
        self._finished.clear()
        for found in self._tree.scan():
            self._remove(found.stream_id, found.epoch)
        self._tree.close()

    def _take_stock(self) -> None:
        """What an earlier driver left: its epochs are already known to the tree (C2), now they are retired."""
        policies = self._config.policies
        now_ns = self._clock.monotonic_ns()
        at_once = policies.recreate_on_startup or policies.epoch_gc_on_startup
        for found in self._tree.scan():
            if at_once or found.is_retired:  # a removal that was interrupted is finished
                self._remove(found.stream_id, found.epoch)
            else:
                self._retired.append(Retired(found.stream_id, found.epoch, now_ns))

    def _create(self, order: CreateEpoch) -> None:
        policies = self._config.policies
        try:
            epoch = self._tree.next_epoch(order.stream_id)
            ring = self._tree.create(
                order.stream_id,
                epoch,
                order.ring,
                self._clock.monotonic_ns() + self.stamp_offset_ns(),
                require_hugepages=self._config.shm.require_hugepages,
                reserve_space=order.reserve,
                prefault=order.reserve and policies.prefault_shm,
                mlock=order.reserve and policies.mlock_shm,
            )
        except Exception as error:  # whatever it is: somebody waits for the outcome
            text = str(error) if isinstance(error, TensorPoolError) else f"{type(error).__name__}: {error}"
            self._log.error("epoch_failed", stream_id=order.stream_id, error=text)
            is_fatal = isinstance(error, RegionRejected) and error.check == shm.Check.MLOCK  # E37
            self._finished.append(Failed(order.stream_id, order.reserve, text, is_fatal))
            return
        made = Epoch(
            stream_id=order.stream_id,
            epoch=epoch,
            layout_version=ring.layout_version,
            ring=order.ring,
            header_region_uri=ring.header.uri,
            pool_region_uris=tuple(pool.uri for pool in ring.pools),
        )
        self._finished.append((Created(made, order.reserve), ring))

    def _remove(self, stream_id: int, epoch: int) -> None:
        try:
            self._tree.remove(stream_id, epoch)
            self._log.info("epoch_removed", stream_id=stream_id, epoch=epoch)
        except OSError as error:
            self._log.warning("epoch_not_removed", stream_id=stream_id, epoch=epoch, error=str(error))

    def _sweep(self) -> None:
        """What drivers of other namespaces left when they died (C11)."""
        window_ns = LIVENESS_PERIODS * self._config.announce_period_ns
        for base_dir in self._config.shm.allowed_base_dirs:
            swept = shm.remove_dead_epochs(base_dir, self._clock, window_ns, except_namespace=self._tree.path)
            for epoch in swept:
                self._log.info("leftover_removed", path=epoch.path)


def _huge_page_bytes(path: str) -> int | None:
    """E38: what regions are really backed by; None for standard pages."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        return huge_page_bytes(fd)
    finally:
        os.close(fd)


def _check_pages(config: DriverConfig, huge_bytes: int | None) -> None:
    """Refuse a base_dir whose pages are not those that the configuration wants (§17)."""
    base_dir, page_bytes = config.shm.base_dir, huge_bytes or os.sysconf("SC_PAGE_SIZE")
    if config.shm.require_hugepages and huge_bytes is None:
        accepted = f"false; {base_dir} is not on hugetlbfs, mount one there"
        raise ConfigError("shm.require_hugepages", True, accepted)
    if config.shm.page_size_bytes > page_bytes:
        accepted = f"at most {page_bytes}, the page size of {base_dir}; mount a hugetlbfs there for larger pages"
        raise ConfigError("shm.page_size_bytes", config.shm.page_size_bytes, accepted)
