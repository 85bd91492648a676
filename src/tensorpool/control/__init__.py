# SPDX-License-Identifier: Apache-2.0
"""The service control plane: services that EventMessages command, and commanders that send them.

service           receives commands, echoes, runs and answers them
common_commands   ping, status, log-level, drain, pause, resume
commands          typed handlers, without IO
events            values in messages, and what keys mean
streams           the Aeron streams of a service
service_agent     runs a service with a connection of its own
commander         sends a command and waits for echo and result
config            every setting
"""

from typing import TYPE_CHECKING

from tensorpool import lazy

if TYPE_CHECKING:
    from tensorpool.control.commander import Commander, Outcome
    from tensorpool.control.common_commands import add_common_commands
    from tensorpool.control.config import ControlConfig
    from tensorpool.control.errors import (
        CommandError,
        CommandFailed,
        CommandRejected,
        CommandUnanswered,
        CommandUnfinished,
    )
    from tensorpool.control.events import Alive, Ref, State, make_event, read_alive, read_value
    from tensorpool.control.service import Service
    from tensorpool.control.service_agent import AgentWithService, ServiceAgent

__all__ = [
    "AgentWithService",
    "Alive",
    "CommandError",
    "CommandFailed",
    "CommandRejected",
    "CommandUnanswered",
    "CommandUnfinished",
    "Commander",
    "ControlConfig",
    "Outcome",
    "Ref",
    "Service",
    "ServiceAgent",
    "State",
    "add_common_commands",
    "make_event",
    "read_alive",
    "read_value",
]

_HOMES = (
    dict.fromkeys(__all__, "tensorpool.control.errors")
    | dict.fromkeys(("Alive", "Ref", "State", "make_event", "read_alive", "read_value"), "tensorpool.control.events")
    | dict.fromkeys(("Commander", "Outcome"), "tensorpool.control.commander")
    | dict.fromkeys(("AgentWithService", "ServiceAgent"), "tensorpool.control.service_agent")
    | {"ControlConfig": "tensorpool.control.config", "Service": "tensorpool.control.service"}
    | {"add_common_commands": "tensorpool.control.common_commands"}
)

if not TYPE_CHECKING:
    __getattr__ = lazy.exports(__name__, _HOMES)  # clients need the configuration only
