# SPDX-License-Identifier: Apache-2.0
"""Which frames of several streams belong together, schema 903: the rules of a join, announced and asked for."""

from tensorpool.wire.sbe import load

schema = load("merge.xml", module=__name__)
globals().update(schema.types)
__all__ = ["schema", *schema.types]
