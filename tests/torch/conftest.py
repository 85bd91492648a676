# SPDX-License-Identifier: Apache-2.0
"""The deployment that tests of live datasets share. Where PyTorch is installed, its DataLoader is tried."""

from tests.support.buckets import bucket, s3_environment
from tests.support.deployment import client, pool, stream

__all__ = ["bucket", "client", "pool", "s3_environment", "stream"]
