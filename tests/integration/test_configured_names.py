# SPDX-License-Identifier: Apache-2.0
"""A stream that the driver's configuration names, asked for by its name while the driver starts."""

from __future__ import annotations

from pathlib import Path

import tensorpool as tp
from tensorpool import aeron
from tests.support.driver_process import Deployment

STREAM = 38_000


def test_a_configured_name_is_found_while_the_driver_starts(media_driver: aeron.MediaDriver, shm_dir: Path) -> None:
    """By a client that asks before the driver does anything, several times over."""
    for _ in range(4):
        deployment = Deployment(shm_dir, media_driver.aeron_dir, streams=[STREAM])
        with deployment.start() as process:
            config = tp.DriverConfig.load(deployment.config_path, environ={})
            with (
                tp.connect(media_driver.aeron_dir, config=config) as client,
                client.producer(f"s{STREAM}", timeout=60) as producer,
            ):
                assert producer.stream_id == STREAM
            assert process.terminate()[0] == 0
