# SPDX-License-Identifier: Apache-2.0
"""Java that starts quickly: Spark's classes from an archive, and little compiled for jobs of seconds.

The archive is made once per checkout, by one start of Spark, in build/; a JVM that cannot use it goes without.
"""

from __future__ import annotations

import fcntl
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
MAKE_S: Final = 240

# What a session, a query and a batch of it load.
_TRAINING: Final = """
import sys
from tensorpool.spark import session

spark = session("local[2]", **{"spark.driver.extraJavaOptions": sys.argv[1], "spark.log.level": "OFF"})
spark.range(4).repartition(2).selectExpr("id % 2 AS k").groupBy("k").count().collect()
rate = spark.readStream.format("rate").load().writeStream.format("noop").trigger(availableNow=True)
rate.option("checkpointLocation", sys.argv[2] + "/checkpoint").start().awaitTermination()
gateway = spark.sparkContext._gateway
spark.stop()
gateway.shutdown()
gateway.proc.stdin.close()
gateway.proc.wait()
"""


@functools.cache
def quick_options() -> str:
    """Options of Java for the tests' Sparks."""
    archive = _archive()
    return f"{LITTLE_COMPILED} {FROM_ARCHIVE.format(archive)}" if archive.exists() else LITTLE_COMPILED


def _archive() -> Path:
    """Where the archive is; made by the first who asks, while the others wait."""
    java = subprocess.run(["java", "-version"], capture_output=True, check=True).stderr
    jars = Path(pyspark.__file__).parent / "jars"
    key = hashlib.sha256(java + pyspark.__version__.encode() + f"{jars}{jars.stat().st_mtime_ns}".encode())
    folder = ROOT / "build"
    folder.mkdir(exist_ok=True)
    path = folder / f"spark-{key.hexdigest()[:12]}.jsa"
    with (folder / "spark-archive.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            for old in folder.glob("spark-*.jsa"):
                old.unlink()
            with tempfile.TemporaryDirectory(dir=folder) as draft:
                options = f"{LITTLE_COMPILED} -Xlog:disable -XX:ArchiveClassesAtExit={draft}/{path.name}"
                command = [sys.executable, "-c", _TRAINING, options, draft]
                subprocess.run(command, capture_output=True, timeout=MAKE_S, check=False)
                if (Path(draft) / path.name).exists():
                    (Path(draft) / path.name).rename(path)
    return path
