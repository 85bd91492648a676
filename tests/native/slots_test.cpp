// SPDX-License-Identifier: Apache-2.0
// Writing and reading slots: golden bytes, every reason to drop a frame, claims, and what callers must not do.
// Wire §8.2, §8.3, §9, §15.3, §15.21; decisions B2-B4, B13-B18, A20, A21.
#include <array>
#include <atomic>
#include <chrono>
#include <set>
#include <thread>

#include "check.hpp"
#include "rings.hpp"

using namespace tensorpool;
using namespace tensorpool::test;

namespace {

constexpr std::uint64_t kGoldenSeq = 5;

// byte_layouts.md: seq 5 committed, 24 bytes, slot 5, pool 1, timestamp 77, meta 1, FLOAT32 ROW 2x3; the rest is zero.
constexpr std::array<std::uint8_t, kHeaderSlotBytes> kGolden = {
    0x0b, 0,    0,    0, 0,    0, 0, 0, 0x18, 0, 0, 0, 5, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0x4d, 0, 0, 0, 0,
    0,    0,    0,    1, 0,  //
    0,    0,    0,    0, 0,    0, 0, 0, 0,    0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,    0, 0, 0, 0,
    0,    0xc0, 0,    0, 0,  //
    0xb8, 0,    0x34, 0, 0x84, 3, 1, 0, 9,    0, 1, 0, 2, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0,    3, 0, 0, 0};

std::array<std::uint8_t, 24> golden_payload() {
    std::array<std::uint8_t, 24> bytes;
    for (std::size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::uint8_t>(0x40 + i);
    return bytes;
}

TensorLayout golden_layout() {
    TensorLayout layout = layout_of(Dtype::FLOAT32, MajorOrder::ROW, {2, 3});
    layout.resolve();
    return layout;
}

// A ring of 8 slots with pools 1 (64 bytes) and 4 (256 bytes) that holds the golden frame.
struct GoldenRing : HeapRing {
    GoldenRing() : HeapRing(8, {{4, 256}, {1, 64}}), reader(geometry()) { put(kGolden); }
    void put(const std::array<std::uint8_t, kHeaderSlotBytes>& image) {
        std::memcpy(slot(kGoldenSeq), image.data(), kHeaderSlotBytes);
    }
    Drop read() { return reader.read(kGoldenSeq, frame); }
    RingReader reader;
    SlotFrame frame;
};

std::uint64_t word_of(const HeapRing& ring, std::uint32_t index) { return load<std::uint64_t>(ring.slot(index)); }

// Whatever a frame says, its payload lies inside its own slot of its own pool.
void check_frame_is_contained(const RingGeometry& geometry, const SlotFrame& frame) {
    const Pool& pool = geometry.pools()[frame.pool];
    const std::size_t begin = RingGeometry::payload_offset(pool, frame.slot);
    CHECK(frame.payload_offset == begin);
    CHECK(frame.values_len_bytes <= pool.stride_bytes);
    CHECK(begin + pool.stride_bytes <= pool.region.size());
    if (frame.values_len_bytes != 0) CHECK(frame.layout->extent_bytes <= frame.values_len_bytes);
}

}  // namespace

TEST(slots, write_makes_the_golden_bytes) {
    const HeapRing ring(8, {{4, 256}, {1, 64}});
    RingWriter writer(ring.geometry());
    CHECK(writer.write(kGoldenSeq, golden_layout(), golden_payload(), 77, 1));
    CHECK(std::memcmp(ring.slot(5), kGolden.data(), kHeaderSlotBytes) == 0);
    CHECK(std::memcmp(ring.pool(1).data() + 64 + 5 * 64, golden_payload().data(), 24) == 0);
    for (std::uint32_t i = 0; i < 8; ++i)
        if (i != 5)
            for (std::size_t b = 0; b < kHeaderSlotBytes; ++b) CHECK_EQ(ring.slot(i)[b], 0);
    for (std::size_t i = 0; i < kSuperblockBytes; ++i) CHECK_EQ(ring.header.bytes()[i], 0);
    CHECK_EQ(writer.next_seq(), 6u);
    CHECK_EQ(writer.written(), 1u);
}

TEST(slots, the_golden_bytes_read_back) {
    GoldenRing ring;
    std::memcpy(ring.pool(1).data() + 64 + 5 * 64, golden_payload().data(), 24);
    CHECK_EQ(ring.read(), Drop::NONE);
    CHECK_EQ(ring.frame.seq, 5u);
    CHECK_EQ(ring.frame.timestamp_ns, 77u);
    CHECK_EQ(ring.frame.meta_version, 1u);
    CHECK_EQ(ring.frame.slot, 5u);
    CHECK_EQ(ring.reader.geometry().pools()[ring.frame.pool].pool_id, 1);
    CHECK_EQ(ring.frame.values_len_bytes, 24u);
    CHECK_EQ(ring.frame.payload_offset, 64u + 5 * 64);
    CHECK_EQ(ring.frame.layout->extent_bytes, 24u);
    CHECK_EQ(ring.frame.layout->ndims, 2);
    std::array<std::uint8_t, 24> copied{};
    CHECK(ring.reader.copy(ring.frame, copied.data()));
    CHECK(copied == golden_payload());
    CHECK(ring.reader.intact(ring.frame));
}

TEST(slots, a_dirty_slot_is_rewritten_completely) {
    const HeapRing ring(8, {{4, 256}, {1, 64}});
    std::memset(ring.slot(5) + 8, 0xAA, kHeaderSlotBytes - 8);
    RingWriter writer(ring.geometry());
    writer.write(kGoldenSeq, golden_layout(), golden_payload(), 77, 1);
    CHECK(std::memcmp(ring.slot(5), kGolden.data(), kHeaderSlotBytes) == 0);
    // the same through a claim
    std::memset(ring.slot(5) + 8, 0xAA, kHeaderSlotBytes - 8);
    RingWriter other(ring.geometry());
    other.begin(kGoldenSeq, golden_layout(), 0, 0, false);
    other.commit(77, 1);
    CHECK(std::memcmp(ring.slot(5), kGolden.data(), kHeaderSlotBytes) == 0);
}

TEST(slots, dims_of_an_earlier_frame_do_not_linger) {
    const HeapRing ring(1, {{1, 256}});
    RingWriter writer(ring.geometry());
    TensorLayout eight =
        layout_of(Dtype::UINT8, MajorOrder::ROW, {2, 2, 2, 2, 2, 2, 2, 2}, {128, 64, 32, 16, 8, 4, 2, 1});
    CHECK_EQ(eight.resolve(), Drop::NONE);
    writer.write(0, eight, std::vector<std::uint8_t>(256), 0, 0);
    CHECK_EQ(load<std::int32_t>(ring.slot(0) + slot::kDims + 28), 2);
    writer.write(1, golden_layout(), golden_payload(), 0, 0);
    for (std::size_t i = 2; i < 8; ++i) {
        CHECK_EQ(load<std::int32_t>(ring.slot(0) + slot::kDims + 4 * i), 0);
        CHECK_EQ(load<std::int32_t>(ring.slot(0) + slot::kStrides + 4 * i), 0);
    }
}

TEST(slots, every_drop_reason_can_be_forged) {
    struct Forgery {
        const char* what;
        std::size_t at;
        std::uint64_t value;
        std::size_t bytes;
        Drop expected;
    };
    const Forgery forgeries[] = {
        {"in progress", 0, 5 << 1, 8, Drop::NOT_COMMITTED},
        {"never written", 0, 0, 8, Drop::STALE},
        {"an earlier frame", 0, (5 - 4) << 1 | 1, 8, Drop::STALE},
        {"an earlier frame in progress", 0, 4 << 1, 8, Drop::STALE},
        {"a later frame", 0, 13 << 1 | 1, 8, Drop::OVERWRITTEN},
        {"a later frame in progress", 0, 13 << 1, 8, Drop::OVERWRITTEN},
        {"the largest word", 0, ~std::uint64_t{0}, 8, Drop::OVERWRITTEN},
        {"header length 191", 60, 191, 4, Drop::BAD_EMBEDDED_HEADER},
        {"header length 193", 60, 193, 4, Drop::BAD_EMBEDDED_HEADER},
        {"header length 0", 60, 0, 4, Drop::BAD_EMBEDDED_HEADER},
        {"header length in the high byte", 63, 1, 1, Drop::BAD_EMBEDDED_HEADER},
        {"block length", 64, 183, 2, Drop::BAD_EMBEDDED_HEADER},
        {"template", 66, 51, 2, Drop::BAD_EMBEDDED_HEADER},
        {"schema", 68, 901, 2, Drop::BAD_EMBEDDED_HEADER},
        {"version 0", 70, 0, 2, Drop::BAD_EMBEDDED_HEADER},
        {"version 2", 70, 2, 2, Drop::BAD_EMBEDDED_HEADER},
        {"payload offset", 18, 1, 4, Drop::BAD_PAYLOAD_OFFSET},
        {"payload offset, high byte", 21, 1, 1, Drop::BAD_PAYLOAD_OFFSET},
        {"payload slot", 12, 4, 4, Drop::BAD_PAYLOAD_SLOT},
        {"payload slot of the next turn", 12, 13, 4, Drop::BAD_PAYLOAD_SLOT},
        {"payload slot out of range", 12, 0xFFFF'FFFF, 4, Drop::BAD_PAYLOAD_SLOT},
        {"unknown pool", 16, 2, 2, Drop::BAD_POOL},
        {"pool id, high byte", 17, 1, 1, Drop::BAD_POOL},
        {"longer than the pool's stride", 8, 65, 4, Drop::BAD_LENGTH},
        {"as long as can be", 8, 0xFFFF'FFFF, 4, Drop::BAD_LENGTH},
        {"shorter than the shape", 8, 23, 4, Drop::BAD_LENGTH},
        {"bytes without elements", 83, 0, 4, Drop::BAD_LENGTH},
        {"dtype UNKNOWN", 72, 0, 2, Drop::BAD_DTYPE},
        {"dtype 12", 72, 12, 2, Drop::BAD_DTYPE},
        {"dtype 99", 72, 99, 2, Drop::BAD_DTYPE},
        {"dtype negative", 72, 0xFFFF, 2, Drop::BAD_DTYPE},
        {"order UNKNOWN", 74, 0, 2, Drop::BAD_MAJOR_ORDER},
        {"order 3", 74, 3, 2, Drop::BAD_MAJOR_ORDER},
        {"ndims 0", 76, 0, 1, Drop::BAD_NDIMS},
        {"ndims 9", 76, 9, 1, Drop::BAD_NDIMS},
        {"ndims 255", 76, 255, 1, Drop::BAD_NDIMS},
        {"negative dim", 87, 0x8000'0000, 4, Drop::BAD_DIMS},
        {"dims beyond 4 GiB", 83, 0x7FFF'FFFF, 4, Drop::BAD_DIMS},
        {"negative stride", 115, 0xFFFF'FFF4, 4, Drop::BAD_STRIDES},
        {"overlap", 115, 11, 4, Drop::BAD_STRIDES},
        {"contradiction", 119, 16, 4, Drop::BAD_LENGTH},  // outer inferred as 48: longer than the payload
        {"progress without stride", 78, 1, 1, Drop::BAD_PROGRESS},
        {"progress unit 3", 78, 3, 1, Drop::BAD_PROGRESS},
    };
    std::set<Drop> seen;
    for (const Forgery& forgery : forgeries) {
        GoldenRing ring;
        for (std::size_t i = 0; i < forgery.bytes; ++i)
            ring.slot(5)[forgery.at + i] = static_cast<std::uint8_t>(forgery.value >> (8 * i));
        CHECK_EQ_IN(forgery.what, ring.read(), forgery.expected);
        for (std::size_t i = 0; i < kDropCount; ++i)
            CHECK_EQ_IN(forgery.what, ring.reader.drops()[i].get(),
                        i == static_cast<std::size_t>(forgery.expected) ? 1u : 0u);
        seen.insert(forgery.expected);
        // the same after a good frame, whose layout the reader remembers
        GoldenRing warm;
        CHECK_EQ(warm.read(), Drop::NONE);
        std::memcpy(warm.slot(5), ring.slot(5), kHeaderSlotBytes);
        CHECK_EQ_IN(forgery.what, warm.read(), forgery.expected);
        warm.put(kGolden);
        CHECK_EQ_IN(forgery.what, warm.read(), Drop::NONE);
    }
    // From NO_POOL on they are not a slot's: the producer's own, and those that a feed finds out by counting.
    for (std::size_t i = 1; i < static_cast<std::size_t>(Drop::NO_POOL); ++i)
        CHECK_EQ_IN(i, seen.count(static_cast<Drop>(i)), 1u);
}

TEST(slots, payload_bytes_beyond_the_shape_are_allowed) {
    GoldenRing ring;
    store<std::uint32_t>(ring.slot(5) + 8, 64);
    CHECK_EQ(ring.read(), Drop::NONE);
    CHECK_EQ(ring.frame.values_len_bytes, 64u);
}

// Each byte of the slot takes each value: nothing but the listed bytes decides, and no frame leaves its slot.
TEST(slots, every_value_of_every_byte) {
    GoldenRing ring;
    for (std::size_t at = 8; at < kHeaderSlotBytes; ++at) {
        const bool opaque = (at >= 22 && at < 60) || at == 77 || at >= slot::kTail;  // times, versions, padding
        const bool past_ndims =
            (at >= 91 && at < 115) || (at >= 123 && at < 147);  // dims and strides from the third on
        const bool unused_progress = at >= 79 && at < 83;       // B24
        const bool exact = (at >= 12 && at < 16) || (at >= 18 && at < 22) || (at >= 60 && at < 72);
        for (int value = 0; value < 256; ++value) {
            ring.put(kGolden);
            ring.slot(5)[at] = static_cast<std::uint8_t>(value);
            const Drop drop = ring.read();
            const bool same = kGolden[at] == value;
            if (same || opaque || past_ndims || unused_progress)
                CHECK_EQ_IN(at, drop, Drop::NONE);
            else if (exact)
                CHECK_EQ_IN(at, drop != Drop::NONE, true);
            if (drop == Drop::NONE) check_frame_is_contained(ring.reader.geometry(), ring.frame);
        }
    }
}

TEST(slots, random_headers_stay_inside_their_slot) {
    GoldenRing ring;
    std::uint64_t state = 42;
    const auto random = [&state] {
        state ^= state << 13, state ^= state >> 7, state ^= state << 17;
        return state;
    };
    std::uint64_t accepted = 0;
    for (int round = 0; round < 100'000; ++round) {
        ring.put(kGolden);
        for (std::uint64_t n = random() % 6 + 1; n > 0; --n) {
            static constexpr std::size_t kFields[] = {8,  12, 16, 18, 60, 64,  72,  74, 76,
                                                      78, 79, 83, 87, 91, 115, 119, 123};
            static constexpr std::int32_t kValues[] = {0,  1,  2,   3,  4,           8,       12,      24,
                                                       64, 65, 255, -1, 0x7FFF'FFFF, 1 << 17, 1 << 30, 14};
            const std::size_t at = kFields[random() % std::size(kFields)];
            store<std::int32_t>(ring.slot(5) + at, kValues[random() % std::size(kValues)]);
        }
        if (ring.read() != Drop::NONE) continue;
        ++accepted;
        check_frame_is_contained(ring.reader.geometry(), ring.frame);
        std::vector<std::uint8_t> into(ring.frame.values_len_bytes);
        CHECK(ring.reader.copy(ring.frame, into.data()));
    }
    CHECK(accepted > 100);
}

TEST(slots, accepts_exactly_the_expected_commit_word) {
    GoldenRing ring;
    for (std::uint64_t seq : {std::uint64_t{5}, std::uint64_t{13}, std::uint64_t{5} + (std::uint64_t{1} << 40)})
        for (std::uint64_t word = 0; word < 64; ++word) {
            ring.put(kGolden);
            store<std::uint64_t>(ring.slot(5), word);
            SlotFrame frame;
            const Drop drop = ring.reader.read(seq, frame);
            const Drop expected = word == committed(seq)     ? Drop::NONE
                                  : word == in_progress(seq) ? Drop::NOT_COMMITTED
                                  : (word >> 1) > seq        ? Drop::OVERWRITTEN
                                                             : Drop::STALE;
            CHECK_EQ_IN(word, drop, expected);
        }
    SlotFrame frame;
    store<std::uint64_t>(ring.slot(7), ~std::uint64_t{0});
    CHECK_EQ(ring.reader.read(~std::uint64_t{0}, frame), Drop::STALE);  // no frame has such a seq
    CHECK_EQ(ring.reader.read(kMaxSeq + 1, frame), Drop::STALE);
    CHECK_EQ(ring.reader.read(0, frame), Drop::NOT_COMMITTED);  // A21: an untouched slot is seq 0 in progress
    CHECK(is_late(Drop::NOT_COMMITTED) && is_late(Drop::OVERWRITTEN) && is_late(Drop::STALE));
    for (std::size_t i = static_cast<std::size_t>(Drop::BAD_EMBEDDED_HEADER); i < kDropCount; ++i)
        CHECK(!is_late(static_cast<Drop>(i)));
}

TEST(slots, empty_payloads_need_no_pool) {
    const HeapRing ring(8, {{4, 256}, {1, 64}});
    RingWriter writer(ring.geometry());
    RingReader reader(ring.geometry());
    TensorLayout empty = layout_of(Dtype::FLOAT32, MajorOrder::ROW, {0, 3});
    CHECK_EQ(empty.resolve(), Drop::NONE);
    CHECK(writer.write(3, empty, {}, 1, 2));
    CHECK_EQ(word_of(ring, 3), committed(3));
    CHECK_EQ(load<std::uint32_t>(ring.slot(3) + slot::kValuesLenBytes), 0u);
    CHECK_EQ(load<std::uint32_t>(ring.slot(3) + slot::kPayloadSlot), 3u);
    CHECK_EQ(load<std::uint16_t>(ring.slot(3) + slot::kPoolId), 1);  // B17
    SlotFrame frame;
    CHECK_EQ(reader.read(3, frame), Drop::NONE);
    CHECK_EQ(frame.values_len_bytes, 0u);
    store<std::uint16_t>(ring.slot(3) + slot::kPoolId, 999);
    CHECK_EQ(reader.read(3, frame), Drop::NONE);
    CHECK_EQ(frame.pool, 0u);
    store<std::int32_t>(ring.slot(3) + slot::kDims, 1 << 20);  // a shape without bytes (B14)
    CHECK_EQ(reader.read(3, frame), Drop::NONE);
    CHECK_EQ(frame.values_len_bytes, 0u);
    CHECK(reader.copy(frame, nullptr));
    store<std::uint32_t>(ring.slot(3) + slot::kPayloadSlot, 2);
    CHECK_EQ(reader.read(3, frame), Drop::BAD_PAYLOAD_SLOT);
}

TEST(slots, a_frame_without_a_pool_changes_nothing_and_is_counted) {
    GoldenRing ring;
    RingWriter writer(ring.geometry());
    const TensorLayout large = byte_layout(257);
    CHECK(!writer.write(5, large, std::vector<std::uint8_t>(257), 0, 0));
    CHECK_EQ(writer.begin(5, large, 0, 0, true), RingGeometry::npos);
    CHECK(!writer.is_claimed());
    CHECK_EQ(writer.no_pool_drops(), 2u);
    CHECK_EQ(writer.next_seq(), 0u);
    CHECK(std::memcmp(ring.slot(5), kGolden.data(), kHeaderSlotBytes) == 0);
    CHECK(writer.write(5, byte_layout(256), std::vector<std::uint8_t>(256), 0, 0));
}

TEST(slots, claims_are_in_progress_until_they_are_committed) {
    GoldenRing ring;
    RingWriter writer(ring.geometry());
    const std::size_t pool = writer.begin(13, golden_layout(), 7, 8, false);
    CHECK_EQ(ring.geometry().pools()[pool].pool_id, 1);
    CHECK_EQ(word_of(ring, 5), in_progress(13));
    CHECK(std::memcmp(ring.slot(5) + 8, kGolden.data() + 8, kHeaderSlotBytes - 8) ==
          0);  // the header waits for the commit
    SlotFrame frame;
    CHECK_EQ(ring.reader.read(13, frame), Drop::NOT_COMMITTED);
    CHECK_EQ(ring.reader.read(5, frame), Drop::OVERWRITTEN);
    CHECK(writer.is_claimed());
    CHECK_EQ(writer.next_seq(), 0u);
    writer.commit(9, 10);
    CHECK_EQ(ring.reader.read(13, frame), Drop::NONE);
    CHECK_EQ(frame.timestamp_ns, 9u);
    CHECK_EQ(frame.meta_version, 10u);
    CHECK_EQ(writer.next_seq(), 14u);
    CHECK(!writer.is_claimed());
}

TEST(slots, the_header_of_a_progressive_claim_stands_at_once) {
    const HeapRing ring(8, {{4, 256}, {1, 64}});
    RingWriter writer(ring.geometry());
    writer.begin(kGoldenSeq, golden_layout(), 77, 1, true);
    CHECK_EQ(word_of(ring, 5), in_progress(5));
    CHECK(std::memcmp(ring.slot(5) + 8, kGolden.data() + 8, kHeaderSlotBytes - 8) == 0);  // B4
    writer.commit(77, 1);
    CHECK(std::memcmp(ring.slot(5), kGolden.data(), kHeaderSlotBytes) == 0);
}

TEST(slots, an_abandoned_claim_is_never_delivered_and_its_seq_is_free) {
    GoldenRing ring;
    RingWriter writer(ring.geometry());
    writer.begin(13, golden_layout(), 0, 0, true);
    writer.abandon();
    CHECK_EQ(word_of(ring, 5), in_progress(13));
    SlotFrame frame;
    CHECK_EQ(ring.reader.read(13, frame), Drop::NOT_COMMITTED);
    CHECK_EQ(writer.written(), 0u);
    CHECK(writer.write(13, golden_layout(), golden_payload(), 0, 0));
    CHECK_EQ(ring.reader.read(13, frame), Drop::NONE);
}

TEST(slots, the_seq_of_an_abandoned_claim_that_was_told_of_is_spent) {
    GoldenRing ring;
    RingWriter writer(ring.geometry());
    writer.begin(13, golden_layout(), 0, 0, true);
    writer.abandon(true);
    CHECK_EQ(writer.next_seq(), 14u);
    CHECK_THROWS(std::invalid_argument, writer.write(13, golden_layout(), golden_payload(), 0, 0));
    CHECK(writer.write(14, golden_layout(), golden_payload(), 0, 0));
    CHECK_EQ(writer.written(), 1u);
}

TEST(slots, a_frame_that_is_being_written_can_be_read_in_part_and_says_whose_slot_it_is) {
    GoldenRing ring;
    RingWriter writer(ring.geometry());
    SlotFrame frame;
    writer.begin(13, golden_layout(), 0, 0, true);
    CHECK_EQ(ring.reader.read(13, frame), Drop::NOT_COMMITTED);
    CHECK_EQ(ring.reader.read_partial(13, frame), Drop::NONE);
    CHECK_EQ(ring.reader.read_partial(21, frame), Drop::STALE);
    CHECK_EQ(ring.reader.read_partial(5, frame), Drop::OVERWRITTEN);
    CHECK_EQ(ring.reader.read_partial(13, frame), Drop::NONE);
    CHECK(ring.reader.is_held(frame));
    writer.commit(0, 0);
    CHECK(ring.reader.is_held(frame));  // written to the end, and still the same frame
    writer.begin(21, golden_layout(), 0, 0, true);
    CHECK(!ring.reader.is_held(frame));
    writer.commit(0, 0);
}

TEST(slots, misuse_is_refused_before_anything_is_written) {
    GoldenRing ring;
    RingWriter writer(ring.geometry());
    const TensorLayout layout = golden_layout();
    CHECK_THROWS(LocalProtocolError, writer.commit(0, 0));
    CHECK_THROWS(LocalProtocolError, writer.abandon());
    CHECK_THROWS(std::invalid_argument, writer.write(kMaxSeq + 1, layout, golden_payload(), 0, 0));
    CHECK_THROWS(std::invalid_argument, writer.begin(~std::uint64_t{0}, layout, 0, 0, false));
    CHECK_THROWS(std::invalid_argument, writer.write(5, layout, std::vector<std::uint8_t>(23), 0, 0));
    CHECK_THROWS(std::invalid_argument, writer.write(5, layout, std::vector<std::uint8_t>(25), 0, 0));
    CHECK(std::memcmp(ring.slot(5), kGolden.data(), kHeaderSlotBytes) == 0);

    writer.begin(6, layout, 0, 0, false);
    CHECK_THROWS(LocalProtocolError, writer.begin(7, layout, 0, 0, false));
    CHECK_THROWS(LocalProtocolError, writer.write(7, layout, golden_payload(), 0, 0));
    CHECK_EQ(word_of(ring, 7), 0u);
    writer.commit(0, 0);
    CHECK_THROWS(LocalProtocolError, writer.commit(0, 0));

    for (std::uint64_t back : {std::uint64_t{0}, std::uint64_t{5}, std::uint64_t{6}}) {
        CHECK_THROWS(std::invalid_argument, writer.write(back, layout, golden_payload(), 0, 0));
        CHECK_THROWS(std::invalid_argument, writer.begin(back, layout, 0, 0, false));
    }
    CHECK(std::memcmp(ring.slot(5), kGolden.data(), kHeaderSlotBytes) == 0);
    CHECK(writer.write(kMaxSeq, layout, golden_payload(), 0, 0));
    CHECK_EQ(word_of(ring, 7), ~std::uint64_t{0});
    CHECK_THROWS(std::invalid_argument, writer.write(kMaxSeq, layout, golden_payload(), 0, 0));
}

TEST(slots, a_view_knows_when_it_was_overwritten) {
    GoldenRing ring;
    CHECK_EQ(ring.read(), Drop::NONE);
    RingWriter writer(ring.geometry());
    writer.write(4, golden_layout(), golden_payload(), 0, 0);  // another slot
    CHECK(ring.reader.intact(ring.frame));
    writer.begin(13, golden_layout(), 0, 0, false);
    CHECK(!ring.reader.intact(ring.frame));
    std::array<std::uint8_t, 24> into;
    CHECK(!ring.reader.copy(ring.frame, into.data()));
    writer.commit(0, 0);
    CHECK(!ring.reader.intact(ring.frame));
    CHECK(!ring.reader.copy(ring.frame, into.data()));
}

TEST(slots, newest_is_the_highest_committed_seq_in_its_own_slot) {
    const HeapRing ring(4, {{1, 64}});
    RingReader reader(ring.geometry());
    CHECK(!reader.newest());
    RingWriter writer(ring.geometry());
    for (std::uint64_t seq = 0; seq < 11; ++seq) {
        writer.write(seq, byte_layout(1), std::vector<std::uint8_t>(1), 0, 0);
        CHECK_EQ(*reader.newest(), seq);
    }
    writer.begin(11, byte_layout(1), 0, 0, false);
    CHECK_EQ(*reader.newest(), 10u);
    writer.abandon();
    store<std::uint64_t>(ring.slot(0), committed(101));  // not a multiple of 4: no producer put it there
    CHECK_EQ(*reader.newest(), 10u);
}

// From every seq that was there, also when the ring went round since.
TEST(slots, newest_is_found_from_a_known_seq_by_a_few_looks) {
    const HeapRing ring(1024, {{1, 64}});
    RingReader reader(ring.geometry());
    CHECK(!reader.newest_from(0));
    RingWriter writer(ring.geometry());
    std::uint64_t seq = 0;
    for (const std::uint64_t frames : {1, 1, 63, 64, 65, 500, 1023, 1024, 1025, 3000}) {
        const std::uint64_t known = seq - (seq > 0);
        for (std::uint64_t i = 0; i < frames; ++i)
            writer.write(seq++, byte_layout(1), std::vector<std::uint8_t>(1), 0, 0);
        CHECK_EQ(*reader.newest_from(known), seq - 1);
        CHECK_EQ(*reader.newest_from(seq - 1), seq - 1);
        CHECK_EQ(*reader.newest_from(0), seq - 1);
        CHECK(!reader.newest_from(seq));
    }
    writer.write(seq + 40, byte_layout(1), std::vector<std::uint8_t>(1), 0, 0);
    CHECK_EQ(*reader.newest_from(seq - 1), seq + 40);  // some seqs were left out
    writer.begin(seq + 41, byte_layout(1), 0, 0, false);
    CHECK_EQ(*reader.newest_from(seq - 1), seq + 40);
}

TEST(slots, is_committed_means_this_frame_or_a_later_one) {
    const HeapRing ring(4, {{1, 64}});
    RingReader reader(ring.geometry());
    RingWriter writer(ring.geometry());
    CHECK(!reader.is_committed(2));
    writer.begin(2, byte_layout(1), 0, 0, false);
    CHECK(!reader.is_committed(2));
    writer.commit(0, 0);
    CHECK(reader.is_committed(2));
    CHECK(!reader.is_committed(6));
    writer.write(6, byte_layout(1), std::vector<std::uint8_t>(1), 0, 0);
    CHECK(reader.is_committed(2) && reader.is_committed(6));
    writer.write(8, byte_layout(1), std::vector<std::uint8_t>(1), 0, 0);
    CHECK(!reader.is_committed(kMaxSeq + 1));  // its commit word would wrap to that of seq 0
    CHECK(!reader.wait(kMaxSeq + 1, 0));
}

// Two threads hammer one writer. Refusals are LocalProtocolError, what was accepted is whole, and ThreadSanitizer sees
// no race.
TEST(slots, a_second_thread_is_refused_and_never_interleaved) {
    constexpr std::size_t kBytes = 64 * 1024;
    const HeapRing ring(4, {{1, kBytes}});
    RingWriter writer(ring.geometry());
    const TensorLayout layout = byte_layout(kBytes);
    std::atomic<std::uint64_t> next{0}, written{0}, refused{0}, went_back{0};
    const auto hammer = [&](std::uint8_t fill) {
        const std::vector<std::uint8_t> bytes(kBytes, fill);
        const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
        while (refused.load() < 20 && std::chrono::steady_clock::now() < deadline) {
            try {
                writer.write(next.fetch_add(1), layout, bytes, fill, fill);
                written.fetch_add(1);
            } catch (const LocalProtocolError&) {
                refused.fetch_add(1);
            } catch (const std::invalid_argument&) {  // the other thread took a later number and came first
                went_back.fetch_add(1);
            }
        }
    };
    std::thread other(hammer, std::uint8_t{0xB0});
    hammer(0xA0);
    other.join();
    CHECK(refused.load() >= 20);
    CHECK_EQ(writer.written(), written.load());
    CHECK_EQ(next.load(), written.load() + refused.load() + went_back.load());
    RingReader reader(ring.geometry());
    const std::uint64_t newest = *reader.newest();
    SlotFrame frame;
    CHECK_EQ(reader.read(newest, frame), Drop::NONE);
    std::vector<std::uint8_t> into(kBytes);
    CHECK(reader.copy(frame, into.data()));
    for (std::uint8_t byte : into) CHECK_EQ(std::uint32_t{byte}, frame.meta_version);
}

TEST(slots, reading_never_waits_for_a_writer) {
    GoldenRing ring;
    RingWriter writer(ring.geometry());
    writer.begin(13, golden_layout(), 0, 0, false);
    SlotFrame frame;
    const std::uint64_t start = monotonic_ns();
    for (int i = 0; i < 1000; ++i) CHECK_EQ(ring.reader.read(13, frame), Drop::NOT_COMMITTED);
    CHECK(monotonic_ns() - start < 1'000'000'000);
    CHECK_EQ(ring.reader.drops().count(Drop::NOT_COMMITTED), 1000u);
}
