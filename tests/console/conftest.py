# SPDX-License-Identifier: Apache-2.0
"""A driver, a console beside it, and cameras whose frames a test knows."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import tensorpool as tp
from tensorpool.console.server import Console, ConsoleOptions
from tensorpool.shm.arrays import Array
from tests.console.page import Site

# Reports come four times a second, so that a test sees a change soon.
SETTINGS = {
    "policies.announce_period_ms": 250,
    "policies.lease_keepalive_interval_ms": 300,
    "profiles.default": {
        "header_nslots": 64,
        "payload_pools": [{"pool_id": 1, "stride_bytes": 1 << 12}, {"pool_id": 2, "stride_bytes": 1 << 16}],
    },
}
_numbers = itertools.count()


@pytest.fixture(scope="package")
def pool() -> Iterator[tp.Local]:
    """One driver for all; use stream names of your own."""
    with tp.local(overrides=SETTINGS) as pool:
        yield pool


@pytest.fixture(scope="package")
def client(pool: tp.Local) -> Iterator[tp.Client]:
    with pool.connect() as client:
        yield client


@pytest.fixture(scope="package")
def lake(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("lakes") / "lab"


@pytest.fixture(scope="package")
def console(pool: tp.Local, lake: Path) -> Iterator[Console]:
    """With one lake, which is not there yet."""
    settings = pool.config.dump()
    keys = ("shm.base_dir", "policies.announce_period_ms", "policies.lease_keepalive_interval_ms")
    options = [f"--set={key}={settings[key]}" for key in keys]
    chosen = ConsoleOptions(lakes=(str(lake),), record_options=("--aeron-dir", pool.aeron_dir, *options))
    with Console(pool.config, pool.aeron_dir, chosen) as console:
        yield console


@pytest.fixture
def site(console: Console) -> Site:
    return Site.of(console)


class Camera:
    """Publishes a picture of each seq on a thread, at a rate."""

    def __init__(self, client: tp.Client, name: str, paint: Callable[[int], Array], rate_hz: float) -> None:
        self.name = name
        self.paint = paint
        self.producer = client.producer(name, create=True)
        self._period_s = 1 / rate_hz
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def stream_id(self) -> int:
        return self.producer.stream_id

    def _run(self) -> None:
        while not self._stop.wait(self._period_s):
            self.producer.publish(self.paint(self.producer.next_seq))

    def stop(self) -> None:
        """Publish no more; the producer stays."""
        self._stop.set()
        self._thread.join()

    def close(self) -> None:
        self.stop()
        self.producer.close()


type MakeCamera = Callable[..., Camera]


def noise(shape: tuple[int, ...], dtype: str = "uint8") -> Callable[[int], Array]:
    """A picture for each seq, unlike those of other seqs."""

    def paint(seq: int) -> Array:
        chance = np.random.default_rng(seq)
        if np.dtype(dtype).kind == "f":
            return chance.standard_normal(shape).astype(dtype)
        return chance.integers(0, np.iinfo(dtype).max, shape, dtype=dtype, endpoint=True)

    return paint


@pytest.fixture
def camera(client: tp.Client) -> Iterator[MakeCamera]:
    """Makes cameras that end with the test: `camera(noise((48, 64, 3)), rate_hz=30)`."""
    made: list[Camera] = []

    def make(paint: Callable[[int], Array], *, rate_hz: float = 60.0) -> Camera:
        made.append(Camera(client, f"console/camera-{next(_numbers)}", paint, rate_hz))
        return made[-1]

    yield make
    for one in made:
        one.close()
