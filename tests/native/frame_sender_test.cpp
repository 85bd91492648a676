// SPDX-License-Identifier: Apache-2.0
// Cutting payloads into chunks and sending them: every byte once, golden bytes, no room, no subscriber, torn frames.
// Bridge §5.1, §5.2, §11; decisions G1-G3, G24, G26.
#include <algorithm>
#include <array>
#include <functional>

#include "check.hpp"
#include "frame_sender.hpp"
#include "rings.hpp"

using namespace tensorpool;
using namespace tensorpool::test;

namespace {

// A log that keeps what was committed. `script` decides about each claim: a position, or why there is none.
struct FakeLog {
    std::vector<std::vector<std::uint8_t>> messages;
    std::function<std::int64_t(std::size_t)> script = [](std::size_t) { return 1; };
    std::function<void()> during_fill = [] {};
    std::size_t claims = 0;
    std::size_t aborted = 0;

    template <typename Fill>
    std::int64_t claim_if(std::size_t length, Fill&& fill) {
        const std::int64_t result = script(claims++);
        if (result <= 0) return result;
        std::vector<std::uint8_t> message(length, 0xEE);
        during_fill();
        if (!fill(message.data())) return ++aborted, 0;
        messages.push_back(std::move(message));
        return result;
    }
};

// A ring with one frame of `bytes` bytes, whose payload counts up.
struct Source : HeapRing {
    explicit Source(std::size_t bytes)
        : HeapRing(4, {{1, 64}, {2, 65'536}}), writer(geometry()), reader(geometry()), payload(bytes) {
        for (std::size_t i = 0; i < bytes; ++i) payload[i] = static_cast<std::uint8_t>(i * 7 + (i >> 8));
        layout = layout_of(Dtype::UINT8, MajorOrder::ROW, {static_cast<std::int32_t>(bytes)});
        layout.resolve();
        write(9);
        CHECK(reader.read(9, frame) == Drop::NONE);
    }
    void write(std::uint64_t seq) { writer.write(seq, layout, payload, 77, 3); }

    RingWriter writer;
    RingReader reader;
    std::vector<std::uint8_t> payload;
    TensorLayout layout;
    SlotFrame frame;
};

constexpr std::uint64_t kTraceId = 0x0102'0304'0506'0708;

struct Sent : Source {
    Sent(std::size_t bytes, ChunkPlan plan, std::uint64_t limit = kMaxBridgedBytes,
         ChunkLayout layout = ChunkLayout::SPECIFICATION)
        : Source(bytes),
          log(std::make_shared<FakeLog>()),
          sender(reader, log, 10'000, 5, plan, {layout, limit, true, {}}) {}
    std::shared_ptr<FakeLog> log;
    FrameSender<FakeLog> sender;
};

std::uint32_t u32(const std::vector<std::uint8_t>& message, std::size_t at) {
    return load<std::uint32_t>(message.data() + at);
}

}  // namespace

TEST(frame_sender, plan_covers_every_payload_exactly_once) {
    for (const auto& [first, next] :
         {std::pair{1063u, 1280u}, {1u, 1u}, {7847u, 8064u}, {65'159u, 65'376u}, {3u, 5u}}) {
        const ChunkPlan plan(first, next);
        for (const std::uint32_t bytes :
             {0u, 1u, 2u, 3u, 4u, first - 1, first, first + 1, first + next, first + next + 1, 65'000u}) {
            std::uint32_t at = 0;
            for (std::uint32_t i = 0; i < plan.count(bytes); ++i) {
                const ChunkPlan::Slice slice = plan.slice(i, bytes);
                CHECK(slice.offset == at);
                CHECK(slice.length > 0 || bytes == 0);
                CHECK(slice.length <= (i == 0 ? first : next));
                at += slice.length;
            }
            CHECK(at == bytes);
        }
    }
}

TEST(frame_sender, plan_refuses_what_needs_too_many_chunks) {
    const ChunkPlan small(1063, 1280);
    CHECK(small.largest_bytes() == 1063 + std::uint64_t{65'534} * 1280);
    CHECK(small.count(small.largest_bytes()) == 65'535u);
    CHECK(small.count(small.largest_bytes() + 1) == 0u);
    const ChunkPlan large(65'159, 65'376);
    CHECK(large.largest_bytes() == kMaxBridgedBytes);
    CHECK(large.count(kMaxBridgedBytes) > 0u);
    CHECK(large.count(kMaxBridgedBytes + 1) == 0u);
    CHECK_THROWS(std::invalid_argument, ChunkPlan(0, 1));
    CHECK_THROWS(std::invalid_argument, ChunkPlan(2, 1));
    CHECK_THROWS(std::invalid_argument, ChunkPlan(1, 65'536));
}

TEST(frame_sender, frame_leaves_whole_with_its_slot_header_in_chunk_0) {
    Sent sent(1000, {300, 400});
    CHECK(sent.sender.send(sent.frame, kTraceId) == SendResult::SENT);
    const auto& messages = sent.log->messages;
    CHECK(messages.size() == 3u);
    std::vector<std::uint8_t> payload;
    for (std::size_t i = 0; i < messages.size(); ++i) {
        const auto& message = messages[i];
        const std::uint32_t header = i == 0 ? 256 : 0;
        const std::array<std::uint8_t, 8> golden = {41, 0, 1, 0, 0x86, 3, 1, 0};
        CHECK(std::equal(golden.begin(), golden.end(), message.begin()));
        CHECK(u32(message, 8) == 10'000u);
        CHECK(load<std::uint64_t>(message.data() + 12) == 5u);
        CHECK(load<std::uint64_t>(message.data() + 20) == 9u);
        CHECK(u32(message, 28) == i);
        CHECK(u32(message, 32) == 3u);
        CHECK(u32(message, 36) == payload.size());
        CHECK(u32(message, 44) == 1000u);
        CHECK(message[48] == (i == 0 ? 1 : 0));
        CHECK(u32(message, 49) == header);
        const std::uint32_t length = u32(message, 53 + header);
        CHECK(u32(message, 40) == length);
        CHECK(message.size() == 57 + header + length);
        payload.insert(payload.end(), message.begin() + 57 + header, message.end());
    }
    CHECK(payload == sent.payload);
    CHECK(std::memcmp(messages[0].data() + 53, sent.slot(1), kHeaderSlotBytes) == 0);  // 9 & 3
    CHECK(sent.sender.digest().digest.crc32c == crc32c(payload, crc32c({messages[0].data() + 53, kHeaderSlotBytes})));
    CHECK(sent.sender.frames() == 1u);
    CHECK(sent.sender.bytes() == 1000u);
    CHECK(sent.sender.chunks() == 3u);
}

TEST(frame_sender, traced_frame_carries_its_trace_id_and_a_checksum_of_each_chunk) {
    Sent sent(1000, {300, 400}, kMaxBridgedBytes, ChunkLayout::TRACED);
    CHECK(sent.sender.send(sent.frame, kTraceId) == SendResult::SENT);
    const auto& messages = sent.log->messages;
    CHECK(messages.size() == 3u);
    const std::array<std::uint32_t, 3> offsets = {0, 300, 700};
    const std::array<std::uint32_t, 3> lengths = {300, 400, 300};
    for (std::size_t i = 0; i < messages.size(); ++i) {
        const auto& message = messages[i];
        const std::array<std::uint8_t, 8> golden = {53, 0, 1, 0, 0x86, 3, 1, 0};
        CHECK(std::equal(golden.begin(), golden.end(), message.begin()));
        CHECK(u32(message, 8) == 10'000u);
        CHECK(load<std::uint64_t>(message.data() + 12) == 5u);
        CHECK(load<std::uint64_t>(message.data() + 20) == 9u);
        CHECK(load<std::uint64_t>(message.data() + 28) == kTraceId);
        CHECK(u32(message, 36) == i);
        CHECK(u32(message, 40) == 3u);
        CHECK(u32(message, 44) == offsets[i]);
        CHECK(u32(message, 48) == lengths[i]);
        CHECK(u32(message, 52) == 1000u);
        CHECK(message[60] == (i == 0 ? 1 : 0));
        const std::uint32_t header = i == 0 ? 256 : 0;
        CHECK(u32(message, 61) == header);
        CHECK(u32(message, 65 + header) == lengths[i]);
        CHECK(message.size() == 69 + header + lengths[i]);
        std::vector<std::uint8_t> content(message.begin() + 65, message.begin() + 65 + header);
        content.insert(content.end(), message.begin() + 69 + header, message.end());
        CHECK(u32(message, 56) == crc32c(content));
        ArrivedChunk chunk;
        CHECK(chunk.decode(message) == ChunkDrop::NONE);
        CHECK(chunk.trace_id == kTraceId);
        CHECK(chunk.crc32c == crc32c(content));
    }
}

TEST(frame_sender, every_other_block_length_is_refused) {
    Sent sent(10, {300, 400});
    CHECK(sent.sender.send(sent.frame, kTraceId) == SendResult::SENT);
    std::vector<std::uint8_t> message = sent.log->messages[0];
    for (std::uint32_t block = 0; block <= 0xffff; ++block) {
        store<std::uint16_t>(message.data(), static_cast<std::uint16_t>(block));
        ArrivedChunk chunk;
        if (block != 41) CHECK(chunk.decode(message) == ChunkDrop::MALFORMED);
    }
}

TEST(frame_sender, empty_frame_is_one_chunk_with_a_header) {
    Sent sent(0, {300, 400});
    CHECK(sent.sender.send(sent.frame, kTraceId) == SendResult::SENT);
    CHECK(sent.log->messages.size() == 1u);
    CHECK(sent.log->messages[0].size() == 57u + 256u);
    CHECK(u32(sent.log->messages[0], 32) == 1u);
}

TEST(frame_sender, frame_without_room_goes_on_where_it_stopped) {
    Sent sent(1000, {300, 400});
    sent.log->script = [](std::size_t claim) { return claim == 1 || claim == 2 ? aeron::kBackPressured : 1; };
    CHECK(sent.sender.send(sent.frame, kTraceId) == SendResult::BACK_PRESSURED);
    CHECK(sent.sender.is_open());
    CHECK_THROWS(LocalProtocolError, sent.sender.send(sent.frame, kTraceId));
    CHECK(sent.sender.resume() == SendResult::BACK_PRESSURED);
    CHECK(sent.sender.resume() == SendResult::SENT);
    CHECK(!sent.sender.is_open());
    CHECK(sent.log->messages.size() == 3u);
    CHECK_THROWS(LocalProtocolError, sent.sender.resume());
}

TEST(frame_sender, frame_without_listener_is_given_up) {
    Sent sent(1000, {300, 400});
    sent.log->script = [](std::size_t claim) { return claim == 1 ? aeron::kNotConnected : 1; };
    CHECK(sent.sender.send(sent.frame, kTraceId) == SendResult::NOT_CONNECTED);
    CHECK(!sent.sender.is_open());
    CHECK(sent.sender.frames() == 0u);
}

TEST(frame_sender, overwritten_frame_never_gets_its_last_chunk) {
    for (const std::size_t torn_at : {0u, 1u, 2u}) {
        Sent sent(1000, {300, 400});
        sent.log->during_fill = [&] {
            if (sent.log->messages.size() == torn_at) sent.write(13);  // the same slot
        };
        CHECK(sent.sender.send(sent.frame, kTraceId) == SendResult::TORN);
        CHECK(sent.log->messages.size() == torn_at);
        CHECK(sent.log->aborted == 1u);
        CHECK(!sent.sender.is_open());
        CHECK(sent.sender.frames() == 0u);
    }
}

TEST(frame_sender, frame_overwritten_while_it_waits_for_room_is_torn) {
    Sent sent(1000, {300, 400});
    sent.log->script = [](std::size_t claim) { return claim == 1 ? aeron::kBackPressured : 1; };
    CHECK(sent.sender.send(sent.frame, kTraceId) == SendResult::BACK_PRESSURED);
    sent.write(13);
    CHECK(sent.sender.resume() == SendResult::TORN);
    CHECK(sent.log->messages.size() == 1u);
}

TEST(frame_sender, too_large_frame_sends_nothing) {
    Sent limited(1000, {300, 400}, 999);
    CHECK(limited.sender.send(limited.frame, kTraceId) == SendResult::TOO_LARGE);
    CHECK(!limited.sender.is_open());
    Sent fits(1000, {300, 400}, 1000);
    CHECK(fits.sender.send(fits.frame, kTraceId) == SendResult::SENT);
    CHECK(limited.log->claims == 0u);
}

TEST(frame_sender, abandoned_frame_makes_room_for_the_next) {
    Sent sent(1000, {300, 400});
    sent.log->script = [](std::size_t claim) { return claim == 1 ? aeron::kBackPressured : 1; };
    CHECK(sent.sender.send(sent.frame, kTraceId) == SendResult::BACK_PRESSURED);
    sent.sender.abandon();
    sent.write(10);
    CHECK(sent.reader.read(10, sent.frame) == Drop::NONE);
    CHECK(sent.sender.send(sent.frame, kTraceId) == SendResult::SENT);
    CHECK(load<std::uint64_t>(sent.log->messages.back().data() + 20) == 10u);
}
