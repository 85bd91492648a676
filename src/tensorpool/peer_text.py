# SPDX-License-Identifier: Apache-2.0
"""Text that another process chose, for terminals, logs and JSON."""

from __future__ import annotations


def printable(text: str, limit: int | None = None) -> str:
    r"""The text with every character escaped that a terminal would obey; cut to `limit` characters, with "…" there.

    >>> printable("a\x1b[31mb"), printable("acquire", 4)
    ('a\\x1b[31mb', 'acq…')
    """
    text = text if limit is None else text[: limit + 1]
    shown = "".join(letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in text)
    return shown if limit is None or len(shown) <= limit else shown[: max(limit - 1, 0)] + "…"
