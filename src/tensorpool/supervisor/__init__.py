# SPDX-License-Identifier: Apache-2.0
"""The supervisor: what is alive, who lags, what changed, and what consumers are told about it.

view        everything that is known, without IO     policy       who is told to take less, without IO
entries     what is kept of each, without IO         exports      JSON and Prometheus; http: the server
track       counters looked at now and then          supervisor   the service
snapshot    what is shown of a moment, as JSON too   config       every setting
probe       a look into rings, read-only             observer     listens, and feeds the view

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
