# SPDX-License-Identifier: Apache-2.0
"""How two configurations of one process differ, key by key."""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec

from tensorpool.errors import TensorPoolError
from tensorpool.settings.schema import plain, values


class ReloadRefused(TensorPoolError):
    """A configuration was read again and cannot be applied, for these reasons; nothing has changed."""

    def __init__(self, reasons: str) -> None:
        super().__init__(f"the configuration stays as it is: {reasons}")


def differences(old: msgspec.Struct, new: msgspec.Struct) -> dict[str, str]:
    """Every key whose value differs, with a line that says how; secrets stay hidden.

    >>> differences(old, new)                                                     # doctest: +SKIP
    {'policies.max_leases': '~ policies.max_leases = 256 (was 10000)'}

    A line begins with + for a key that only the new one has, with - for one that only the old one has.
    """
    before, after = ({key: value for key, _, value in values(each)} for each in (old, new))
    found = {}
    for key in sorted(before.keys() | after.keys()):
        was, now = plain(before.get(key)), plain(after.get(key))
        if key not in before:
            found[key] = f"+ {key} = {now}"
        elif key not in after:
            found[key] = f"- {key} = {was}"
        elif before[key] != after[key]:
            found[key] = f"~ {key} = {now} (was {was})"
    return found


def fixed(lines: Mapping[str, str], changeable: re.Pattern[str]) -> list[str]:
    """Why some of these differences cannot be applied while the process runs: their keys are not `changeable`."""
    return [f"{line[2:]} needs a restart" for key, line in lines.items() if not changeable.fullmatch(key)]
