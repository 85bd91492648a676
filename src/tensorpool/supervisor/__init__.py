# SPDX-License-Identifier: Apache-2.0
"""The supervisor: which streams, consumers and services are alive, which consumers lag, and rules that act on it.

observer          receives all messages and feeds the view
view              everything that is known, without IO
observed          the state of one stream, consumer, lease or service
sampled_counter   the rate of a counter that is read now and then
probe             reads the newest slot of a ring
policy            which consumers get another mode, without IO
snapshot          the view at one moment, as structs and as JSON
exports, http     JSON and Prometheus over HTTP
supervisor        the service

`Observer` needs no supervisor to run: `tensorpool top` and `tensorpool inspect` have one of their own.
"""

from tensorpool.supervisor.config import RuleConfig, SupervisorConfig, SupervisorSection
from tensorpool.supervisor.snapshot import (
    Change,
    ChangeKind,
    ConsumerState,
    ConsumerStatus,
    LeaseStatus,
    ServiceStatus,
    Snapshot,
    StreamState,
    StreamStatus,
)
from tensorpool.supervisor.view import View

__all__ = [
    "Change",
    "ChangeKind",
    "ConsumerState",
    "ConsumerStatus",
    "LeaseStatus",
    "RuleConfig",
    "ServiceStatus",
    "Snapshot",
    "StreamState",
    "StreamStatus",
    "SupervisorConfig",
    "SupervisorSection",
    "View",
]
