# SPDX-License-Identifier: Apache-2.0
"""`[control]`: where services hear commands and where they answer; a section of every service's configuration.

Service Control §4, §5, §7; decisions A11, H4, H6, H7. The specification names neither stream ids nor a schema id: ours
are the defaults, and a deployment that numbers them otherwise says so here.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from tensorpool.channel import Endpoint, check_channel, check_endpoints
from tensorpool.config import AeronStreamId, Channel, PositiveU32
from tensorpool.errors import ConfigError
from tensorpool.wire import bridge, control, discovery, driver, event, trace

IPC: Final = "aeron:ipc?term-length=4m"
MAX_TAG_BYTES: Final = 255
TAKEN: Final = frozenset(module.schema.id for module in (control, driver, bridge, trace, discovery))

Tag = Annotated[
    str, Meta(pattern=rf"\A[!-~]{{1,{MAX_TAG_BYTES}}}\Z", description="1 to 255 visible ASCII characters, no spaces")
]


def _check_schema_id(key: str, schema_id: int) -> None:
    if schema_id in TAKEN:
        taken = ", ".join(map(str, sorted(TAKEN)))
        raise ConfigError(key, schema_id, f"an id that no other schema has; taken: {taken}")


SchemaId = Annotated[int, Meta(ge=0, le=0xFFFF, extra={"check": _check_schema_id})]


class ControlConfig(msgspec.Struct, frozen=True, kw_only=True):
    """`[control]` of a service, and of whoever commands it.

    `aliases` are further tags that a service answers to. `drain` says from where it may be ended: "local" is a control
    channel on IPC, which takes access to the media driver's directory; a UDP channel takes nothing but the network.
    """

    enabled: bool = True
    control_channel: Channel = IPC
    control_stream_id: AeronStreamId = 1400
    status_channel: Channel = IPC
    status_stream_id: AeronStreamId = 1401
    schema_id: SchemaId = event.schema.id
    aliases: tuple[Tag, ...] = ()
    alive_period_ms: PositiveU32 = 1000
    commands_per_s: PositiveU32 = 100
    max_value_bytes: PositiveU32 = 65_536
    drain: Literal["local", "any", "never"] = "local"

    def __post_init__(self) -> None:
        for key in ("control_channel", "status_channel"):
            if check_channel(f"control.{key}", getattr(self, key)).is_spy:
                raise ConfigError(f"control.{key}", getattr(self, key), "aeron:ipc or aeron:udp")
        if _place(self.control) == _place(self.status):
            accepted = "another id than control.control_stream_id: a service would take its own echo for a command"
            raise ConfigError("control.status_stream_id", self.status_stream_id, accepted)

    @property
    def control(self) -> Endpoint:
        return Endpoint(self.control_channel, self.control_stream_id)

    @property
    def status(self) -> Endpoint:
        return Endpoint(self.status_channel, self.status_stream_id)

    @property
    def may_drain(self) -> bool:
        """Whether an event may end a service."""
        is_local = check_channel("control.control_channel", self.control_channel).media == "ipc"
        return self.drain == "any" or (self.drain == "local" and is_local)

    def check_beside(self, endpoints: dict[str, Endpoint]) -> None:
        """Refuse what meets other endpoints of the same service on one stream id and disagrees. Raises ConfigError."""
        if self.enabled:
            ours = {"control.control_channel": self.control, "control.status_channel": self.status}
            check_endpoints(endpoints | ours)


def check_tag(key: str, tag: str) -> str:
    """`tag`, if it can be one. Raises ConfigError."""
    try:
        return msgspec.convert(tag, Tag)
    except msgspec.ValidationError:
        raise ConfigError(key, tag, f"1 to {MAX_TAG_BYTES} visible ASCII characters, no spaces") from None


def _place(endpoint: Endpoint) -> tuple[object, int]:
    return check_channel("channel", endpoint.channel).address, endpoint.stream_id
