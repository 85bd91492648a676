# SPDX-License-Identifier: Apache-2.0
"""Discovery requests and responses, schema 910. Discovery §5, §15."""

from tensorpool.wire.sbe import load

schema = load("discovery.xml", module=__name__)
globals().update(schema.types)
__all__ = ["schema", *schema.types]
