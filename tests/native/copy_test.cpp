// SPDX-License-Identifier: Apache-2.0
// Every kind of copy moves exactly the bytes that memcpy would.
#include <array>
#include <fstream>
#include <numeric>

#include "check.hpp"
#include "copy.hpp"

using namespace tensorpool;

namespace {

constexpr std::size_t kGuard = 192;  // more than any vector or block that could run over
constexpr std::size_t kLargest = 4096 + 130;

alignas(64) std::array<std::uint8_t, kLargest + 2 * kGuard> source;
alignas(64) std::array<std::uint8_t, kLargest + 2 * kGuard> target;

template <typename Copy>
void check_copy(const Copy& copy, std::size_t to, std::size_t from, std::size_t bytes) {
    const std::size_t begin = kGuard / 2 + to;
    std::memset(target.data() + begin - 64, 0xEE, bytes + 128);
    copy(target.data() + begin, source.data() + from, bytes);
    streaming_fence();
    bool same = std::memcmp(target.data() + begin, source.data() + from, bytes) == 0;
    for (std::size_t i = 1; i <= 64; ++i)
        same = same && target[begin - i] == 0xEE && target[begin + bytes + i - 1] == 0xEE;
    if (!same)
        CHECK_EQ_IN("to " + std::to_string(to) + " from " + std::to_string(from) + " bytes " + std::to_string(bytes),
                    same, true);
}

template <typename Copy>
void check_all(const Copy& copy) {
    std::vector<std::size_t> sizes(280);
    std::iota(sizes.begin(), sizes.end(), std::size_t{0});
    for (std::size_t edge : {std::size_t{384}, std::size_t{1024}, std::size_t{1152}, std::size_t{2048},
                             std::size_t{2176}, std::size_t{4096}})
        for (std::size_t d = 0; d < 5; ++d) sizes.push_back(edge - 2 + d);
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
    const std::size_t step = 7;  // sanitized copies are slow; 7 is odd, so that all alignments still meet all sizes
#else
    const std::size_t step = 1;
#endif
    std::size_t turn = 0;
    for (std::size_t to = 0; to < 64; ++to)
        for (std::size_t from = 0; from < 34; from += 3)
            for (std::size_t i = turn++ % step; i < sizes.size(); i += step) check_copy(copy, to, from, sizes[i]);
}

void fill_source() {
    std::uint32_t state = 12345;
    for (std::uint8_t& byte : source) {
        state = state * 1664525u + 1013904223u;
        byte = static_cast<std::uint8_t>(state >> 24);
    }
}

}  // namespace

TEST(copy, streaming_equals_memcpy_for_all_alignments_and_block_edges) {
    fill_source();
    check_all([](std::uint8_t* to, const std::uint8_t* from, std::size_t bytes) { copy_streaming(to, from, bytes); });
}

TEST(copy, plain_copies_equal_memcpy_for_all_alignments_and_block_edges) {
    fill_source();
    check_all([](std::uint8_t* to, const std::uint8_t* from, std::size_t bytes) { copy_racing(to, from, bytes); });
}

TEST(copy, payload_copies_equal_memcpy_either_way) {
    fill_source();
    for (bool streaming : {false, true})
        for (std::size_t to = 0; to < 64; to += 5)
            for (std::size_t bytes = 0; bytes < 700; bytes += 3)
                check_copy([streaming](std::uint8_t* at, const std::uint8_t* from,
                                       std::size_t n) { copy_payload(at, from, n, streaming); },
                           to, bytes % 31, bytes);
    copy_payload(nullptr, nullptr, 0, true);  // an empty payload touches nothing
    copy_payload(nullptr, nullptr, 0, false);
}

#if defined(__x86_64__) && !defined(__SANITIZE_THREAD__)
TEST(copy, both_vector_widths_move_whole_blocks) {
    fill_source();
    for (std::size_t blocks = 0; blocks <= 4096; blocks += 128)
        for (std::size_t from = 0; from < 34; ++from) {
            check_copy([](std::uint8_t* to, const std::uint8_t* at, std::size_t n) { stream_blocks_sse2(to, at, n); },
                       32, from, blocks);  // begin = 96 + 32 = a cache line
            if (__builtin_cpu_supports("avx2"))
                check_copy(
                    [](std::uint8_t* to, const std::uint8_t* at, std::size_t n) { stream_blocks_avx2(to, at, n); }, 32,
                    from, blocks);
        }
}
#endif

TEST(copy, large_copies_are_whole) {
    for (std::size_t bytes : {std::size_t{1} << 20, (std::size_t{4} << 20) + 77}) {
        std::vector<std::uint8_t> from(bytes), to(bytes + 1, 0);
        for (std::size_t i = 0; i < bytes; ++i) from[i] = static_cast<std::uint8_t>(i * 31 + (i >> 8));
        copy_payload(to.data() + 1, from.data(), bytes, true);
        CHECK(std::memcmp(to.data() + 1, from.data(), bytes) == 0);
    }
}

// The kernel says what one core shares with its neighbours; a whole socket's sum would keep streaming off for rings
// that no cache holds.
TEST(copy, the_last_level_cache_is_that_of_one_core) {
    std::ifstream file("/sys/devices/system/cpu/cpu0/cache/index3/size");
    std::size_t kib = 0;
    if (file >> kib) CHECK_EQ(last_level_cache_bytes(), kib << 10);
}

TEST(copy, streaming_is_for_large_frames_in_rings_beyond_the_cache) {
    const std::size_t cache = last_level_cache_bytes();
    CHECK(cache > 0);
    CHECK(!prefers_streaming(kStreamingFromBytes - 1, cache * 4));
    CHECK(prefers_streaming(kStreamingFromBytes, cache * 4));
    CHECK(!prefers_streaming(kStreamingFromBytes, cache / 4));
    CHECK(prefers_streaming(kStreamingFromBytes, cache / 4 + 1));
}
