# SPDX-License-Identifier: Apache-2.0
"""Train a model from a recording, then from the live stream: with PyTorch where it is installed, else with numpy."""

from __future__ import annotations

import importlib.util
import itertools
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import tensorpool as tp
from tensorpool.lake.direct_recorder import DirectRecorder
from tensorpool.lake.recording_engine import Settings
from tensorpool.torch import LakeDataset, LiveDataset, Sample

ROWS, COLUMNS = 8, 16
BATCH = 16
RING = {"header_nslots": 1024, "payload_pools": [{"pool_id": 1, "stride_bytes": 4096}]}


def photograph(rng: np.random.Generator) -> np.ndarray:
    """A mark on the belt, and noise. The first row holds where the encoder says that the mark is, from 0 to 1."""
    column = rng.integers(COLUMNS)
    frame = rng.normal(0, 0.05, (1 + ROWS, COLUMNS)).astype(np.float32)
    frame[0] = column / (COLUMNS - 1)
    frame[1:, column] += 1
    return frame


def picture_and_place(sample: Sample) -> tuple[np.ndarray, np.ndarray]:
    """The same for a recorded and for a live frame: what the model sees, and what it has to say."""
    return sample.array[1:].ravel(), sample.array[0, :1]


class WithTorch:
    """Batches by a DataLoader with two workers, and a linear model."""

    def __init__(self) -> None:
        import torch

        torch.manual_seed(1)
        self.model = torch.nn.Linear(ROWS * COLUMNS, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1)

    def batches(self, frames: Any, is_shuffled: bool, epoch: int) -> Iterator[Any]:
        import torch

        # Workers are not forked from this process, which has threads; see docs/training.md.
        return iter(
            torch.utils.data.DataLoader(
                frames, BATCH, shuffle=is_shuffled, num_workers=2, multiprocessing_context="forkserver"
            )
        )

    def learn(self, pictures: Any, places: Any) -> float:
        error = ((self.model(pictures) - places) ** 2).mean()
        self.optimizer.zero_grad()
        error.backward()
        self.optimizer.step()
        return error.item()


class WithNumpy:
    """The same, in a few lines of numpy."""

    def __init__(self) -> None:
        self.weights = np.zeros((ROWS * COLUMNS, 1), np.float32)
        self.offset = np.zeros(1, np.float32)

    def batches(self, frames: Any, is_shuffled: bool, epoch: int) -> Iterator[Any]:
        if is_shuffled:
            order = np.random.default_rng(epoch).permutation(len(frames))
            samples = (frames[index] for index in order)
        else:
            samples = iter(frames)
        for batch in itertools.batched(samples, BATCH):
            yield tuple(map(np.stack, zip(*batch, strict=True)))

    def learn(self, pictures: np.ndarray, places: np.ndarray) -> float:
        wrong = pictures @ self.weights + self.offset - places
        self.weights -= 0.1 * 2 * pictures.T @ wrong / len(wrong)
        self.offset -= 0.1 * 2 * wrong.mean()
        return float((wrong**2).mean())


def main() -> None:
    has_torch = importlib.util.find_spec("torch") is not None
    learner: WithTorch | WithNumpy = WithTorch() if has_torch else WithNumpy()
    if has_torch:
        print("PyTorch learns")
    else:
        print("numpy learns; with PyTorch (pip install 'aeron-tensorpool[torch]') a DataLoader makes the batches")

    with (
        tp.local(overrides={"profiles.default": RING}) as pool,
        pool.connect() as client,
        tempfile.TemporaryDirectory() as folder,
    ):
        producer = client.producer("belt/1", create=True)
        is_over = threading.Event()

        def run_camera() -> None:
            rng = np.random.default_rng(1)
            while not is_over.wait(1 / 200):
                producer.publish(photograph(rng))

        camera = threading.Thread(target=run_camera)
        camera.start()
        try:
            lake = record(pool, Path(folder) / "lake")
            recorded = LakeDataset(lake, "belt/1", transform=picture_and_place)
            state = None
            for epoch in range(2):
                if state is not None:  # as after a restart: the same frames, though others may be recorded by now
                    recorded = LakeDataset(lake, "belt/1", transform=picture_and_place)
                    recorded.load_state_dict(state)
                errors = [learner.learn(*batch) for batch in learner.batches(recorded, True, epoch)]
                state = recorded.state_dict()
                print(f"lake, epoch {epoch}: {len(recorded)} samples, error {errors[0]:.3f} -> {errors[-1]:.3f}")

            live = LiveDataset(
                "belt/1",
                count=200,
                timeout=30,
                transform=picture_and_place,
                aeron_dir=pool.aeron_dir,  # of a driver that everybody uses neither is needed
                config=pool.config,
            )
            errors = [learner.learn(*batch) for batch in learner.batches(live, False, 0)]
            counts = live.counts
            print(f"live: {counts.received} samples, {counts.lost} lost, error {errors[0]:.3f} -> {errors[-1]:.3f}")
        finally:
            is_over.set()
            camera.join()


def record(pool: tp.Local, lake: Path) -> Path:
    """What `tensorpool record belt/1 --to LAKE --direct` does."""
    settings = Settings(trigger_s=0.5, aeron_dir=pool.aeron_dir, overrides={"shm.base_dir": pool.config.shm.base_dir})
    with DirectRecorder(["belt/1"], lake, settings=settings) as recorder:
        while recorder.totals().frames < 320:
            recorder.wait(0.2)
    totals = recorder.totals()
    print(f"recorded {totals.frames} frames, {totals.lost} lost")
    return lake


if __name__ == "__main__":
    main()
