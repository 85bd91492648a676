// SPDX-License-Identifier: Apache-2.0
// BridgeFrameChunk (schema 902, template 1) on the wire: how a sender encodes it, and how a receiver decodes and checks
// it. Bridge §5.1, §5.2, §11; decisions A6, G1, G21.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "seqlock.hpp"

namespace tensorpool {

inline constexpr std::uint32_t kMaxChunks = 65'535;                        // §5.2
inline constexpr std::uint32_t kMaxChunkBytes = 65'535;                    // §11
inline constexpr std::uint32_t kMaxBridgedBytes = std::uint32_t{1} << 30;  // §11
inline constexpr std::size_t kChunkHeadBytes = 8 + 41 + 4 + 4;  // message header, block, the lengths of two varData
inline constexpr std::uint64_t kChunkHeader = 0x0001'0386'0001'0029;  // block 41, template 1, schema 902, version 1

// Which part of which frame it is.
struct ChunkPlace {
    std::uint32_t stream_id = 0;
    std::uint64_t epoch = 0;
    std::uint64_t seq = 0;
    std::uint32_t index = 0;
    std::uint32_t count = 0;
    std::uint32_t offset = 0;
    std::uint32_t length = 0;
    std::uint32_t payload_length = 0;  // of the whole frame
};

// A chunk to send: the part that is not payload.
struct ChunkHead : ChunkPlace {
    std::size_t head_bytes() const noexcept { return kChunkHeadBytes + (index == 0 ? kHeaderSlotBytes : 0); }
    std::size_t message_bytes() const noexcept { return head_bytes() + length; }

    // Everything but headerBytes and payloadBytes; returns where each of them goes.
    struct Places {
        std::uint8_t* header;  // 256 bytes, for chunk 0 only
        std::uint8_t* payload;
    };
    Places encode(std::uint8_t* at) const noexcept {
        store<std::uint64_t>(at, kChunkHeader);
        store<std::uint32_t>(at + 8, stream_id);
        store<std::uint64_t>(at + 12, epoch);
        store<std::uint64_t>(at + 20, seq);
        store<std::uint32_t>(at + 28, index);
        store<std::uint32_t>(at + 32, count);
        store<std::uint32_t>(at + 36, offset);
        store<std::uint32_t>(at + 40, length);
        store<std::uint32_t>(at + 44, payload_length);
        store<std::uint8_t>(at + 48, index == 0 ? 1 : 0);
        const std::uint32_t header_bytes = index == 0 ? kHeaderSlotBytes : 0;
        store<std::uint32_t>(at + 49, header_bytes);
        std::uint8_t* const header = at + 53;
        store<std::uint32_t>(header + header_bytes, length);
        return {header, header + header_bytes + 4};
    }
};

// Why a chunk was not used.
enum class ChunkDrop : std::uint8_t {
    NONE = 0,
    FOREIGN,         // another message
    MALFORMED,       // not decodable, or values that the schema does not have
    UNKNOWN_STREAM,  // no mapping
    CHUNK_COUNT,     // 0 or above 65535
    CHUNK_INDEX,     // not below the count
    HEADER,          // headerIncluded and headerBytes do not fit each other or the index
    LENGTH,          // payloadBytes are not chunkLength
    CHUNK_SIZE,      // above what the configuration allows
    NO_ANNOUNCE,     // the source's pools are not known yet
    EPOCH,           // not the announced one, or a higher one was seen
    LATE,            // of a frame that is not above the last one published
    DROPPED_FRAME,   // of a frame that was dropped
    PAUSED,
    FRAGMENTED,  // longer than a datagram
    ADDRESS,     // from an address that is not allowed
    SESSION,     // of another session than the one that the mapping follows
    SEQ_JUMP,    // further ahead than the source can be
    COUNT_,
};

// As counters name them.
inline constexpr std::array<const char*, static_cast<std::size_t>(ChunkDrop::COUNT_)> kChunkDropNames{
    "",           "foreign",    "malformed",   "unknown_stream", "chunk_count", "chunk_index",   "header",
    "length",     "chunk_size", "no_announce", "epoch",          "late",        "dropped_frame", "paused",
    "fragmented", "address",    "session",     "seq_jump"};

// A chunk that arrived, as it stands in a message.
struct ArrivedChunk : ChunkPlace {
    bool has_header = false;
    std::span<const std::uint8_t> header;
    std::span<const std::uint8_t> payload;

    // What is wrong with the message or with the chunk by itself; the spans are views of the message.
    ChunkDrop decode(std::span<const std::uint8_t> message) noexcept {
        if (message.size() < 8) return ChunkDrop::MALFORMED;
        const std::uint8_t* const at = message.data();
        const auto head = load<std::uint64_t>(at);
        if (head != kChunkHeader)  // A6: of version 1 only this block is known
            return (head ^ kChunkHeader) >> 16 == 0 || (head >> 16 & 0xffff'ffff) == 0x0386'0001 ? ChunkDrop::MALFORMED
                                                                                                 : ChunkDrop::FOREIGN;
        if (message.size() < kChunkHeadBytes) return ChunkDrop::MALFORMED;
        stream_id = load<std::uint32_t>(at + 8);
        epoch = load<std::uint64_t>(at + 12);
        seq = load<std::uint64_t>(at + 20);
        index = load<std::uint32_t>(at + 28);
        count = load<std::uint32_t>(at + 32);
        offset = load<std::uint32_t>(at + 36);
        length = load<std::uint32_t>(at + 40);
        payload_length = load<std::uint32_t>(at + 44);
        const std::uint8_t flag = at[48];
        const auto header_length = load<std::uint32_t>(at + 49);
        if (header_length > message.size() - kChunkHeadBytes) return ChunkDrop::MALFORMED;
        const std::size_t second = 53 + std::size_t{header_length};
        const auto payload_bytes = load<std::uint32_t>(at + second);
        if (payload_bytes != message.size() - second - 4 || flag > 1) return ChunkDrop::MALFORMED;
        has_header = flag == 1;
        header = message.subspan(53, header_length);
        payload = message.subspan(second + 4);
        if (count == 0 || count > kMaxChunks) return ChunkDrop::CHUNK_COUNT;
        if (index >= count) return ChunkDrop::CHUNK_INDEX;
        if (has_header != (index == 0) || header.size() != (has_header ? kHeaderSlotBytes : 0))
            return ChunkDrop::HEADER;
        if (payload.size() != length) return ChunkDrop::LENGTH;
        if (length > kMaxChunkBytes) return ChunkDrop::CHUNK_SIZE;
        if (payload_length > kMaxBridgedBytes || seq > kMaxSeq) return ChunkDrop::MALFORMED;
        return ChunkDrop::NONE;
    }
};

}  // namespace tensorpool
