# SPDX-License-Identifier: Apache-2.0
"""Attach, detach, leases and shutdown, schema 901. Driver Model §4, appendix A; K9 for the two layouts of attach."""

from tensorpool.wire.sbe import load

schema = load("driver.xml", "driver_extended.xml", module=__name__)
globals().update(schema.types)
__all__ = ["schema", *schema.types]
