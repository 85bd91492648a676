// SPDX-License-Identifier: Apache-2.0
// Sleeping until a slot is committed, in memory that readers cannot write.
//
// A reader sleeps in FUTEX_WAIT on the low half of the commit word it expects to change; its read-only mapping is
// enough. The writer cannot see sleepers, and a wake-up costs about half a microsecond even when no reader sleeps, so
// it wakes at most once per kWakeEveryNs. A reader therefore keeps polling for kGraceNs after each frame before it
// sleeps: kGraceNs is longer, so it sees the frames for which the writer skips the wake-up. Sleeps are bounded, because
// writers of other implementations may never wake readers.
#pragma once

#include <cerrno>
#include <climits>
#include <cstdint>
#include <ctime>

#include <sched.h>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace tensorpool {

inline constexpr std::uint64_t kWakeEveryNs = 50'000;
inline constexpr std::uint64_t kGraceNs = 80'000;
inline constexpr std::uint64_t kLongestSleepNs = 2'000'000;
inline constexpr std::uint64_t kLongestIdleSleepNs = 50'000'000;

// How long to sleep at a time after having waited so long already: the frame of a producer that sends no wake-ups is
// seen at most a quarter of its interval late, and an idle stream costs next to nothing.
inline std::uint64_t bounded_sleep_ns(std::uint64_t waited_ns) noexcept {
    const std::uint64_t quarter_ns = waited_ns / 4;
    return quarter_ns < kLongestSleepNs       ? kLongestSleepNs
           : quarter_ns > kLongestIdleSleepNs ? kLongestIdleSleepNs
                                              : quarter_ns;
}

inline std::uint64_t monotonic_ns() noexcept {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return static_cast<std::uint64_t>(now.tv_sec) * 1'000'000'000u + static_cast<std::uint64_t>(now.tv_nsec);
}

// Sleeps while *word == expected, at most `nanoseconds`. Returns early on a wake-up or a signal.
inline void sleep_on(const std::uint32_t* word, std::uint32_t expected, std::uint64_t nanoseconds) noexcept {
    const timespec timeout{static_cast<time_t>(nanoseconds / 1'000'000'000u),
                           static_cast<long>(nanoseconds % 1'000'000'000u)};
#if defined(__linux__)
    syscall(SYS_futex, word, FUTEX_WAIT, expected, &timeout, nullptr, 0);
#else
    if (__atomic_load_n(word, __ATOMIC_ACQUIRE) == expected) nanosleep(&timeout, nullptr);
#endif
}

inline void pause() noexcept {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

inline void wake_all(const std::uint32_t* word) noexcept {
#if defined(__linux__)
    syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
#else
    (void)word;
#endif
}

}  // namespace tensorpool
