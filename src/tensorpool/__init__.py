# SPDX-License-Identifier: Apache-2.0
"""tensorpool: zero-copy exchange of large tensors between processes.

The public names, re-exported, and `__version__`; nothing is defined here. They are imported at first use, so that a
command that needs one of them does not pay for all.
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
        Metadata,
        Producer,
        ProducerStats,
        Progress,
        Slot,
        State,
        StateChange,
        connect,
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
    "FrameOverwritten",
    "FrameTooLarge",
    "LeaseLost",
    "Local",
    "LocalProtocolError",
    "Metadata",
    "MissingExtra",
    "Producer",
    "ProducerStats",
    "Progress",
    "ProtocolError",
    "RegionRejected",
    "RemoteProtocolError",
    "RingRefused",
    "Slot",
    "State",
    "StateChange",
    "TensorPoolError",
    "TransportError",
    "connect",
    "local",
    "open",
]

_CLIENT = """
    Client ClockPair Consumer ConsumerStats DropReason Frame Metadata Producer ProducerStats Progress Slot State
    StateChange connect
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
