// SPDX-License-Identifier: Apache-2.0
// The private extensions bridge.crc32c and bridge.mac_key_file: what proves that a frame arrived as it was sent, and the
// message that carries it on the control stream. Schema 902, template 9001, which no published schema has: receivers
// that do not know it skip it, and the chunks stay as they are.
//
//   streamId u32 · epoch u64 · seq u64 · payloadLength u32 · crc32c u32, and with a key: mac 16 bytes
//
// crc32c is over the 256 bytes of the slot header as chunk 0 carries them, then over the payload. mac is BLAKE2b with the
// key over the first 24 bytes of the block (which frame it is), the trace id where the chunks carry one (8 bytes), the
// slot header and the payload; crc32c is 0 then. It may arrive before or after the chunks; a receiver that checks waits
// for it until the assembly timeout. Bridge §5.4.
#pragma once

#include <algorithm>
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
        std::array<std::uint8_t, 32> identity;
        store<std::uint32_t>(identity.data(), frame.stream_id);
        store<std::uint64_t>(identity.data() + 4, frame.epoch);
        store<std::uint64_t>(identity.data() + 12, frame.seq);
        store<std::uint32_t>(identity.data() + 20, frame.payload_length);
        store<std::uint64_t>(identity.data() + 24, frame.trace_id);
        mac_->update(std::span(identity).first(frame.trace_id == 0 ? 24 : 32));
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

// The digest of a frame as a message.
struct DigestMessage {
    static constexpr std::size_t kBytes = 8 + 28;
    static constexpr std::size_t kBytesWithMac = kBytes + FrameDigest{}.mac.size();

    std::uint32_t stream_id = 0;
    std::uint64_t epoch = 0;
    std::uint64_t seq = 0;
    std::uint32_t payload_length = 0;
    FrameDigest digest;
    bool has_mac = false;

    std::size_t bytes() const noexcept { return has_mac ? kBytesWithMac : kBytes; }

    void encode(std::uint8_t* at) const noexcept {
        store<std::uint64_t>(at, kMessage | (bytes() - 8));
        store<std::uint32_t>(at + 8, stream_id);
        store<std::uint64_t>(at + 12, epoch);
        store<std::uint64_t>(at + 20, seq);
        store<std::uint32_t>(at + 28, payload_length);
        store<std::uint32_t>(at + 32, digest.crc32c);
        if (has_mac) std::copy(digest.mac.begin(), digest.mac.end(), at + kBytes);
    }

    // False for anything else.
    bool decode(std::span<const std::uint8_t> message) noexcept {
        has_mac = message.size() == kBytesWithMac;
        if (message.size() != bytes() || load<std::uint64_t>(message.data()) != (kMessage | (bytes() - 8)))
            return false;
        const std::uint8_t* const at = message.data();
        stream_id = load<std::uint32_t>(at + 8);
        epoch = load<std::uint64_t>(at + 12);
        seq = load<std::uint64_t>(at + 20);
        payload_length = load<std::uint32_t>(at + 28);
        digest.crc32c = load<std::uint32_t>(at + 32);
        if (has_mac) std::copy_n(at + kBytes, digest.mac.size(), digest.mac.begin());
        return true;
    }

private:
    static constexpr std::uint64_t kMessage = 0x0001'0386'2329'0000;  // template 9001, schema 902, version 1
};

}  // namespace tensorpool
