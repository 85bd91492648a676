// SPDX-License-Identifier: Apache-2.0
// FrameDescriptor (schema 900, template 4) encoded and decoded where Python would be too slow: once per frame.
// Wire §10.2.1, §16; decisions A4, A6.
#pragma once

#include <cstdint>
#include <span>

#include "layout.hpp"

namespace tensorpool {

struct FrameDescriptor {
    std::uint32_t stream_id = 0;
    std::uint64_t epoch = 0;
    std::uint64_t seq = 0;
    std::uint64_t timestamp_ns = kNullU64;
    std::uint32_t meta_version = kNullU32;
    std::uint64_t trace_id = 0;

    static constexpr std::uint64_t kNullU64 = ~std::uint64_t{0};
    static constexpr std::uint32_t kNullU32 = ~std::uint32_t{0};
    static constexpr std::size_t kBytes = 48;
    static constexpr std::uint64_t kHeader = 0x0001'0384'0004'0028;  // block 40, template 4, schema 900, version 1

    void encode(std::uint8_t* at) const noexcept {
        store<std::uint64_t>(at, kHeader);
        store<std::uint32_t>(at + 8, stream_id);
        store<std::uint64_t>(at + 12, epoch);
        store<std::uint64_t>(at + 20, seq);
        store<std::uint64_t>(at + 28, timestamp_ns);
        store<std::uint32_t>(at + 36, meta_version);
        store<std::uint64_t>(at + 40, trace_id);
    }

    // False for anything that is not exactly a version-1 FrameDescriptor.
    bool decode(std::span<const std::uint8_t> message) noexcept {
        if (message.size() != kBytes || load<std::uint64_t>(message.data()) != kHeader) return false;
        stream_id = load<std::uint32_t>(message.data() + 8);
        epoch = load<std::uint64_t>(message.data() + 12);
        seq = load<std::uint64_t>(message.data() + 20);
        timestamp_ns = load<std::uint64_t>(message.data() + 28);
        meta_version = load<std::uint32_t>(message.data() + 36);
        trace_id = load<std::uint64_t>(message.data() + 40);
        return true;
    }
};

}  // namespace tensorpool
