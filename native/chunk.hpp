// SPDX-License-Identifier: Apache-2.0
// BridgeFrameChunk (schema 902, template 1) on the wire: how a sender encodes it, and how a receiver decodes and checks
// it. Two layouts of its fixed block are known, and the block length is the only mark of a layout:
//
//   41, the specification's   streamId epoch seq         chunkIndex … payloadLength               headerIncluded
//   53, traced                streamId epoch seq traceId chunkIndex … payloadLength payloadCrc32c headerIncluded
//
// payloadCrc32c is of the chunk's headerBytes and payloadBytes; 0: the sender computed none.
// Bridge §5.1, §5.2, §11; decisions A6, G1, G21, K9.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "crc32c.hpp"
#include "seqlock.hpp"

namespace tensorpool {

inline constexpr std::uint32_t kMaxChunks = 65'535;                        // §5.2
inline constexpr std::uint32_t kMaxChunkBytes = 65'535;                    // §11
inline constexpr std::uint32_t kMaxBridgedBytes = std::uint32_t{1} << 30;  // §11
inline constexpr std::uint64_t kChunkMessage = 0x0001'0386'0001;           // template 1, schema 902, version 1

enum class ChunkLayout : std::uint16_t { SPECIFICATION = 41, TRACED = 53 };  // the length of the fixed block

// Where the fields of a message lie whose place depends on its layout.
struct ChunkOffsets {
    explicit constexpr ChunkOffsets(ChunkLayout layout) noexcept : is_traced(layout == ChunkLayout::TRACED) {}
    constexpr std::size_t block_bytes() const noexcept { return is_traced ? 53 : 41; }
    constexpr std::size_t trace_id() const noexcept { return 28; }
    constexpr std::size_t index() const noexcept { return is_traced ? 36 : 28; }  // and four more fields after it
    constexpr std::size_t crc32c() const noexcept { return 56; }
    constexpr std::size_t flag() const noexcept { return is_traced ? 60 : 48; }
    constexpr std::size_t header_length() const noexcept { return 8 + block_bytes(); }
    constexpr std::size_t header() const noexcept { return header_length() + 4; }
    // Message header, block and the lengths of two varData.
    constexpr std::size_t head_bytes() const noexcept { return header() + 4; }

    bool is_traced;
};

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
    std::uint64_t trace_id = 0;        // of the frame; only the traced layout carries it
};

// A chunk to send: the part that is not payload.
struct ChunkHead : ChunkPlace {
    ChunkLayout layout = ChunkLayout::SPECIFICATION;

    std::uint32_t header_bytes() const noexcept { return index == 0 ? kHeaderSlotBytes : 0; }
    std::size_t message_bytes() const noexcept { return ChunkOffsets(layout).head_bytes() + header_bytes() + length; }

    // Everything but headerBytes, payloadBytes and their checksum; returns where each of them goes.
    struct Places {
        std::uint8_t* header;  // 256 bytes, for chunk 0 only
        std::uint8_t* payload;
        std::uint8_t* crc32c;  // of the traced layout; else null
    };
    Places encode(std::uint8_t* at) const noexcept {
        const ChunkOffsets offsets(layout);
        store<std::uint64_t>(at, kChunkMessage << 16 | offsets.block_bytes());
        store<std::uint32_t>(at + 8, stream_id);
        store<std::uint64_t>(at + 12, epoch);
        store<std::uint64_t>(at + 20, seq);
        if (offsets.is_traced) store<std::uint64_t>(at + offsets.trace_id(), trace_id);
        std::uint8_t* const place = at + offsets.index();
        store<std::uint32_t>(place, index);
        store<std::uint32_t>(place + 4, count);
        store<std::uint32_t>(place + 8, offset);
        store<std::uint32_t>(place + 12, length);
        store<std::uint32_t>(place + 16, payload_length);
        store<std::uint8_t>(at + offsets.flag(), index == 0 ? 1 : 0);
        store<std::uint32_t>(at + offsets.header_length(), header_bytes());
        std::uint8_t* const header = at + offsets.header();
        store<std::uint32_t>(header + header_bytes(), length);
        return {header, header + header_bytes() + 4, offsets.is_traced ? at + offsets.crc32c() : nullptr};
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
    CRC,         // its payloadCrc32c is wrong
    COUNT_,
};

// As counters name them.
inline constexpr std::array<const char*, static_cast<std::size_t>(ChunkDrop::COUNT_)> kChunkDropNames{
    "",           "foreign",    "malformed",   "unknown_stream", "chunk_count", "chunk_index",   "header",
    "length",     "chunk_size", "no_announce", "epoch",          "late",        "dropped_frame", "paused",
    "fragmented", "address",    "session",     "seq_jump",       "crc"};

// A chunk that arrived, as it stands in a message.
struct ArrivedChunk : ChunkPlace {
    bool has_header = false;
    std::uint32_t crc32c = 0;  // 0: there is none
    std::span<const std::uint8_t> header;
    std::span<const std::uint8_t> payload;

    // What is wrong with the message or with the chunk by itself; the spans are views of the message.
    ChunkDrop decode(std::span<const std::uint8_t> message) noexcept {
        if (message.size() < 8) return ChunkDrop::MALFORMED;
        const std::uint8_t* const at = message.data();
        const auto head = load<std::uint64_t>(at);
        if (head >> 16 != kChunkMessage)
            return ((head >> 16 ^ kChunkMessage) & 0xffff'ffff) == 0 ? ChunkDrop::MALFORMED : ChunkDrop::FOREIGN;
        const auto layout = static_cast<ChunkLayout>(head & 0xffff);
        if (layout != ChunkLayout::SPECIFICATION && layout != ChunkLayout::TRACED) return ChunkDrop::MALFORMED;  // A6
        const ChunkOffsets offsets(layout);
        if (message.size() < offsets.head_bytes()) return ChunkDrop::MALFORMED;
        stream_id = load<std::uint32_t>(at + 8);
        epoch = load<std::uint64_t>(at + 12);
        seq = load<std::uint64_t>(at + 20);
        if (offsets.is_traced) trace_id = load<std::uint64_t>(at + offsets.trace_id());
        const std::uint8_t* const place = at + offsets.index();
        index = load<std::uint32_t>(place);
        count = load<std::uint32_t>(place + 4);
        offset = load<std::uint32_t>(place + 8);
        length = load<std::uint32_t>(place + 12);
        payload_length = load<std::uint32_t>(place + 16);
        if (offsets.is_traced) crc32c = load<std::uint32_t>(at + offsets.crc32c());
        const std::uint8_t flag = at[offsets.flag()];
        const auto header_length = load<std::uint32_t>(at + offsets.header_length());
        if (header_length > message.size() - offsets.head_bytes()) return ChunkDrop::MALFORMED;
        const std::size_t second = offsets.header() + header_length;
        const auto payload_bytes = load<std::uint32_t>(at + second);
        if (payload_bytes != message.size() - second - 4 || flag > 1) return ChunkDrop::MALFORMED;
        has_header = flag == 1;
        header = message.subspan(offsets.header(), header_length);
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

    bool is_unharmed() const noexcept {
        return crc32c == 0 || crc32c == tensorpool::crc32c(payload, tensorpool::crc32c(header));
    }
};

}  // namespace tensorpool
