# SPDX-License-Identifier: Apache-2.0
"""From a live camera to a trained classifier: record, join what the camera said, make a training set, learn.

Cells begin with `# %%`: run them one by one in an editor that knows notebooks, or the whole as a program.
"""

# %% A camera that looks at parts on a belt, and says what they are
from __future__ import annotations

import shutil
import tempfile
import threading
from pathlib import Path

import numpy as np

import tensorpool as tp
from tensorpool.lake import Lake
from tensorpool.lake.pictures import contact_sheet
from tensorpool.spark import session
from tensorpool.spark.functions import frames_to_numpy, to_training_set, with_metadata
from tensorpool.spark.recorder import Recorder, Settings

PER_PART, PARTS, RATE_HZ = 40, ("disc", "bar", "disc", "bar", "disc", "bar"), 150
ROWS, COLUMNS = np.mgrid[0:48, 0:64]
rng = np.random.default_rng(1)
folder = Path(tempfile.mkdtemp(prefix="tensorpool-example-"))


def photograph(part: str) -> np.ndarray:
    """A part somewhere on the belt, and noise."""
    row, column = rng.integers(15, 33), rng.integers(15, 49)
    if part == "disc":
        is_part = np.hypot(ROWS - row, COLUMNS - column) < 9
    else:
        is_part = (abs(ROWS - row) < 3) & (abs(COLUMNS - column) < 14)
    return np.clip(60 + 120 * is_part + rng.normal(0, 12, ROWS.shape), 0, 255).astype(np.uint8)


def run_camera(producer: tp.Producer) -> None:
    pause = threading.Event()
    for part in PARTS:
        producer.set_metadata({"part": part, "exposure_ms": 4})
        pause.wait(0.1)  # metadata travel beside the frames
        for _ in range(PER_PART):
            producer.publish(photograph(part))
            pause.wait(1 / RATE_HZ)


RING = {"header_nslots": 1024, "payload_pools": [{"pool_id": 1, "stride_bytes": 4096}]}
pool = tp.local(overrides={"profiles.default": RING})
client = pool.connect()
producer = client.producer("belt/1", create=True)

# %% Record it
QUICK = {"spark.log.level": "OFF", "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"}
spark = session("local[2]", **QUICK)
here = Settings(aeron_dir=pool.aeron_dir, overrides={"shm.base_dir": pool.config.shm.base_dir}, trigger_s=0.5)
with Recorder(spark, [producer.stream_id], folder / "lake", settings=here) as recorder:
    run_camera(producer)
lake = Lake.open(folder / "lake")
lost = sum(gap.hi - gap.lo for gap in lake.gaps())
print(f"recorded {sum(file.frames for file in lake.files())} frames, {lost} lost")

# %% Look at it
contact_sheet(lake, folder / "belt.png", count=12)
print(f"wrote {(folder / 'belt.png').name}")

# %% Every frame with what the camera said about it, small, scaled, and split by blocks of neighbours
recording = spark.read.format("tensorpool.lake")
frames = recording.load(str(lake.path))
metadata = recording.option("table", "metadata").load(str(lake.path))
examples = to_training_set(
    with_metadata(frames, metadata), label="metadata.part", size=(12, 16), scale="standard", block=4
).toArrow()


def arrays(split: str) -> tuple[np.ndarray, np.ndarray]:
    """Pixels and labels; the amplitudes of the spectrum do not care where a part lies."""
    own = examples.filter(np.array(examples["split"].to_pylist()) == split)
    images = np.stack(frames_to_numpy(own))
    spectra = np.log1p(abs(np.fft.rfft2(images))).reshape(len(images), -1)
    return spectra, np.array(own["label"].to_pylist()) == "disc"


# %% Learn: logistic regression by gradient descent
inputs, labels = arrays("train")
middle, width = inputs.mean(0), inputs.std(0) + 1e-6
weights = np.zeros(inputs.shape[1] + 1)
for _ in range(300):
    guess = 1 / (1 + np.exp(-((inputs - middle) / width @ weights[1:] + weights[0])))
    step = (guess - labels) / len(labels)
    weights -= 0.5 * np.r_[step.sum(), step @ ((inputs - middle) / width)]

# %% And see whether it has learned something
unseen, truth = arrays("test")
is_right = (((unseen - middle) / width @ weights[1:] + weights[0]) > 0) == truth
print(f"trained on {len(labels)}, tested on {len(truth)}: {100 * is_right.mean():.0f} % right")

# %% The end
spark.stop()
client.close()
pool.close()
shutil.rmtree(folder)  # leave this out to keep the lake and the picture
