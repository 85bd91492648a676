# SPDX-License-Identifier: Apache-2.0
"""Commands and status of services, schema 905 unless a deployment says otherwise. Service Control §5.

`schema.with_id(906)` encodes and decodes the same messages under another id.
"""

from tensorpool.wire.sbe import load

# §5.1: a compatible schema may have more fields, so a longer block is skipped instead of refused.
schema = load("event.xml", module=__name__, is_extensible=True)
globals().update(schema.types)
__all__ = ["schema", *schema.types]
