# SPDX-License-Identifier: Apache-2.0
"""A snapshot as JSON: what /view serves and `tensorpool top --json` prints. No IO, no clock."""

from __future__ import annotations

import msgspec

from tensorpool.supervisor.snapshot import Snapshot


def to_json(snapshot: Snapshot, wall_ns: int) -> bytes:
    """One object; times are of day, ages of the moment `wall_ns` at which the snapshot was taken."""
    fields: dict[str, object] = {"time_ns": wall_ns}
    fields |= {name: value for name, value in msgspec.structs.asdict(snapshot).items() if name != "taken_ns"}
    fields["changes"] = [
        {"time_ns": wall_ns - snapshot.taken_ns + change.at_ns} | _without_at(msgspec.structs.asdict(change))
        for change in snapshot.changes
    ]
    return msgspec.json.encode(fields)


def _without_at(fields: dict[str, object]) -> dict[str, object]:
    return {name: value for name, value in fields.items() if name != "at_ns"}
