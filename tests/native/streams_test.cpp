// SPDX-License-Identifier: Apache-2.0
// A producer's stream and a consumer's, over a log in this process: what any thread may ask while they run, and that a
// frame is published once, whatever fails after its commit.
#include <atomic>
#include <thread>

#include <linux/futex.h>
#include <sys/syscall.h>

#include "check.hpp"
#include "descriptor_feed.hpp"
#include "fake_aeron.hpp"
#include "publisher.hpp"
#include "rings.hpp"
#include "wait_any.hpp"

using namespace tensorpool;
using namespace tensorpool::test;

namespace {

constexpr std::uint32_t kStream = 10'000;
constexpr std::uint64_t kEpoch = 5;
const std::uint8_t kPayload[16] = {1, 2, 3};

struct Stream {
    explicit Stream(std::uint32_t own_id = kStream, std::shared_ptr<FakeAeron> own_log = std::make_shared<FakeAeron>())
        : id(own_id), log(std::move(own_log)) {}

    const std::uint32_t id;
    const std::shared_ptr<FakeAeron> log;
    FakeAeron& aeron = *log;
    HeapRing ring{4, {{1, 64}}};
    RingWriter writer{ring.geometry()};
    RingReader reader{ring.geometry()};
    std::shared_ptr<Subscription> descriptors = aeron.subscription(kStream);
    FramePublisher publisher{writer, aeron.publication(kStream), id, kEpoch, false};

    bool publish(std::uint64_t seq) { return publisher.publish(seq, byte_layout(16), kPayload, 1, 2, 3); }

    std::vector<std::uint64_t> announced() {
        struct Seqs final : Sink {
            std::vector<std::uint64_t> seqs;
            bool on_message(std::span<const std::uint8_t> message, const MessageInfo&) override {
                FrameDescriptor descriptor;
                CHECK(descriptor.decode(message));
                seqs.push_back(descriptor.seq);
                return true;
            }
        } seqs;
        while (descriptors->poll(seqs, 100) > 0) {
        }
        return seqs.seqs;
    }
};

thread_local bool fails_futex_wake = false;
thread_local bool lacks_futex_waitv = false;

}  // namespace

extern "C" {
long __real_syscall(long, ...);

long __wrap_syscall(long number, long a, long b, long c, long d, long e, long f) {
    if (lacks_futex_waitv && number == 449) return errno = ENOSYS, -1;
    if (!fails_futex_wake || number != SYS_futex || b != FUTEX_WAKE) return __real_syscall(number, a, b, c, d, e, f);
    errno = EPERM;
    return -1;
}
}

// ThreadSanitizer reports every count that is not a RelaxedCounter.
TEST(streams, any_thread_may_ask_for_counts_meanwhile) {
    constexpr std::uint64_t kFrames = 3000;
    Stream stream;
    const auto late = std::make_shared<LateFrames>();
    DescriptorFeed feed(stream.reader, kStream, kEpoch, 0, 0, late);
    std::atomic<bool> is_over{false};
    std::atomic<std::uint64_t> asked{0};
    std::thread producer([&] {
        while (asked.load(std::memory_order_relaxed) == 0) std::this_thread::yield();
        std::uint64_t published = 0;
        stream.aeron.on_claim = [&] {
            return ++published % 16 == 0 ? kNotConnected : published % 17 == 0 ? kBackPressured : 1;
        };
        for (std::uint64_t seq = 0; seq < kFrames; ++seq) {
            if (seq % 5 == 0) {
                stream.writer.begin(seq, byte_layout(16), 0, 0, false);
                stream.publisher.commit(0, 0, 0);
            } else {
                CHECK(stream.publish(seq));
            }
            if (seq % 7 == 0)
                CHECK(!stream.publisher.publish(seq + 1, byte_layout(65), std::vector<std::uint8_t>(65), 0, 0, 0));
        }
        const std::uint8_t foreign[1] = {0};
        for (const std::uint64_t epoch : {kEpoch - 1, std::uint64_t{0}}) {
            std::uint8_t message[FrameDescriptor::kBytes];
            FrameDescriptor{kStream, epoch, 0, 0, 0, 0}.encode(message);
            CHECK(stream.aeron.publication(kStream)->claim(sizeof message, [&](std::uint8_t* at) {
                std::memcpy(at, epoch == 0 ? foreign : message, epoch == 0 ? 1 : sizeof message);
            }) != 0);
        }
        is_over.store(true, std::memory_order_relaxed);
    });
    std::thread consumer([&] {
        ReceivedFrame frame;
        for (std::uint64_t turn = 0; !is_over.load(std::memory_order_relaxed) || turn % 100 != 0; ++turn) {
            feed.wait(*stream.descriptors, 10'000);
            if (turn % 50 == 7 ? feed.latest(*stream.descriptors, frame) : feed.next(*stream.descriptors, frame))
                turn % 20 == 3 ? feed.refuse(frame, Drop::BAD_PROGRESS) : frame.found_overwritten();
        }
        while (feed.next(*stream.descriptors, frame)) {
        }
    });
    std::thread asker([&] {
        while (!is_over.load(std::memory_order_relaxed)) {
            std::uint64_t sum = stream.writer.next_seq() + stream.writer.written() + stream.writer.no_pool_drops();
            sum += stream.writer.is_claimed() ? 1 : 0;
            sum += stream.publisher.bytes() + stream.publisher.unheard() + stream.publisher.back_pressured();
            sum += stream.publisher.is_broken() ? 1 : 0;
            sum += feed.received() + feed.duplicates() + feed.ignored() + feed.foreign() + feed.lost();
            sum += feed.last_seq_seen().value_or(0) + feed.attention() + late->count();
            for (std::size_t i = 0; i < kDropCount; ++i) sum += feed.drops()[i].get() + stream.reader.drops()[i].get();
            asked.store(sum | 1, std::memory_order_relaxed);
        }
    });
    producer.join();
    consumer.join();
    asker.join();
    CHECK_EQ(stream.writer.written(), kFrames);
    CHECK_EQ(stream.writer.next_seq(), kFrames);
    CHECK_EQ(stream.publisher.unheard(), kFrames / 16);
    CHECK(stream.publisher.back_pressured() > 0);
    CHECK_EQ(feed.ignored(), 1u);
    CHECK_EQ(feed.foreign(), 1u);
    std::uint64_t accounted = feed.received();
    for (std::size_t i = 1; i < kDropCount; ++i) accounted += feed.drops()[i].get();
    CHECK_EQ(accounted, feed.finish().value_or(0));
}

TEST(streams, a_second_thread_is_refused_until_the_descriptor_is_out) {
    Stream stream;
    bool is_nested = false;
    stream.aeron.on_claim = [&] {
        if (!std::exchange(is_nested, true))
            std::thread([&] {
                CHECK_THROWS(LocalProtocolError, stream.publish(1));
            }).join();  // else its descriptor would be first
        return 1;
    };
    CHECK(stream.publish(0));
    CHECK(stream.publish(1));
    CHECK_EQ(stream.writer.written(), 2u);
    CHECK(stream.announced() == (std::vector<std::uint64_t>{0, 1}));
}

// Each thread goes on to the next frame as soon as one is published; a refused call has published nothing.
TEST(streams, of_two_threads_one_publishes_a_frame) {
    constexpr std::uint64_t kFrames = 2000;
    Stream stream;
    std::atomic<std::uint64_t> published{0};
    const auto work = [&] {
        for (std::uint64_t seq = 0; (seq = stream.writer.next_seq()) < kFrames;) {
            try {
                stream.publish(seq);
                published.fetch_add(1);
            } catch (const LocalProtocolError&) {
            } catch (const std::invalid_argument&) {  // the other thread has used this seq
            }
        }
    };
    std::thread other(work);
    work();
    other.join();
    CHECK_EQ(published.load(), stream.writer.written());
    const std::vector<std::uint64_t> seqs = stream.announced();
    CHECK_EQ(seqs.size(), published.load());
    CHECK(std::adjacent_find(seqs.begin(), seqs.end(), std::greater_equal{}) == seqs.end());
}

TEST(streams, what_fails_after_the_commit_does_not_make_the_caller_publish_again) {
    Stream stream;
    stream.aeron.on_claim = []() -> std::int64_t { throw AeronError("the media driver is gone", 0); };
    CHECK(stream.publish(0));
    CHECK(stream.publisher.is_broken());
    CHECK_EQ(stream.publisher.unheard(), 1u);
    stream.aeron.on_claim = [] { return 1; };
    fails_futex_wake = true;
    const std::uint32_t word = 0;
    CHECK_EQ(syscall(SYS_futex, &word, FUTEX_WAKE, 1, nullptr, nullptr, 0), -1L);
    for (std::uint64_t seq = 1; seq < 4; ++seq) {
        const timespec past_the_window{0, 2 * static_cast<long>(kWakeEveryNs)};
        nanosleep(&past_the_window, nullptr);
        CHECK(stream.publish(seq));
    }
    fails_futex_wake = false;
    CHECK_EQ(stream.writer.written(), 4u);
}

// A peer names channels; each that Aeron refuses must cost nothing for good.
TEST(streams, a_refused_subscription_leaves_nothing_behind) {
    FakeAeron aeron;
    for (int i = 0; i < 3; ++i) CHECK_THROWS(AeronError, aeron.subscription(7, FakeAeron::kRefused));
    CHECK_EQ(aeron.client->kept_images(), 0u);
    const auto subscription = aeron.subscription(7);
    CHECK_EQ(aeron.client->kept_images(), 1u);
    subscription->close();
    CHECK_EQ(aeron.client->kept_images(), 0u);
}

namespace {

// Waits for three streams while another thread publishes one frame in each of them in turn; their order of arrival.
std::vector<std::size_t> waited_for(bool has_waitv) {
    constexpr std::uint64_t kLongNs = 20'000'000'000;
    std::deque<Stream> streams;  // that share a descriptor stream
    std::deque<DescriptorFeed> feeds;
    for (std::uint32_t i = 0; i < 3; ++i) {
        Stream& stream = i == 0 ? streams.emplace_back() : streams.emplace_back(kStream + i, streams[0].log);
        feeds.emplace_back(stream.reader, stream.id, kEpoch, 0, 0, std::make_shared<LateFrames>());
    }
    std::atomic<std::size_t> seen{0};
    std::thread producer([&] {
        for (const std::size_t index : {2u, 0u, 1u}) {
            while (seen != (index + 1) % 3) std::this_thread::yield();  // 0, 1, 2
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
            CHECK(streams[index].publish(0));
        }
    });
    lacks_futex_waitv = !has_waitv;
    std::vector<std::size_t> order;
    while (order.size() < 3) {
        {
            std::deque<WatchedFeed> watched;
            for (std::size_t i = 0; i < 3; ++i) watched.emplace_back(feeds[i], streams[i].descriptors);
            const std::uint64_t start = monotonic_ns();
            wait_any(watched, {}, kLongNs);
            CHECK(monotonic_ns() - start < kLongNs);
            for (std::size_t i = 0; i < 3; ++i)
                if (watched[i].has_frames()) order.push_back(i);
        }
        ReceivedFrame frame;
        CHECK(!order.empty());
        CHECK(feeds[order.back()].next(*streams[order.back()].descriptors, frame));
        seen = order.size();
    }
    producer.join();
    lacks_futex_waitv = false;
    return order;
}

}  // namespace

TEST(streams, one_thread_waits_for_several) { CHECK(waited_for(true) == (std::vector<std::size_t>{2, 0, 1})); }

// From now on this process sleeps on one word at a time.
TEST(streams, one_thread_waits_for_several_on_an_old_kernel) {
    CHECK(waited_for(false) == (std::vector<std::size_t>{2, 0, 1}));
    const std::uint32_t memory[2] = {};
    const SleepWord words[] = {{&memory[0], 0}, {&memory[1], 0}};
    const std::uint64_t start = monotonic_ns();
    lacks_futex_waitv = true;
    for (std::size_t turn = 0; turn < 20; ++turn) sleep_on_any(words, 1'000'000, turn);
    lacks_futex_waitv = false;
    CHECK(monotonic_ns() - start >= 20'000'000);  // it sleeps, on one of them
}

TEST(streams, a_feed_is_waited_for_by_one_thread) {
    Stream stream;
    DescriptorFeed feed(stream.reader, kStream, kEpoch, 0, 0, std::make_shared<LateFrames>());
    std::deque<WatchedFeed> watched;
    watched.emplace_back(feed, stream.descriptors);
    CHECK_THROWS(LocalProtocolError, watched.emplace_back(feed, stream.descriptors));
    wait_any(watched, {}, 1'000'000);
    CHECK(!watched.front().has_frames());
    feed.stop();  // from any thread
    const std::uint64_t start = monotonic_ns();
    wait_any(watched, {}, 20'000'000'000);
    CHECK(monotonic_ns() - start < 20'000'000'000);
    CHECK(!watched.front().has_frames());
}

// Every time it is asked long after the frame; the interval of the frames is what the clock says.
TEST(streams, a_producer_that_wakes_its_readers_is_slept_for_without_looking) {
    using Step = DescriptorFeed::Step;
    constexpr std::uint64_t kIntervalNs = 8'000'000, kLaterNs = 200'000;
    Stream stream;
    DescriptorFeed feed(stream.reader, kStream, kEpoch, 0, 0, std::make_shared<LateFrames>());
    std::uint64_t seq = 0, arrived_ns = 0;
    const auto step_at = [&](std::uint64_t now_ns) {
        return feed.step(DescriptorFeed::Busy(feed), *stream.descriptors, now_ns);
    };
    const auto slept = [&](bool is_woken) { feed.slept(DescriptorFeed::Busy(feed), is_woken); };
    const auto receive = [&] {
        nap(kIntervalNs);
        CHECK(stream.publish(seq++));
        CHECK_EQ(step_at(monotonic_ns()).kind, Step::kFrames);
        arrived_ns = monotonic_ns();
        ReceivedFrame frame;
        CHECK(feed.next(*stream.descriptors, frame));
    };
    const auto longest_ns = [&](std::uint64_t since_ns) {
        const Step step = step_at(arrived_ns + since_ns);
        CHECK_EQ(step.kind, Step::kSleep);
        CHECK(step.word.has_value());
        return step.longest_ns;
    };
    receive();
    receive();
    CHECK(longest_ns(kLaterNs) <= kLongestSleepNs);  // it has not woken us yet
    slept(true);
    receive();
    CHECK(longest_ns(kLaterNs) > kIntervalNs);
    CHECK(longest_ns(kLaterNs) <= kLongestIdleSleepNs);
    slept(false);
    CHECK(longest_ns(kLongestIdleSleepNs) < kLongestIdleSleepNs / 2);  // it is overdue: looked for more often
    nap(kLongestIdleSleepNs);
    receive();  // it came without a wake-up
    CHECK(longest_ns(kLaterNs) <= kLongestSleepNs);
}

TEST(streams, a_burst_is_announced_frame_by_frame) {
    Stream stream;
    {
        FramePublisher::Burst burst(stream.publisher);
        for (int i = 0; i < 3; ++i) CHECK(burst.publish(byte_layout(16), kPayload, 7, 2, 0));
        CHECK(!burst.publish(byte_layout(65), std::vector<std::uint8_t>(65), 7, 2, 0));
        CHECK_THROWS(LocalProtocolError, stream.publish(3));
    }
    CHECK(stream.announced() == (std::vector<std::uint64_t>{0, 1, 2}));
    CHECK_EQ(stream.publisher.bytes(), 48u);
    CHECK(stream.publish(3));
}
