// SPDX-License-Identifier: Apache-2.0
// Sends the frames of one source stream over a bridge's payload stream: which frame is next, and what becomes of it.
//
//     take a frame ──► begin ──SENT──► take the next in order
//                        │ no room: go on in the next turn, while its slot and the receiver's patience last
//                        └─given up (counted)──► take the newest
//
// The source never waits for the network: frames that the link cannot carry are dropped as a whole, each with a reason.
// Bridge §5; decisions G3, G16.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <utility>

#include "aeron_publication.hpp"
#include "aeron_subscription.hpp"
#include "descriptor_feed.hpp"
#include "frame_sender.hpp"

namespace tensorpool {

// Why a frame that was taken from the source was not sent.
enum class SendDrop : std::uint8_t {
    NOT_CONNECTED,   // there is no receiver
    BACK_PRESSURED,  // no receiver would wait for it any longer
    TORN,            // its producer has overwritten it (G3)
    TOO_LARGE,       // more than 65535 chunks, or than the limit (G2)
    PAUSED,
    EPOCH_ENDED,  // while it was being sent
    COUNT_,
};

// As counters name them.
inline constexpr std::array<const char*, static_cast<std::size_t>(SendDrop::COUNT_)> kSendDropNames{
    "not_connected", "back_pressured", "torn", "too_large", "paused", "epoch_ended"};

class StreamSender {
public:
    // `control` carries the digests of frames, and its receiver is the one that has to know the announce.
    // A frame that is not sent within `timeout_ns` is given up.
    StreamSender(RingReader& reader, std::shared_ptr<aeron::Publication> payload,
                 std::shared_ptr<aeron::Publication> control, std::uint32_t stream_id, std::uint64_t epoch,
                 ChunkPlan plan, SendOptions options, std::uint64_t timeout_ns)
        : payload_(payload),
          control_(std::move(control)),
          timeout_ns_(timeout_ns),
          sender_(reader, std::move(payload), stream_id, epoch, plan, std::move(options)) {}

    // What a turn did.
    enum class Turn : std::uint8_t {
        IDLE,    // there is no frame
        WORKED,  // a frame was sent, or dropped
        FULL,    // there is no room for the rest
        OWNER,   // the owner has to announce the epoch, to remap, or to find the descriptors again
    };

    // Goes on with the open frame, or takes the next one. Never waits. Throws when the media driver is gone.
    Turn turn(DescriptorFeed& feed, aeron::Subscription& descriptors) {
        send_digests();
        if (sender_.is_open()) return settle(sender_.resume());
        const bool is_connected = payload_->is_connected() && control_->is_connected();
        if (!is_connected) is_announced_ = false;  // a receiver that connects later needs the announce
        const bool is_paused = is_paused_.load(std::memory_order_relaxed);
        if (is_connected && !is_announced_ && !is_paused) return Turn::OWNER;
        if (const Turn taken = take(feed, descriptors); taken != Turn::WORKED) return taken;
        wants_newest_ = false;
        if (is_paused) return drop(SendDrop::PAUSED);
        if (!is_connected) return drop(SendDrop::NOT_CONNECTED);
        return settle(sender_.send(frame_, frame_.trace_id));
    }

    bool is_open() const noexcept { return sender_.is_open(); }
    bool has_digests() const noexcept { return !digests_.empty(); }

    // Whether the receiver that is connected knows the epoch; without that no frame is taken (G16).
    void set_announced(bool is_announced) noexcept { is_announced_ = is_announced; }
    // From any thread.
    void set_paused(bool is_paused) noexcept { is_paused_.store(is_paused, std::memory_order_relaxed); }
    // Whether reading the descriptors failed since this was asked last: their media driver is gone.
    bool take_failure() noexcept { return std::exchange(has_failed_, false); }

    // The epoch is over: the open frame and the digests that had no room are given up.
    void end() noexcept {
        if (sender_.is_open()) drop(SendDrop::EPOCH_ENDED);
        sender_.abandon();
        drop_digests();
    }

    // --- counts, for any thread

    std::uint64_t frames() const noexcept { return sender_.frames(); }
    std::uint64_t bytes() const noexcept { return sender_.bytes(); }
    std::uint64_t chunks() const noexcept { return sender_.chunks(); }
    std::uint64_t digests() const noexcept { return digests_sent_.get(); }
    std::uint64_t digests_dropped() const noexcept { return digests_dropped_.get(); }
    std::uint64_t drops(SendDrop drop) const noexcept { return drops_[static_cast<std::size_t>(drop)].get(); }

private:
    static constexpr std::size_t kMaxDigests = 256;

    // WORKED: `frame_` is the next frame to send.
    Turn take(DescriptorFeed& feed, aeron::Subscription& descriptors) {
        try {
            if (!wants_newest_) {
                if (feed.next(descriptors, frame_)) return Turn::WORKED;
            } else if (feed.latest(descriptors, newest_) && newest_.seq != frame_.seq && newest_.delivery) {
                frame_ = newest_;  // one without a delivery was counted as lost before
                return Turn::WORKED;
            }
        } catch (const aeron::AeronError&) {
            has_failed_ = true;
        } catch (const aeron::ClosedError&) {
            has_failed_ = true;
        }
        const bool needs_owner = (feed.attention() & ~std::uint32_t{DescriptorFeed::kImageLost}) != 0;
        return has_failed_ || needs_owner ? Turn::OWNER : Turn::IDLE;
    }

    Turn settle(SendResult result) {
        switch (result) {
            case SendResult::SENT:
                if (sender_.options().with_digest) queue_digest();
                return Turn::WORKED;
            case SendResult::BACK_PRESSURED:
                if (monotonic_ns() - sender_.began_ns() < timeout_ns_) return Turn::FULL;
                sender_.abandon();
                return give_up(SendDrop::BACK_PRESSURED);
            case SendResult::TORN: return give_up(SendDrop::TORN);
            case SendResult::NOT_CONNECTED: return drop(SendDrop::NOT_CONNECTED);
            case SendResult::TOO_LARGE: break;
        }
        return drop(SendDrop::TOO_LARGE);
    }

    Turn give_up(SendDrop reason) noexcept { return wants_newest_ = true, drop(reason); }
    Turn drop(SendDrop reason) noexcept { return drops_[static_cast<std::size_t>(reason)].add(), Turn::WORKED; }

    // As soon as there is room; the receiver waits for it as long as for a chunk.
    void queue_digest() {
        if (digests_.size() == kMaxDigests) digests_.pop_front(), digests_dropped_.add();
        digests_.push_back(sender_.digest());
        send_digests();
    }

    void send_digests() {
        while (!digests_.empty()) {
            const DigestMessage& next = digests_.front();
            const std::int64_t result = control_->claim(next.bytes(), [&](std::uint8_t* at) { next.encode(at); });
            if (result == aeron::kNotConnected) return drop_digests();
            if (result <= 0) return;
            digests_.pop_front();
            digests_sent_.add();
        }
    }

    void drop_digests() noexcept {
        digests_dropped_.add(digests_.size());
        digests_.clear();
    }

    const std::shared_ptr<aeron::Publication> payload_;
    const std::shared_ptr<aeron::Publication> control_;
    const std::uint64_t timeout_ns_;
    FrameSender<aeron::Publication> sender_;
    ReceivedFrame frame_;  // that was taken last
    ReceivedFrame newest_;
    bool wants_newest_ = false;
    bool is_announced_ = false;
    bool has_failed_ = false;
    std::atomic<bool> is_paused_{false};
    std::deque<DigestMessage> digests_;
    RelaxedCounter digests_sent_, digests_dropped_;
    std::array<RelaxedCounter, static_cast<std::size_t>(SendDrop::COUNT_)> drops_;
};

}  // namespace tensorpool
