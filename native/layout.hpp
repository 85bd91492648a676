// SPDX-License-Identifier: Apache-2.0
// Offsets and sizes in a region file, and unaligned little-endian access.
// Wire §6, §7.1, §8.1, §8.2, §9; decisions A1, A2, A7, A8.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace tensorpool {

static_assert(std::endian::native == std::endian::little, "§15.1: regions are little-endian; this host is not");
static_assert(sizeof(void*) == 8, "regions exceed 4 GiB: a 64-bit host is needed");

inline constexpr std::size_t kSuperblockBytes = 64;   // §6: a constant, never derived from a blockLength
inline constexpr std::size_t kHeaderSlotBytes = 256;  // §8.1
inline constexpr int kMaxDims = 8;                    // §8.2

// Byte offsets inside a 256-byte header slot. dims and strides are packed and unaligned (A2).
namespace slot {
inline constexpr std::size_t kSeqCommit = 0;
inline constexpr std::size_t kValuesLenBytes = 8;
inline constexpr std::size_t kPayloadSlot = 12;
inline constexpr std::size_t kPoolId = 16;
inline constexpr std::size_t kPayloadOffset = 18;
inline constexpr std::size_t kTimestampNs = 22;
inline constexpr std::size_t kMetaVersion = 30;
inline constexpr std::size_t kPad = 34;
inline constexpr std::size_t kTraceId = 34;       // in the padding: K11
inline constexpr std::size_t kTraceMark = 42;     // the trace id with kTraceMarkBits flipped
inline constexpr std::size_t kHeaderLength = 60;  // u32 length prefix of headerBytes
inline constexpr std::size_t kEmbedded = 64;      // the embedded SBE message header, 8 bytes
inline constexpr std::size_t kDtype = 72;
inline constexpr std::size_t kMajorOrder = 74;
inline constexpr std::size_t kNdims = 76;
inline constexpr std::size_t kPadAlign = 77;
inline constexpr std::size_t kProgressUnit = 78;
inline constexpr std::size_t kProgressStride = 79;
inline constexpr std::size_t kDims = 83;
inline constexpr std::size_t kStrides = 115;
inline constexpr std::size_t kTail = 147;  // pad to the end of the slot
}  // namespace slot

// Says that padding holds a trace id: no byte repeated eight times, and no zeros, pass for one (K11).
inline constexpr std::uint64_t kTraceMarkBits = 0x5450'5452'4143'4531;

// The embedded TensorHeader message header: blockLength 184, templateId 52, schemaId 900, version 1 (§8.3, A22).
inline constexpr std::uint32_t kEmbeddedLength = 192;
inline constexpr std::uint64_t kEmbeddedHeader = 0x0001'0384'0034'00B8;

static_assert(slot::kStrides + std::size_t{4} * kMaxDims == slot::kTail);
static_assert(slot::kEmbedded + kEmbeddedLength == kHeaderSlotBytes);
static_assert(slot::kTail + 109 == kHeaderSlotBytes);

template <typename T>
inline T load(const std::uint8_t* at) noexcept {
    T value;
    std::memcpy(&value, at, sizeof value);
    return value;
}

template <typename T>
inline void store(std::uint8_t* at, T value) noexcept {
    std::memcpy(at, &value, sizeof value);
}

// The trace id in the padding of a slot; 0: none (K11).
inline std::uint64_t trace_id_of(const std::uint8_t* image) noexcept {
    const auto trace_id = load<std::uint64_t>(image + slot::kTraceId);
    return load<std::uint64_t>(image + slot::kTraceMark) == (trace_id ^ kTraceMarkBits) ? trace_id : 0;
}

// Padding without a trace id is left as it is: it may be another implementation's.
inline void set_trace_id(std::uint8_t* image, std::uint64_t trace_id) noexcept {
    if (trace_id == 0 && trace_id_of(image) == 0) return;
    store<std::uint64_t>(image + slot::kTraceId, trace_id);
    store<std::uint64_t>(image + slot::kTraceMark, trace_id == 0 ? 0 : trace_id ^ kTraceMarkBits);
}

}  // namespace tensorpool
