// SPDX-License-Identifier: Apache-2.0
// Which process an object belongs to. A forked child gets copies of its parent's objects but none of its threads, and
// the memory and logs behind them stay the parent's: the child must not use the copies.
#pragma once

#include <atomic>
#include <cstdint>

#include <pthread.h>

namespace tensorpool {

// Grows in every forked child; compared instead of the pid, which costs a system call.
inline std::uint32_t fork_generation() noexcept {
    static std::atomic<std::uint32_t> generation{0};
    static const int registered =
        pthread_atfork(nullptr, nullptr, [] { generation.fetch_add(1, std::memory_order_relaxed); });
    (void)registered;
    return generation.load(std::memory_order_relaxed);
}

// The process that made an object.
class OwningProcess {
public:
    bool is_current() const noexcept { return generation_ == fork_generation(); }

private:
    std::uint32_t generation_ = fork_generation();
};

}  // namespace tensorpool
