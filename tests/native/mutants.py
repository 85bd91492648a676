# SPDX-License-Identifier: Apache-2.0
"""Proof that the tests of the slot protocol can fail: known mistakes, put into copies of the native headers.

    python -m tests.native.mutants            build every mutant and show how it is caught
    python -m tests.native.mutants no-begin   only this one

A mistake in the order of steps shows in the stress (torn_reads.cpp) within seconds. Most missing fences do
not show on x86, which keeps plain stores and plain loads in order; they are caught by litmus.cpp, which
permutes the recorded accesses as a weaker machine would.
"""

from __future__ import annotations

import platform
import sys
from typing import NamedTuple

from tests.native.programs import Edit, Run, build, run


class Mutant(NamedTuple):
    name: str
    mistake: str
    program: str
    edits: tuple[Edit, ...]
    arguments: tuple[str, ...] = ()
    is_x86_only: bool = False

    def attack(self, seconds: float = 15) -> Run:
        """Builds the mutant and runs its program, which ends with the first torn read."""
        limit = ("--seconds", str(seconds)) if self.program == "torn_reads" else ()
        return run(build(self.program, self.edits), *limit, *self.arguments, timeout=seconds + 30)


def is_caught(result: Run) -> bool:
    """Whether the program itself said what is wrong; a crash or a wrong total alone does not count."""
    report = result.report
    findings = ("torn_header", "torn_payload", "unexplained", "torn_outcomes")
    return result.code == 1 and any(report.get(finding, 0) > 0 for finding in findings)


# Streaming stores for everything from 256 bytes, whatever the size of the cache.
STREAM_ALWAYS = Edit(
    "copy.hpp",
    "return bytes >= kStreamingFromBytes && exceeds_cache(total_bytes);",
    "return bytes >= 256 && total_bytes > 0;",
)
NO_SFENCE_AFTER_COPY = Edit(
    "copy.hpp",
    "    copy_streaming(to, from, bytes);\n    streaming_fence();\n",
    "    copy_streaming(to, from, bytes);\n",
)
FENCE = "std::atomic_thread_fence(std::memory_order_"
STORE_RELAXED = "store(committed(seq), std::memory_order_relaxed)"

EVERY_MUTANT = (
    Mutant(
        "no-header-recheck",
        "read() does not look at the commit word again after copying the slot",
        "torn_reads",
        (Edit("ring.hpp", "        if (word.recheck() != seen) return Drop::OVERWRITTEN;\n", ""),),
    ),
    Mutant(
        "no-payload-recheck",
        "intact() and copy() do not look at the commit word again",
        "torn_reads",
        (
            Edit(
                "ring.hpp",
                "return CommitWord(geometry_.slot(frame.slot)).recheck() == committed(frame.seq);",
                "return frame.seq <= kMaxSeq;",
            ),
        ),
    ),
    Mutant(
        "recheck-of-the-commit-bit-only",
        "intact() accepts a later frame in the same slot",
        "torn_reads",
        (
            Edit(
                "ring.hpp",
                "return CommitWord(geometry_.slot(frame.slot)).recheck() == committed(frame.seq);",
                "return (CommitWord(geometry_.slot(frame.slot)).recheck() & 1) == 1;",
            ),
        ),
    ),
    Mutant(
        "header-read-in-place",
        "read() parses the slot itself instead of a copy that was checked",
        "torn_reads",
        (
            Edit(
                "ring.hpp",
                "        alignas(64) std::uint8_t image[kHeaderSlotBytes];\n"
                "        copy_racing(image, geometry_.slot(index), kHeaderSlotBytes);\n",
                "        const std::uint8_t* const image = geometry_.slot(index);\n",
            ),
        ),
    ),
    Mutant(
        "no-begin",
        "the writer does not mark the slot as in progress",
        "torn_reads",
        (
            Edit(
                "seqlock.hpp",
                "        std::atomic_ref(*word_).store(in_progress(seq), std::memory_order_release);\n",
                "",
            ),
        ),
    ),
    Mutant(
        "commit-before-payload",
        "the writer commits first and copies afterwards",
        "torn_reads",
        (
            Edit(
                "ring.hpp",
                "        word.begin(seq);\n",
                "        word.begin(seq);\n        word.commit(seq);\n",
            ),
        ),
    ),
    Mutant(
        "commit-before-header",
        "the writer commits the payload and writes the header afterwards",
        "torn_reads",
        (
            Edit(
                "ring.hpp",
                "        write_header(slot, layout, pool, index, timestamp_ns, meta_version, trace_id);\n"
                "        word.commit(seq);\n",
                "        word.commit(seq);\n"
                "        write_header(slot, layout, pool, index, timestamp_ns, meta_version, trace_id);\n",
            ),
        ),
    ),
    Mutant(
        "no-fence-after-begin",
        "payload and header may become visible before the in-progress word",
        "litmus",
        (Edit("seqlock.hpp", f"        {FENCE}release);  // pairs with the acquire fence in recheck\n", ""),),
    ),
    Mutant(
        "no-fence-before-recheck",
        "the commit word may be looked at again before the slot was read",
        "litmus",
        (Edit("seqlock.hpp", f"        {FENCE}acquire);  // pairs with the release fence in begin\n", ""),),
    ),
    Mutant(
        "relaxed-commit",
        "the commit word may become visible before payload and header",
        "litmus",
        (Edit("seqlock.hpp", "store(committed(seq), std::memory_order_release)", STORE_RELAXED),),
    ),
    Mutant(
        "relaxed-peek",
        "the slot may be read before the commit word",
        "litmus",
        (
            Edit(
                "seqlock.hpp",
                ".load(std::memory_order_acquire);  // pairs",
                ".load(std::memory_order_relaxed);  //",
            ),
        ),
    ),
    Mutant(
        "streaming-stores-pass-begin",
        "a copy's streaming stores may become visible before the in-progress word",
        "litmus",
        (Edit("copy.hpp", "if (streaming || bytes >= kMemcpyMayStreamFromBytes) streaming_fence();", ""),),
        is_x86_only=True,
    ),
    Mutant(
        "large-memcpy-passes-begin",
        "a memcpy that streams by its own choice is not fenced against the in-progress word",
        "litmus",
        (Edit("copy.hpp", "if (streaming || bytes >= kMemcpyMayStreamFromBytes)", "if (streaming)"),),
        is_x86_only=True,
    ),
    Mutant(
        "commit-passes-streaming-stores",
        "streaming stores are not fenced before the commit",
        "litmus",
        (NO_SFENCE_AFTER_COPY,),
        is_x86_only=True,
    ),
    Mutant(
        "streaming-claim-passes-begin",
        "the streaming stores of a claim's owner may become visible before the in-progress word",
        "litmus",
        (Edit("ring.hpp", "        streaming_fence();  // the owner of the claim may use", "        //"),),
        is_x86_only=True,
    ),
    Mutant(
        "commit-passes-streaming-claim",
        "a claim is committed before its owner's streaming stores are visible",
        "litmus",
        (
            Edit(
                "ring.hpp",
                "        streaming_fence();  // the owner of the claim may have used",
                "        //",
            ),
        ),
        is_x86_only=True,
    ),
)


MUTANTS = tuple(mutant for mutant in EVERY_MUTANT if platform.machine() == "x86_64" or not mutant.is_x86_only)


def main(names: list[str]) -> int:
    chosen = [mutant for mutant in MUTANTS if not names or mutant.name in names]
    missed = 0
    for mutant in chosen:
        result = mutant.attack()
        caught = is_caught(result)
        missed += not caught
        found = {
            key: value for key, value in result.report.items() if ("torn" in key or key == "unexplained") and value
        }
        print(f"{'caught' if caught else 'MISSED':7} {mutant.name:32} {result.seconds:6.2f} s  {found}")
    return 1 if missed or not chosen else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
