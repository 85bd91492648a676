# SPDX-License-Identifier: Apache-2.0
"""Control plane and shared-memory structures, schema 900.

Wire §7, §8, §10, §16; decision A11 for the meta blobs of §10.3.3.
"""

from tensorpool.wire.sbe import load

schema = load("control.xml", "metablob.xml", module=__name__)
globals().update(schema.types)
__all__ = ["schema", *schema.types]
