// SPDX-License-Identifier: Apache-2.0
// The commit word of a slot: seq_commit = seq << 1 | committed, one aligned 8-byte atomic.
// Everything that orders payload and header against it is here. Wire §8.3, §15.3; decisions A20, A21, B1.
//
// Writer                                        Reader
//   begin:  store in-progress                     peek:   load word          (acquire)
//           fence release  ───── pairs with ────►         … read the slot …
//           … write the slot …                    recheck: fence acquire
//   commit: store committed (release) ──────────►          load word, must be unchanged
//
// The fence in begin keeps the slot's bytes from becoming visible before the in-progress word does, so a
// reader that saw any new byte sees a changed word on its recheck. The fence in recheck keeps the reads of the
// slot from sinking below the second load.
#pragma once

#include <atomic>
#include <cstdint>

#include "layout.hpp"

namespace tensorpool {

inline constexpr std::uint64_t kMaxSeq = (std::uint64_t{1} << 63) - 1;  // A20: 63 usable bits

inline constexpr std::uint64_t in_progress(std::uint64_t seq) noexcept { return seq << 1; }
inline constexpr std::uint64_t committed(std::uint64_t seq) noexcept { return (seq << 1) | 1; }

// A view of one commit word. §8.2: 8-byte aligned, within one cache line: slots start at 64 + 256 * i.
class CommitWord {
public:
    explicit CommitWord(const std::uint8_t* slot) noexcept
        : word_(const_cast<std::uint64_t*>(reinterpret_cast<const std::uint64_t*>(slot))) {}

    std::uint64_t peek() const noexcept {
        return std::atomic_ref(*word_).load(std::memory_order_acquire);  // pairs with the release in commit
    }

    std::uint64_t recheck() const noexcept {
        std::atomic_thread_fence(std::memory_order_acquire);  // pairs with the release fence in begin
        return std::atomic_ref(*word_).load(std::memory_order_relaxed);
    }

    void begin(std::uint64_t seq) noexcept {
        std::atomic_ref(*word_).store(in_progress(seq), std::memory_order_release);
        std::atomic_thread_fence(std::memory_order_release);  // pairs with the acquire fence in recheck
    }

    void commit(std::uint64_t seq) noexcept {
        std::atomic_ref(*word_).store(committed(seq), std::memory_order_release);  // pairs with the acquire in peek
    }

    // The half that changes at every commit; a futex waits on 32 bits.
    const std::uint32_t* low_half() const noexcept { return reinterpret_cast<const std::uint32_t*>(word_); }

private:
    std::uint64_t* word_;
};

}  // namespace tensorpool
