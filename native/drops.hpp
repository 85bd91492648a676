// SPDX-License-Identifier: Apache-2.0
// Why a frame was not delivered. Loss is normal and never an error: it is counted under one of these.
// Wire §15.3, §15.4, §15.21; decisions B6, B9-B16, B27-B30, B33.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "relaxed_counter.hpp"

namespace tensorpool {

enum class Drop : std::uint8_t {
    NONE = 0,
    // drops_late: the slot no longer, or not yet, holds the frame
    NOT_COMMITTED,  // the producer is still writing this very frame
    OVERWRITTEN,    // the slot moved on to a later frame, before or during the read
    STALE,          // the slot still holds an earlier frame
    // a header that no conforming producer writes
    BAD_EMBEDDED_HEADER,
    BAD_PAYLOAD_OFFSET,
    BAD_PAYLOAD_SLOT,
    BAD_POOL,
    BAD_LENGTH,
    BAD_DTYPE,
    BAD_MAJOR_ORDER,
    BAD_NDIMS,
    BAD_DIMS,
    BAD_STRIDES,
    BAD_PROGRESS,
    // the producer's side
    NO_POOL,    // larger than every pool's stride (§9)
    DETACHED,   // published while there was no lease, or no memory, to publish with
    ABANDONED,  // given up after its progress was reported: its seq is not used again
    // frames that a consumer knows of by their seq alone
    GAP,           // its descriptor never came
    RESYNC,        // skipped to catch up: more than max_outstanding_seq_gap behind
    UNMAPPED,      // published while the consumer had its epoch not, or not yet, mapped
    EPOCH_ENDED,   // committed, but not yet seen when the epoch ended
    RATE_LIMITED,  // skipped to keep to max_rate_hz
    SKIPPED,       // skipped because the caller asked for the newest frame
    // a frame that contradicts the one before it
    BAD_TIMESTAMP,  // §15.7: slot and descriptor carry a time, and one of them went back
    COUNT_,
};

inline constexpr std::size_t kDropCount = static_cast<std::size_t>(Drop::COUNT_);

// B27: what QosConsumer.drops_late counts.
inline constexpr bool is_late(Drop drop) noexcept {
    return drop == Drop::NOT_COMMITTED || drop == Drop::OVERWRITTEN || drop == Drop::STALE;
}

// B27, B30: what QosConsumer.drops_gap counts.
inline constexpr bool is_gap(Drop drop) noexcept { return drop == Drop::GAP || drop == Drop::RESYNC; }

// How many frames were dropped for each reason. The reading thread counts; any thread may ask.
struct DropCounters : std::array<RelaxedCounter, kDropCount> {
    RelaxedCounter& of(Drop drop) noexcept { return (*this)[static_cast<std::size_t>(drop)]; }
    std::uint64_t count(Drop drop) const noexcept { return (*this)[static_cast<std::size_t>(drop)].get(); }
};

}  // namespace tensorpool
