# SPDX-License-Identifier: Apache-2.0
"""Text from peers, bounded and readable by people and JSON. Decisions A13, F5."""

from __future__ import annotations

from typing import Final

import msgspec

from tensorpool.wire.control import Attribute

MAX_TEXT: Final = 256
MAX_TAGS: Final = 32
MAX_VALUE_BYTES: Final = 4096


def readable(text: str) -> str:
    """As people and JSON can read it: a name may have bytes that are no text (A13)."""
    return text[:MAX_TEXT].encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def tags_of(attribute: Attribute) -> tuple[str, ...]:
    if len(attribute.value) > MAX_VALUE_BYTES:
        return ()
    text = attribute.value.decode("utf-8", "backslashreplace")
    if attribute.format == "application/json":
        try:
            given = msgspec.json.decode(attribute.value)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return ()
        tags = [tag for tag in given if isinstance(tag, str)] if isinstance(given, list) else []
    else:
        tags = [tag.strip() for tag in text.split(",") if tag.strip()]
    return tuple(tag[:MAX_TEXT] for tag in tags[:MAX_TAGS])
