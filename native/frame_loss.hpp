// SPDX-License-Identifier: Apache-2.0
// Why a bridge did not publish a frame. Bridge §5, §6, §8.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace tensorpool {

// Why a frame was not published. A frame whose chunks are all refused is counted once, at its chunk 0.
enum class FrameLoss : std::uint8_t {
    NONE = 0,
    INCONSISTENT,  // its chunks contradict each other or the rules
    CONFLICT,      // chunks overlap, or repeat with other content
    TIMEOUT,
    HEADER,         // its slot header is malformed or contradicts the chunks
    SOURCE_POOL,    // its pool was not announced
    SOURCE_STRIDE,  // larger than its pool's stride
    TOO_LARGE,      // above max_payload_bytes
    NO_POOL,        // no local pool holds it
    OUT_OF_ORDER,   // a later frame was published before it was whole
    EPOCH,          // of another epoch, or under assembly when the epoch changed
    NO_ANNOUNCE,
    NO_LEASE,  // there was no local memory to publish it in
    INFLIGHT,  // too many frames under assembly: the oldest goes
    CRC,       // its checksum is wrong, or never came
    PAUSED,
    SEQ_JUMP,  // further ahead than the source can be
    MAC,       // its authentication code is wrong, or never came
    COUNT_,
};

// As counters name them.
inline constexpr std::array<const char*, static_cast<std::size_t>(FrameLoss::COUNT_)> kFrameLossNames{
    "",          "inconsistent", "conflict",     "timeout", "header",      "source_pool", "source_stride",
    "too_large", "no_pool",      "out_of_order", "epoch",   "no_announce", "no_lease",    "inflight",
    "crc",       "paused",       "seq_jump",     "mac"};

}  // namespace tensorpool
