// SPDX-License-Identifier: Apache-2.0
// Which EventMessages of a shared stream are for a service: decided on the bytes in the log, so that messages for other
// services cost neither an allocation nor a call into Python. Service Control 5, 5.1; decision H7.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "aeron_subscription.hpp"

namespace tensorpool {

static_assert(std::endian::native == std::endian::little, "messages are little-endian");

class EventFilter {
public:
    struct Counts {
        std::uint64_t mine = 0;
        std::uint64_t other_tag = 0;
        std::uint64_t other_schema = 0;
        std::uint64_t malformed = 0;  // cut short, or a tag that does not fit
        std::uint64_t too_long = 0;
    };

    static constexpr std::size_t kMaxBytes = 1 << 20;  // of an event in fragments

    EventFilter(std::uint16_t schema_id, std::vector<std::string> tags)
        : schema_id_(schema_id), tags_(std::move(tags)) {}

    // Whether the message is for us; counted.
    bool admits(std::span<const std::uint8_t> message) noexcept { return is_mine(message) && ++counts_.mine; }

    // The same of a message that is not whole yet: the tag stands in its first fragment.
    bool is_mine(std::span<const std::uint8_t> message) noexcept {
        if (message.size() < kHeaderBytes) return refuse(counts_.malformed);
        if (load<std::uint16_t>(message, 4) != schema_id_ || load<std::uint16_t>(message, 2) != kTemplateId)
            return refuse(counts_.other_schema);
        const std::size_t at = kHeaderBytes + load<std::uint16_t>(message, 0);
        if (at < kHeaderBytes + kBlockBytes || at + 4 > message.size()) return refuse(counts_.malformed);
        const std::size_t length = load<std::uint32_t>(message, at);
        if (length > message.size() - at - 4) return refuse(counts_.malformed);
        const std::string_view tag(reinterpret_cast<const char*>(message.data()) + at + 4, length);
        return std::find(tags_.begin(), tags_.end(), tag) != tags_.end() || refuse(counts_.other_tag);
    }

    void on_too_long() noexcept { ++counts_.too_long; }
    const Counts& counts() const noexcept { return counts_; }

private:
    static constexpr std::size_t kHeaderBytes = 8;
    static constexpr std::size_t kBlockBytes = 40;
    static constexpr std::uint16_t kTemplateId = 1;

    template <typename T>
    static T load(std::span<const std::uint8_t> message, std::size_t at) noexcept {
        T value;
        std::memcpy(&value, message.data() + at, sizeof value);
        return value;
    }

    static bool refuse(std::uint64_t& count) noexcept {
        ++count;
        return false;
    }

    const std::uint16_t schema_id_;
    const std::vector<std::string> tags_;
    Counts counts_;
};

// Hands on the messages that a filter admits, and every image event.
class FilteredSink final : public aeron::Sink {
public:
    FilteredSink(EventFilter& filter, aeron::Sink& next) : filter_(filter), next_(next) {}
    bool on_message(std::span<const std::uint8_t> message, const aeron::MessageInfo& info) override {
        return !filter_.admits(message) || next_.on_message(message, info);
    }
    bool wants(std::span<const std::uint8_t> fragment, const aeron::MessageInfo&) override {
        return filter_.is_mine(fragment);
    }
    std::size_t max_bytes() const override { return EventFilter::kMaxBytes; }
    void on_too_long(const aeron::MessageInfo&) override { filter_.on_too_long(); }
    void on_image(const aeron::ImageEvent& event) override { next_.on_image(event); }

private:
    EventFilter& filter_;
    aeron::Sink& next_;
};

}  // namespace tensorpool
