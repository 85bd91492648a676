# SPDX-License-Identifier: Apache-2.0
"""Worker processes that take samples of datasets, started as a DataLoader starts its own; and a DataLoader's, if there.

PyTorch is too large for the lock file: the loader "processes" needs none of it, "torch" is tried where it is installed.
"""

from __future__ import annotations

import importlib.util
import multiprocessing as mp
import warnings
from collections.abc import Sequence
from typing import Any, Final

from tensorpool.torch import LakeDataset, LiveDataset, Sample

WORKERS: Final = 2
LOADERS: Final = ["processes", *(["torch"] if importlib.util.find_spec("torch") else [])]
PATIENCE_S: Final = 120.0

type Found = list[tuple[int, int, int]]  # the number of a worker's process, the seq and the first value of each sample


def with_process(sample: Sample) -> tuple[int, int, int]:
    """Which process made the sample, its seq, and its first byte."""
    return mp.current_process().pid or 0, sample.seq, int(sample.array.flat[0])


def unpacked(batch: Sequence[Any]) -> Any:
    """A batch as it is."""
    return batch


def load(
    loader: str, method: str, recorded: LakeDataset, indices: Sequence[int], live: Sequence[LiveDataset]
) -> tuple[Found, Found]:
    """The samples of a lake at these indices, in their order, then all of a live stream, each taken by one of WORKERS.

    A DataLoader divides one live dataset; otherwise each worker has one with a share of its own.
    """
    if loader == "torch":
        return _flat(_torch_loader(recorded, method, sampler=indices)), _flat(_torch_loader(live[0], method))
    jobs = [(recorded, indices[worker::WORKERS], share) for worker, share in enumerate(live)]
    found = _run(method, jobs)
    in_order = [found[at % WORKERS][0][at // WORKERS] for at in range(len(indices))]
    return in_order, [one for _, samples in found for one in samples]


def _flat(loader: Any) -> Found:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # that a process with threads forks
        return [one for batch in loader for one in batch]


def _torch_loader(dataset: Any, method: str, **how: Any) -> Any:
    from torch.utils.data import DataLoader

    return DataLoader(
        dataset, batch_size=4, num_workers=WORKERS, multiprocessing_context=method, collate_fn=unpacked, **how
    )


def _run(method: str, jobs: Sequence[tuple[Any, ...]]) -> list[tuple[Found, Found]]:
    context = mp.get_context(method)
    pipes = [context.Pipe(duplex=False) for _ in jobs]
    processes = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # that a process with threads forks
        for job, (_, answer) in zip(jobs, pipes, strict=True):
            processes.append(context.Process(target=_work, args=(answer, *job), daemon=True))  # type: ignore[attr-defined]
            processes[-1].start()
            answer.close()
    try:
        found = []
        for receive, _ in pipes:
            assert receive.poll(PATIENCE_S), "a worker gives no answer"
            found.append(receive.recv())
        for process in processes:
            process.join(PATIENCE_S)
        assert [process.exitcode for process in processes] == [0] * len(processes)
    finally:
        for process in processes:
            process.kill()
            process.join()
    return found


def _work(answer: Any, recorded: LakeDataset, indices: Sequence[int], live: LiveDataset) -> None:
    answer.send((recorded.__getitems__(indices), list(live)))
