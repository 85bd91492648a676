// SPDX-License-Identifier: Apache-2.0
// Chunks into frames where sanitizers see every byte: forged datagrams of exact size, rings of exact size, and readers
// of the slots that a frame is being assembled in. Bridge §5, §6; decisions G18-G21.
#include <atomic>
#include <cstring>
#include <optional>
#include <random>
#include <thread>
#include <vector>

#include "assembler.hpp"
#include "check.hpp"
#include "rings.hpp"

using namespace tensorpool;
using namespace tensorpool::test;

namespace {

constexpr std::uint32_t kStream = 1000;
constexpr std::uint64_t kEpoch = 7;
constexpr std::uint64_t kForeverNs = ~std::uint64_t{0};

using Bytes = std::vector<std::uint8_t>;

struct RingTarget final : FrameTarget {
    explicit RingTarget(RingGeometry geometry) : writer(std::move(geometry)) {}
    RingWriter& ring() noexcept override { return writer; }
    void announce(std::uint64_t seq, std::uint32_t, std::uint64_t, std::uint64_t) override { announced.push_back(seq); }
    RingWriter writer;
    std::vector<std::uint64_t> announced;
};

Bytes payload_of(std::uint64_t seq, std::size_t bytes) {
    Bytes payload(bytes);
    for (std::size_t i = 0; i < bytes; ++i) payload[i] = static_cast<std::uint8_t>(seq * 31 + i);
    return payload;
}

Bytes header_of(std::uint64_t seq, std::size_t bytes) {
    Bytes image(kHeaderSlotBytes);
    store<std::uint64_t>(image.data(), committed(seq));
    store<std::uint32_t>(image.data() + slot::kValuesLenBytes, static_cast<std::uint32_t>(bytes));
    store<std::uint16_t>(image.data() + slot::kPoolId, 1);
    write_tensor_header(image.data(), byte_layout(bytes));
    return image;
}

Bytes message_of(std::uint64_t seq, std::uint32_t index, std::uint32_t count, std::uint32_t offset, const Bytes& slice,
                 std::size_t total) {
    const Bytes header = index == 0 ? header_of(seq, total) : Bytes{};
    Bytes message(57 + header.size() + slice.size());
    std::uint8_t* const at = message.data();
    store<std::uint64_t>(at, kChunkMessage << 16 | 41);
    store<std::uint32_t>(at + 8, kStream);
    store<std::uint64_t>(at + 12, kEpoch);
    store<std::uint64_t>(at + 20, seq);
    store<std::uint32_t>(at + 28, index);
    store<std::uint32_t>(at + 32, count);
    store<std::uint32_t>(at + 36, offset);
    store<std::uint32_t>(at + 40, static_cast<std::uint32_t>(slice.size()));
    store<std::uint32_t>(at + 44, static_cast<std::uint32_t>(total));
    at[48] = index == 0;
    store<std::uint32_t>(at + 49, static_cast<std::uint32_t>(header.size()));
    std::copy(header.begin(), header.end(), at + 53);
    store<std::uint32_t>(at + 53 + header.size(), static_cast<std::uint32_t>(slice.size()));
    std::copy(slice.begin(), slice.end(), at + 57 + header.size());
    return message;
}

std::vector<Bytes> chunks_of(std::uint64_t seq, const Bytes& payload, std::size_t chunk_bytes) {
    std::vector<Bytes> messages;
    const auto count =
        static_cast<std::uint32_t>(std::max<std::size_t>(1, (payload.size() + chunk_bytes - 1) / chunk_bytes));
    for (std::uint32_t index = 0; index < count; ++index) {
        const std::size_t begin = index * chunk_bytes;
        const std::size_t end = std::min(payload.size(), begin + chunk_bytes);
        const Bytes slice(payload.begin() + static_cast<std::ptrdiff_t>(begin),
                          payload.begin() + static_cast<std::ptrdiff_t>(end));
        messages.push_back(message_of(seq, index, count, static_cast<std::uint32_t>(begin), slice, payload.size()));
    }
    return messages;
}

// As ChunkRouter does it: in a copy of exactly its size.
void take(Assembler& assembler, const Bytes& message) {
    const std::unique_ptr<std::uint8_t[]> exact(new std::uint8_t[std::max<std::size_t>(message.size(), 1)]);
    if (!message.empty()) std::memcpy(exact.get(), message.data(), message.size());
    ArrivedChunk chunk;
    const ChunkDrop drop = chunk.decode({exact.get(), message.size()});
    if (drop == ChunkDrop::NONE && chunk.stream_id == kStream) assembler.take(chunk, 1);
}

struct Receiving {
    explicit Receiving(std::uint32_t stride = 4096, AssemblyLimits limits = {}, std::uint32_t nslots = 8)
        : ring(nslots, {{5, stride}}), reader(ring.geometry()), assembler(kStream, limits) {
        assembler.set_source(kEpoch, {{1, stride}});
        bind();
    }
    void bind() {
        assembler.bind(nullptr, 0);
        target.emplace(ring.geometry());
        assembler.bind(&*target, kForeverNs);
    }
    HeapRing ring;
    std::optional<RingTarget> target;
    RingReader reader;
    Assembler assembler;
};

}  // namespace

TEST(assembler, any_order_gives_the_same_frame) {
    std::mt19937 random(1);
    Receiving receiving;
    for (std::uint64_t seq = 0; seq < 300; ++seq) {
        const Bytes payload = payload_of(seq, random() % 4097);
        std::vector<Bytes> chunks = chunks_of(seq, payload, 1 + random() % 900);
        if (seq % 3 != 0) std::shuffle(chunks.begin(), chunks.end(), random);
        for (const Bytes& message : chunks) take(receiving.assembler, message);
        SlotFrame frame;
        CHECK_EQ(receiving.reader.read(seq, frame), Drop::NONE);
        Bytes found(frame.values_len_bytes);
        CHECK(receiving.reader.copy(frame, found.data()));
        CHECK(found == payload);
    }
    CHECK_EQ(receiving.assembler.frames(), std::uint64_t{300});
    CHECK_EQ(receiving.target->announced.size(), std::size_t{300});
    CHECK_EQ(receiving.assembler.inflight(), std::size_t{0});
}

// §6, step 11: a consumer that receives the descriptor finds the frame whole.
TEST(assembler, a_frame_is_announced_when_its_slot_is_committed) {
    struct Looking final : FrameTarget {
        explicit Looking(const HeapRing& heap) : writer(heap.geometry()), reader(heap.geometry()) {}
        RingWriter& ring() noexcept override { return writer; }
        void announce(std::uint64_t seq, std::uint32_t, std::uint64_t, std::uint64_t bytes) override {
            ++announced;
            SlotFrame frame;
            CHECK_EQ(reader.read(seq, frame), Drop::NONE);
            CHECK_EQ(std::uint64_t{frame.values_len_bytes}, bytes);
            Bytes found(frame.values_len_bytes);
            CHECK(reader.copy(frame, found.data()));
            CHECK(found == payload_of(seq, bytes));
        }
        RingWriter writer;
        RingReader reader;
        std::uint64_t announced = 0;
    };
    HeapRing ring(4, {{5, 4096}});
    Looking target(ring);
    Assembler assembler(kStream, {});
    assembler.set_source(kEpoch, {{1, 4096}});
    assembler.bind(&target, kForeverNs);
    for (std::uint64_t seq = 0; seq < 40; ++seq) {
        std::vector<Bytes> chunks = chunks_of(seq, payload_of(seq, 3000 + seq), 700);
        if (seq % 2 != 0) std::reverse(chunks.begin(), chunks.end());  // into a buffer, and copied
        for (const Bytes& message : chunks) take(assembler, message);
    }
    assembler.bind(nullptr, 0);
    CHECK_EQ(target.announced, std::uint64_t{40});
    CHECK_EQ(assembler.in_place(), std::uint64_t{20});
}

TEST(assembler, the_most_chunks_in_reverse) {
    AssemblyLimits limits;
    Receiving receiving(65'536, limits);
    const Bytes payload = payload_of(1, 65'535);
    std::vector<Bytes> chunks = chunks_of(1, payload, 1);
    CHECK_EQ(chunks.size(), std::size_t{65'535});
    for (auto message = chunks.rbegin(); message != chunks.rend(); ++message) take(receiving.assembler, *message);
    CHECK_EQ(receiving.assembler.frames(), std::uint64_t{1});
}

TEST(assembler, forged_bytes_hurt_nobody) {
    std::mt19937 random(2);
    AssemblyLimits limits;
    limits.max_inflight = 3;
    Receiving receiving(4096, limits);
    for (int round = 0; round < 20'000; ++round) {
        const std::uint64_t seq = random() % 64;
        std::vector<Bytes> chunks = chunks_of(seq, payload_of(seq, random() % 3000), 700);
        Bytes& message = chunks[random() % chunks.size()];
        const auto edits = random() % 4;
        for (unsigned edit = 0; edit < edits; ++edit)
            message[random() % message.size()] = static_cast<std::uint8_t>(random());
        if (random() % 8 == 0) message.resize(random() % (message.size() + 1));
        take(receiving.assembler, message);
        CHECK(receiving.assembler.inflight() <= 3);
        CHECK(receiving.assembler.buffered_bytes() <= 3 * 4096);
        if (round % 50 == 0) receiving.assembler.expire(static_cast<std::uint64_t>(round) * 10'000'000);
        if (round % 1000 == 0) {  // as after a long silence: seqs may begin anew
            receiving.assembler.set_source(kEpoch + 1, {{1, 4096}});
            receiving.assembler.set_source(kEpoch, {{1, 4096}});
            receiving.bind();
        }
    }
}

// What ThreadSanitizer sees: readers that look at slots while frames are assembled in them.
TEST(assembler, readers_never_see_a_torn_frame) {
    Receiving receiving(4096, {}, 4);
    std::atomic<bool> is_over{false};
    std::atomic<std::uint64_t> newest{0};
    std::uint64_t torn = 0;
    std::uint64_t whole = 0;
    std::thread reading([&] {
        RingReader reader(receiving.ring.geometry());
        Bytes found(4096);
        while (!is_over.load(std::memory_order_relaxed)) {
            const std::uint64_t seq = newest.load(std::memory_order_relaxed);
            SlotFrame frame;
            if (reader.read(seq, frame) != Drop::NONE || !reader.copy(frame, found.data())) continue;
            const Bytes expected = payload_of(seq, frame.values_len_bytes);
            if (std::memcmp(found.data(), expected.data(), expected.size()) == 0)
                ++whole;
            else
                ++torn;
        }
    });
    for (std::uint64_t seq = 1; seq <= 1'500; ++seq) {
        for (const Bytes& message : chunks_of(seq, payload_of(seq, 1000 + seq % 3000), 600))
            take(receiving.assembler, message);
        newest.store(seq, std::memory_order_relaxed);
        if (seq % 7 == 0) take(receiving.assembler, chunks_of(seq + 1, payload_of(seq + 1, 2000), 600)[0]);
    }
    is_over = true;
    reading.join();
    CHECK_EQ(torn, std::uint64_t{0});
    CHECK(whole > 0 || receiving.assembler.frames() > 0);
}

TEST(assembler, checksums_agree_however_they_are_computed) {
    const std::uint8_t digits[] = {'1', '2', '3', '4', '5', '6', '7', '8', '9'};
    CHECK_EQ(crc32c(digits), std::uint32_t{0xE306'9283});
    CHECK_EQ(crc32c(std::span(digits).subspan(4), crc32c(std::span(digits).first(4))), std::uint32_t{0xE306'9283});
    const Bytes bytes = payload_of(3, 1003);
    CHECK_EQ(~crc32c_by_table(~0u, bytes.data(), bytes.size()), crc32c(bytes));
}

TEST(assembler, one_thread_at_a_time) {
    Receiving receiving;
    const Assembler::Busy busy(receiving.assembler);
    CHECK_THROWS(LocalProtocolError, receiving.assembler.expire(1));
}

// Counters of a bridge are named by them: two reasons under one name would add up.
TEST(assembler, every_reason_has_a_name_of_its_own) {
    for (const std::span<const char* const> names : {std::span<const char* const>(kChunkDropNames), {kFrameLossNames}})
        for (std::size_t i = 1; i < names.size(); ++i) {
            CHECK(names[i] != nullptr && *names[i] != '\0');
            for (std::size_t j = i + 1; j < names.size(); ++j) CHECK(std::strcmp(names[i], names[j]) != 0);
        }
    CHECK_EQ(std::string(kChunkDropNames[static_cast<std::size_t>(ChunkDrop::PAUSED)]), std::string("paused"));
    CHECK_EQ(std::string(kChunkDropNames[static_cast<std::size_t>(ChunkDrop::LENGTH)]), std::string("length"));
    CHECK_EQ(std::string(kFrameLossNames[static_cast<std::size_t>(FrameLoss::PAUSED)]), std::string("paused"));
    CHECK_EQ(std::string(kFrameLossNames[static_cast<std::size_t>(FrameLoss::NO_POOL)]), std::string("no_pool"));
}

TEST(assembler, limits_that_admit_nothing_are_refused) {
    AssemblyLimits limits;
    limits.max_inflight = 0;
    CHECK_THROWS(std::invalid_argument, Assembler(1, limits));
    limits = {};
    limits.timeout_ns = 0;
    CHECK_THROWS(std::invalid_argument, Assembler(1, limits));
}
