# SPDX-License-Identifier: Apache-2.0
"""A live camera as a DataFrame: functions of numpy arrays, rates and gaps, while the frames come in.

Cells begin with `# %%`: run them one by one in an editor that knows notebooks, or the whole as a program.
"""

# %% A camera, and a driver of its own
from __future__ import annotations

import threading

import numpy as np

import tensorpool as tp
from tensorpool.spark import session
from tensorpool.spark.functions import frame_udf, rates

RATE_HZ, WANTED = 100, 150
SIGHT = np.hypot(*np.mgrid[-60:60, -80:80])
is_over = threading.Event()


def run_camera(producer: tp.Producer) -> None:
    """A ring that grows, a hundred times a second; every 50th frame is overexposed."""
    seq = 0
    while not is_over.wait(1 / RATE_HZ):
        image = np.where(abs(SIGHT - seq % 100) < 5, 200, 20).astype(np.uint8)
        seq = (producer.publish(np.full_like(image, 255) if seq % 50 == 49 else image) or seq) + 1


RING = {"header_nslots": 2048, "payload_pools": [{"pool_id": 1, "stride_bytes": 32_768}]}  # 20 s to look back
pool = tp.local(overrides={"profiles.default": RING})
client = pool.connect()
producer = client.producer("camera/front", create=True)
camera = threading.Thread(target=run_camera, args=(producer,))
camera.start()

# %% The camera as a DataFrame
QUICK = {"spark.log.level": "OFF", "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"}
spark = session("local[2]", **QUICK)
frames = (
    spark.readStream.format("tensorpool")
    .option("streams", "camera/front")
    .option("payload", "reference")  # functions look at frames where they are: in shared memory
    .option("aeronDir", pool.aeron_dir)  # the embedded driver's, not the default directory
    .option("shm.base_dir", pool.config.shm.base_dir)
    .load()
)


# %% A function of an array is a function of frames
@frame_udf("double")
def radius(image: np.ndarray) -> float:
    """How large the ring is: the mean distance of its pixels from the middle."""
    return float(SIGHT[image > 100].mean())


@frame_udf("boolean")
def is_overexposed(image: np.ndarray) -> bool:
    return bool((image == 255).mean() > 0.5)


columns = ("stream_id", "seq", "timestamp_ns", "received_ns", "nbytes")
seen = frames.select(*columns, radius().alias("radius"), is_overexposed().alias("is_overexposed"))
query = seen.writeStream.format("memory").queryName("seen").trigger(processingTime="200 milliseconds").start()

# %% Wait for some, and look at them
while sum(progress.numInputRows for progress in query.recentProgress) < WANTED:
    query.awaitTermination(1)  # comes back after a while; raises what made the query fail
query.stop()
table = spark.table("seen").orderBy("seq").toPandas()
missing = int((table["seq"].diff().dropna() - 1).sum())
growing = table[(table["seq"] % 100 > 10) & (table["seq"] % 100 < 45)].drop_duplicates("seq")
error = float((growing["radius"] - growing["seq"] % 100).abs().max())
print(f"saw more than {WANTED} frames: {len(table) > WANTED - 1}, {missing} missing")
print(f"overexposed: every 50th, {bool((table['seq'][table['is_overexposed']] % 50 == 49).all())}")
print(f"the ring grows by a pixel a frame, as measured within {np.ceil(error):.0f} px")

# %% Figures of what was seen
hz = rates(spark.table("seen"), "1s").orderBy("start_ns").toPandas()["hz"]
print(f"up to {hz.max():.0f} frames a second")

# %% The end
is_over.set()
camera.join()
spark.stop()
client.close()
pool.close()
