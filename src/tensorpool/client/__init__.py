# SPDX-License-Identifier: Apache-2.0
"""What users hold: clients, producers, consumers and frames.

client        connections, and where the rest comes from    attachment   leases, without IO
producer      publishing; its session: duties beside it     mapping      which epoch is mapped, without IO
consumer      receiving; its session: duties beside it      progress     partial frames, without IO
frame         views that know whether they are whole        metadata     what frames mean, by version
reception     where reader and conductor meet               names        streams by name
conductor     the duty cycle; link: its Aeron streams       aio          the same for asyncio
"""

from tensorpool._core import DropReason
from tensorpool.client.aio import AsyncClient, AsyncConsumer
from tensorpool.client.client import Client, connect
from tensorpool.client.consumer import Consumer, Progress
from tensorpool.client.frame import Frame
from tensorpool.client.metadata import Metadata
from tensorpool.client.producer import Producer, ProducerStats, Slot
from tensorpool.client.reception import ConsumerStats
from tensorpool.client.session import State, StateChange

__all__ = [
    "AsyncClient",
    "AsyncConsumer",
    "Client",
    "Consumer",
    "ConsumerStats",
    "DropReason",
    "Frame",
    "Metadata",
    "Producer",
    "ProducerStats",
    "Progress",
    "Slot",
    "State",
    "StateChange",
    "connect",
]
