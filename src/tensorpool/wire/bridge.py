# SPDX-License-Identifier: Apache-2.0
"""Frames in chunks over UDP, schema 902. Bridge §5, §11."""

from tensorpool.wire.sbe import load

schema = load("bridge.xml", module=__name__)
globals().update(schema.types)
__all__ = ["schema", *schema.types]
