// SPDX-License-Identifier: Apache-2.0
// The private extensions bridge.crc32c and bridge.mac_key_file: what proves that a frame arrived as it was sent.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "blake2b.hpp"
#include "chunk.hpp"
#include "crc32c.hpp"

namespace tensorpool {

struct FrameDigest {
    std::uint32_t crc32c = 0;
    std::array<std::uint8_t, 16> mac{};

    // In a time that does not tell how much of a forged code was right.
    bool operator==(const FrameDigest& other) const noexcept {
        std::uint32_t differs = crc32c ^ other.crc32c;
        for (std::size_t i = 0; i < mac.size(); ++i) differs |= mac[i] ^ other.mac[i];
        return differs == 0;
    }
};

// With a key a MAC over the frame's identity, its slot header and its payload; without one a CRC32C of the last two.
class FrameDigester {
public:
    FrameDigester(std::span<const std::uint8_t> key, const ChunkPlace& frame) {
        if (key.empty()) return;
        mac_.emplace(key, FrameDigest{}.mac.size());
        std::array<std::uint8_t, 24> identity;
        store<std::uint32_t>(identity.data(), frame.stream_id);
        store<std::uint64_t>(identity.data() + 4, frame.epoch);
        store<std::uint64_t>(identity.data() + 12, frame.seq);
        store<std::uint32_t>(identity.data() + 20, frame.payload_length);
        mac_->update(identity);
    }

    void update(std::span<const std::uint8_t> bytes) noexcept {
        if (mac_)
            mac_->update(bytes);
        else
            crc_ = crc32c(bytes, crc_);
    }

    FrameDigest digest() const noexcept {
        FrameDigest found{crc_, {}};
        if (mac_) {
            Blake2b copy = *mac_;
            copy.finish(found.mac);
        }
        return found;
    }

private:
    std::uint32_t crc_ = 0;
    std::optional<Blake2b> mac_;
};

}  // namespace tensorpool
