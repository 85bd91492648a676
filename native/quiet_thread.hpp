// SPDX-License-Identifier: Apache-2.0
// A thread of ours behind an object: it takes no signals, so that they interrupt the threads that wait for them, and a
// forked child, in which it does not exist, can forget it.
#pragma once

#include <functional>
#include <memory>
#include <thread>
#include <utility>

#include <pthread.h>
#include <signal.h>

#include "fork_generation.hpp"

namespace tensorpool {

class QuietThread {
public:
    QuietThread() = default;

    // Throws std::system_error where there can be no further thread. `name` has at most 15 characters.
    QuietThread(const char* name, std::function<void()> run) {
        sigset_t all, before;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        try {
            thread_ = std::make_unique<std::thread>(std::move(run));
        } catch (...) {
            pthread_sigmask(SIG_SETMASK, &before, nullptr);
            throw;
        }
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
#if defined(__linux__)
        pthread_setname_np(thread_->native_handle(), name);
#else
        (void)name;
#endif
    }
    ~QuietThread() {
        if (process_.is_current())
            join();
        else
            (void)thread_.release();
    }
    QuietThread(const QuietThread&) = delete;
    QuietThread& operator=(const QuietThread&) = delete;
    QuietThread& operator=(QuietThread&&) = default;

    // Waits until `run` has returned.
    void join() {
        if (thread_ && thread_->joinable()) thread_->join();
    }

private:
    OwningProcess process_;
    std::unique_ptr<std::thread> thread_;
};

}  // namespace tensorpool
