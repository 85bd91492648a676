# SPDX-License-Identifier: Apache-2.0
"""What users hold: clients, producers, consumers and frames.

client        connections, and where the rest comes from    attachment   leases, without IO
producer      publishing; its session: duties beside it     mapping      which epoch is mapped, without IO
consumer      receiving; its session: duties beside it      progress     partial frames, without IO
frame         views that know whether they are whole        metadata     what frames mean, by version
stream_reader where both threads meet                       names        streams by name
conductor     the duty cycle; streams: what it opens        aio          the same for asyncio
wall_clock    UTC of frames, without IO                     waiting      one thread for many consumers
rate_limiter  a slower copy of a stream                     joining      streams read together; join_barrier: without IO
"""

from typing import TYPE_CHECKING

from tensorpool import lazy

if TYPE_CHECKING:
    from tensorpool._core import DropReason
    from tensorpool.client.aio import AsyncClient, AsyncConsumer, AsyncJoin
    from tensorpool.client.client import Client, connect
    from tensorpool.client.consumer import Consumer, Progress
    from tensorpool.client.frame import Frame
    from tensorpool.client.join_barrier import Unjoined
    from tensorpool.client.joining import FrameCopy, Join, JoinStats, join
    from tensorpool.client.metadata import Metadata
    from tensorpool.client.producer import Producer, ProducerStats
    from tensorpool.client.rate_limiter import RateLimiter
    from tensorpool.client.session import State, StateChange
    from tensorpool.client.slot import Slot
    from tensorpool.client.stream_reader import ConsumerStats
    from tensorpool.client.waiting import wait_any
    from tensorpool.client.wall_clock import ClockPair

__all__ = [
    "AsyncClient",
    "AsyncConsumer",
    "AsyncJoin",
    "Client",
    "ClockPair",
    "Consumer",
    "ConsumerStats",
    "DropReason",
    "Frame",
    "FrameCopy",
    "Join",
    "JoinStats",
    "Metadata",
    "Producer",
    "ProducerStats",
    "Progress",
    "RateLimiter",
    "Slot",
    "State",
    "StateChange",
    "Unjoined",
    "connect",
    "join",
    "wait_any",
]

if not TYPE_CHECKING:
    __getattr__ = lazy.exports(
        __name__,
        {
            "AsyncClient": "tensorpool.client.aio",
            "AsyncConsumer": "tensorpool.client.aio",
            "AsyncJoin": "tensorpool.client.aio",
            "Client": "tensorpool.client.client",
            "ClockPair": "tensorpool.client.wall_clock",
            "Consumer": "tensorpool.client.consumer",
            "ConsumerStats": "tensorpool.client.stream_reader",
            "DropReason": "tensorpool._core",
            "Frame": "tensorpool.client.frame",
            "FrameCopy": "tensorpool.client.joining",
            "Join": "tensorpool.client.joining",
            "JoinStats": "tensorpool.client.joining",
            "Unjoined": "tensorpool.client.join_barrier",
            "join": "tensorpool.client.joining",
            "Metadata": "tensorpool.client.metadata",
            "Producer": "tensorpool.client.producer",
            "ProducerStats": "tensorpool.client.producer",
            "Progress": "tensorpool.client.consumer",
            "RateLimiter": "tensorpool.client.rate_limiter",
            "Slot": "tensorpool.client.slot",
            "State": "tensorpool.client.session",
            "StateChange": "tensorpool.client.session",
            "connect": "tensorpool.client.client",
            "wait_any": "tensorpool.client.waiting",
        },
    )
