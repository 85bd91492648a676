# SPDX-License-Identifier: Apache-2.0
"""Epochs on disk: new files for each in a directory of its own, retired in one step, numbered upwards.

    <namespace>/<stream_id>/<epoch>/header.ring
                                    <pool_id>.pool
    <namespace>/<stream_id>/.<epoch>.retired/            renamed, no longer announced, about to be deleted
    <namespace>/highest-epoch.<epoch>                    empty; its name is the highest number ever given here

The highest number outlives every directory, also a clean stop: a driver that finds nothing else starts above it,
though the wall clock went back. It is one for all streams, so that streams which come and go leave nothing behind, and
it is in a name, so that a rename replaces it in one step, on a full mount and on hugetlbfs too.

Old files are never reused: a producer that still writes to them does no harm, and readers keep what they mapped. All
work is done relative to open directories and follows no link, so that it cannot leave the tree.
Wire §15.21a.3, §15.21a.4, §15.21a.7; Driver Model §6, §10, §14, §15; decisions C2–C4, C13, D2, D9.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import stat
import threading
from collections.abc import Callable, Iterator
from typing import Any, Final

import msgspec

from tensorpool._core import SUPERBLOCK_BYTES
from tensorpool.clock import Clock
from tensorpool.closing import ClosesOnExit
from tensorpool.errors import Closed, ConfigError, LocalProtocolError
from tensorpool.file_access import FileAccess
from tensorpool.shm.containment import directory
from tensorpool.shm.layout import LAYOUT_VERSION, MAX_EPOCH, RegionSpec, RingSpec, parse_superblock
from tensorpool.shm.namespace import (
    DEFAULT_NAMESPACE,
    FOLDER_FLAGS,
    NamespaceLock,
    ensure_directory,
    make_namespace,
)
from tensorpool.shm.permission import FILE_MODE
from tensorpool.shm.region import Backing, Region, create_refused, create_region
from tensorpool.shm.ring import MappedRing
from tensorpool.shm.space import require_space
from tensorpool.wire.control import RegionType, ShmRegionSuperblock
from tensorpool.wire.region_uri import RegionUri

_HEADER_NAME: Final = "header.ring"
_STREAM_NAME: Final = re.compile(r"[1-9][0-9]{0,9}")  # no number has a second spelling
_HIGHEST_PREFIX: Final = "highest-epoch."
_RECORD_FLAGS: Final = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
_EPOCH_NAME: Final = re.compile(r"(\.)?([1-9][0-9]{0,19})(?(1)\.retired)")


class FoundEpoch(msgspec.Struct, frozen=True):
    """An epoch's directory as a scan found it.

    `superblock` is its header ring's: None for one that is still being created, or was left unfinished.
    """

    stream_id: int
    epoch: int
    path: str
    is_retired: bool
    superblock: ShmRegionSuperblock | None

    @property
    def highest_epoch(self) -> int:
        """The higher of the numbers in its name and in its superblock, should they differ."""
        superblock = self.superblock
        if superblock is None or superblock.stream_id != self.stream_id or superblock.epoch > MAX_EPOCH:
            return self.epoch
        return max(self.epoch, superblock.epoch)


def scan_epochs(namespace_path: str) -> list[FoundEpoch]:
    """Every epoch below a namespace, by stream and epoch. Ignores everything else, and changes nothing.

    Raises OSError when the namespace itself cannot be read.
    """
    found: list[FoundEpoch] = []
    with directory(namespace_path) as folder, _folder(".", folder) as streams:
        for name in filter(_STREAM_NAME.fullmatch, os.listdir(streams)):
            with contextlib.suppress(OSError), _folder(name, streams) as stream:
                found += _scan_stream(f"{namespace_path}/{name}", int(name), stream)
    return sorted(found, key=lambda epoch: (epoch.stream_id, epoch.epoch))


class EpochTree(ClosesOnExit):
    """The epochs of one namespace, for the one driver that creates and retires them.

        with EpochTree.open("/dev/shm/tensorpool", clock=SystemClock()) as tree:
            epoch = tree.next_epoch(10000)
            ring = tree.create(10000, epoch, RingSpec(1024, (PoolSpec(1, 1 << 20),)), now_ns)
            announce(ring.header.uri, [pool.uri for pool in ring.pools])
            tree.remove(10000, epoch)

    Holds the namespace's lock; raises ConfigError while another driver does and for a `highest-epoch.` file that
    cannot be understood, and OSError for a namespace that cannot be read. `create` may take its time on a thread of its
    own beside the other calls.
    """

    def __init__(self, namespace_path: str, *, clock: Clock, file_mode: int = FILE_MODE) -> None:
        self.path: Final = namespace_path
        self._clock = clock
        self._access = FileAccess(file_mode)  # the group is that of the namespace's directory
        self._stop = threading.Event()
        with contextlib.ExitStack() as undo:
            with directory(namespace_path) as folder:
                self._streams = os.open(".", FOLDER_FLAGS, dir_fd=folder)
            undo.callback(os.close, self._streams)
            self._lock = NamespaceLock(self._streams, namespace_path)
            undo.callback(self._lock.release)
            # C2: learnt before anything can be removed, and never forgotten.
            self._highest: dict[int, int] = {}
            self._counting = threading.Lock()  # epochs are made and removed on several threads
            self._recorded = self._floor = self._read_highest()
            for found in self.scan():
                self._remember(found.stream_id, max(found.highest_epoch, self._floor))
            undo.pop_all()
        self._is_closed = False

    @classmethod
    def open(
        cls,
        base_dir: str,
        namespace: str = DEFAULT_NAMESPACE,
        *,
        clock: Clock,
        file_mode: int = FILE_MODE,
        gid: int | None = None,
    ) -> EpochTree:
        """The tree of this user's namespace, made where it is missing. Raises ConfigError."""
        path = make_namespace(base_dir, namespace, file_mode=file_mode, gid=gid)
        return cls(path, clock=clock, file_mode=file_mode)

    def scan(self) -> list[FoundEpoch]:
        """See `scan_epochs`."""
        return scan_epochs(self.path)

    def next_epoch(self, stream_id: int) -> int:
        """A number above every epoch that this stream ever had.

        For a stream without files the wall clock in nanoseconds (C2), or above the record where the clock went back.
        """
        with self._counting:
            last = self._highest.get(stream_id)
            epoch = max(self._clock.realtime_ns(), self._floor + 1) if last is None else last + 1
            if epoch > MAX_EPOCH:
                remedy = f"remove the highest one below {self.path}/{stream_id}, and {self.path}/{_HIGHEST_PREFIX}*, "
                raise LocalProtocolError(f"stream {stream_id} has used up its epochs; {remedy}while no driver runs")
            self._highest[stream_id] = epoch
            return epoch

    def create(
        self,
        stream_id: int,
        epoch: int,
        ring: RingSpec,
        now_ns: int,
        *,
        layout_version: int = LAYOUT_VERSION,
        reserve_space: bool = True,
        prefault: bool = False,
        mlock: bool = False,
        require_hugepages: bool = False,
    ) -> MappedRing:
        """Create all regions of an epoch, or none; `Backing` explains the options.

        Raises RegionRejected as `create_region` does, and for an epoch that is there already; and Closed when the tree
        is stopped meanwhile.
        """
        backing = Backing(reserve_space=reserve_space, prefault=prefault, mlock=mlock, stop=self._stop)
        specs = ring.regions(stream_id, epoch, layout_version)
        uris = region_uris(self.path, ring, stream_id, epoch, require_hugepages)
        streams = self._open_streams()
        self._remember(stream_id, epoch)
        if backing.is_reserved:
            require_space(str(uris[0]), streams, self.path, specs)
        try:
            self._record(epoch)
            ensure_directory(str(stream_id), streams, self._access)
            with _folder(str(stream_id), streams) as stream:
                os.mkdir(str(epoch), 0o700, dir_fd=stream)
                return self._fill(stream, ring, specs, uris, now_ns, backing)
        except OSError as error:
            raise create_refused(uris[0], streams, ring.size_bytes, error) from error

    def remove(self, stream_id: int, epoch: int) -> None:
        """Retire an epoch: its directory disappears at once, then its files go. Readers keep their mappings.

        Where there is no such epoch nothing happens; what an interrupted removal left behind goes too. Raises
        OSError when the system refuses.
        """
        streams = self._open_streams()
        self._remember(stream_id, epoch)
        self._record(epoch)
        with contextlib.suppress(FileNotFoundError), _folder(str(stream_id), streams) as stream:
            _retire(epoch, stream)

    def stop(self) -> None:
        """Have epochs that are being created on other threads given up: their `create` raises Closed soon."""
        self._stop.set()

    def close(self) -> None:
        """Release the namespace. Epochs stay, and so does the record: the next driver knows where to go on."""
        if self._is_closed:
            return
        self._is_closed = True
        for name in filter(_STREAM_NAME.fullmatch, os.listdir(self._streams)):
            with contextlib.suppress(OSError):
                os.rmdir(name, dir_fd=self._streams)  # only those that are empty
        self._lock.release()
        os.close(self._streams)

    def _fill(
        self,
        stream: int,
        ring: RingSpec,
        specs: tuple[RegionSpec, ...],
        uris: list[RegionUri],
        now_ns: int,
        backing: Backing,
    ) -> MappedRing:
        """Create the regions in the epoch's new directory, or take the directory away again.

        The header ring comes last: a client that finds its superblock finds a whole epoch.
        """
        epoch = specs[0].epoch
        regions: list[Region] = []
        try:
            with _folder(str(epoch), stream) as folder:
                self._access.set_directory(folder)
                regions += (
                    create_region(uri, spec, now_ns, dir_fd=folder, backing=backing, mode=self._access.file_mode)
                    for uri, spec in reversed(list(zip(uris, specs, strict=True)))
                )
            header, *pools = reversed(regions)
            return MappedRing(ring, header, tuple(pools))
        except BaseException:
            regions.clear()  # unmapped now: a kept traceback keeps this frame
            _retire(epoch, stream)
            raise

    def _open_streams(self) -> int:
        if self._is_closed:
            raise Closed(f"the epochs of {self.path} were closed")
        return self._streams

    def _remember(self, stream_id: int, epoch: int) -> None:
        with self._counting:
            self._highest[stream_id] = max(epoch, self._highest.get(stream_id, 0))

    def _read_highest(self) -> int:
        """The record, 0 where there is none. Raises ConfigError for one that does not say what it should."""
        numbers = [0]
        for name in os.listdir(self._streams):
            if name.startswith(_HIGHEST_PREFIX):
                match = _EPOCH_NAME.fullmatch(name.removeprefix(_HIGHEST_PREFIX))
                if match is None or match[1] is not None or int(match[2]) > MAX_EPOCH:
                    accepted = (
                        f"one whose {_HIGHEST_PREFIX} file ends in a number: {self.path}/{name} does not; remove it"
                    )
                    raise ConfigError("shm.namespace", os.path.basename(self.path), accepted)
                numbers.append(int(match[2]))
        return max(numbers)

    def _record(self, epoch: int) -> None:
        """Raise the record to `epoch`, before it is used and before it disappears. Raises OSError."""
        with self._counting:
            if epoch <= self._recorded:
                return
            old, new = f"{_HIGHEST_PREFIX}{self._recorded}", f"{_HIGHEST_PREFIX}{epoch}"
            try:
                os.rename(old, new, src_dir_fd=self._streams, dst_dir_fd=self._streams)
            except FileNotFoundError:
                os.close(os.open(new, _RECORD_FLAGS, 0o600, dir_fd=self._streams))
            os.fsync(self._streams)
            self._recorded = epoch


def region_uris(
    namespace_path: str, ring: RingSpec, stream_id: int, epoch: int, require_hugepages: bool
) -> list[RegionUri]:
    """Where the regions of an epoch are: the header ring first, then the pools in their order."""
    specs = ring.regions(stream_id, epoch, LAYOUT_VERSION)
    folder = f"{namespace_path}/{stream_id}/{epoch}"
    return [RegionUri(f"{folder}/{_file_name(spec)}", require_hugepages) for spec in specs]


def _file_name(spec: RegionSpec) -> str:
    return _HEADER_NAME if spec.region_type is RegionType.HEADER_RING else f"{spec.pool_id}.pool"


@contextlib.contextmanager
def _folder(name: str, dir_fd: int) -> Iterator[int]:
    """A descriptor of a directory that may be listed; a link is not followed."""
    fd = os.open(name, FOLDER_FLAGS, dir_fd=dir_fd)
    try:
        yield fd
    finally:
        os.close(fd)


def _scan_stream(path: str, stream_id: int, stream: int) -> Iterator[FoundEpoch]:
    for name in os.listdir(stream):
        match = _EPOCH_NAME.fullmatch(name)
        if match is None or int(match[2]) > MAX_EPOCH:
            continue
        with contextlib.suppress(OSError), _folder(name, stream) as folder:
            superblock = _read_superblock(folder)
            yield FoundEpoch(stream_id, int(match[2]), f"{path}/{name}", match[1] is not None, superblock)


def _read_superblock(folder: int) -> ShmRegionSuperblock | None:
    """Read, not mapped: a file that shrinks meanwhile costs nothing."""
    try:
        fd = os.open(_HEADER_NAME, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    except OSError:
        return None
    try:
        is_file = stat.S_ISREG(os.fstat(fd).st_mode)
        return parse_superblock(os.pread(fd, SUPERBLOCK_BYTES, 0)) if is_file else None
    except OSError:
        return None
    finally:
        os.close(fd)


def _retire(epoch: int, stream: int) -> None:
    """Rename, so that no client sees half an epoch, then delete."""
    retired = f".{epoch}.retired"
    _delete(retired, stream)
    with contextlib.suppress(FileNotFoundError):
        os.rename(str(epoch), retired, src_dir_fd=stream, dst_dir_fd=stream)
        _delete(retired, stream)


def _delete(name: str, dir_fd: int) -> None:
    with contextlib.suppress(FileNotFoundError):
        if stat.S_ISDIR(os.stat(name, dir_fd=dir_fd, follow_symlinks=False).st_mode):
            shutil.rmtree(name, dir_fd=dir_fd, onexc=_unless_gone)
        else:
            os.unlink(name, dir_fd=dir_fd)


def _unless_gone(_function: Callable[..., Any], _path: str, error: BaseException) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error
