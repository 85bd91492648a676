// SPDX-License-Identifier: Apache-2.0
// Where slots and payloads are, and which pool a frame goes to. Wire §8.1, §9, §15.5; decisions B17, B18, B19-B21.
#include "check.hpp"
#include "rings.hpp"

using namespace tensorpool;
using namespace tensorpool::test;

namespace {

RingGeometry geometry_of(std::size_t header_bytes, std::vector<std::pair<Pool, std::size_t>> pools,
                         std::uint32_t nslots) {
    static std::uint8_t memory[1 << 16];  // only its size is looked at
    for (auto& [pool, bytes] : pools) pool.region = {memory, bytes};
    std::vector<Pool> only;
    for (const auto& [pool, bytes] : pools) only.push_back(pool);
    return {{memory, header_bytes}, only, nslots};
}

Pool pool_of(std::uint16_t pool_id, std::uint32_t stride_bytes) { return {pool_id, stride_bytes, {}}; }

}  // namespace

TEST(geometry, accepts_only_powers_of_two_slots) {
    for (std::uint32_t nslots : {0u, 3u, 5u, 6u, 7u, 12u, 0xFFFF'FFFFu})
        CHECK_THROWS(std::invalid_argument, geometry_of(1 << 16, {{pool_of(1, 64), 1 << 16}}, nslots));
    for (std::uint32_t nslots : {1u, 2u, 4u, 64u})
        CHECK_EQ(geometry_of(1 << 16, {{pool_of(1, 64), 1 << 16}}, nslots).nslots(), nslots);
}

TEST(geometry, accepts_only_strides_that_are_multiples_of_64) {
    for (std::uint32_t stride : {0u, 1u, 32u, 63u, 65u, 96u, 0xFFFF'FFFFu})
        CHECK_THROWS(std::invalid_argument, geometry_of(1 << 16, {{pool_of(1, stride), 1 << 16}}, 1));
    for (std::uint32_t stride : {64u, 128u, 192u, 4096u})
        CHECK_EQ(geometry_of(1 << 16, {{pool_of(1, stride), 1 << 16}}, 1).largest_stride_bytes(), stride);
}

TEST(geometry, refuses_regions_that_are_one_byte_short) {
    const std::size_t header = 64 + 4 * 256;
    const std::size_t pool = 64 + 4 * 128;
    geometry_of(header, {{pool_of(1, 128), pool}}, 4);
    CHECK_THROWS(std::invalid_argument, geometry_of(header - 1, {{pool_of(1, 128), pool}}, 4));
    CHECK_THROWS(std::invalid_argument, geometry_of(header, {{pool_of(1, 128), pool - 1}}, 4));
    // 64-bit arithmetic: 2^31 slots of 2^31 bytes do not wrap into something small
    CHECK_THROWS(std::invalid_argument, geometry_of(1 << 16, {{pool_of(1, 64), 1 << 16}}, 1u << 31));
    CHECK_THROWS(std::invalid_argument, geometry_of(header, {{pool_of(1, 1u << 31), pool}}, 4));
}

TEST(geometry, needs_pools_with_distinct_ids) {
    CHECK_THROWS(std::invalid_argument, geometry_of(1 << 16, {}, 4));
    CHECK_THROWS(std::invalid_argument,
                 geometry_of(1 << 16, {{pool_of(3, 64), 1 << 16}, {pool_of(3, 128), 1 << 16}}, 4));
}

TEST(geometry, slots_and_payloads_start_past_the_superblock) {
    const HeapRing ring(8, {{1, 4096}, {2, 64}});
    const RingGeometry geometry = ring.geometry();
    for (std::uint32_t i = 0; i < 8; ++i) {
        CHECK_EQ(geometry.slot(i) - ring.header.bytes().data(), 64 + 256 * static_cast<std::ptrdiff_t>(i));
        for (const Pool& pool : geometry.pools()) {
            CHECK_EQ(RingGeometry::payload_offset(pool, i), 64 + std::size_t{pool.stride_bytes} * i);
            CHECK(RingGeometry::payload(pool, i) == pool.region.data() + RingGeometry::payload_offset(pool, i));
        }
    }
    CHECK_EQ(ring.header.bytes().size(), 64 + 8 * 256);
}

TEST(geometry, payload_offsets_exceed_4_gib) {
    const Pool pool = pool_of(1, 1u << 30);
    CHECK_EQ(RingGeometry::payload_offset(pool, 7), 64 + std::size_t{7} * (std::size_t{1} << 30));
}

TEST(geometry, index_is_the_low_bits_of_seq) {
    for (std::uint32_t nslots : {1u, 2u, 8u, 64u}) {
        const RingGeometry geometry = geometry_of(1 << 16, {{pool_of(1, 64), 1 << 16}}, nslots);
        for (std::uint64_t seq : {std::uint64_t{0}, std::uint64_t{1}, std::uint64_t{7}, std::uint64_t{8},
                                  (std::uint64_t{1} << 32) + 5, kMaxSeq - 1, kMaxSeq})
            CHECK_EQ(std::uint64_t{geometry.index_of(seq)}, seq % nslots);
    }
}

TEST(geometry, every_commit_word_is_aligned_and_alone_in_its_cache_line) {
    const SharedRing shared(8, {{1, 64}});
    const MappedRing ring = shared.map(true);
    const RingGeometry geometry = ring.geometry();
    for (std::uint32_t i = 0; i < 8; ++i)
        CHECK_EQ(reinterpret_cast<std::uintptr_t>(geometry.slot(i)) % 64, std::uintptr_t{0});
}

TEST(geometry, the_smallest_pool_that_holds_a_frame_is_chosen) {
    const HeapRing ring(1, {{9, 256}, {7, 4096}, {4, 64}, {2, 64}, {5, 256}});
    const RingGeometry geometry = ring.geometry();
    const struct {
        std::uint64_t bytes;
        int pool_id;
    } rows[] = {{0, 2},
                {1, 2},
                {63, 2},
                {64, 2},  // B17: empty goes to the smallest; B18: equal strides, lowest id
                {65, 5},
                {255, 5},
                {256, 5},  //
                {257, 7},
                {4095, 7},
                {4096, 7},  //
                {4097, -1},
                {0xFFFF'FFFF, -1},
                {std::uint64_t{1} << 40, -1}};
    for (const auto& row : rows) {
        const std::size_t index = geometry.pool_for(row.bytes);
        const int pool_id = index == RingGeometry::npos ? -1 : geometry.pools()[index].pool_id;
        CHECK_EQ_IN(row.bytes, pool_id, row.pool_id);
    }
    for (std::uint16_t id : {std::uint16_t{9}, std::uint16_t{7}, std::uint16_t{4}, std::uint16_t{2}, std::uint16_t{5}})
        CHECK_EQ(geometry.pools()[geometry.pool_by_id(id)].pool_id, id);
    CHECK_EQ(geometry.pool_by_id(0), RingGeometry::npos);
    CHECK_EQ(geometry.pool_by_id(0xFFFF), RingGeometry::npos);
}

TEST(geometry, boundaries_hold_for_every_stride) {
    const HeapRing ring(1, {{1, 64}, {2, 128}, {3, 1024}, {4, 65536}});
    const RingGeometry geometry = ring.geometry();
    for (std::uint64_t bytes = 0; bytes <= 65536 + 2; ++bytes) {
        const std::size_t chosen = geometry.pool_for(bytes);
        if (bytes > 65536) {
            CHECK_EQ(chosen, RingGeometry::npos);
            continue;
        }
        CHECK(geometry.pools()[chosen].stride_bytes >= bytes);
        if (chosen > 0) CHECK(geometry.pools()[chosen - 1].stride_bytes < bytes);
    }
}
