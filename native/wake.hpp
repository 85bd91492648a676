// SPDX-License-Identifier: Apache-2.0
// Sleeping until a slot is committed, in memory that readers cannot write.
//
// A reader sleeps in FUTEX_WAIT on the low half of the commit word it expects to change; its read-only mapping is
// enough. The writer cannot see sleepers, and a wake-up costs about half a microsecond even when no reader sleeps, so
// it wakes once per kWakeEveryNs, and once more in advance: after a pause it wakes for two frames that follow each other
// at once. A reader therefore keeps polling for kGraceNs after each frame before it sleeps, unless that frame came alone
// and after a pause: kGraceNs is longer, so it sees the frames for which the writer skips the wake-up. Sleeps are bounded,
// because writers of other implementations may never wake readers.
#pragma once

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <climits>
#include <cstdint>
#include <ctime>
#include <span>

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
inline constexpr std::uint64_t kLongestPartialSleepNs = 1'000'000;
inline constexpr std::uint64_t kLullNs = 1'000;
inline constexpr std::uint64_t kSpinNs = 10'000;
inline constexpr std::size_t kWordsAtOnce = 128;  // that the kernel watches in one call

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

// Sleeps while *word == expected, at most `nanoseconds`. True: a writer woke us. Else errno is EINTR after a signal.
inline bool sleep_on(const std::uint32_t* word, std::uint32_t expected, std::uint64_t nanoseconds) noexcept {
    const timespec timeout{static_cast<time_t>(nanoseconds / 1'000'000'000u),
                           static_cast<long>(nanoseconds % 1'000'000'000u)};
#if defined(__linux__)
    return syscall(SYS_futex, word, FUTEX_WAIT, expected, &timeout, nullptr, 0) == 0;
#else
    if (__atomic_load_n(word, __ATOMIC_ACQUIRE) == expected) nanosleep(&timeout, nullptr);
    return false;
#endif
}

// A word to sleep on until it changes, as the kernel's struct futex_waitv has it.
struct SleepWord {
    SleepWord(const std::uint32_t* word, std::uint32_t seen) noexcept
        : expected(seen), address(reinterpret_cast<std::uintptr_t>(word)) {}

    const std::uint32_t* word() const noexcept { return reinterpret_cast<const std::uint32_t*>(address); }
    bool has_changed() const noexcept { return __atomic_load_n(word(), __ATOMIC_ACQUIRE) != expected; }

    std::uint64_t expected;
    std::uint64_t address;
    std::uint32_t flags = 2;  // FUTEX_32, shared between processes
    std::uint32_t reserved = 0;
};

// Sleeps while no word changes, at most `nanoseconds`. Returns the index of the word by which a writer woke us, or the number
// of words where none did; then errno is EINTR after a signal. Linux watches 128 words at once, before 5.16 only one: then `turn` chooses
// which, and the sleep is short, because the caller looks at the others.
inline std::size_t sleep_on_any(std::span<const SleepWord> all, std::uint64_t nanoseconds, std::size_t turn) noexcept {
    std::span<const SleepWord> words = all;
    static std::atomic<std::size_t> words_at_once{kWordsAtOnce};
    const std::size_t limit = words_at_once.load(std::memory_order_relaxed);
    if (words.size() > limit) {
        nanoseconds = std::min(nanoseconds, kLongestPartialSleepNs);
        const std::size_t groups = (words.size() + limit - 1) / limit;
        words = words.subspan(turn % groups * limit);
        words = words.first(std::min(limit, words.size()));
    }
    const std::size_t first = static_cast<std::size_t>(words.data() - all.data());
    if (words.size() == 1)
        return sleep_on(words[0].word(), static_cast<std::uint32_t>(words[0].expected), nanoseconds) ? first
                                                                                                     : all.size();
#if defined(__linux__)
    constexpr long kFutexWaitv = 449;  // on every architecture but alpha; headers before 5.16 do not have it
    const std::uint64_t until_ns = monotonic_ns() + nanoseconds;
    const timespec until{static_cast<time_t>(until_ns / 1'000'000'000u), static_cast<long>(until_ns % 1'000'000'000u)};
    const long result = syscall(kFutexWaitv, words.data(), words.size(), 0, &until, CLOCK_MONOTONIC);
    if (result >= 0) return first + static_cast<std::size_t>(result);
    if (errno == EAGAIN || errno == EINTR || errno == ETIMEDOUT) return all.size();
#endif
    words_at_once.store(1, std::memory_order_relaxed);  // an older kernel, or a sandbox that forbids the call
    return all.size();
}

inline void pause() noexcept {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

// A pause between looks at memory: each look takes the cache lines away that the writer is about to write. It does not
// yield the core: Linux charges for a yield as if the thread had used up its slice, and beside a busy process a reader that
// yields after each frame is lapped for many milliseconds.
inline void lull() noexcept {
    for (const std::uint64_t until_ns = monotonic_ns() + kLullNs; monotonic_ns() < until_ns;) pause();
}

inline void nap(std::uint64_t nanoseconds) noexcept {
    const timespec duration{static_cast<time_t>(nanoseconds / 1'000'000'000u),
                            static_cast<long>(nanoseconds % 1'000'000'000u)};
    nanosleep(&duration, nullptr);
}

inline void wake_all(const std::uint32_t* word) noexcept {
#if defined(__linux__)
    syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
#else
    (void)word;
#endif
}

// Wakes threads of this process that wait for something else than a frame.
class Doorbell {
public:
    void ring() noexcept {
        __atomic_fetch_add(&rings_, 1, __ATOMIC_RELEASE);  // pairs with the acquire in rings
        wake_all(&rings_);
    }
    std::uint32_t rings() const noexcept { return __atomic_load_n(&rings_, __ATOMIC_ACQUIRE); }
    SleepWord since(std::uint32_t seen) const noexcept { return {&rings_, seen}; }

private:
    std::uint32_t rings_ = 0;
};

}  // namespace tensorpool
