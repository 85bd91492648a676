// SPDX-License-Identifier: Apache-2.0
// Trace ids of one producer: unique, growing, and in the order of time across producers.
//
// Bit 63 is 0, bits 62..17 are ticks of 2^14 ns since 2026-01-01 UTC (they last until 2062), bit 16 says that the node id
// was derived and not assigned, bits 15..0 are the node id. Each id takes a tick of its own: a producer that makes more
// than one per tick, or whose clock is set back, takes the ticks that follow. K9.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>

namespace tensorpool {

class TraceIds {
public:
    static constexpr unsigned kTickShift = 14;  // nanoseconds to ticks
    static constexpr unsigned kNodeBits = 16;
    static constexpr std::uint64_t kEpochNs = 1'767'225'600'000'000'000;  // 2026-01-01 UTC

    void set_node(std::uint16_t node_id, bool is_derived) noexcept {
        node_.store(node_id | std::uint64_t{is_derived} << kNodeBits, std::memory_order_relaxed);
    }

    // From any thread.
    std::uint64_t next() noexcept {
        const auto since = std::chrono::system_clock::now().time_since_epoch();
        const auto now_ns = static_cast<std::uint64_t>(std::chrono::nanoseconds(since).count());
        const std::uint64_t now = now_ns < kEpochNs ? 0 : (now_ns - kEpochNs) >> kTickShift;
        std::uint64_t last = last_.load(std::memory_order_relaxed), tick = 0;
        do tick = std::max(now, last + 1);  // relaxed: only the ticks themselves are shared
        while (!last_.compare_exchange_weak(last, tick, std::memory_order_relaxed));
        return (tick << (kNodeBits + 1) | node_.load(std::memory_order_relaxed)) & ~(std::uint64_t{1} << 63);
    }

private:
    std::atomic<std::uint64_t> last_{0};
    std::atomic<std::uint64_t> node_{0};
};

}  // namespace tensorpool
