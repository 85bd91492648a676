# SPDX-License-Identifier: Apache-2.0
"""tensorpool: zero-copy exchange of large tensors between processes.

The public names, re-exported; nothing is defined here. They are imported at first use, so that a command that needs one
of them does not pay for all.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tensorpool.driver import Driver, DriverConfig, local
    from tensorpool.errors import (
        Closed,
        ConfigError,
        DecodeError,
        LocalProtocolError,
        ProtocolError,
        RegionRejected,
        RemoteProtocolError,
        TensorPoolError,
        TransportError,
    )

__all__ = [
    "Closed",
    "ConfigError",
    "DecodeError",
    "Driver",
    "DriverConfig",
    "LocalProtocolError",
    "ProtocolError",
    "RegionRejected",
    "RemoteProtocolError",
    "TensorPoolError",
    "TransportError",
    "local",
]

_HOMES = dict.fromkeys(__all__, "tensorpool.errors") | {
    "Driver": "tensorpool.driver",
    "DriverConfig": "tensorpool.driver",
    "local": "tensorpool.driver",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'tensorpool' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
