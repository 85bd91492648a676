# SPDX-License-Identifier: Apache-2.0
"""The log of one Delta table: what the table is now or was, and new versions of it.

A version is one entry, put under its number if no other committer was first; a committer that was second reads the
other's entry and decides again. Now and then the sum of all entries is written as a checkpoint, on a thread, so that
opening the table does not take longer and longer.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import msgspec

from tensorpool.lake import delta_log
from tensorpool.lake.delta_log import Action, CommitInfo, Metadata
from tensorpool.lake.errors import LakeDamaged
from tensorpool.lake.log_store import LogStore
from tensorpool.lake.snapshot import Snapshot
from tensorpool.logs import get_logger

MIN_ENTRIES_PER_CHECKPOINT: Final = 100
FILES_PER_ENTRY: Final = 200  # a table of many files writes a checkpoint less often
KEPT_CHECKPOINTS: Final = 2
ENGINE: Final = "tensorpool"


class TableLog:
    """Remembers what it read, and reads on from there. Threads may share it."""

    def __init__(self, store: LogStore) -> None:
        self.store: Final = store
        self._lock = threading.RLock()  # around everything that changes what is remembered
        self._snapshot = Snapshot()
        self._newest = b""  # the entry of the snapshot's version, as it was read
        self._checkpoint = -1  # the newest that we know of
        self._writing: threading.Thread | None = None

    def exists(self) -> bool:
        """Whether there is a table. Raises LakeDamaged where its log cannot be read."""
        return self._read_on().version >= 0

    def snapshot(self) -> Snapshot:
        """As of now; the caller must not change it. Raises LakeDamaged."""
        found = self._read_on()
        if found.version < 0:
            raise LakeDamaged(f"{self.store.uri}/{delta_log.FOLDER}", "the log of the table is missing")
        return found

    def snapshot_at(self, version: int) -> Snapshot:
        """As it was after a version. Raises LakeDamaged where the log does not reach back so far."""
        base = max((found for found in self._numbers()[1] if found <= version), default=-1)
        snapshot = self._read_checkpoint(base) if base >= 0 else Snapshot()
        for wanted in range(snapshot.version + 1, version + 1):
            self._apply(snapshot, wanted, self._entry(wanted))
        return snapshot

    def entry(self, version: int) -> list[Action]:
        """What a version brought. Raises LakeDamaged where its entry is not there any more."""
        return _decoded(self._where(version), self._entry(version))

    def oldest(self) -> tuple[int, int]:
        """The oldest entry that is there, and the oldest version that can still be read as a whole."""
        entries, checkpoints = self._numbers()
        first = min(entries, default=0)
        return first, first if first == 0 else min(checkpoints, default=first)

    def append(self, make: Callable[[Snapshot], Sequence[Action] | None], operation: str, **parameters: str) -> int:
        """Add a version of what `make` makes of the present one; its number, or -1 where `make` wants nothing.

        `make` is called again when another committer was first, with what that one committed.
        """
        with self._lock:
            while (version := self._try_append(make, operation, parameters)) is None:
                pass
        return version

    def _try_append(
        self, make: Callable[[Snapshot], Sequence[Action] | None], operation: str, parameters: Mapping[str, object]
    ) -> int | None:
        """None: another committer was first."""
        snapshot = self._read_on()
        actions = make(snapshot)
        if actions is None:
            return -1
        version = snapshot.version + 1
        if version == 0 and not any(isinstance(action, Metadata) for action in actions):
            raise LakeDamaged(f"{self.store.uri}/{delta_log.FOLDER}", "the log of the table is missing")
        info = CommitInfo(now_ms(), operation, dict(parameters), ENGINE, uuid.uuid4().hex)
        data = delta_log.encode_entry([info, *actions])
        if not self.store.put_if_absent(delta_log.entry_name(version), data):
            return None
        self._apply(snapshot, version, data)
        if self._is_checkpoint_due():
            self.write_checkpoint(waits=False)
        return version

    def write_checkpoint(self, *, waits: bool = True) -> None:
        """Write the present version down as a whole, on a thread if the caller does not wait for it."""
        with self._lock:
            self._write_checkpoint(waits=waits)

    def _write_checkpoint(self, *, waits: bool) -> None:
        if self._writing is not None and (waits or not self._writing.is_alive()):
            self._writing.join()
            self._writing = None
        if self._writing is not None:
            return
        snapshot = self.snapshot().copy()
        self._checkpoint = snapshot.version
        if waits:
            self._write(snapshot)
        else:
            # Not a daemon: a process that ends finishes the file.
            self._writing = threading.Thread(target=self._write_quietly, args=(snapshot,), name="tensorpool-checkpoint")
            self._writing.start()

    def settle(self) -> None:
        """Wait for a checkpoint that is being written."""
        if self._writing is not None:
            self._writing.join()
            self._writing = None

    def forget_before(self, time_ms: int) -> int:
        """Remove entries that a checkpoint covers and that are older than a moment; how many."""
        oldest = min(self._numbers()[0], default=-1)
        if oldest < 0 or self._time_of(oldest) >= time_ms:
            return 0
        self.write_checkpoint()
        entries, checkpoints = self._numbers()
        kept = sorted(checkpoints)[-KEPT_CHECKPOINTS:]
        gone: list[int] = []
        for version in sorted(entries):
            if version >= kept[0] or self._time_of(version) >= time_ms:
                break
            gone.append(version)
        self.store.remove(delta_log.entry_name(version) for version in gone)
        # The newest checkpoint below the oldest entry that is left is still the beginning of what can be read.
        first = max(gone) + 1 if gone else min(entries, default=0)
        base = max((version for version in checkpoints if version < first), default=kept[0])
        self.store.remove(delta_log.checkpoint_name(version) for version in checkpoints if version < min(base, kept[0]))
        return len(gone)

    # --- reading

    def _read_on(self) -> Snapshot:
        with self._lock:
            if self._snapshot.version < 0 or self._is_left_behind():
                self._load()
            while (data := self.store.read(delta_log.entry_name(self._snapshot.version + 1))) is not None:
                self._apply(self._snapshot, self._snapshot.version + 1, data)
            return self._snapshot

    def _is_left_behind(self) -> bool:
        """Whether the entry that we read last is forgotten, or is another table's: every entry has an id of its own."""
        found = self.store.read(delta_log.entry_name(self._snapshot.version))
        return found != self._newest and (found is not None or self._last_checkpoint() != self._snapshot.version)

    def _load(self) -> None:
        """From the newest checkpoint on."""
        self._newest = b""
        self._checkpoint = self._last_checkpoint()
        if self._checkpoint >= 0:
            try:
                self._snapshot = self._read_checkpoint(self._checkpoint)
            except LakeDamaged as damage:
                get_logger("lake").warning("checkpoint_unreadable", path=damage.path, problem=damage.problem)
                self._checkpoint = -1
        if self._checkpoint < 0:
            self._search()
        if self._snapshot.version >= 0:
            self._newest = self.store.read(delta_log.entry_name(self._snapshot.version)) or b""

    def _search(self) -> None:
        """Without `_last_checkpoint`: the newest checkpoint that can be read, or every entry from the first."""
        entries, checkpoints = self._numbers()
        self._snapshot = Snapshot()
        for version in sorted(checkpoints, reverse=True):
            try:
                self._snapshot = self._read_checkpoint(version)
            except LakeDamaged:
                continue
            self._checkpoint = version
            break
        newest = max(entries, default=-1)
        for version in range(self._snapshot.version + 1, newest + 1):
            self._apply(self._snapshot, version, self._entry(version))

    def _last_checkpoint(self) -> int:
        data = self.store.read(delta_log.LAST_CHECKPOINT)
        if data is None:
            return -1
        from tensorpool.lake.checkpoints import LastCheckpoint  # loads Arrow

        try:
            found = msgspec.json.decode(data, type=LastCheckpoint)
        except msgspec.DecodeError:
            return -1  # it is a hint only
        return -1 if found.parts else found.version

    def _read_checkpoint(self, version: int) -> Snapshot:
        from tensorpool.lake.checkpoints import decode_checkpoint

        name = delta_log.checkpoint_name(version)
        data = self.store.read(name)
        if data is None:
            raise LakeDamaged(f"{self.store.uri}/{name}", "the checkpoint is missing")
        try:
            return decode_checkpoint(data, version)
        except ValueError as error:
            raise LakeDamaged(f"{self.store.uri}/{name}", str(error)) from None

    def _apply(self, snapshot: Snapshot, version: int, data: bytes) -> None:
        try:
            snapshot.apply(version, _decoded(self._where(version), data))
        except ValueError as error:
            raise LakeDamaged(self._where(version), str(error)) from None
        if snapshot is self._snapshot:
            self._newest = data

    def _entry(self, version: int) -> bytes:
        data = self.store.read(delta_log.entry_name(version))
        if data is None:
            raise LakeDamaged(self._where(version), "the log entry is missing")
        return data

    def _where(self, version: int) -> str:
        return f"{self.store.uri}/{delta_log.entry_name(version)}"

    def _numbers(self) -> tuple[list[int], list[int]]:
        names = self.store.names(delta_log.FOLDER)
        entries = [found for name in names if (found := delta_log.entry_version(name)) is not None]
        checkpoints = [found for name in names if (found := delta_log.checkpoint_version(name)) is not None]
        return entries, checkpoints

    def _time_of(self, version: int) -> int:
        return next((action.timestamp for action in self.entry(version) if isinstance(action, CommitInfo)), 0)

    # --- checkpoints

    def _is_checkpoint_due(self) -> bool:
        enough = max(MIN_ENTRIES_PER_CHECKPOINT, len(self._snapshot.files) // FILES_PER_ENTRY)
        return self._snapshot.version - self._checkpoint >= enough

    def _write(self, snapshot: Snapshot) -> None:
        from tensorpool.lake.checkpoints import LastCheckpoint, encode_checkpoint

        data, rows = encode_checkpoint(snapshot, now_ms())
        self.store.put_if_absent(delta_log.checkpoint_name(snapshot.version), data)
        if self._last_checkpoint() < snapshot.version:
            self.store.put(delta_log.LAST_CHECKPOINT, msgspec.json.encode(LastCheckpoint(snapshot.version, rows)))

    def _write_quietly(self, snapshot: Snapshot) -> None:
        """A checkpoint that fails costs time only: the entries are there."""
        try:
            self._write(snapshot)
        except Exception as error:
            get_logger("lake").warning("checkpoint_failed", version=snapshot.version, error=str(error))


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def _decoded(where: str, data: bytes) -> list[Action]:
    try:
        return delta_log.decode_entry(data)
    except ValueError as error:
        raise LakeDamaged(where, str(error)) from None
