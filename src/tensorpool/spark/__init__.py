# SPDX-License-Identifier: Apache-2.0
"""The data pipeline on Spark; the only importer of pyspark."""

from tensorpool.spark.session import register, session

__all__ = ["register", "session"]
