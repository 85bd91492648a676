// SPDX-License-Identifier: Apache-2.0
// Every kind of copy moves exactly the bytes that memcpy would.
#include <array>
#include <fstream>
#include <numeric>

#include "check.hpp"
#include "copy_calibration.hpp"

using namespace tensorpool;

namespace {

constexpr std::size_t kGuard = 192;  // more than any vector or block that could run over
constexpr std::size_t kLargest = 4096 + 260;

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
    std::vector<std::size_t> sizes(280);  // these are memcpy's
    std::iota(sizes.begin(), sizes.end(), std::size_t{0});
    for (std::size_t edge :
         {1024, 2048, 2112, 2304, 2368, 2560, 3072, 4096, 4160})  // blocks, and with a head of a line
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

TEST(copy, every_kind_equals_memcpy_for_all_alignments_and_block_edges) {
    fill_source();
#if defined(__SANITIZE_THREAD__)
    const std::size_t kinds = 1;  // all are one loop over the bytes
#else
    const std::size_t kinds = kCopyKindNames.size();
#endif
    for (std::size_t i = 0; i < kinds; ++i)
        if (const auto kind = static_cast<CopyKind>(i); is_supported(kind))
            check_all(
                [kind](std::uint8_t* to, const std::uint8_t* from, std::size_t n) { copy_by(kind, to, from, n); });
}

TEST(copy, payload_copies_equal_memcpy_for_every_use) {
    fill_source();
    for (std::size_t i = 0; i < kCopyUseNames.size(); ++i) {
        const auto use = static_cast<CopyUse>(i);
        for (std::size_t to = 0; to < 64; to += 5)
            for (std::size_t bytes = 0; bytes < 4096; bytes += 71)
                check_copy([use](std::uint8_t* at, const std::uint8_t* from,
                                 std::size_t n) { copy_payload(at, from, n, use); },
                           to, bytes % 31, bytes);
        copy_payload(nullptr, nullptr, 0, use);  // an empty payload touches nothing
    }
}

// Sizes at which another use begins, in rings within the cache and beyond it.
TEST(copy, payloads_are_whole_where_one_use_ends_and_the_next_begins) {
    for (std::size_t edge : {kMediumFromBytes, kStreamingFromBytes, last_level_cache_bytes() / 4 + 1})
        for (std::size_t bytes : {edge - 1, edge, edge + 77}) {
            std::vector<std::uint8_t> from(bytes), to(bytes + 2, 0xEE);
            for (std::size_t i = 0; i < bytes; ++i) from[i] = static_cast<std::uint8_t>(i * 31 + (i >> 8));
            for (std::size_t total : {bytes, last_level_cache_bytes() * 2}) {
                std::memset(to.data(), 0xEE, to.size());
                write_payload(to.data() + 1, from.data(), bytes, total);
                CHECK(std::memcmp(to.data() + 1, from.data(), bytes) == 0);
                std::memset(to.data(), 0xEE, to.size());
                read_payload(to.data() + 1, from.data(), bytes, total);
                CHECK(std::memcmp(to.data() + 1, from.data(), bytes) == 0);
                CHECK_EQ(int{to[0]}, 0xEE);
                CHECK_EQ(int{to[bytes + 1]}, 0xEE);
            }
        }
}

TEST(copy, a_kind_serves_the_uses_that_it_fits) {
    for (std::size_t i = 0; i < kCopyKindNames.size(); ++i) {
        const auto kind = static_cast<CopyKind>(i);
        copy_kinds.reset();
        const std::size_t count = set_fitting(kind);
        if (!is_supported(kind)) CHECK_EQ(count, std::size_t{0});
        for (std::size_t u = 0; u < kCopyUseNames.size(); ++u) {
            const auto use = static_cast<CopyUse>(u);
            CHECK(is_supported(copy_kinds[use]) && is_fit(use, copy_kinds[use]));
            // Stores without fences around them are never streaming ones.
            if (use != CopyUse::STREAM) CHECK(!is_streaming(copy_kinds[use]));
        }
    }
    copy_kinds.reset();
}

TEST(copy, a_calibration_chooses_what_fits_and_keeps_defaults_without_time) {
    const CopyCalibration::Kinds measured = CopyCalibration::run(std::chrono::milliseconds(5));
    const CopyCalibration::Kinds hurried = CopyCalibration::run(std::chrono::nanoseconds(-1));
    for (std::size_t u = 0; u < kCopyUseNames.size(); ++u) {
        const auto use = static_cast<CopyUse>(u);
        CHECK(is_supported(measured[u]) && is_fit(use, measured[u]));
        CHECK(hurried[u] == default_kind(use));
    }
}

TEST(copy, lines_are_whole_in_pieces_and_from_every_alignment) {
    if (!is_supported(CopyKind::LINES)) return;
    for (std::size_t offset : {0, 1, 16, 48, 63, 64})
        for (std::size_t bytes : {16383, 16384, 16385 + 255, 3 * 16384 + 300}) {
            std::vector<std::uint8_t> from(offset + bytes + 64), to(bytes + 130, 0xEE);
            for (std::size_t i = 0; i < from.size(); ++i) from[i] = static_cast<std::uint8_t>(i * 31 + (i >> 8));
            copy_by(CopyKind::LINES, to.data() + 65, from.data() + offset, bytes);
            CHECK(std::memcmp(to.data() + 65, from.data() + offset, bytes) == 0);
            CHECK_EQ(int{to[64]}, 0xEE);
            CHECK_EQ(int{to[bytes + 65]}, 0xEE);
        }
}

#if defined(__x86_64__) && !defined(__SANITIZE_THREAD__)
TEST(copy, memcpy_is_avoided_where_the_target_begins_shortly_after_the_source_within_a_page) {
    const std::uint8_t* const from = source.data();
    CHECK(!is_slow_for_libc(target.data() + ((from - target.data()) & 4095), from));
    for (std::ptrdiff_t distance : {1, 48, 63})
        CHECK(is_slow_for_libc(target.data() + ((from + distance - target.data()) & 4095), from));
    for (std::ptrdiff_t distance : {64, 4032, 4095})
        CHECK(!is_slow_for_libc(target.data() + ((from + distance - target.data()) & 4095), from));
}
#endif

TEST(copy, large_copies_are_whole) {
    for (std::size_t bytes : {std::size_t{1} << 20, (std::size_t{4} << 20) + 77}) {
        std::vector<std::uint8_t> from(bytes), to(bytes + 1, 0);
        for (std::size_t i = 0; i < bytes; ++i) from[i] = static_cast<std::uint8_t>(i * 31 + (i >> 8));
        copy_payload(to.data() + 1, from.data(), bytes, CopyUse::STREAM);
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
