// SPDX-License-Identifier: Apache-2.0
// Measures which kind of copy suits this processor, in bounded time, with the bytes where they are in use: in the cache of
// another core, which has just written or read them, or in no cache.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <limits>
#include <memory>
#include <new>
#include <span>
#include <system_error>
#include <thread>
#include <vector>

#include <sched.h>
#include <time.h>

#include "copy.hpp"
#include "quiet_thread.hpp"

namespace tensorpool {

// A thread that reads or writes memory when asked, so that its lines are in the cache of the core on which it runs.
class CachePartner {
public:
    enum class Task { NONE, READ, WRITE, END };

    CachePartner() : thread_("tp-calibrate", [this] { run(); }) {}
    ~CachePartner() { task_.store(Task::END, std::memory_order_release); }  // pairs with the acquire in run
    CachePartner(const CachePartner&) = delete;
    CachePartner& operator=(const CachePartner&) = delete;

    // Waits until it is done. False: it ran on the core of the caller.
    bool perform(Task task, std::span<std::uint8_t> bytes) noexcept {
        bytes_ = bytes;
        task_.store(task, std::memory_order_release);  // pairs with the acquire in run
        while (task_.load(std::memory_order_acquire) != Task::NONE) std::this_thread::yield();
        return core_ != core();
    }

private:
    void run() noexcept {
        for (Task task = Task::NONE; task != Task::END;) {
            task = task_.load(std::memory_order_acquire);
            if (task == Task::WRITE) std::memset(bytes_.data(), 2, bytes_.size());
            if (task == Task::READ)
                for (std::size_t i = 0; i < bytes_.size(); i += 64)
                    *static_cast<const volatile std::uint8_t*>(&bytes_[i]);
            if (task == Task::NONE || task == Task::END) {
                std::this_thread::yield();
                continue;
            }
            core_ = core();
            task_.store(Task::NONE, std::memory_order_release);  // pairs with the acquire in perform
        }
    }

    static int core() noexcept {
#if defined(__linux__)
        return sched_getcpu();
#else
        return 0;
#endif
    }

    std::atomic<Task> task_{Task::NONE};
    std::span<std::uint8_t> bytes_;
    int core_ = 0;
    QuietThread thread_;  // the last: it uses the others
};

class CopyCalibration {
public:
    using Clock = std::chrono::steady_clock;
    using Kinds = std::array<CopyKind, kCopyUseNames.size()>;

    static constexpr std::size_t kRounds = 5, kLeastRounds = 2;
    static constexpr double kGain = 0.93;  // another kind than the default must take at most so much of its time

    // The kinds that won. After `budget` no further round begins; a use with too few rounds keeps its default. Throws
    // std::bad_alloc, and std::system_error where there can be no further thread.
    static Kinds run(Clock::duration budget) {
        Kinds kinds = defaults();
        CopyCalibration calibration(Clock::now() + budget);
        // The most common uses first: they are decided where time is short.
        using Task = CachePartner::Task;
        calibration.decide(kinds, CopyUse::WRITE, {.frame = 64 << 10, .total = 256 << 10, .before = Task::READ});
        calibration.decide(kinds, CopyUse::READ_MEDIUM,
                           {.frame = 256 << 10, .total = 256 << 10, .before = Task::WRITE});
        calibration.decide(kinds, CopyUse::READ_SMALL, {.frame = 8 << 10, .total = 128 << 10, .before = Task::WRITE});
        calibration.decide(kinds, CopyUse::READ_COLD, {.frame = 256 << 10, .total = 512 << 10});
        calibration.decide(kinds, CopyUse::READ_LARGE, {.frame = 1 << 20, .total = 1 << 20});
        calibration.decide(kinds, CopyUse::STREAM, {.frame = 1 << 20, .total = 1 << 20});
        calibration.decide(kinds, CopyUse::WRITE_COLD, {.frame = 256 << 10, .total = 512 << 10});
        return kinds;
    }

    static Kinds defaults() noexcept {
        Kinds kinds;
        for (std::size_t i = 0; i < kinds.size(); ++i) kinds[i] = default_kind(static_cast<CopyUse>(i));
        return kinds;
    }

    // What may be chosen for a use.
    static std::vector<CopyKind> candidates(CopyUse use) {
        std::vector<CopyKind> found;
        for (std::size_t i = 0; i < kCopyKindNames.size(); ++i) {
            const auto kind = static_cast<CopyKind>(i);
            if (is_supported(kind) && is_fit(use, kind)) found.push_back(kind);
        }
        return found;
    }

private:
    static constexpr std::size_t kRingBytes = 4 << 20,
                                 kOwnBytes = 1 << 20;  // beyond a core's cache; within it or nearly
    static constexpr std::size_t kSlotOffset = 64;     // where slots begin within a page
    static constexpr std::size_t kOwnOffset = 16;      // where a large array from malloc does

    // One round of a use copies `total` bytes of the ring, in frames; `before`: what the other core has done with them, else
    // they are in no cache.
    struct Work {
        std::size_t frame, total;
        CachePartner::Task before = CachePartner::Task::NONE;
    };

    struct Release {
        void operator()(std::uint8_t* at) const noexcept { ::operator delete[](at, std::align_val_t{4096}); }
    };
    using Memory = std::unique_ptr<std::uint8_t[], Release>;

    static Memory make(std::size_t bytes) {
        Memory memory(new (std::align_val_t{4096}) std::uint8_t[bytes]);
        std::memset(memory.get(), 1, bytes);
        return memory;
    }

    explicit CopyCalibration(Clock::time_point deadline)
        : deadline_(deadline), ring_(make(kSlotOffset + kRingBytes)), own_(make(kOwnOffset + kOwnBytes)) {}

    void decide(Kinds& kinds, CopyUse use, const Work& work) {
        const std::vector<CopyKind> kinds_to_try = candidates(use);
        std::vector<double> best(kinds_to_try.size(), std::numeric_limits<double>::max());
        std::size_t rounds = 0;
        for (; rounds < kRounds && Clock::now() < deadline_; ++rounds)
            for (std::size_t i = 0; i < kinds_to_try.size(); ++i) {
                const std::span<std::uint8_t> slots = next_slots(work.total);
                if (!place(slots, work.before)) return;
                best[i] = std::min(best[i], time(use, kinds_to_try[i], slots, work.frame));
            }
        if (rounds < kLeastRounds) return;
        CopyKind& chosen = kinds[static_cast<std::size_t>(use)];
        double limit = 1;
        for (std::size_t i = 0; i < kinds_to_try.size(); ++i)
            if (kinds_to_try[i] == chosen) limit = kGain * best[i];
        for (std::size_t i = 0; i < kinds_to_try.size(); ++i)
            if (best[i] < limit) {
                chosen = kinds_to_try[i];
                limit = best[i];
            }
    }

    std::span<std::uint8_t> next_slots(std::size_t bytes) noexcept {
        if (at_ + bytes > kRingBytes) at_ = 0;
        at_ += bytes;
        return {ring_.get() + kSlotOffset + at_ - bytes, bytes};
    }

    // Puts the bytes where they are in use. False: there was no other core until the time was over.
    bool place(std::span<std::uint8_t> slots, CachePartner::Task before) noexcept {
        if (before == CachePartner::Task::NONE) return flush(slots), true;
        while (Clock::now() < deadline_)
            if (partner_.perform(before, slots)) return true;
        return false;
    }

    // CPU time of this thread, in ns: what others get of the core meanwhile is not the copy's cost.
    double time(CopyUse use, CopyKind kind, std::span<std::uint8_t> slots, std::size_t frame) noexcept {
        const bool reads = use == CopyUse::READ_SMALL || use == CopyUse::READ_MEDIUM || use == CopyUse::READ_LARGE;
        std::uint8_t* const own = own_.get() + kOwnOffset;
        const double started = cpu_ns();
        for (std::size_t done = 0; done + frame <= slots.size(); done += frame)
            if (reads)
                copy_by(kind, own, slots.data() + done, frame);
            else
                copy_by(kind, slots.data() + done, own, frame);
        streaming_fence();
        return cpu_ns() - started;
    }

    static double cpu_ns() noexcept {
        timespec now;
        clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
        return static_cast<double>(now.tv_sec) * 1e9 + static_cast<double>(now.tv_nsec);
    }

    static void flush(std::span<std::uint8_t> bytes) noexcept {
#if defined(__x86_64__)
        for (std::size_t i = 0; i < bytes.size(); i += 64) _mm_clflush(bytes.data() + i);
        _mm_mfence();
#else
        static_cast<void>(bytes);
#endif
    }

    Clock::time_point deadline_;
    Memory ring_, own_;
    std::size_t at_ = 0;
    CachePartner partner_;
};

}  // namespace tensorpool
