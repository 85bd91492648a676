// SPDX-License-Identifier: Apache-2.0
// CRC32C (Castagnoli) with the processor's instruction where it has one, by table where it has not.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

#if defined(__x86_64__)
#include <nmmintrin.h>
#endif

namespace tensorpool {

inline std::uint32_t crc32c_by_table(std::uint32_t state, const std::uint8_t* at, std::size_t bytes) noexcept {
    static constexpr auto kTable = [] {
        std::array<std::uint32_t, 256> entries{};
        for (std::uint32_t i = 0; i < 256; ++i) {
            std::uint32_t value = i;
            for (int bit = 0; bit < 8; ++bit) value = value >> 1 ^ ((value & 1) != 0 ? 0x82F6'3B78u : 0u);
            entries[i] = value;
        }
        return entries;
    }();
    for (std::size_t i = 0; i < bytes; ++i) state = state >> 8 ^ kTable[(state ^ at[i]) & 0xff];
    return state;
}

#if defined(__x86_64__)
__attribute__((target("sse4.2"))) inline std::uint32_t crc32c_by_instruction(std::uint32_t state,
                                                                             const std::uint8_t* at,
                                                                             std::size_t bytes) noexcept {
    std::uint64_t wide = state;
    for (; bytes >= 8; at += 8, bytes -= 8) {
        std::uint64_t word;
        std::memcpy(&word, at, 8);
        wide = _mm_crc32_u64(wide, word);
    }
    state = static_cast<std::uint32_t>(wide);
    for (; bytes > 0; ++at, --bytes) state = _mm_crc32_u8(state, *at);
    return state;
}
#endif

// The checksum of `data` after bytes whose checksum is `before`; 0 for none.
inline std::uint32_t crc32c(std::span<const std::uint8_t> data, std::uint32_t before = 0) noexcept {
    const std::uint32_t state = ~before;
#if defined(__x86_64__)
    static const bool has_instruction = __builtin_cpu_supports("sse4.2");
    if (has_instruction) return ~crc32c_by_instruction(state, data.data(), data.size());
#endif
    return ~crc32c_by_table(state, data.data(), data.size());
}

}  // namespace tensorpool
