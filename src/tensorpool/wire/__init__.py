# SPDX-License-Identifier: Apache-2.0
"""Bytes to messages and back. No IO, no clock, no state.

    message = decode(buffer)            # any message of any schema; DecodeError if it is not exactly one
    message.encode()                    # the same bytes again

One module per schema holds its messages: `control` `driver` `bridge` `merge` `trace` `event` `discovery`.
"""

from __future__ import annotations

from collections.abc import Buffer

from tensorpool.errors import DecodeError
from tensorpool.wire import bridge, control, discovery, driver, event, merge, trace
from tensorpool.wire.sbe import Message, MessageHeader, decode_any, peek_header

__all__ = ["DecodeError", "Message", "MessageHeader", "decode", "peek_header"]

_SCHEMAS = {module.schema.id: module.schema for module in (control, driver, bridge, merge, trace, event, discovery)}


def decode(buffer: Buffer) -> Message:
    """Read one message, header first, from exactly the given bytes.

    >>> decode(bytes.fromhex("1c00060084030100102700000300000007000000000000000500000000000000ffffffff"))
    QosProducer(stream_id=10000, producer_id=3, epoch=7, current_seq=5, watermark=None)

    Template ids repeat between schemas: the schema id decides first. Raises DecodeError, and nothing else,
    for bytes that are not one message of version 1 with a block length of its schema.
    """
    return decode_any(_SCHEMAS, buffer)
