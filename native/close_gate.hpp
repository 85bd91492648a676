// SPDX-License-Identifier: Apache-2.0
// Counts the calls that are inside an object, so that it can be closed at any time. Each call enters and leaves the
// gate; close() shuts it, and the caller that leaves last tears the object down. So a close inside a handler, or from
// another thread during a call, is safe, and a call after close is refused. A gate made before a fork refuses
// everything in the child and never tears down there: the threads behind it do not exist in the child.
#pragma once

#include <atomic>
#include <cstdint>

#include "fork_generation.hpp"

namespace tensorpool {

class CloseGate {
public:
    // True: the caller is inside and must leave().
    bool enter() noexcept {
        if (is_foreign()) return false;
        std::uint32_t state = state_.load(std::memory_order_relaxed);
        do {
            if (state & kShut) return false;
        } while (!state_.compare_exchange_weak(state, state + 1, std::memory_order_acquire));
        return true;
    }

    // True: the caller was the last one inside a shut gate and must tear down, then call finish().
    [[nodiscard]] bool leave() noexcept {
        return state_.fetch_sub(1, std::memory_order_acq_rel) == (kShut | 1) && !is_foreign();
    }

    // True: no call is inside, and the caller must tear down, then call finish(). Later calls return false.
    [[nodiscard]] bool shut() noexcept {
        if (is_foreign()) return false;
        return state_.fetch_or(kShut, std::memory_order_acq_rel) == 0;
    }

    void finish() noexcept {
        finished_.store(1, std::memory_order_release);  // pairs with the acquire in wait_finished
        finished_.notify_all();
    }

    void wait_finished() const noexcept {
        if (!is_foreign()) finished_.wait(0, std::memory_order_acquire);
    }

    bool is_shut() const noexcept { return is_foreign() || (state_.load(std::memory_order_acquire) & kShut) != 0; }
    bool is_foreign() const noexcept { return !process_.is_current(); }

private:
    static constexpr std::uint32_t kShut = 0x8000'0000;
    const OwningProcess process_;
    std::atomic<std::uint32_t> state_{0};
    std::atomic<std::uint32_t> finished_{0};
};

}  // namespace tensorpool
