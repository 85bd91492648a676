# SPDX-License-Identifier: Apache-2.0
"""Format "tensorpool.lake": recordings as DataFrames.

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

from tensorpool.errors import ConfigError
from tensorpool.lake.lake import Lake
from tensorpool.spark.catalog import options_given, schema_for
from tensorpool.spark.columns import LAKE_DDL, METADATA_DDL
from tensorpool.spark.lake_options import lake_options


class LakeDataSource(DataSource):
    """`spark.read.format("tensorpool.lake").load("/data/lake")`"""

    @classmethod
    def name(cls) -> str:
        return "tensorpool.lake"

    def schema(self) -> str | StructType:
        options = lake_options(options_given(self.options))
        Lake.open(options.path)
        return schema_for(LAKE_DDL[options.table] + (METADATA_DDL if options.include_metadata else ""), self.options)

    def reader(self, schema: StructType) -> DataSourceReader:
        from tensorpool.spark.lake_reader import LakeReader, with_ids

        return LakeReader(with_ids(lake_options(options_given(self.options, schema))))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        from tensorpool.spark.lake_reader import LakeStreamReader, with_ids

        return LakeStreamReader(with_ids(lake_options(options_given(self.options, schema))))

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        options = lake_options(self.options)
        if overwrite:
            raise ConfigError("mode", "overwrite", "append; a lake is trimmed by retention")
        Lake.create(options.path)
        from tensorpool.spark.lake_writer import LakeWriter

        return LakeWriter(options, schema)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        options = lake_options(self.options)
        if overwrite:
            raise ConfigError("outputMode", "complete", "append")
        Lake.create(options.path)
        from tensorpool.spark.lake_writer import LakeStreamWriter

        return LakeStreamWriter(options, schema)
