// SPDX-License-Identifier: Apache-2.0
// Measures which kind of copy suits this processor, in bounded time, for the uses that one thread can imitate: bytes in
// the last-level cache or in no cache. What a write costs while a reader's core has the lines cannot be measured so:
// CopyUse::WRITE keeps its default.
#pragma once

#include <array>
#include <chrono>
#include <limits>
#include <memory>
#include <new>
#include <span>
#include <vector>

#include <time.h>

#include "copy.hpp"

namespace tensorpool {

class CopyCalibration {
public:
    using Clock = std::chrono::steady_clock;
    using Kinds = std::array<CopyKind, kCopyUseNames.size()>;

    static constexpr std::size_t kRounds = 5, kLeastRounds = 2;
    static constexpr double kGain = 0.93;  // another kind than the default must take at most so much of its time

    // The kinds that won. After `budget` no further round begins; a use with too few rounds keeps its default. Throws
    // std::bad_alloc.
    static Kinds run(Clock::duration budget) {
        CopyCalibration calibration(Clock::now() + budget);
        Kinds kinds;
        for (std::size_t i = 0; i < kinds.size(); ++i) kinds[i] = default_kind(static_cast<CopyUse>(i));
        // The most common uses first: they are decided where time is short.
        calibration.decide(kinds, CopyUse::READ_MEDIUM, {.frame = 256 << 10, .total = kRingBytes, .flushes = false});
        calibration.decide(kinds, CopyUse::READ_LARGE, {.frame = 1 << 20, .total = 1 << 20, .flushes = true});
        calibration.decide(kinds, CopyUse::STREAM, {.frame = 1 << 20, .total = 1 << 20, .flushes = true});
        calibration.decide(kinds, CopyUse::WRITE_COLD, {.frame = 256 << 10, .total = 512 << 10, .flushes = true});
        calibration.decide(kinds, CopyUse::READ_SMALL, {.frame = 8 << 10, .total = 1 << 20, .flushes = false});
        return kinds;
    }

    // What may be chosen for a use.
    static std::vector<CopyKind> candidates(CopyUse use) {
        std::vector<CopyKind> found;
        for (std::size_t i = 0; i < kCopyKindNames.size(); ++i) {
            const auto kind = static_cast<CopyKind>(i);
            const bool owns = kind == CopyKind::AVX2_OWN || kind == CopyKind::AVX512_OWN;
            if (is_supported(kind) && is_fit(use, kind) && (use == CopyUse::WRITE || !owns)) found.push_back(kind);
        }
        return found;
    }

private:
    static constexpr std::size_t kRingBytes = 4 << 20,
                                 kOwnBytes = 1 << 20;  // beyond a core's cache; within it or nearly
    static constexpr std::size_t kSlotOffset = 64;     // where slots begin within a page

    // One round of a use copies `total` bytes of the ring, in frames; `flushes`: none of them are in a cache.
    struct Work {
        std::size_t frame, total;
        bool flushes;
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
        : deadline_(deadline), ring_(make(kSlotOffset + kRingBytes)), own_(make(kOwnBytes)) {}

    void decide(Kinds& kinds, CopyUse use, const Work& work) {
        const std::vector<CopyKind> kinds_to_try = candidates(use);
        std::vector<double> best(kinds_to_try.size(), std::numeric_limits<double>::max());
        std::size_t rounds = 0;
        for (; rounds < kRounds && Clock::now() < deadline_; ++rounds)
            for (std::size_t i = 0; i < kinds_to_try.size(); ++i)
                best[i] = std::min(best[i], time(use, kinds_to_try[i], work));
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

    // CPU time of this thread, in ns: what others get of the core meanwhile is not the copy's cost.
    double time(CopyUse use, CopyKind kind, const Work& work) noexcept {
        const bool reads = use == CopyUse::READ_SMALL || use == CopyUse::READ_MEDIUM || use == CopyUse::READ_LARGE;
        if (at_ + work.total > kRingBytes) at_ = 0;
        std::uint8_t* const slots = ring_.get() + kSlotOffset + at_;
        at_ += work.total;
        if (work.flushes) flush({slots, work.total});
        const double started = cpu_ns();
        for (std::size_t done = 0; done + work.frame <= work.total; done += work.frame)
            if (reads)
                copy_by(kind, own_.get(), slots + done, work.frame);
            else
                copy_by(kind, slots + done, own_.get(), work.frame);
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
};

}  // namespace tensorpool
