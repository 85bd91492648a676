// SPDX-License-Identifier: Apache-2.0
// The gate: closing inside a call, from another thread, twice, and in a forked child.
#include <atomic>
#include <memory>
#include <thread>
#include <vector>

#include <sys/wait.h>
#include <unistd.h>

#include "check.hpp"
#include "close_gate.hpp"

using namespace tensorpool;

namespace {

// What a gate protects. `is_alive` is a plain bool on purpose: without the gate's ordering it is a data race.
struct Guarded {
    CloseGate gate;
    bool is_alive = true;
    std::atomic<int> torn_down{0};

    void tear_down() {
        is_alive = false;
        torn_down.fetch_add(1);
        gate.finish();
    }
    bool call() {
        if (!gate.enter()) return false;
        CHECK(is_alive);
        if (gate.leave()) tear_down();
        return true;
    }
    void close() {
        if (gate.shut()) tear_down();
    }
};

template <typename Child>
void check_in_child(const Child& body) {
    std::fflush(stdout);
    const pid_t child = fork();
    if (child == 0) {
        alarm(20);
        body();
        check::exit_child();
    }
    int status = -1;
    CHECK_EQ(waitpid(child, &status, 0), child);
    CHECK_EQ(status, 0);
}

}  // namespace

TEST(close_gate, close_tears_down_at_once_when_nobody_is_inside) {
    Guarded guarded;
    CHECK(guarded.call());
    CHECK(!guarded.gate.is_shut());
    guarded.close();
    CHECK_EQ(guarded.torn_down.load(), 1);
    CHECK(guarded.gate.is_shut());
    CHECK(!guarded.call());
    guarded.close();
    CHECK_EQ(guarded.torn_down.load(), 1);
    guarded.gate.wait_finished();
}

TEST(close_gate, close_inside_a_call_waits_for_its_end) {
    Guarded guarded;
    CHECK(guarded.gate.enter());
    CHECK(guarded.gate.enter());  // a handler calls again
    guarded.close();
    CHECK_EQ(guarded.torn_down.load(), 0);
    CHECK(!guarded.gate.enter());
    CHECK(guarded.is_alive);
    CHECK(!guarded.gate.leave());
    guarded.close();
    CHECK_EQ(guarded.torn_down.load(), 0);
    const bool last = guarded.gate.leave();
    CHECK(last);
    if (last) guarded.tear_down();
    guarded.close();
    CHECK_EQ(guarded.torn_down.load(), 1);
}

TEST(close_gate, close_from_another_thread_waits_for_the_caller_inside) {
    Guarded guarded;
    std::atomic<bool> entered{false}, shut{false}, finished{false};
    CHECK(guarded.gate.enter());
    std::thread closer([&] {
        entered = true;
        guarded.close();
        shut = true;
        guarded.gate.wait_finished();
        CHECK(!guarded.is_alive);
        finished = true;
    });
    while (!shut) std::this_thread::yield();
    CHECK(!finished);
    CHECK_EQ(guarded.torn_down.load(), 0);
    if (guarded.gate.leave()) guarded.tear_down();
    closer.join();
    CHECK(finished);
    CHECK_EQ(guarded.torn_down.load(), 1);
}

TEST(close_gate, the_last_leaver_tears_down_exactly_once_under_hammering) {
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
    constexpr int kRounds = 300;
#else
    constexpr int kRounds = 1000;
#endif
    for (int round = 0; round < kRounds; ++round) {
        Guarded guarded;
        std::atomic<int> ready{0};
        std::vector<std::thread> threads;
        for (int caller = 0; caller < 3; ++caller)
            threads.emplace_back([&] {
                ready.fetch_add(1);
                for (int i = 0; guarded.call(); ++i)
                    if (i % 64 == 63) std::this_thread::yield();  // let the closers in
            });
        for (int closer = 0; closer < 2; ++closer)
            threads.emplace_back([&, closer] {
                while (ready.load() < (round + closer) % 4) std::this_thread::yield();
                for (int i = 0; i < (round * 7) % 50; ++i) guarded.call();
                guarded.close();
                guarded.gate.wait_finished();
                CHECK(!guarded.is_alive);
            });
        for (std::thread& thread : threads) thread.join();
        CHECK_EQ(guarded.torn_down.load(), 1);
    }
}

TEST(close_gate, a_forked_child_refuses_everything_and_never_tears_down) {
    Guarded guarded;
    CHECK(!guarded.gate.is_foreign());
    check_in_child([&] {
        CHECK(guarded.gate.is_foreign());
        CHECK(guarded.gate.is_shut());
        CHECK(!guarded.call());
        guarded.close();
        guarded.gate.wait_finished();  // finish() is never called: must not hang
        CHECK_EQ(guarded.torn_down.load(), 0);
        Guarded own;  // what the child makes itself is its own
        CHECK(own.call());
        own.close();
        CHECK_EQ(own.torn_down.load(), 1);
    });
    CHECK(guarded.call());
    guarded.close();
    CHECK_EQ(guarded.torn_down.load(), 1);
}

TEST(close_gate, a_child_forked_inside_a_call_leaves_without_tearing_down) {
    Guarded guarded;
    CHECK(guarded.gate.enter());
    check_in_child([&] {
        guarded.close();
        CHECK(!guarded.gate.leave());
    });
    guarded.close();  // shut while inside: the leaver has to tear down, in this process only
    check_in_child([&] { CHECK(!guarded.gate.leave()); });
    check_in_child([&] {
        check_in_child([&] { CHECK(!guarded.gate.leave()); });  // nor in a grandchild
    });
    const bool last = guarded.gate.leave();
    CHECK(last);
    if (last) guarded.tear_down();
}
