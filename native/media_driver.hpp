// SPDX-License-Identifier: Apache-2.0
// Aeron's C media driver inside this process. Settings are the public aeron_driver_context_set_* functions by name,
// so that all of them can be set and a library without one of them says so. Its one shared thread is ours by default: it
// sleeps until a client of ours wakes it, and wakes those that wait for its answers; Aeron's own idle strategies only nap.
#pragma once

#include <atomic>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "aeron_client.hpp"
#include "udp_offload.hpp"

namespace tensorpool::aeron {

// The setters take numbers, booleans, enumerations and durations alike in one machine word.
using Setting = std::variant<std::int64_t, std::string>;

class MediaDriver {
public:
    // `on_offload_refused` asks for the UDP offload and is called where it cannot be had; without it Aeron's own transport.
    // `own_thread_dir` is the driver's directory where its one thread is to be ours, empty where Aeron starts its threads.
    MediaDriver(const Api& api, const std::vector<std::pair<std::string, Setting>>& settings,
                const std::string& own_thread_dir, UdpOffload::OnRefusal on_offload_refused)
        : api_(api) {
        if (api_.driver_context_init(&context_) < 0) throw last_error(api_, "aeron_driver_context_init");
        try {
            for (const auto& [name, value] : settings) apply(name, value);
            pin_threads();
            if (on_offload_refused) process_udp_offload().install(api_, context_, std::move(on_offload_refused));
            if (api_.driver_init(&driver_, context_) < 0) throw last_error(api_, "cannot create the media driver");
            const bool is_ours = !own_thread_dir.empty();
            if (api_.driver_start(driver_, is_ours) < 0) throw last_error(api_, "cannot start the media driver");
            if (is_ours) {
                cnc_.emplace(own_thread_dir);
                thread_ = QuietThread("aeron-driver", [this] { take_turns(); });
            }
        } catch (...) {
            tear_down();
            throw;
        }
    }
    ~MediaDriver() { close(); }
    MediaDriver(const MediaDriver&) = delete;
    MediaDriver& operator=(const MediaDriver&) = delete;

    void close() {
        if (!gate_.shut()) return gate_.wait_finished();
        tear_down();
        gate_.finish();
    }
    bool is_closed() const noexcept { return gate_.is_shut(); }

private:
    static constexpr std::uint64_t kShortestNapNs = 16'000;
    static constexpr std::uint64_t kLongestNapNs = 2'000'000;       // while frames go over UDP, or come fast
    static constexpr std::uint64_t kLongestIdleNapNs = 10'000'000;  // while little happens on IPC
    static constexpr std::uint64_t kUdpQuietNs = 1'000'000'000;
    static constexpr std::uint64_t kSoonNs = 20'000'000;
    static constexpr std::uint32_t kSpins = 10, kYields = 20;

    // One turn after the other while there is work. Commands of our clients end a nap; what comes over UDP, and a log that
    // is about to be full, is noticed after it.
    void take_turns() noexcept {
        std::uint64_t udp_ns = 0, work_ns = 0;
        std::int64_t udp_bytes = 0;
        std::uint32_t answered = 0;
        for (std::uint32_t idle = 0; !is_ending_.load(std::memory_order_relaxed);) {
            const std::uint32_t asked = load(cnc_->commands());
            const int work = api_.driver_main_do_work(driver_);
            if (const std::uint32_t answers = load(cnc_->answers()); answers != answered) {
                answered = answers;
                wake_all(cnc_->answers());
            }
            const std::uint64_t now_ns = monotonic_ns();
            if (work > 0) {
                if (now_ns - work_ns < kSoonNs || load(cnc_->commands()) != asked) idle = 0;  // else a timer's, alone
                work_ns = now_ns;
                continue;
            }
            ++idle;
            if (const std::int64_t bytes = cnc_->udp_bytes(); bytes != udp_bytes) udp_bytes = bytes, udp_ns = now_ns;
            rest(idle, udp_ns != 0 && now_ns - udp_ns < kUdpQuietNs, asked);
        }
    }

    void rest(std::uint32_t idle, bool is_udp, std::uint32_t asked) const noexcept {
        const std::uint32_t before_naps = is_udp ? kSpins + kYields : 0;
        if (idle <= before_naps) return idle <= kSpins ? pause() : static_cast<void>(sched_yield());
        const std::uint64_t nap_ns = kShortestNapNs << std::min(idle - before_naps, 16u);
        const std::uint64_t longest_ns = is_udp ? kLongestNapNs : kLongestIdleNapNs;
        if (cnc_->commands() != nullptr)
            sleep_on(cnc_->commands(), asked, std::min(nap_ns, longest_ns));
        else
            nap(std::min(nap_ns, longest_ns));
    }

    static std::uint32_t load(const std::uint32_t* word) noexcept {
        return word == nullptr ? 0 : __atomic_load_n(word, __ATOMIC_ACQUIRE);
    }

    void apply(const std::string& name, const Setting& value) {
        void* const setter = api_.find("aeron_driver_context_set_" + name);
        if (setter == nullptr) throw std::invalid_argument("this Aeron has no media driver setting '" + name + "'");
        const int result = std::holds_alternative<std::string>(value)
                               ? reinterpret_cast<int (*)(DriverContext*, const char*)>(setter)(
                                     context_, std::get<std::string>(value).c_str())
                               : reinterpret_cast<int (*)(DriverContext*, std::int64_t)>(setter)(
                                     context_, std::get<std::int64_t>(value));
        if (result < 0) throw last_error(api_, "media driver setting " + name);
    }

    // Aeron's own program does the same: without it the *_cpu_affinity settings are kept and not applied.
    void pin_threads() {
        using Setter = int (*)(DriverContext*, void*, void*);
        void* const pin = api_.find("aeron_set_thread_affinity_on_start");
        const auto choose = reinterpret_cast<Setter>(api_.find("aeron_driver_context_set_agent_on_start_function"));
        if (pin != nullptr && choose != nullptr) choose(context_, pin, context_);
    }

    void tear_down() noexcept {
        is_ending_.store(true, std::memory_order_relaxed);
        if (cnc_ && cnc_->commands() != nullptr) wake_all(cnc_->commands());
        thread_.join();
        if (driver_) api_.driver_close(driver_);
        if (context_) api_.driver_context_close(context_);
        driver_ = nullptr;
        context_ = nullptr;
        cnc_.reset();
    }

    const Api& api_;
    DriverContext* context_ = nullptr;
    Driver* driver_ = nullptr;
    std::optional<CncFile> cnc_;
    std::atomic<bool> is_ending_{false};
    QuietThread thread_;
    CloseGate gate_;
};

}  // namespace tensorpool::aeron
