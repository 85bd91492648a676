# SPDX-License-Identifier: Apache-2.0
"""Zero-copy exchange of large tensors between processes.

>>> import tensorpool as tp
>>> with tp.local() as pool, pool.connect() as client:             # or tp.connect() # doctest: +SKIP
...     producer = client.producer("camera/front", create=True)    # one per stream
...     consumer = client.consumer("camera/front")                 # any number
...     producer.publish(image)
...     frame = consumer.poll(timeout=1.0)                         # frame.array: a view of shared memory

    connect, local          a client of the driver that runs on this host, or of one inside this process
    Client                  producer(), consumer(), run(), discover(), aio
    wait_any, join          which of many consumers has a frame; frames of several streams that belong together
    Producer, Slot          publish(array), claim(shape, dtype), set_metadata(…), stats
    Consumer, Frame         poll(), latest(), iteration; array, copy(), seq, time, dropped_before
    open                    a recording: open("lake")["camera/front"][10:20].numpy()
    Driver, DriverConfig    the driver inside your program, and its settings
    TensorPoolError         the base of everything that is raised on purpose; the others say what and what to do

Every public name is re-exported here, and imported when it is first used.
"""

from typing import TYPE_CHECKING

from tensorpool import lazy

if TYPE_CHECKING:
    from tensorpool.channel import Endpoint
    from tensorpool.client import (
        Client,
        ClockPair,
        Consumer,
        ConsumerStats,
        DropReason,
        Frame,
        FrameCopy,
        Join,
        Metadata,
        Producer,
        ProducerStats,
        Progress,
        RateLimiter,
        Slot,
        State,
        StateChange,
        Unjoined,
        connect,
        join,
        wait_any,
    )
    from tensorpool.driver import Driver, DriverConfig
    from tensorpool.embedded import Local, local
    from tensorpool.errors import (
        AttachPending,
        AttachRefused,
        Closed,
        ConfigError,
        DecodeError,
        DriverUnreachable,
        FrameOverwritten,
        FrameTooLarge,
        LeaseLost,
        LocalProtocolError,
        MissingExtra,
        ProtocolError,
        RegionRejected,
        RemoteProtocolError,
        RingRefused,
        TensorPoolError,
        TransportError,
    )
    from tensorpool.opening import open
    from tensorpool.version import __version__ as __version__
    from tensorpool.wire.control import Dtype

__all__ = [
    "AttachPending",
    "AttachRefused",
    "Client",
    "ClockPair",
    "Closed",
    "ConfigError",
    "Consumer",
    "ConsumerStats",
    "DecodeError",
    "Driver",
    "DriverConfig",
    "DriverUnreachable",
    "DropReason",
    "Dtype",
    "Endpoint",
    "Frame",
    "FrameCopy",
    "FrameOverwritten",
    "FrameTooLarge",
    "Join",
    "LeaseLost",
    "Local",
    "LocalProtocolError",
    "Metadata",
    "MissingExtra",
    "Producer",
    "ProducerStats",
    "Progress",
    "ProtocolError",
    "RateLimiter",
    "RegionRejected",
    "RemoteProtocolError",
    "RingRefused",
    "Slot",
    "State",
    "StateChange",
    "TensorPoolError",
    "TransportError",
    "Unjoined",
    "connect",
    "join",
    "local",
    "open",
    "wait_any",
]

_CLIENT = """
    Client ClockPair Consumer ConsumerStats DropReason Frame FrameCopy Join Metadata Producer ProducerStats Progress
    RateLimiter Slot State StateChange Unjoined connect join wait_any
"""
_HOMES = (
    dict.fromkeys(__all__, "tensorpool.errors")
    | dict.fromkeys(("Driver", "DriverConfig"), "tensorpool.driver")
    | dict.fromkeys(("Local", "local"), "tensorpool.embedded")
    | dict.fromkeys(_CLIENT.split(), "tensorpool.client")
    | {"Dtype": "tensorpool.wire.control", "Endpoint": "tensorpool.channel", "__version__": "tensorpool.version"}
    | {"open": "tensorpool.opening"}
)


if not TYPE_CHECKING:
    __getattr__ = lazy.exports(__name__, _HOMES)


def __dir__() -> list[str]:
    return sorted(__all__)
