# SPDX-License-Identifier: Apache-2.0
"""Aeron channels: parsed, checked and edited without asking Aeron, so that a typo never becomes a default.

Wire §15.11; decisions A14, F4.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from typing import Final, Self

import msgspec

from tensorpool.errors import ConfigError

WINDOW_LIMIT: Final = "100ms"  # after which Aeron skips an untethered subscriber that does not poll


class Endpoint(msgspec.Struct, frozen=True):
    """Where messages go: an Aeron channel and an Aeron stream id."""

    channel: str
    stream_id: int

    @property
    def uri(self) -> ChannelUri:
        """The channel in its parts. Raises ConfigError for one that was never checked and is malformed."""
        return check_channel("channel", self.channel)

    @property
    def place(self) -> tuple[tuple[str | None, ...], int]:
        """Equal for two endpoints whose subscribers receive the same messages."""
        return self.uri.address, self.stream_id


class ChannelUri(msgspec.Struct, frozen=True):
    """A parsed Aeron channel; made by `check_channel`, turned into text by `str`."""

    media: str
    parameters: Mapping[str, str]
    is_spy: bool = False

    def __str__(self) -> str:
        prefix = "aeron-spy:" if self.is_spy else ""
        text = "|".join(f"{name}={value}" for name, value in self.parameters.items())
        return f"{prefix}aeron:{self.media}{'?' if text else ''}{text}"

    @property
    def is_ipc(self) -> bool:
        return self.media == "ipc"

    @property
    def address(self) -> tuple[str | None, ...]:
        """The host, port and interface of a UDP channel; the same for every IPC channel."""
        names = () if self.is_ipc else ("endpoint", "control", "interface")
        return (self.media, *map(self.parameters.get, names))

    @property
    def terms(self) -> dict[str, str | int]:
        """The parameters that all publishers of one stream must agree on; sizes in bytes, however they were written."""
        agreed = {name: text for name, text in self.parameters.items() if name not in ("alias", "tags")}
        return {name: text if (size := _size(text)) is None else size for name, text in agreed.items()}

    def with_parameters(self, parameters: Mapping[str, str]) -> Self:
        """The same channel with these parameters set or replaced.

        >>> str(check_channel("key", "aeron:ipc?alias=x").with_parameters({"term-length": "64k"}))
        'aeron:ipc?alias=x|term-length=64k'
        """
        return msgspec.structs.replace(self, parameters={**self.parameters, **parameters})

    def with_defaults(self, parameters: Mapping[str, str]) -> Self:
        """The same channel with these parameters where it does not set them itself."""
        return self.with_parameters({name: text for name, text in parameters.items() if name not in self.parameters})

    def with_only(self, names: Sequence[str]) -> Self:
        """The same channel without any other parameters than these, in this order."""
        kept = {name: self.parameters[name] for name in names if name in self.parameters}
        return msgspec.structs.replace(self, parameters=kept)

    def for_subscription(self) -> Self:
        """Untethered, unless the channel says otherwise: Aeron skips this subscriber when it stalls."""
        return self.with_defaults({"tether": "false"})

    def for_publication(self, term: str | None = None) -> Self:
        """An exclusive log over IPC that a stalled untethered subscriber holds for 100 ms at most; UDP is unchanged.

        `term` is the size of the log; None keeps what the channel says.
        """
        if not self.is_ipc:
            return self
        sized = self if term is None else self.with_parameters({"term-length": term})
        return sized.with_defaults({"untethered-window-limit-timeout": WINDOW_LIMIT})


MAX_MESSAGE_BYTES: Final = 16 << 20  # Aeron's own limit
MAX_AERON_STREAM_ID: Final = 2**31 - 1  # the wire has 32 unsigned bits (A14)

_MAX_CHANNEL_BYTES: Final = 4095
_CHANNEL: Final = re.compile(r"(?P<spy>aeron-spy:)?aeron:(?P<media>ipc|udp)(\?(?P<parameters>[!-~]*))?")
_SIZE: Final = re.compile(r"([0-9]{1,12})([kKmMgG]?)")
_UNITS: Final = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
_PARAMETERS: Final = re.findall(
    r"\S+",
    """
    alias cc channel-rcv-ts-offset channel-snd-ts-offset control control-mode endpoint eos fc group gtag
    init-term-id interface linger max-resend media-rcv-ts-offset mtu nak-delay pub-wnd rcv-wnd rejoin reliable
    response-correlation-id response-endpoint session-id so-rcvbuf so-sndbuf sparse ssc stream-id tags term-id
    term-length term-offset tether ttl untethered-linger-timeout untethered-resting-timeout
    untethered-window-limit-timeout
    """,
)


def is_repeatable(text: str) -> bool:
    """Whether a channel or URI from the wire may be kept and sent on: printable ASCII (A13), within Aeron's limit."""
    return text.isascii() and text.isprintable() and len(text) <= _MAX_CHANNEL_BYTES


def check_channel(key: str, channel: str) -> ChannelUri:
    """Parse a channel without asking Aeron. Raises ConfigError for `key`.

    >>> check_channel("driver.control_channel", "aeron:ipc?term-length=4m").parameters
    {'term-length': '4m'}

    Aeron ignores parameters that it does not know, so one that resembles a known one is refused.
    """
    match = _CHANNEL.fullmatch(channel)
    if match is None or len(channel) > _MAX_CHANNEL_BYTES:
        accepted = "an Aeron URI such as aeron:ipc?term-length=4m or aeron:udp?endpoint=host:port|mtu=8k"
        raise ConfigError(key, channel, accepted)
    parameters: dict[str, str] = {}
    for parameter in [] if match["parameters"] is None else match["parameters"].split("|"):
        name, _, value = parameter.partition("=")
        if not name or not value or name in parameters:
            accepted = f"parameters as name=value, each once, with '|' between; found {parameter!r}"
            raise ConfigError(key, channel, accepted)
        close = difflib.get_close_matches(name, _PARAMETERS, 1, 0.8)
        if close and name not in _PARAMETERS:
            raise ConfigError(key, channel, f"the parameters that Aeron knows; {name} is almost {close[0]}")
        parameters[name] = value
    term = _size(parameters.get("term-length", "64k")) or 0
    if not 1 << 16 <= term <= 1 << 30 or term & (term - 1):
        raise ConfigError(key, channel, "a term-length that is a power of two from 64k to 1g")
    mtu = _size(parameters.get("mtu", "1408")) or 0
    if not 32 <= mtu <= 65504 or mtu % 32:
        raise ConfigError(key, channel, "an mtu that is a multiple of 32 up to 65504")
    if match["media"] == "udp" and not parameters.keys() & {"endpoint", "control", "control-mode", "tags"}:
        raise ConfigError(key, channel, "aeron:udp with an endpoint=host:port or a control=host:port")
    return ChannelUri(match["media"], parameters, match["spy"] is not None)


def asks_for_id(endpoint: Endpoint) -> bool:
    """Whether a consumer asks the driver for the id of a private stream: a channel with id 0 (E22, E24)."""
    return bool(endpoint.channel) and not endpoint.stream_id


def may_be_private(channel: str, shared_channel: str) -> bool:
    """Whether a consumer may have a private stream on `channel`: over IPC, or over the media of the shared stream.

    Any process can send a hello: without this rule it could make a producer send to any address.
    """
    try:
        uri = check_channel("channel", channel)
    except ConfigError:
        return False
    return not uri.is_spy and uri.media in ("ipc", check_channel("channel", shared_channel).media)


def check_endpoints(endpoints: Mapping[str, Endpoint]) -> None:
    """Refuse two channels with one stream id and address but different parameters, as Aeron would (F4).

    `endpoints` are keyed by the configuration key of their channel. Raises ConfigError for the later of the two.
    """
    seen: dict[object, tuple[str, ChannelUri]] = {}
    for key, endpoint in endpoints.items():
        uri = check_channel(key, endpoint.channel)
        if uri.is_spy:
            continue  # a spy does not publish
        other, first = seen.setdefault((uri.address, endpoint.stream_id), (key, uri))
        if uri.terms != first.terms:
            why = f"both use stream id {endpoint.stream_id}, whose publishers have to agree"
            raise ConfigError(key, endpoint.channel, f"the parameters of {other} ({why}), or another id")


def max_message_bytes(channel: str) -> int | None:
    """The longest message that a publication to a channel takes; None where the media driver's settings decide."""
    term = _size(check_channel("channel", channel).parameters.get("term-length", ""))
    return None if term is None else min(term // 8, MAX_MESSAGE_BYTES)


def _size(text: str) -> int | None:
    match = _SIZE.fullmatch(text)
    return int(match[1]) * _UNITS[match[2].lower()] if match else None
