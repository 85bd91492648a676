# SPDX-License-Identifier: Apache-2.0
"""Java that starts quickly: Spark's classes from an archive, and little compiled for jobs of seconds.

`make spark-archive`, a part of `make test`, makes the archive once per Java and Spark. It takes 20 s of processor time
and saves 3 s at each start of Spark; without it the tests pass too.
"""

from __future__ import annotations

import functools
import hashlib
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

import pyspark

from tests.support.processes import ROOT

LITTLE_COMPILED: Final = "-XX:TieredStopAtLevel=1 -XX:CICompilerCount=1 -XX:+UseSerialGC"
FROM_ARCHIVE: Final = "-Xshare:auto -Xlog:disable -Xlog:all=error:stderr -XX:SharedArchiveFile={}"
# Compiling queries takes longer than small ones run.
QUICK_SETTINGS: Final = "-Dspark.sql.codegen.wholeStage=false -Dspark.sql.codegen.factoryMode=NO_CODEGEN"
MAKE_S: Final = 400

# What a session, a query and a batch of it load.
_TRAINING: Final = """
import sys
from tensorpool.spark import session

spark = session("local[2]", **{"spark.driver.extraJavaOptions": sys.argv[1], "spark.log.level": "OFF",
                               "spark.ui.enabled": "false"})
spark.range(4).repartition(2).selectExpr("id % 2 AS k").groupBy("k").count().collect()
rate = spark.readStream.format("rate").load().writeStream.format("noop").trigger(availableNow=True)
rate.option("checkpointLocation", sys.argv[2] + "/checkpoint").start().awaitTermination()
gateway = spark.sparkContext._gateway
spark.stop()
gateway.shutdown()
gateway.proc.stdin.close()
gateway.proc.wait()
"""


def quick_options() -> str:
    """Options of Java for the tests' Sparks."""
    archive = _archive()
    return f"{LITTLE_COMPILED} {FROM_ARCHIVE.format(archive)}" if archive.exists() else LITTLE_COMPILED


@functools.cache
def _archive() -> Path:
    """Where the archive of this Java and this Spark is, or would be."""
    java = subprocess.run(["java", "-version"], capture_output=True, check=True).stderr
    jars = Path(pyspark.__file__).parent / "jars"
    key = hashlib.sha256(java + pyspark.__version__.encode() + str(jars).encode())
    for jar in sorted(jars.iterdir()):
        key.update(f"{jar.name} {jar.stat().st_size} {jar.stat().st_mtime_ns}".encode())
    return ROOT / "build" / f"spark-{key.hexdigest()[:12]}.jsa"


def make_archive() -> Path:
    """Start Spark once and keep the classes that it loads, unless that is done already."""
    path = _archive()
    if path.exists():
        return path
    path.parent.mkdir(exist_ok=True)
    for old in path.parent.glob("spark-*.jsa"):
        old.unlink()
    with tempfile.TemporaryDirectory(dir=path.parent) as draft:
        options = f"{LITTLE_COMPILED} -Xlog:disable -XX:ArchiveClassesAtExit={draft}/{path.name}"
        subprocess.run([sys.executable, "-c", _TRAINING, options, draft], timeout=MAKE_S, check=True)
        (Path(draft) / path.name).rename(path)
    return path


if __name__ == "__main__":
    print(make_archive())
