// SPDX-License-Identifier: Apache-2.0
// Counters: 64-bit values that the media driver shows to all of its clients.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "aeron_client.hpp"

namespace tensorpool::aeron {

// A 64-bit value in the driver's counters file, readable by every client of the driver.
class Counter final : public Resource {
public:
    static std::shared_ptr<Counter> add(const std::shared_ptr<ClientCore>& client, std::int32_t type_id,
                                        std::span<const std::uint8_t> key, const std::string& label,
                                        const Interrupted& interrupted) {
        if (key.size() > kMaxKeyBytes || label.size() > kMaxLabelBytes)
            throw std::invalid_argument("a counter's key has at most 112 bytes, its label 380");
        auto counter = std::shared_ptr<Counter>(new Counter(client, label));
        const Api& api = client->api();
        Async* async = nullptr;
        const int result = client->command([&] {
            return api.async_add_counter(&async, client->raw(), type_id, key.data(), key.size(), label.data(),
                                         label.size());
        });
        if (result < 0) throw last_error(api, "cannot add " + counter->name());
        counter->counter_ =
            client->await<CounterHandle>(async, api.async_add_counter_poll, counter->name(), interrupted);
        client->adopt(counter);
        return counter;
    }
    ~Counter() override { close_now(); }

    std::int64_t get() {
        const Inside inside(*this);
        return std::atomic_ref(*api().counter_addr(counter_)).load(std::memory_order_acquire);
    }
    void set(std::int64_t value) {
        const Inside inside(*this);
        std::atomic_ref(*api().counter_addr(counter_)).store(value, std::memory_order_release);
    }
    std::int64_t add_and_get(std::int64_t delta) {
        const Inside inside(*this);
        return std::atomic_ref(*api().counter_addr(counter_)).fetch_add(delta, std::memory_order_acq_rel) + delta;
    }

private:
    static constexpr std::size_t kMaxKeyBytes = 112;
    static constexpr std::size_t kMaxLabelBytes = 380;

    Counter(const std::shared_ptr<ClientCore>& client, const std::string& label)
        : Resource(client, "counter " + label) {}
    void tear_down() noexcept override {
        if (counter_) client_->command([&] { return api().counter_close(counter_, nullptr, nullptr); });
    }
    CounterHandle* counter_ = nullptr;
};

struct CounterReading {
    std::int32_t counter_id;
    std::int32_t type_id;
    std::int64_t value;
    std::string label;
    std::string key;
    std::int64_t owner_id = -1;  // the client that it belongs to; -1 where Aeron does not say
};

inline std::vector<CounterReading> read_counters(ClientCore& client) {
    if (!client.gate().enter()) throw ClosedError("the Aeron client is closed");
    std::vector<CounterReading> readings;
    client.api().counters_reader_foreach_counter(
        client.api().counters_reader(client.raw()),
        [](std::int64_t value, std::int32_t id, std::int32_t type_id, const std::uint8_t* key, std::size_t key_length,
           const char* label, std::size_t label_length, void* out) {
            static_cast<std::vector<CounterReading>*>(out)->push_back(
                {id, type_id, value, {label, label_length}, {reinterpret_cast<const char*>(key), key_length}});
        },
        &readings);
    using OwnerId = int (*)(CountersReader*, std::int32_t, std::int64_t*);
    if (const auto owner_id = reinterpret_cast<OwnerId>(client.api().find("aeron_counters_reader_counter_owner_id")))
        for (CounterReading& reading : readings)
            owner_id(client.api().counters_reader(client.raw()), reading.counter_id, &reading.owner_id);
    client.leave();
    return readings;
}

}  // namespace tensorpool::aeron
