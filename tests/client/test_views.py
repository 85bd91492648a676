# SPDX-License-Identifier: Apache-2.0
"""Views that live on while everything around them goes: no fault, and no torn data taken for whole.

A process of its own publishes and reads without pause and does at random what a program may do to its views: keeps and
drops them, slices them, lends them to DLPack and to memoryviews, collects garbage, forks; and to what is behind them:
another epoch, a lease that is revoked, a consumer, a producer or a client that is closed, files that are removed, and
at the end the whole driver. Every frame is filled with one value that its epoch and seq determine, so that a torn or
foreign one shows. Seeds are printed.
"""

from __future__ import annotations

import pytest

from tests.support.processes import run_script

PROGRAM = """
import gc, os, random, sys, threading, time, warnings
from pathlib import Path
import numpy as np
import tensorpool as tp

warnings.simplefilter("ignore")  # that a process with threads is forked
seed, steps = int(sys.argv[1]), int(sys.argv[2])
choose = random.Random(seed)
NSLOTS, WORDS = 4, 4096
OVERRIDES = {
    "driver.stream_id_range": [20000, 20099],
    "policies.announce_period_ms": 200,
    "policies.lease_keepalive_interval_ms": 500,
    "policies.epoch_gc_keep": 1,
    "policies.epoch_gc_min_age_ns": 0,
    "profiles.default": {"header_nslots": NSLOTS, "payload_pools": [{"pool_id": 1, "stride_bytes": 4 * WORDS}]},
}


def value(epoch, seq):
    return np.uint32((epoch * 2654435761 + seq * 40503 + 1) & 0xFFFFFFFF)


class Writer:
    '''Publishes without pause on a thread of its own, copying without the GIL.'''

    def __init__(self, client):
        self.producer = client.producer("views", create=True, timeout=30, release_gil_from_bytes=1)
        self.is_over = False
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def run(self):
        while not self.is_over:
            epoch, seq = self.producer.epoch, self.producer.next_seq
            if epoch is None:
                time.sleep(0.001)
                continue
            try:
                slot = self.producer.claim((WORDS,), np.uint32)
                if slot.seq is None or self.producer.epoch != epoch:
                    slot.abandon()
                    continue
                slot.array[:] = value(epoch, slot.seq)
                slot.commit()
                array = np.full(WORDS, value(epoch, slot.seq + 1) if slot.seq is not None else 0, np.uint32)
                if slot.seq is not None and self.producer.epoch == epoch:
                    self.producer.publish(array, seq=slot.seq + 1)
            except (tp.Closed, ValueError):
                continue  # it was closed, or lost its lease in between
            if choose_writer.random() < 0.05:
                time.sleep(0.0005)

    def close(self):
        self.is_over = True
        self.thread.join()
        self.producer.close()


choose_writer = random.Random(seed + 1)


class Held:
    '''Something that shows a frame's memory, and what it must show.'''

    def __init__(self, frame, show, keeps_frame):
        self.value = value(frame.epoch, frame.seq)
        self.show = show
        self.frame = frame if keeps_frame else None

    def check(self):
        '''Read it; what reads as whole is whole.'''
        seen = np.unique(np.asarray(self.show))  # reads every byte, without a fault
        if self.frame is None:
            return None
        is_whole = self.frame.is_intact()
        if is_whole:
            assert list(seen) == [self.value], (seed, "torn data was taken for whole", self.frame, seen, self.value)
        return is_whole


def shown(frame):
    '''One of the ways to look at a frame.'''
    view = frame.array
    kind = choose.randrange(6)
    if kind == 0:
        return view
    if kind == 1:
        return view[choose.randrange(WORDS // 2) :: choose.choice([1, 2, -1])]
    if kind == 2:
        return np.from_dlpack(frame)
    if kind == 3:
        return np.frombuffer(memoryview(view), np.uint32)
    if kind == 4:
        return view.reshape(64, -1).T
    return np.asarray(frame)


def fork():
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            for it in held:
                it.check()
            choose.shuffle(held)
            del held[: len(held) // 2]
            gc.collect()
            for it in held:
                it.check()
            held.clear()
            gc.collect()
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(pid, 0)[1] == 0, (seed, "a forked child failed")


it = frame = None
held, counts = [], {"whole": 0, "overwritten": 0, "epochs": 0, "forks": 0}
pool = tp.local(overrides=OVERRIDES)
client = pool.connect()
writer = Writer(client)
reader_client = pool.connect()
consumer = reader_client.consumer("views", timeout=30)

for step in range(steps):
    action = choose.random()
    if action < 0.45:
        frame = consumer.poll(0.05) if choose.random() < 0.7 else consumer.latest()
        if frame is not None:
            held.append(Held(frame, shown(frame), choose.random() < 0.8))
    elif action < 0.65 and held:
        is_whole = choose.choice(held).check()
        counts["whole"] += is_whole is True
        counts["overwritten"] += is_whole is False
    elif action < 0.75:
        frame = consumer.poll(0.05)
        if frame is not None:
            try:
                seen = np.unique(frame.copy())
                assert list(seen) == [value(frame.epoch, frame.seq)], (seed, "a torn copy", frame, seen)
                counts["whole"] += 1
            except tp.FrameOverwritten:
                counts["overwritten"] += 1
    elif action < 0.85 and held:
        choose.shuffle(held)
        del held[: choose.randrange(len(held) + 1)]
    elif action < 0.90:
        gc.collect()
    elif action < 0.93:
        writer.close()  # the next one has another epoch, and old ones are removed
        writer = Writer(client)
        counts["epochs"] += 1
    elif action < 0.95:
        if (lease := consumer.lease_id) is not None:
            pool.conductor.revoke(lease)
    elif action < 0.965:
        consumer.close()
        consumer = reader_client.consumer("views", timeout=30)
    elif action < 0.98:
        reader_client.close()
        reader_client = pool.connect()
        consumer = reader_client.consumer("views", timeout=30)
    elif action < 0.99:
        for path in Path(pool.config.shm.base_dir).rglob("*.pool"):
            if choose.random() < 0.3 and str(writer.producer.epoch) not in str(path):
                path.unlink(missing_ok=True)
    else:
        fork()
        counts["forks"] += 1
    if len(held) > 60:
        del held[:30]

fork()
writer.close()
reader_client.close()
client.close()
pool.close()
for it in held:
    it.check()
del it, consumer, frame, writer
gc.collect()
choose.shuffle(held)
while held:
    held.pop().check()
gc.collect()
with open("/proc/self/maps") as maps:
    left = [line for line in maps if "tensorpool-local" in line and ".pool" in line]
assert not left, (seed, "memory is still mapped", left)
print(counts)
"""


@pytest.mark.spec("WIRE-8.3-17", "WIRE-15.13-02")
@pytest.mark.parametrize("seed", [1, 2])
def test_views_survive_whatever_happens_around_them(seed: int) -> None:
    """A fault would be a signal, torn data an assertion."""
    code, output = run_script(PROGRAM, str(seed), "220", timeout_s=100)
    assert code == 0, f"seed {seed}: {output[-3000:]}"
    assert "'whole': 0," not in output
    assert "'overwritten': 0," not in output
