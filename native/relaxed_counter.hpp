// SPDX-License-Identifier: Apache-2.0
// A count that one thread writes and any thread may read: relaxed atomics, without a locked instruction.
#pragma once

#include <atomic>
#include <cstdint>

namespace tensorpool {

class RelaxedCounter {
public:
    void add(std::uint64_t amount = 1) noexcept { set(get() + amount); }
    void set(std::uint64_t value) noexcept { value_.store(value, std::memory_order_relaxed); }
    void take_back(std::uint64_t amount = 1) noexcept { set(get() - amount); }
    void raise_to(std::uint64_t value) noexcept {
        if (value > get()) set(value);
    }
    std::uint64_t reset() noexcept {
        const std::uint64_t value = get();
        set(0);
        return value;
    }
    std::uint64_t get() const noexcept { return value_.load(std::memory_order_relaxed); }

private:
    std::atomic<std::uint64_t> value_{0};
};

}  // namespace tensorpool
