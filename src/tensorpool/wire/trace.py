# SPDX-License-Identifier: Apache-2.0
"""Which traces a frame was made from, schema 904. Decision A11."""

from tensorpool.wire.sbe import load

schema = load("trace.xml", module=__name__)
globals().update(schema.types)
__all__ = ["schema", *schema.types]
