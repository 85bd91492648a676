// SPDX-License-Identifier: Apache-2.0
// Sleeping readers: woken by the writer from another thread or process, through a read-only mapping, and never for
// longer than a bounded time when the writer does not wake them.
#include <atomic>
#include <fstream>
#include <functional>
#include <string>
#include <thread>

#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>

#include "check.hpp"
#include "rings.hpp"

using namespace tensorpool;
using namespace tensorpool::test;

namespace {

constexpr std::uint64_t kMs = 1'000'000;
constexpr std::uint64_t kForever = 20'000 * kMs;  // far longer than any test: a sleeper that returns earlier was woken

// Waits until the kernel says that a thread sleeps: state S in its stat file.
bool wait_asleep(pid_t pid, pid_t thread) {
    const std::string path = "/proc/" + std::to_string(pid) + "/task/" + std::to_string(thread) + "/stat";
    for (int i = 0; i < 5000; ++i) {
        std::ifstream stat(path);
        std::string text((std::istreambuf_iterator<char>(stat)), {});
        const std::size_t state = text.rfind(") ");
        if (state != std::string::npos && text[state + 2] == 'S') return true;
        nap(kMs);
    }
    return false;
}

std::uint64_t thread_cpu_ns() {
    timespec now;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return static_cast<std::uint64_t>(now.tv_sec) * 1'000'000'000u + static_cast<std::uint64_t>(now.tv_nsec);
}

void write_one(RingWriter& writer, std::uint64_t seq) {
    const std::uint8_t byte[1] = {1};
    writer.write(seq, byte_layout(1), byte, 0, 0);
}

struct Sleeper {
    std::atomic<pid_t> thread_id{0};
    std::atomic<std::uint64_t> slept_ns{0};
    std::atomic<bool> is_done{false};
    std::thread thread;

    Sleeper(const std::uint32_t* word, std::uint32_t expected) : Sleeper([=] { sleep_on(word, expected, kForever); }) {}
    explicit Sleeper(std::function<void()> sleep)
        : thread([this, sleep] {
              thread_id = gettid();
              const std::uint64_t start = monotonic_ns();
              sleep();
              slept_ns = monotonic_ns() - start;
              is_done = true;
          }) {
        while (thread_id == 0) std::this_thread::yield();
        CHECK(wait_asleep(getpid(), thread_id));
    }
    ~Sleeper() { thread.join(); }
    bool done_within(std::uint64_t nanoseconds) const {
        const std::uint64_t start = monotonic_ns();
        while (!is_done && monotonic_ns() - start < nanoseconds) nap(kMs);
        return is_done;
    }
};

}  // namespace

TEST(wake, the_writer_wakes_who_sleeps_on_the_newest_slot) {
    const SharedRing shared(4, {{1, 64}});
    const MappedRing mine = shared.map(true);
    const MappedRing theirs = shared.map(false);  // another mapping of the same file: the futex is the file's
    RingWriter writer(mine.geometry());
    write_one(writer, 0);
    const CommitWord word(theirs.geometry().slot(1));
    const auto seen = static_cast<std::uint32_t>(word.peek());
    Sleeper sleeper(word.low_half(), seen);
    writer.wake(monotonic_ns());  // the newest frame is in slot 0: this sleeper is not meant
    CHECK(!sleeper.done_within(30 * kMs));
    write_one(writer, 1);
    writer.wake(monotonic_ns() + kWakeEveryNs);
    CHECK(sleeper.done_within(kForever / 2));
    CHECK(sleeper.slept_ns < kForever / 2);
}

TEST(wake, wake_ups_are_rate_limited_with_one_in_advance) {
    const SharedRing shared(1, {{1, 64}});
    const MappedRing ring = shared.map(true);
    RingWriter writer(ring.geometry());
    write_one(writer, 0);
    const CommitWord word(ring.geometry().slot(0));
    const auto seen = static_cast<std::uint32_t>(word.peek());
    for (const std::uint64_t now : {1'000'000'000u, 2'000'000'000u}) {  // a pause earns no more than one
        writer.wake(now);
        {
            Sleeper second(word.low_half(), seen);
            writer.wake(now + 1);
            CHECK(second.done_within(kForever / 2));
        }
        Sleeper third(word.low_half(), seen);
        writer.wake(now + kWakeEveryNs - 1);
        CHECK(!third.done_within(30 * kMs));
        writer.wake(now + kWakeEveryNs);
        CHECK(third.done_within(kForever / 2));
    }
}

TEST(wake, one_wake_up_is_for_every_sleeper) {
    const SharedRing shared(1, {{1, 64}});
    const MappedRing ring = shared.map(true);
    RingWriter writer(ring.geometry());
    write_one(writer, 0);
    const CommitWord word(ring.geometry().slot(0));
    const auto seen = static_cast<std::uint32_t>(word.peek());
    Sleeper first(word.low_half(), seen), second(word.low_half(), seen), third(word.low_half(), seen);
    writer.wake(monotonic_ns());
    for (const Sleeper* sleeper : {&first, &second, &third}) CHECK(sleeper->done_within(kForever / 4));
}

TEST(wake, a_burst_wakes_who_sleeps_on_its_first_slot) {
    const SharedRing shared(8, {{1, 64}});
    const MappedRing ring = shared.map(true);
    RingWriter writer(ring.geometry());
    write_one(writer, 0);
    const CommitWord word(ring.geometry().slot(1));
    Sleeper sleeper(word.low_half(), static_cast<std::uint32_t>(word.peek()));
    for (std::uint64_t seq = 1; seq < 4; ++seq) write_one(writer, seq);
    writer.wake(monotonic_ns(), 3);
    CHECK(sleeper.done_within(kForever / 2));
}

TEST(wake, a_sleeper_on_many_words_is_woken_by_any) {
    const SharedRing first(4, {{1, 64}}), second(4, {{1, 64}});
    const MappedRing rings[] = {first.map(true), second.map(true)};
    for (int woken = 0; woken < 2; ++woken) {
        std::vector<SleepWord> words;
        for (const MappedRing& ring : rings) {
            const CommitWord word(ring.geometry().slot(0));
            words.emplace_back(word.low_half(), static_cast<std::uint32_t>(word.peek()));
        }
        Sleeper sleeper([&] { sleep_on_any(words, kForever, 0); });
        RingWriter writer(rings[woken].geometry());
        write_one(writer, 0);
        CHECK(words[static_cast<std::size_t>(woken)].has_changed());
        writer.wake(monotonic_ns());
        CHECK(sleeper.done_within(kForever / 2));
    }
}

TEST(wake, more_words_than_the_kernel_watches_are_watched_in_turns) {
    std::vector<std::uint32_t> memory(2 * kWordsAtOnce + 5);
    std::vector<SleepWord> words;
    for (const std::uint32_t& word : memory) words.emplace_back(&word, 0);
    for (std::size_t turn = 0; turn < 4; ++turn) {
        const std::uint64_t start = monotonic_ns();
        sleep_on_any(words, kForever, turn);  // bounded: a thread that sleeps on a part has to look at the rest
        CHECK(monotonic_ns() - start < kForever / 2);
    }
    memory.back() = 1;  // of the third group: its sleep ends at once
    const std::uint64_t start = monotonic_ns();
    for (int i = 0; i < 1000; ++i) sleep_on_any(words, kForever, 2);
    CHECK(monotonic_ns() - start < 1000 * kLongestPartialSleepNs);
}

TEST(wake, a_bell_wakes_who_sleeps_on_it) {
    Doorbell bell;
    const SleepWord word = bell.since(bell.rings());
    Sleeper sleeper([&] { sleep_on_any({&word, 1}, kForever, 0); });
    bell.ring();
    CHECK(sleeper.done_within(kForever / 2));
    CHECK(word.has_changed());
}

TEST(wake, a_writer_that_wrote_nothing_wakes_nobody) {
    const SharedRing shared(2, {{1, 64}});
    const MappedRing ring = shared.map(true);
    RingWriter writer(ring.geometry());
    writer.wake(monotonic_ns());  // there is no newest frame
}

TEST(wake, a_changed_word_is_not_slept_on) {
    const SharedRing shared(1, {{1, 64}});
    const MappedRing ring = shared.map(true);
    const CommitWord word(ring.geometry().slot(0));
    const std::uint64_t start = monotonic_ns();
    sleep_on(word.low_half(), 77, kForever);
    CHECK(monotonic_ns() - start < kForever / 2);
}

TEST(wake, waiting_ends_with_the_commit) {
    const SharedRing shared(4, {{1, 64}});
    const MappedRing mine = shared.map(true);
    const MappedRing theirs = shared.map(false);
    RingWriter writer(mine.geometry());
    std::atomic<bool> woken{false};
    std::atomic<pid_t> thread_id{0};
    std::thread waiter([&] {
        thread_id = gettid();
        const RingReader reader(theirs.geometry());
        woken = reader.wait(2, kForever);
    });
    while (thread_id == 0) std::this_thread::yield();
    CHECK(wait_asleep(getpid(), thread_id));
    const std::uint64_t start = monotonic_ns();
    write_one(writer, 2);
    writer.wake(monotonic_ns());
    waiter.join();
    CHECK(woken);
    CHECK(monotonic_ns() - start < kForever / 2);
}

TEST(wake, sleeps_are_bounded_where_nobody_wakes) {
    const SharedRing shared(4, {{1, 64}});
    const MappedRing ring = shared.map(true);
    RingWriter writer(ring.geometry());
    std::atomic<bool> reached{false};
    std::thread waiter([&] { reached = RingReader(ring.geometry()).wait(0, kForever); });
    nap(20 * kMs);
    const std::uint64_t start = monotonic_ns();
    write_one(writer, 0);  // and no wake
    waiter.join();
    CHECK(reached);
    CHECK(monotonic_ns() - start < 2000 * kMs);  // kLongestSleepNs is 2 ms; the rest is for a busy machine
}

TEST(wake, a_timeout_is_kept_without_burning_the_processor) {
    const SharedRing shared(4, {{1, 64}});
    const MappedRing ring = shared.map(false);
    const RingReader reader(ring.geometry());
    const std::uint64_t start = monotonic_ns();
    const std::uint64_t cpu = thread_cpu_ns();
    CHECK(!reader.wait(0, 100 * kMs));
    CHECK(monotonic_ns() - start >= 100 * kMs);
    CHECK(thread_cpu_ns() - cpu < 50 * kMs);
    const std::uint64_t again = monotonic_ns();
    CHECK(!reader.wait(0, 0));
    CHECK(monotonic_ns() - again < 50 * kMs);
}

TEST(wake, what_is_there_already_is_not_waited_for) {
    const HeapRing ring(4, {{1, 64}});
    RingWriter writer(ring.geometry());
    const RingReader reader(ring.geometry());
    write_one(writer, 1);
    CHECK(reader.wait(1, 0));
    write_one(writer, 5);
    CHECK(reader.wait(1, 0));  // gone, but not to come
}

// A read-only mapping is enough for FUTEX_WAIT: the child really sleeps, and one wake-up of the parent ends it.
TEST(wake, another_process_is_woken_through_its_read_only_mapping) {
    const SharedRing shared(2, {{1, 64}});
    const MappedRing ring = shared.map(true);
    const SharedFile control(sizeof(std::atomic<int>));
    const std::unique_ptr<Mapping> page = control.map(true);
    auto& stage = *reinterpret_cast<std::atomic<int>*>(page->bytes().data());
    RingWriter writer(ring.geometry());
    write_one(writer, 0);
    const pid_t child = fork();
    if (child == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        const MappedRing mine = shared.map(false);
        CHECK(!mine.header->is_writable());
        const CommitWord word(mine.geometry().slot(0));
        std::uint64_t start = monotonic_ns();
        sleep_on(word.low_half(), static_cast<std::uint32_t>(word.peek()), 50 * kMs);
        CHECK(monotonic_ns() - start >= 49 * kMs);  // an error would have returned at once
        start = monotonic_ns();
        stage = 1;
        sleep_on(word.low_half(), static_cast<std::uint32_t>(word.peek()), kForever);
        CHECK(monotonic_ns() - start < kForever / 2);
        stage = 2;
        CHECK(RingReader(mine.geometry()).wait(1, kForever));
        check::exit_child();
    }
    const auto reach = [&](int wanted) {
        for (int i = 0; stage < wanted && i < 10'000; ++i) nap(kMs);
        CHECK(wait_asleep(child, child));
    };
    reach(1);
    writer.wake(monotonic_ns());
    reach(2);
    write_one(writer, 1);
    writer.wake(monotonic_ns() + kWakeEveryNs);
    int status = -1;
    CHECK_EQ(waitpid(child, &status, 0), child);
    CHECK_EQ(status, 0);
}
