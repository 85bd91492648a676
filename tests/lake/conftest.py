# SPDX-License-Identifier: Apache-2.0
"""The deployment and the bucket server that all tests of the lake share. Nothing here starts a JVM."""

from tests.support.buckets import bucket, place, s3_environment
from tests.support.deployment import client, pool, stream

__all__ = ["bucket", "client", "place", "pool", "s3_environment", "stream"]
