# SPDX-License-Identifier: Apache-2.0
"""Datasets in worker processes, forked and spawned from a process that has clients, threads and open files."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

import tensorpool as tp
from tensorpool.client import Client
from tensorpool.lake import Lake
from tensorpool.torch import LakeDataset, LiveDataset
from tests.support.deployment import consumer_leases
from tests.support.frame_rows import make_lake, rows_over_time
from tests.support.lakes import Camera
from tests.support.loading import LOADERS, WORKERS, load, with_process
from tests.support.processes import Process, run_script, wait_until


def held_open(frames: LakeDataset) -> tuple[threading.Thread, threading.Event]:
    """A thread that is in the middle of a read of the dataset's files until it is let go."""
    opened = frames._opened
    assert opened is not None
    lock = opened[1]._parts[0]._source.files._lock
    is_held, let_go = threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            is_held.set()
            let_go.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    is_held.wait()
    return thread, let_go


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
@pytest.mark.parametrize("loader", LOADERS)
def test_workers_read_a_lake_and_divide_a_live_stream(
    loader: str, method: str, pool: tp.Local, client: Client, stream: Callable[..., int], tmp_path: Path
) -> None:
    """A sample of a lake is the one of its index, though another thread was reading at the fork; of a live stream each
    worker takes the frames of its share, and what all of them took and lost can be read in the process that waits."""
    make_lake(tmp_path / "lake", rows_over_time(120))
    recorded = LakeDataset(tmp_path / "lake", transform=with_process)
    indices = [*range(0, 120, 7), *range(119, 0, -11)]
    live_stream = stream("deep")
    parts = 1 if loader == "torch" else WORKERS
    shares = [
        LiveDataset(
            live_stream,
            count=60 // parts,
            transform=with_process,
            share=(part, parts),
            aeron_dir=pool.aeron_dir,
            config=pool.config,
        )
        for part in range(parts)
    ]
    thread, let_go = held_open(recorded)
    try:
        with Camera(client, live_stream, hz=200):
            samples, found = load(loader, method, recorded, indices, shares)
    finally:
        let_go.set()
        thread.join()
    assert [one[1:] for one in samples] == [(index, index) for index in indices]
    assert len({pid for pid, _, _ in samples}) == WORKERS

    assert len(found) == 60
    spans = 0
    for pid in {pid for pid, _, _ in found}:
        seqs = [seq for own, seq, _ in found if own == pid]
        assert len(seqs) == 60 // WORKERS
        assert {seq % WORKERS for seq in seqs} == {seqs[0] % WORKERS}
        spans += (seqs[-1] - seqs[0]) // WORKERS + 1
    assert len({seq for _, seq, _ in found}) == 60
    counts = [share.counts for share in shares]
    assert sum(one.received for one in counts) == 60
    assert sum(one.received + one.lost for one in counts) == spans
    wait_until(lambda: consumer_leases(pool, live_stream) == 0, "the workers give their leases back")


def test_a_lake_in_a_bucket_is_not_read_in_a_forked_process(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would wait for threads that a fork does not copy: the error names the other ways to start workers."""
    monkeypatch.setenv("TENSORPOOL_SPOOL_DIR", str(tmp_path / "spool"))
    Lake.create(f"{bucket}/lake")
    code, output = run_script(_FORK, f"{bucket}/lake")
    assert (code, output.splitlines()[-1]) == (0, "0 True"), output


_FORK = """
import os, signal, sys
import tensorpool as tp
from tensorpool.errors import Closed
from tensorpool.torch import LakeDataset
frames = LakeDataset(sys.argv[1])
child = os.fork()
if child == 0:
    signal.alarm(30)
    refused = 0
    for read in (lambda: len(frames), lambda: tp.open(sys.argv[1])):
        try:
            read()
        except Closed as error:
            refused += "'forkserver' or 'spawn'" in str(error)
    os._exit(refused)
print(len(frames), os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2)
"""
_PARENT = """
import multiprocessing as mp, sys
from tensorpool.torch import LiveDataset

def work(frames, line):
    for _ in frames:
        line.put("a sample")

if __name__ == "__main__":
    import tensorpool as tp
    context = mp.get_context("fork")
    overrides = {"shm.base_dir": sys.argv[3]}
    line = context.Queue()
    frames = LiveDataset(int(sys.argv[1]), aeron_dir=sys.argv[2], overrides=overrides)
    context.Process(target=work, args=(frames, line)).start()
    print(line.get(), flush=True)
    sys.stdin.read()
"""


def test_a_worker_whose_parent_was_killed_gives_its_lease_back(
    pool: tp.Local, client: Client, stream: Callable[..., int]
) -> None:
    """It waits for frames without an end, but not for a parent that is gone."""
    own = stream()
    with (
        client.producer(own, create=True) as producer,
        Process("-c", _PARENT, str(own), pool.aeron_dir, pool.config.shm.base_dir) as parent,
    ):
        wait_until(lambda: consumer_leases(pool, own) == 1, "the worker has attached")
        producer.wait_for_consumers()
        producer.publish(b"a frame", dtype=tp.Dtype.BYTES)
        assert parent.read_line() == "a sample"
        parent.send(signal.SIGKILL)
        wait_until(lambda: consumer_leases(pool, own) == 0, "the worker has ended")
