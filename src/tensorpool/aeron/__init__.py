# SPDX-License-Identifier: Apache-2.0
"""The seam over Aeron: nothing above this package knows how messages travel."""

from tensorpool.aeron.agent import (
    Agent,
    AgentInvoker,
    AgentRunner,
    AgentTerminated,
    BackoffIdle,
    IdleStrategy,
    SleepingIdle,
    YieldingIdle,
)
from tensorpool.aeron.holders import Holder, Sample, Subscriber
from tensorpool.aeron.library import version
from tensorpool.aeron.media_driver import DriverSight, MediaDriver, embed
from tensorpool.aeron.renewal import RenewedPublication
from tensorpool.aeron.transport import (
    Client,
    Counter,
    CounterReading,
    ImageEvent,
    MessageInfo,
    OfferResult,
    Publication,
    Subscription,
    connect,
    default_aeron_dir,
    driver_pid,
    explain_denial,
    is_driver_active,
)

__all__ = [
    "Agent",
    "AgentInvoker",
    "AgentRunner",
    "AgentTerminated",
    "BackoffIdle",
    "Client",
    "Counter",
    "CounterReading",
    "DriverSight",
    "Holder",
    "IdleStrategy",
    "ImageEvent",
    "MediaDriver",
    "MessageInfo",
    "OfferResult",
    "Publication",
    "RenewedPublication",
    "Sample",
    "SleepingIdle",
    "Subscriber",
    "Subscription",
    "YieldingIdle",
    "connect",
    "default_aeron_dir",
    "driver_pid",
    "embed",
    "explain_denial",
    "is_driver_active",
    "version",
]
