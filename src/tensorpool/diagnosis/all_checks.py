# SPDX-License-Identifier: Apache-2.0
"""Every check of `tensorpool doctor`, in an order in which the first failure explains the later ones.

Checks that need a media driver run only where one is alive, so that none waits in vain.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from tensorpool import aeron
from tensorpool.diagnosis.check_result import CheckResult, Level, warn
from tensorpool.diagnosis.directories import check_directories, check_region_files
from tensorpool.diagnosis.driver import check_discovery, check_driver, check_lock
from tensorpool.diagnosis.holders import check_holders
from tensorpool.diagnosis.layouts import check_layouts
from tensorpool.diagnosis.leftovers import check_leftovers, survey_everything
from tensorpool.diagnosis.limits import check_memlock, check_open_files, check_socket_buffers
from tensorpool.diagnosis.media_driver import check_media_driver
from tensorpool.diagnosis.software import check_aeron, check_copies, check_java, check_python, check_spark
from tensorpool.diagnosis.space import check_aeron_space, check_space
from tensorpool.driver.config import DriverConfig
from tensorpool.settings import lookalikes


def run_checks(config: DriverConfig, aeron_dir: str | None) -> Iterator[CheckResult]:
    """Each result as soon as it is known."""
    yield check_python()
    libaeron = check_aeron()
    yield libaeron
    yield check_copies()
    yield from _check_environment(config)
    if libaeron.level is not Level.FAIL:
        where = place_of(config, aeron_dir)
        media_driver = check_media_driver(where)
        yield media_driver
        if media_driver.level is not Level.FAIL:
            yield check_driver(config, where)
            yield from check_discovery(config, where)
            yield from check_holders(config, where)
        yield from check_leftovers(survey_everything(config, where))
    yield check_lock(config)
    yield from check_directories(config)
    yield from check_region_files(config)
    yield from check_layouts(config)
    yield check_space(config)
    yield check_aeron_space(place_of(config, aeron_dir))
    for result in (check_memlock(config), check_open_files(), check_socket_buffers(), check_spark(), check_java()):
        if result is not None:
            yield result


def place_of(config: DriverConfig, aeron_dir: str | None) -> str:
    """The media driver's directory, by flag, configuration, environment, or Aeron's default."""
    return aeron_dir or config.driver.aeron_dir or aeron.default_aeron_dir()


def _check_environment(config: DriverConfig) -> Iterator[CheckResult]:
    for name, key in lookalikes(config, os.environ).items():
        yield warn("environment", f"{name} is set, which nothing reads", f"did you mean {key}?")
