# SPDX-License-Identifier: Apache-2.0
"""Format "tensorpool": live streams as DataFrames, and DataFrames as live streams.

Spark imports this module in a process of its own for every step of a query, so that it loads what a step needs only.
"""

from __future__ import annotations

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
)
from pyspark.sql.types import StructType

from tensorpool.lake.live_options import sink_options, source_options, stream_options
from tensorpool.spark.catalog import options_given, schema_for
from tensorpool.spark.columns import LIVE_DDL, METADATA_DDL, TABLE_DDL


class TensorpoolDataSource(DataSource):
    """`spark.readStream.format("tensorpool").option("streams", "camera/front").load()`"""

    @classmethod
    def name(cls) -> str:
        return "tensorpool"

    def schema(self) -> str | StructType:
        options = source_options(options_given(self.options))
        return schema_for(LIVE_DDL[options.table] + (METADATA_DDL if options.include_metadata else ""), self.options)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        options = stream_options(options_given(self.options, schema))
        if options.table in TABLE_DDL:
            from tensorpool.spark.tables import TableStreamReader

            return TableStreamReader(options)
        from tensorpool.spark.live_source import LiveStreamReader

        return LiveStreamReader(options)

    def reader(self, schema: StructType) -> DataSourceReader:
        options = source_options(options_given(self.options, schema))
        if options.table in TABLE_DDL:
            from tensorpool.spark.tables import TableReader

            return TableReader(options)
        from tensorpool.spark.live_source import LiveReader

        return LiveReader(options)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        from tensorpool.spark.sink import FrameWriter

        return FrameWriter(sink_options(self.options), schema)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        from tensorpool.spark.sink import FrameStreamWriter

        return FrameStreamWriter(sink_options(self.options), schema)
