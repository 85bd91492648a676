# SPDX-License-Identifier: Apache-2.0
"""The types of settings: ranges of ids, secrets, and integers and texts with their bounds.

A type with bounds is an `Annotated` with a `Meta`: `ge`, `le` and `pattern` are checked by msgspec, `extra["check"]` is
called with key and value and raises ConfigError, `description` is what an error says would be accepted.
Decisions A14, E21.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Iterator
from typing import Annotated, ClassVar, Final, Self

import msgspec
from msgspec import Meta

from tensorpool.channel import Endpoint, check_channel
from tensorpool.errors import ConfigError

IPC: Final = "aeron:ipc?term-length=4m"
MS: Final = 1_000_000  # nanoseconds


class Range:
    """Ids from `first` to `last`, both included. `Range()` is empty and disables what it stands for.

    >>> ids = Range.parse("20000-29999")
    >>> len(ids), 29999 in ids, ids.overlaps(Range(29999, 30001))
    (10000, True, True)

    `parse` reads "first-last" or [first, last], and "" or [] as the empty range. Raises ValueError.
    """

    ACCEPTED: ClassVar = '"first-last" or [first, last] with first <= last, or "" for none'
    _TEXT: ClassVar = re.compile(r"([0-9]{1,20})-([0-9]{1,20})")

    __slots__ = ("_ids",)

    def __init__(self, first: int = 0, last: int = -1) -> None:
        if not 0 <= first <= last and (first, last) != (0, -1):
            raise ValueError(f"{first}-{last} is no range of ids")
        self._ids = range(first, last + 1)

    @classmethod
    def parse(cls, value: object) -> Self:
        match value:
            case "" | []:
                return cls()
            case str() if match := cls._TEXT.fullmatch(value):
                return cls(int(match[1]), int(match[2]))
            case [first, last] if type(first) is int and type(last) is int:
                if first <= last:
                    return cls(first, last)
        raise ValueError(f"{value!r} is not {cls.ACCEPTED}")

    @property
    def first(self) -> int:
        return self._ids.start

    @property
    def last(self) -> int:
        return self._ids.stop - 1

    def overlaps(self, other: Range) -> bool:
        """Whether some id is in both."""
        return max(self.first, other.first) <= min(self.last, other.last)

    def __contains__(self, value: object) -> bool:
        return isinstance(value, int) and value in self._ids

    def __iter__(self) -> Iterator[int]:
        return iter(self._ids)

    def __len__(self) -> int:
        return len(self._ids)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Range) and self._ids == other._ids

    def __hash__(self) -> int:
        return hash(self._ids)

    def __str__(self) -> str:
        return f"{self.first}-{self.last}" if self else ""

    def __repr__(self) -> str:
        return f"Range({self.first}, {self.last})" if self else "Range()"


class Secret(str):
    """A text that is shown by neither `repr`, `str`, a format nor an error; `encode` gives its bytes.

    >>> Secret("s3cret")
    Secret(<hidden>)
    """

    ACCEPTED: ClassVar = 'ASCII text, or "" for none'

    __slots__ = ()

    @classmethod
    def parse(cls, value: object) -> Self:
        if not isinstance(value, str) or not value.isascii():
            raise ValueError(f"the secret is not {cls.ACCEPTED}")
        return cls(value)

    def matches(self, text: str) -> bool:
        """Whether `text` is this, in a time that does not tell how much is right. "" matches nothing."""
        ours, given = (each.encode(errors="surrogatepass") for each in (self, text))
        return hmac.compare_digest(ours, given) and bool(ours)

    def __str__(self) -> str:
        return "<hidden>" if self else ""

    def __repr__(self) -> str:
        return f"Secret({self})"

    def __format__(self, spec: str) -> str:
        return format(str(self), spec)


def _ids_within(low: int, high: int) -> Meta:
    def check_bounds(key: str, ids: Range) -> None:
        if ids and not low <= ids.first <= ids.last <= high:
            raise ConfigError(key, str(ids), f"ids from {low} to {high}")

    return Meta(extra={"check": check_bounds})


_MAX_AERON_ID: Final = 2**31 - 1  # A14: Aeron's are int32
_MAX_STREAM_ID: Final = 2**32 - 2  # A14: 0 is none, all ones is null

# E21: a tensor stream's own id and the id of an Aeron stream are different things.
StreamId = Annotated[int, Meta(ge=1, le=_MAX_STREAM_ID)]
StreamIdRange = Annotated[Range, _ids_within(1, _MAX_STREAM_ID)]
AeronStreamId = Annotated[int, Meta(ge=1, le=_MAX_AERON_ID)]
AeronStreamIdRange = Annotated[Range, _ids_within(1, _MAX_AERON_ID)]
Channel = Annotated[str, Meta(description="an Aeron URI", extra={"check": check_channel})]
U32 = Annotated[int, Meta(ge=0, le=2**32 - 1)]
PositiveU32 = Annotated[int, Meta(ge=1, le=2**32 - 1)]
Name = Annotated[str, Meta(pattern=r"\A[!-~]+\Z", description="visible ASCII without spaces, not empty")]


def _check_publishable(key: str, channel: str) -> None:
    if check_channel(key, channel).is_spy:
        raise ConfigError(key, channel, "aeron:ipc or aeron:udp; a spy channel can only be subscribed to")


def _check_optional(key: str, channel: str) -> None:
    if channel:
        _check_publishable(key, channel)


PublishableChannel = Annotated[str, Meta(description="an Aeron URI", extra={"check": _check_publishable})]
OptionalChannel = Annotated[str, Meta(description='an Aeron URI, or "" for none', extra={"check": _check_optional})]


class EndpointOf:
    """`control = EndpointOf("control")` in a struct is the endpoint of its control_channel and control_stream_id."""

    def __init__(self, name: str) -> None:
        self._channel = f"{name}_channel".removeprefix("_")
        self._stream_id = f"{name}_stream_id".removeprefix("_")

    def __get__(self, section: msgspec.Struct, owner: type | None = None) -> Endpoint:
        return Endpoint(getattr(section, self._channel), getattr(section, self._stream_id))


class OptionalEndpointOf(EndpointOf):
    """Likewise where the channel may be "": then None."""

    def __get__(self, section: msgspec.Struct, owner: type | None = None) -> Endpoint | None:  # type: ignore[override]
        endpoint = super().__get__(section, owner)
        return endpoint if endpoint.channel else None
