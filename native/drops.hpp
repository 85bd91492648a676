// SPDX-License-Identifier: Apache-2.0
// Why a frame was not delivered. Loss is normal and never an error: it is counted under one of these.
// Wire §15.3, §15.4, §15.21; decisions B6, B9-B16, B27.
#pragma once

#include <array>
#include <cstdint>

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
    NO_POOL,  // larger than every pool's stride (§9)
    COUNT_,
};

inline constexpr std::size_t kDropCount = static_cast<std::size_t>(Drop::COUNT_);

// B27: what QosConsumer.drops_late counts.
inline constexpr bool is_late(Drop drop) noexcept {
    return drop == Drop::NOT_COMMITTED || drop == Drop::OVERWRITTEN || drop == Drop::STALE;
}

using DropCounts = std::array<std::uint64_t, kDropCount>;

}  // namespace tensorpool
