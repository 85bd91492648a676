# SPDX-License-Identifier: Apache-2.0
"""The SHM driver: it owns the memory, grants leases, counts epochs and announces.

leases      who may read or write, and until when     config      every setting, checked at start
streams     what exists and who writes it             memory      epochs made and retired beside the duty cycle
lifecycle   every request in, every duty out          conductor   the duty cycle
clients     which process asks, as it declares        commands    the driver as a service
limits      what each user may hold                   audit       what happened to leases, with the client
"""

from typing import TYPE_CHECKING

from tensorpool.driver.config import DriverConfig

if TYPE_CHECKING:
    from tensorpool.driver.driver import Driver

__all__ = ["Driver", "DriverConfig"]


def __getattr__(name: str) -> object:
    """The driver itself is imported at first use: clients need its configuration only."""
    if name != "Driver":
        raise AttributeError(f"module 'tensorpool.driver' has no attribute {name!r}")
    from tensorpool.driver.driver import Driver

    return Driver
