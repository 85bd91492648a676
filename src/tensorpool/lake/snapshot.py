# SPDX-License-Identifier: Apache-2.0
"""A version of a Delta table, as the sum of the actions up to it. Holds no clock and does no IO."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from tensorpool.lake.delta_log import Action, AddFile, Metadata, Protocol, RemoveFile, Txn, check_understood


class Snapshot(msgspec.Struct):
    """What a table is and which files it has after `version`; -1 where there is no table."""

    version: int = -1
    protocol: Protocol | None = None
    metadata: Metadata | None = None
    files: dict[str, AddFile] = {}
    removed: dict[str, RemoveFile] = {}  # files that may still exist
    txns: dict[str, int] = {}

    @property
    def table_id(self) -> str:
        """Of this table and no other, also not of one that is made at the same place later."""
        return "" if self.metadata is None else self.metadata.id

    def apply(self, version: int, actions: Iterable[Action]) -> None:
        """Add the next version. Raises ValueError where it does not follow, or is not ours to understand."""
        if version != self.version + 1:
            raise ValueError(f"version {version} does not follow version {self.version}")
        for action in actions:
            self.take(action)
        if self.metadata is None or self.protocol is None:
            raise ValueError("the log does not say what the table is: protocol or metaData is missing")
        self.version = version

    def take(self, action: Action) -> None:
        """Add one action, of an entry or of a checkpoint. Raises ValueError for one that we do not understand."""
        match action:
            case AddFile(path=path):
                self.files[path] = action
                self.removed.pop(path, None)
            case RemoveFile(path=path):
                self.files.pop(path, None)
                self.removed[path] = action
            case Txn(app_id=app_id, version=version):
                self.txns[app_id] = version
            case Metadata():
                self.metadata = action
            case Protocol():
                check_understood(action)
                self.protocol = action
            case _:
                pass

    def copy(self) -> Snapshot:
        """One that goes its own way: later versions of this are not applied to it."""
        return msgspec.structs.replace(self, files=dict(self.files), removed=dict(self.removed), txns=dict(self.txns))
