# SPDX-License-Identifier: Apache-2.0
"""Lets Spark find format "tensorpool" by itself: it looks for modules named pyspark_* that have a DefaultSource.

A failure here would hide every other such module from Spark, so nothing is loaded but what exists.
"""

from tensorpool.spark.source import TensorpoolDataSource as DefaultSource

__all__ = ["DefaultSource"]
