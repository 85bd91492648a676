# SPDX-License-Identifier: Apache-2.0
"""The driver's memory: epochs made and retired beside the duty cycle.

Allocating and prefaulting gigabytes takes seconds, so threads do it; the conductor submits, collects what is finished,
and never waits; all lists are kept on its thread. Small epochs, sparse ones and removals have threads of their own, so
that none of them waits behind gigabytes. Each stream has at most one creation under way, so its epochs come in order.
The driver keeps the regions of live epochs mapped, to refresh their sign of life. Retired epochs lose their names by
policy, or earlier where the next epoch would have no room; readers keep their mappings.
Wire §15.14, §15.21a.7; Driver Model §3, §9, §14, §17; decisions C2-C4, C8, C9, C11, D10, E37.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import msgspec

from tensorpool import shm
from tensorpool.clock import Clock
from tensorpool.driver.config import DriverConfig
from tensorpool.driver.effects import CreateEpoch
from tensorpool.driver.epoch_messages import Epoch
from tensorpool.errors import ConfigError, RegionRejected, TensorPoolError
from tensorpool.logs import get_logger
from tensorpool.shm.containment import huge_page_bytes
from tensorpool.shm.locking import can_lock, lockable_bytes

CREATORS = 4
SMALL_BYTES = 64 << 20  # made in a fraction of a second
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
    """An epoch that is not the current one any more, since when, and when it is unmapped here."""

    stream_id: int
    epoch: int
    since_ns: int
    unmapped: Future[None] | None = None


class Memory:
    """Creates, refreshes and removes the epochs of one namespace. Close it to remove everything it made."""

    def __init__(self, config: DriverConfig, clock: Clock, on_finished: Callable[[], object] = lambda: None) -> None:
        self._config = config
        self._on_finished = on_finished  # called on the threads that make epochs
        self._clock = clock
        self._log = get_logger("driver", namespace=config.shm.namespace)
        self._is_locked = _is_lockable(config)
        self._tree = shm.EpochTree.open(
            config.shm.base_dir,
            config.shm.namespace,
            clock=clock,
            file_mode=config.file_mode,
            gid=config.aeron_access().gid,
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
        self._failing: dict[tuple[int, bool], str] = {}  # why the last epoch of a stream could not be made
        self._large = ThreadPoolExecutor(CREATORS, thread_name_prefix="epochs-large")
        self._small = ThreadPoolExecutor(CREATORS, thread_name_prefix="epochs-small")
        self._sparse = ThreadPoolExecutor(1, thread_name_prefix="epochs-sparse")
        self._removals = ThreadPoolExecutor(CREATORS, thread_name_prefix="epochs-removal")
        self._next_sweep_ns = 0
        self._take_stock()

    @property
    def path(self) -> str:
        """The namespace's directory."""
        return self._tree.path

    def reload(self, config: DriverConfig) -> None:
        """Go on by other policies; where the memory lies has not changed."""
        self._config = config

    def submit(self, order: CreateEpoch) -> None:
        """Have an epoch made; its outcome appears in `finished`.

        For a producer's epoch the policy counts the coming one as the current one, and retired epochs are at hand in
        case that the mount has no room for it: the oldest goes first, until there is.
        """
        doomed: list[Retired] = []
        spare: list[Retired] = []
        if order.reserve and self._config.policies.epoch_gc_enabled:
            doomed = self._take_spare(self._clock.monotonic_ns(), coming=frozenset({order.stream_id}))
            spare = list(self._retired)
        is_small = order.ring.size_bytes <= SMALL_BYTES
        pool = self._sparse if not order.reserve else self._small if is_small else self._large
        pool.submit(self._create, order, doomed, spare).add_done_callback(lambda _: self._on_finished())

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
        retired = Retired(stream_id, holder[0].epoch, self._clock.monotonic_ns())
        retired.unmapped = self._removals.submit(holder.clear)
        self._retired.append(retired)

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
            self._removals.submit(self._sweep)
        spare = self._take_spare(now_ns)
        for retired in spare:
            self._removals.submit(self._remove, retired.stream_id, retired.epoch)
        return len(spare)

    def _take_spare(self, now_ns: int, coming: frozenset[int] = frozenset()) -> list[Retired]:
        """Strike and return what the policy does not keep; streams of `coming` are about to get another epoch."""
        policies = self._config.policies
        kept = {stream_id: int(stream_id in self._rings) + int(stream_id in coming) for stream_id in coming}
        retired, self._retired = self._retired, []
        spare: list[Retired] = []
        for epoch in reversed(retired):  # the newest first
            is_served = epoch.stream_id in self._rings or epoch.stream_id in coming
            count = kept[epoch.stream_id] = kept.get(epoch.stream_id, int(is_served)) + 1
            # A stream that is not served any more keeps nothing.
            is_spare = count > policies.epoch_gc_keep or not is_served
            if is_spare and now_ns - epoch.since_ns >= policies.epoch_gc_min_age_ns:
                spare.append(epoch)
            else:
                self._retired.append(epoch)
        self._retired.reverse()
        return spare[::-1]

    def close(self) -> None:
        """Give up what is under way, then remove every epoch of the namespace and release it."""
        self._tree.stop()
        for pool in (self._large, self._small, self._sparse, self._removals):
            pool.shutdown(wait=True, cancel_futures=True)
        self._rings.clear()
        self._finished.clear()
        self.remove_everything()
        self._tree.close()

    def remove_everything(self) -> None:
        """Remove the files of every epoch; those who have mapped them keep their mappings."""
        for found in self._tree.scan():
            self._remove(found.stream_id, found.epoch)

    def _take_stock(self) -> None:
        """What an earlier driver left: its epochs are already known to the tree (C2), now they are retired.

        Their age counts from now, or with `epoch_gc_on_startup` from their last sign of life, and then those that the
        policy does not keep go before the first epoch is made.
        """
        policies = self._config.policies
        now_ns, wall_ns = self._clock.monotonic_ns(), self._clock.realtime_ns()
        for found in self._tree.scan():
            if policies.recreate_on_startup or found.is_retired:  # a removal that was interrupted is finished
                self._remove(found.stream_id, found.epoch)
                continue
            since_ns = now_ns
            if policies.epoch_gc_on_startup and found.superblock is not None:
                age_ns = shm.activity_age_ns(found.superblock.activity_timestamp_ns, now_ns, wall_ns)
                since_ns = now_ns - (policies.epoch_gc_min_age_ns if age_ns is None else age_ns)
            self._retired.append(Retired(found.stream_id, found.epoch, since_ns))
        if policies.epoch_gc_on_startup and policies.epoch_gc_enabled:
            configured = frozenset(stream.stream_id for stream in self._config.streams.values())
            for retired in self._take_spare(now_ns, coming=configured):
                self._remove(retired.stream_id, retired.epoch)

    def _create(self, order: CreateEpoch, doomed: list[Retired], spare: list[Retired]) -> None:
        policies = self._config.policies
        try:
            for retired in doomed:
                self._free(retired)
            epoch = self._tree.next_epoch(order.stream_id)
            while True:
                try:
                    ring = self._tree.create(
                        order.stream_id,
                        epoch,
                        order.ring,
                        self._clock.monotonic_ns() + self.stamp_offset_ns(),
                        require_hugepages=self._config.shm.require_hugepages,
                        reserve_space=order.reserve,
                        prefault=order.reserve and policies.prefault_shm,
                        mlock=order.reserve and self._is_locked,
                    )
                    break
                except RegionRejected as rejected:
                    if rejected.check != shm.Check.SPACE or not spare:
                        raise
                    self._free(spare.pop(0))
        except Exception as error:  # of any kind: a client waits for the outcome
            check = error.check if isinstance(error, RegionRejected) else type(error).__name__
            text = _words(error)
            if self._failing.get((order.stream_id, order.reserve)) != check:  # clients ask again: one line is enough
                self._failing[order.stream_id, order.reserve] = check
                self._log.error("epoch_failed", stream_id=order.stream_id, error=text)
            is_fatal = check == shm.Check.MLOCK  # E37
            self._finished.append(Failed(order.stream_id, order.reserve, text, is_fatal))
            return
        self._failing.pop((order.stream_id, order.reserve), None)
        made = Epoch(
            stream_id=order.stream_id,
            epoch=epoch,
            layout_version=ring.layout_version,
            ring=order.ring,
            header_region_uri=ring.header.uri,
            pool_region_uris=tuple(pool.uri for pool in ring.pools),
        )
        self._finished.append((Created(made, order.reserve), ring))

    def _free(self, retired: Retired) -> None:
        """Give its memory back before anything else is made; if it is still on the list, it is not found again."""
        self._remove(retired.stream_id, retired.epoch)
        if retired.unmapped is not None:
            retired.unmapped.result()

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


def _is_lockable(config: DriverConfig) -> bool:
    """Whether regions are to be locked and can be. Raises ConfigError where this process may not lock enough (§17)."""
    if not config.policies.mlock_shm:
        return False
    if not can_lock():
        get_logger("driver").warning("mlock_unsupported", key="policies.mlock_shm", effect="regions are not locked")
        return False
    needed, allowed = config.locked_bytes, lockable_bytes()
    if allowed is not None and allowed < needed:
        remedy = f"ulimit -l {-(-needed // 1024)}, or LimitMEMLOCK=infinity for a service"
        accepted = f"false; {needed} bytes have to be locked, `ulimit -l` allows {allowed}: {remedy}"
        raise ConfigError("policies.mlock_shm", True, accepted)
    return True


def _words(error: Exception) -> str:
    """Why an epoch could not be made, for the client that waits for it."""
    if isinstance(error, RegionRejected) and error.check == shm.Check.SPACE:
        return f"the ring {error.detail}" if error.detail.startswith("needs ") else error.detail
    return str(error) if isinstance(error, TensorPoolError) else f"{type(error).__name__}: {error}"


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
