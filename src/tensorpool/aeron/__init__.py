# SPDX-License-Identifier: Apache-2.0
"""Everything that calls Aeron: connections, publications, subscriptions, the media driver, and agents."""

from tensorpool.aeron.agent import (
    Agent,
    AgentInvoker,
    AgentRunner,
    AgentTerminated,
    BackoffIdle,
    IdleStrategy,
    NappingIdle,
    SleepingIdle,
    YieldingIdle,
)
from tensorpool.aeron.backlog import Backlog
from tensorpool.aeron.connection import MediaDriverConnection
from tensorpool.aeron.holders import Holder, Sample, Subscriber, publishers
from tensorpool.aeron.library import version
from tensorpool.aeron.media_driver import DriverLiveness, MediaDriver, embed
from tensorpool.aeron.renewal import RenewedPublication
from tensorpool.aeron.streams import distinct, publish, subscribe
from tensorpool.aeron.transport import (
    Bell,
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
    "Backlog",
    "BackoffIdle",
    "Bell",
    "Client",
    "Counter",
    "CounterReading",
    "DriverLiveness",
    "Holder",
    "IdleStrategy",
    "ImageEvent",
    "MediaDriver",
    "MediaDriverConnection",
    "MessageInfo",
    "NappingIdle",
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
    "distinct",
    "driver_pid",
    "embed",
    "explain_denial",
    "is_driver_active",
    "publish",
    "publishers",
    "subscribe",
    "version",
]
