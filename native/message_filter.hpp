// SPDX-License-Identifier: Apache-2.0
// What a subscription over a network puts together of fragments: messages of known kinds, up to a length. Everything
// else is stopped at the fragment that shows it, so that a stranger's message takes no more memory than an honest one.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <span>
#include <utility>
#include <vector>

#include "aeron_subscription.hpp"

namespace tensorpool {

static_assert(std::endian::native == std::endian::little, "messages are little-endian");

class MessageFilter {
public:
    struct Kind {
        std::uint16_t template_id;
        std::uint16_t schema_id;
        bool operator==(const Kind&) const = default;
    };

    struct Counts {
        std::uint64_t foreign = 0;    // of another kind
        std::uint64_t malformed = 0;  // whose first fragment has no header
        std::uint64_t too_long = 0;
    };

    MessageFilter(std::vector<Kind> kinds, std::size_t max_bytes) : kinds_(std::move(kinds)), max_bytes_(max_bytes) {}

    // Whether to put together a message that begins so; counted if not.
    bool admits(std::span<const std::uint8_t> first_fragment) noexcept {
        if (first_fragment.size() < kHeaderBytes) return refuse(counts_.malformed);
        Kind kind;
        static_assert(sizeof kind == 4);
        std::memcpy(&kind, first_fragment.data() + 2, sizeof kind);
        return std::find(kinds_.begin(), kinds_.end(), kind) != kinds_.end() || refuse(counts_.foreign);
    }

    void on_too_long() noexcept { ++counts_.too_long; }
    std::size_t max_bytes() const noexcept { return max_bytes_; }
    const Counts& counts() const noexcept { return counts_; }

private:
    static constexpr std::size_t kHeaderBytes = 8;

    static bool refuse(std::uint64_t& count) noexcept {
        ++count;
        return false;
    }

    const std::vector<Kind> kinds_;
    const std::size_t max_bytes_;
    Counts counts_;
};

// Hands on what a filter lets be put together, every message of one fragment, and every image event.
class BoundedSink final : public aeron::Sink {
public:
    BoundedSink(MessageFilter& filter, aeron::Sink& next) : filter_(filter), next_(next) {}
    bool on_message(std::span<const std::uint8_t> message, const aeron::MessageInfo& info) override {
        return next_.on_message(message, info);
    }
    bool wants(std::span<const std::uint8_t> fragment, const aeron::MessageInfo&) override {
        return filter_.admits(fragment);
    }
    std::size_t max_bytes() const override { return filter_.max_bytes(); }
    void on_too_long(const aeron::MessageInfo&) override { filter_.on_too_long(); }
    void on_image(const aeron::ImageEvent& event) override { next_.on_image(event); }

private:
    MessageFilter& filter_;
    aeron::Sink& next_;
};

}  // namespace tensorpool
