// SPDX-License-Identifier: Apache-2.0
// Sends the frames of a source stream over a bridge's payload stream as they come: no frame calls Python.
// Bridge §5; decisions G3, G16.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <optional>
#include <span>

#include "aeron_publication.hpp"
#include "aeron_subscription.hpp"
#include "descriptor_feed.hpp"
#include "frame_sender.hpp"

namespace tensorpool {

class FramePump {
public:
    explicit FramePump(FrameSender<aeron::Publication>& sender) : sender_(sender) {}

    // Sends frame after frame, and sleeps while there is none. Ends after `for_ns`, when it is stopped, when the feed
    // needs its owner, and as soon as one of `others` has a message, because the owner may have to forward it before
    // the next frame. Also ends with the first frame that is not sent, and returns why: an open one waited
    // `patience_ns`.
    std::optional<SendResult> pump(DescriptorFeed& feed, aeron::Subscription& descriptors,
                                   std::span<aeron::Subscription* const> others, std::uint64_t patience_ns,
                                   std::uint64_t for_ns) {
        const std::uint64_t start_ns = monotonic_ns();
        ReceivedFrame frame;
        while (!is_stopped_.load(std::memory_order_relaxed)) {
            if (std::any_of(others.begin(), others.end(), [](auto* other) { return other->has_fragment(); })) break;
            const std::uint64_t elapsed_ns = monotonic_ns() - start_ns;
            if (elapsed_ns >= for_ns) break;
            SendResult result = SendResult::SENT;
            if (sender_.is_open())
                result = sender_.resume(patience_ns);
            else if (feed.next(descriptors, frame))
                result = sender_.send(frame, patience_ns);
            else if ((feed.attention() & ~std::uint32_t{DescriptorFeed::kImageLost}) != 0)
                break;
            else
                feed.wait(descriptors, for_ns - elapsed_ns);
            if (result == SendResult::TORN) frame.found_overwritten();
            if (result != SendResult::SENT) return result;
        }
        return std::nullopt;
    }

    // From any thread: ends a pump after its frame, and later ones at once, until it is set to false.
    void set_stopped(bool is_stopped) noexcept { is_stopped_.store(is_stopped, std::memory_order_relaxed); }

private:
    FrameSender<aeron::Publication>& sender_;
    std::atomic<bool> is_stopped_{false};
};

}  // namespace tensorpool
