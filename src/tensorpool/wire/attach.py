# SPDX-License-Identifier: Apache-2.0
"""The two dialects of attach: which layout a request and its answer have. Decision K9."""

from __future__ import annotations

from enum import StrEnum

from tensorpool.wire.driver import (
    ExtendedAttachRequest,
    ExtendedAttachResponse,
    ResponseCode,
    ShmAttachRequest,
    ShmAttachResponse,
)

type AttachRequest = ShmAttachRequest | ExtendedAttachRequest
type AttachResponse = ShmAttachResponse | ExtendedAttachResponse


class Dialect(StrEnum):
    """How attach messages are laid out: as specified, or as public implementations have done since January 2026."""

    SPECIFIED = "specified"
    JANUARY_2026 = "2026-01"

    @classmethod
    def of(cls, message: AttachRequest | AttachResponse) -> Dialect:
        is_extended = isinstance(message, ExtendedAttachRequest | ExtendedAttachResponse)
        return cls.JANUARY_2026 if is_extended else cls.SPECIFIED

    @classmethod
    def of_request(cls, data: bytes) -> Dialect:
        """Of a request that may be malformed, by its block length; an unknown length counts as specified."""
        length = int.from_bytes(data[:2], "little")
        return cls.JANUARY_2026 if length == ExtendedAttachRequest.BLOCK_LENGTH else cls.SPECIFIED

    @property
    def other(self) -> Dialect:
        return Dialect.SPECIFIED if self is Dialect.JANUARY_2026 else Dialect.JANUARY_2026


def attach_refusal(dialect: Dialect, correlation_id: int, code: ResponseCode, text: str) -> AttachResponse:
    """The answer to a request that is not granted."""
    layout = ExtendedAttachResponse if dialect is Dialect.JANUARY_2026 else ShmAttachResponse
    return layout(correlation_id=correlation_id, code=code, error_message=text)
