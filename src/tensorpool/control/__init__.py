# SPDX-License-Identifier: Apache-2.0
"""The service control plane: services that are commanded by EventMessages, and those who command them.

config      every setting                               service     hears, echoes, runs, answers
events      values in messages, and what keys mean      standard    ping, status, log-level, drain, pause, resume
commands    typed handlers, without IO                  hosting     a service with a connection of its own
link        a service's streams at a media driver       commander   sends, and waits for echo and result
"""

from typing import TYPE_CHECKING

from tensorpool import lazy

if TYPE_CHECKING:
    from tensorpool.control.commander import Commander, Outcome
    from tensorpool.control.config import ControlConfig
    from tensorpool.control.errors import (
        CommandError,
        CommandFailed,
        CommandRejected,
        CommandUnfinished,
        CommandUnheard,
    )
    from tensorpool.control.events import Alive, Ref, State, make_event, read_alive, read_value
    from tensorpool.control.hosting import Hosted, ServiceAgent
    from tensorpool.control.service import Service
    from tensorpool.control.standard import host_standard

__all__ = [
    "Alive",
    "CommandError",
    "CommandFailed",
    "CommandRejected",
    "CommandUnfinished",
    "CommandUnheard",
    "Commander",
    "ControlConfig",
    "Hosted",
    "Outcome",
    "Ref",
    "Service",
    "ServiceAgent",
    "State",
    "host_standard",
    "make_event",
    "read_alive",
    "read_value",
]

_HOMES = (
    dict.fromkeys(__all__, "tensorpool.control.errors")
    | dict.fromkeys(("Alive", "Ref", "State", "make_event", "read_alive", "read_value"), "tensorpool.control.events")
    | dict.fromkeys(("Commander", "Outcome"), "tensorpool.control.commander")
    | dict.fromkeys(("Hosted", "ServiceAgent"), "tensorpool.control.hosting")
    | {"ControlConfig": "tensorpool.control.config", "Service": "tensorpool.control.service"}
    | {"host_standard": "tensorpool.control.standard"}
)

if not TYPE_CHECKING:
    __getattr__ = lazy.exports(__name__, _HOMES)  # clients need the configuration only
