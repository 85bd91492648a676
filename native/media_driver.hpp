// SPDX-License-Identifier: Apache-2.0
// Aeron's C media driver inside this process. Settings are the public aeron_driver_context_set_* functions by name,
// so that all of them can be set and a library without one of them says so.
#pragma once

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
    MediaDriver(const Api& api, const std::vector<std::pair<std::string, Setting>>& settings,
                UdpOffload::OnRefusal on_offload_refused)
        : api_(api) {
        if (api_.driver_context_init(&context_) < 0) throw last_error(api_, "aeron_driver_context_init");
        try {
            for (const auto& [name, value] : settings) apply(name, value);
            if (on_offload_refused) process_udp_offload().install(api_, context_, std::move(on_offload_refused));
            if (api_.driver_init(&driver_, context_) < 0) throw last_error(api_, "cannot create the media driver");
            if (api_.driver_start(driver_, false) < 0) throw last_error(api_, "cannot start the media driver");
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

    void tear_down() noexcept {
        if (driver_) api_.driver_close(driver_);
        if (context_) api_.driver_context_close(context_);
        driver_ = nullptr;
        context_ = nullptr;
    }

    const Api& api_;
    DriverContext* context_ = nullptr;
    Driver* driver_ = nullptr;
    CloseGate gate_;
};

}  // namespace tensorpool::aeron
