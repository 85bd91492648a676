# SPDX-License-Identifier: Apache-2.0
"""The manifest's files: commits that are written whole and by one alone, and states that save reading them all.

A commit is written under a name of its own, synced, and then linked to its number: a link fails where the number is
taken, so that of two committers one wins and the other looks again. A state is the sum of the commits so far; one is
written whenever reading the commits since the last would take long.
"""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from tensorpool.spark.lake import layout
from tensorpool.spark.lake.errors import LakeDamaged
from tensorpool.spark.lake.manifest import Commit, State

MIN_COMMITS_PER_STATE: Final = 100
FILES_PER_COMMIT: Final = 64  # a lake of many files writes its state less often
KEPT_STATES: Final = 2
LOOK_AROUND_S: Final = 60.0


class Store:
    """The manifest of one lake; remembers what it read."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._state = State()
        self._state_number = 0  # of the newest state that is on disk
        self._loaded_s = 0.0

    def state(self) -> State:
        """As of now. The caller must not change it. Raises LakeDamaged."""
        now_s = time.monotonic()
        if not self._loaded_s:
            self._load()
        elif now_s - self._loaded_s > LOOK_AROUND_S:
            # Commits that nobody needs any more may have been forgotten before we read them.
            if max(self._entries()["state"], default=0) > self._state.number:
                self._load()
            self._loaded_s = now_s
        while (commit := self._find(self._state.number + 1)) is not None:
            self._state.apply(commit)
        return self._state

    def state_at(self, number: int) -> State:
        """As it was after a commit. Raises LakeDamaged where the commits of that time are gone."""
        kinds = self._entries()
        base = max((found for found in kinds["state"] if found <= number), default=0)
        state = self._read_state(base) if base else State()
        for wanted in range(state.number + 1, number + 1):
            state.apply(self.commit(wanted))
        return state

    def commit(self, number: int) -> Commit:
        """One of the commits. Raises LakeDamaged where it is not there."""
        found = self._find(number)
        if found is None:
            raise LakeDamaged(str(self._folder / layout.commit_name(number)), "the commit is missing")
        return found

    def oldest(self) -> int:
        """The number of the oldest commit that can still be read; 0 where there is none."""
        return min(self._entries()["json"], default=0)

    def append(self, make: Callable[[State], Commit | None]) -> Commit | None:
        """Add what `make` makes of the present state; it is asked again when another committer was first.

        None: `make` found that there is nothing to do.
        """
        while True:
            state = self.state()
            commit = make(state)
            if commit is None:
                return None
            commit = msgspec.structs.replace(commit, number=state.number + 1, time_ns=commit.time_ns or time.time_ns())
            if self._write(layout.commit_name(commit.number), _encode(commit)):
                self.state()
                if self._is_state_due():
                    self.write_state()
                return commit

    def write_state(self) -> None:
        """Write down what the commits add up to."""
        state = self.state()
        if self._write(layout.state_name(state.number), _encode(state)):
            self._state_number = state.number
        for number in sorted(self._entries()["state"])[:-KEPT_STATES]:
            (self._folder / layout.state_name(number)).unlink(missing_ok=True)

    def forget_before(self, time_ns: int) -> int:
        """Remove commits that are part of a written state and older than a moment; how many."""
        self.write_state()
        kinds = self._entries()
        summed = min(sorted(kinds["state"])[-KEPT_STATES:], default=0)
        count = 0
        for number in sorted(kinds["json"]):
            if number > summed or self.commit(number).time_ns >= time_ns:
                break
            (self._folder / layout.commit_name(number)).unlink(missing_ok=True)
            count += 1
        return count

    def _is_state_due(self) -> bool:
        enough = max(MIN_COMMITS_PER_STATE, len(self._state.files) // FILES_PER_COMMIT)
        return self._state.number - self._state_number >= enough

    def _load(self) -> None:
        kinds = self._entries()
        self._state_number = max(kinds["state"], default=0)
        self._state = self._read_state(self._state_number) if self._state_number else State()
        newest = max(kinds["json"], default=0)
        for number in range(self._state.number + 1, newest + 1):
            self._state.apply(self.commit(number))
        self._loaded_s = time.monotonic()

    def _entries(self) -> dict[str, list[int]]:
        kinds: dict[str, list[int]] = {"json": [], "state": []}
        try:
            with os.scandir(self._folder) as entries:
                for entry in entries:
                    found = layout.manifest_entry(entry.name)
                    if found is not None:
                        kinds[found[0]].append(found[1])
        except FileNotFoundError:
            raise LakeDamaged(str(self._folder), "the manifest is missing") from None
        return kinds

    def _find(self, number: int) -> Commit | None:
        path = self._folder / layout.commit_name(number)
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return None
        return _decode(path, data, Commit, number)

    def _read_state(self, number: int) -> State:
        path = self._folder / layout.state_name(number)
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            raise LakeDamaged(str(path), "the state is missing") from None
        return _decode(path, data, State, number)

    def _write(self, name: str, data: bytes) -> bool:
        """False: somebody else was first."""
        return write_once(self._folder / name, data)


def write_once(path: Path, data: bytes) -> bool:
    """Write a file whole and for good, or not at all; False where it is there already."""
    draft = path.with_name(f".{uuid.uuid4().hex}")
    try:
        with open(draft, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(draft, path)
        except FileExistsError:
            return False
    finally:
        with contextlib.suppress(FileNotFoundError):
            draft.unlink()
    sync_directory(path.parent)
    return True


def sync_directory(folder: Path) -> None:
    """Make names durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _encode(value: Commit | State) -> bytes:
    return msgspec.json.encode(value) + b"\n"


def _decode[T: (Commit, State)](path: Path, data: bytes, kind: type[T], number: int) -> T:
    try:
        value = msgspec.json.decode(data, type=kind)
    except msgspec.DecodeError as error:
        raise LakeDamaged(str(path), f"it is torn or no part of a manifest ({error})") from None
    if value.number != number:
        raise LakeDamaged(str(path), f"it says that it is number {value.number}")
    return value
