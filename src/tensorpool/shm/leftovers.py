# SPDX-License-Identifier: Apache-2.0
"""Epochs that a dead driver left behind, told apart from those of the living.

An epoch is dead when its namespace has no driver (the lock can be taken), its owner's process is gone and its activity
stamp is stale: all three, so that neither a pid from another container nor a paused driver misleads.
Wire §15.21a.7; decisions C8, C11.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from tensorpool.clock import Clock
from tensorpool.errors import ConfigError
from tensorpool.shm.epochs import EpochTree, FoundEpoch, scan_epochs
from tensorpool.shm.liveness import liveness_of
from tensorpool.shm.namespace import find_namespaces


def dead_epochs(namespace_path: str, clock: Clock, window_ns: int) -> list[FoundEpoch]:
    """Epochs whose owner's process is gone and whose last sign of life is older than `window_ns`.

    An epoch without a superblock was never finished: it is dead once all its finished neighbours are.
    """
    found = scan_epochs(namespace_path)
    now_ns = clock.monotonic_ns()
    dead = []
    for epoch in found:
        if epoch.superblock is not None:
            facts = liveness_of(epoch.superblock, now_ns)
            if facts.is_process_alive or facts.is_active(window_ns):
                return []
        dead.append(epoch)
    return dead if any(epoch.superblock is not None for epoch in dead) else []


def remove_dead_epochs(
    base_dir: str, clock: Clock, window_ns: int, *, except_namespace: str = ""
) -> Iterator[FoundEpoch]:
    """Remove and yield the dead epochs of every namespace below `base_dir` that has no driver."""
    for path in find_namespaces(base_dir):
        if path == except_namespace:
            continue
        with contextlib.suppress(OSError, ConfigError):  # not ours to read, or a driver holds it
            if not dead_epochs(path, clock, window_ns):
                continue
            with EpochTree(path, clock=clock) as tree:
                for epoch in dead_epochs(path, clock, window_ns):  # again, now that nobody can come back to life
                    tree.remove(epoch.stream_id, epoch.epoch)
                    yield epoch
