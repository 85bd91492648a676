# SPDX-License-Identifier: Apache-2.0
"""`[control]`: where services receive commands and where they answer; a section of every service's configuration.

Service Control §4, §5, §7; decisions A11, H4, H6, H7. The specification names neither stream ids nor a schema id: ours
are the defaults, and a deployment that numbers them otherwise says so here.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from tensorpool.channel import Endpoint, check_channel, check_endpoints
from tensorpool.errors import ConfigError
from tensorpool.settings import HIDDEN, IPC, AeronStreamId, EndpointOf, PositiveU32, PublishableChannel, Secret
from tensorpool.wire import bridge, control, discovery, driver, event, merge, trace

MAX_TAG_BYTES: Final = 255
MIN_TOKEN: Final = 16  # characters
TAKEN: Final = frozenset(module.schema.id for module in (control, driver, bridge, merge, trace, discovery))

Tag = Annotated[
    str, Meta(pattern=rf"\A[!-~]{{1,{MAX_TAG_BYTES}}}\Z", description="1 to 255 visible ASCII characters, no spaces")
]


def _check_schema_id(key: str, schema_id: int) -> None:
    if schema_id in TAKEN:
        taken = ", ".join(map(str, sorted(TAKEN)))
        raise ConfigError(key, schema_id, f"an id that no other schema has; taken: {taken}")


SchemaId = Annotated[int, Meta(ge=0, le=0xFFFF, extra={"check": _check_schema_id})]
CommandKey = Annotated[str, Meta(pattern=r"\A[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z", description="the key of a command")]


class ControlConfig(msgspec.Struct, frozen=True, kw_only=True):
    """`[control]` of a service, and of a process that sends commands to it."""

    enabled: bool = True
    """Take part in the service control plane."""
    control_channel: PublishableChannel = IPC
    """Where services receive commands."""
    control_stream_id: AeronStreamId = 1400
    """The Aeron stream id of control_channel."""
    status_channel: PublishableChannel = IPC
    """Where services answer and send heartbeats."""
    status_stream_id: AeronStreamId = 1401
    """The Aeron stream id of status_channel."""
    schema_id: SchemaId = event.schema.id
    """The SBE schema id of EventMessage; other messages on these streams are ignored."""
    aliases: tuple[Tag, ...] = ()
    """Further tags that the service answers to."""
    alive_period_ms: PositiveU32 = 1000
    """How often the service sends a heartbeat."""
    command_timeout_ms: PositiveU32 = 2000
    """How long a commander waits for a command that names no timeout."""
    commands_per_s: PositiveU32 = 100
    """How many commands are accepted in a second; more are refused and counted."""
    max_value_bytes: PositiveU32 = 65_536
    """A command with a longer value is refused."""
    allow_remote: tuple[CommandKey, ...] = ()
    """The commands beside ping and status that the service accepts over a control_channel on the network, where anybody
    may send them: "drain", "pause", …; over IPC, which takes access to the media driver's directory, it accepts all."""
    drain: Literal["local", "never"] = "local"
    """Whether a command may end the service: "local" over IPC, and over the network where allow_remote lists it."""

    token: Secret = Secret("")
    """The secret with which commands that change the service are signed, at least 16 characters; "" for none."""
    token_file: str = ""
    """A file with the token instead; without either, services obey the account that runs them."""

    control = EndpointOf("control")
    status = EndpointOf("status")

    def __post_init__(self) -> None:
        for key in ("control_channel", "status_channel"):
            check_channel(f"control.{key}", getattr(self, key))
        if self.token:
            self.check_token("control.token", self.token)
            if self.token_file:
                raise ConfigError("control.token_file", self.token_file, "none beside control.token: leave one out")
        if self.control.place == self.status.place:
            accepted = "another id than control.control_stream_id: a service would take its own echo for a command"
            raise ConfigError("control.status_stream_id", self.status_stream_id, accepted)

    def allows(self, key: str) -> bool:
        """Whether a command that changes something may come over the control channel."""
        return self.control.uri.is_ipc or key in self.allow_remote

    @staticmethod
    def check_token(key: str, token: Secret) -> None:
        """Refuse a token that can be guessed: echoes of commands that it signed are broadcast. Raises ConfigError."""
        if len(token) < MIN_TOKEN:
            raise ConfigError(key, HIDDEN, f"at least {MIN_TOKEN} characters, such as those of `openssl rand -hex 32`")

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
