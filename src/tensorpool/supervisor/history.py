# SPDX-License-Identifier: Apache-2.0
"""The latest changes in full, and how often each kind occurred in all. No IO, no clock."""

from __future__ import annotations

from collections import Counter, deque
from typing import Final

from tensorpool.supervisor.snapshot import Change, ChangeKind

MAX_TEXT: Final = 400


class History:
    """The latest `max_changes` changes, oldest first."""

    def __init__(self, max_changes: int) -> None:
        self.changes: deque[Change] = deque(maxlen=max_changes)
        self.counts: Counter[ChangeKind] = Counter()
        self._number = 0

    def add(
        self,
        kind: ChangeKind,
        now_ns: int,
        text: str,
        *,
        stream_id: int | None = None,
        consumer_id: int | None = None,
        service: str | None = None,
    ) -> None:
        self._number += 1
        self.counts[kind] += 1
        self.changes.append(
            Change(
                number=self._number,
                at_ns=now_ns,
                kind=kind,
                text=text[:MAX_TEXT],
                stream_id=stream_id,
                consumer_id=consumer_id,
                service=service,
            )
        )
