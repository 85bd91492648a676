// SPDX-License-Identifier: Apache-2.0
// A producer's stream: slot, copy, commit, descriptor and wake-up in one call, or one wake-up for many frames.
//
// The descriptor is sent after the commit (§10.2.1) and never delays the producer: where the log is full or has no
// subscriber, the descriptor is lost, and consumers count a gap. Wire §8.3, §10.2.1, §15.18; decision A20.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>

#include "aeron_publication.hpp"
#include "descriptor.hpp"
#include "relaxed_counter.hpp"
#include "ring.hpp"

namespace tensorpool {

class FramePublisher {
public:
    FramePublisher(RingWriter& writer, std::shared_ptr<aeron::Publication> publication, std::uint32_t stream_id,
                   std::uint64_t epoch, bool with_publish_time)
        : writer_(writer),
          publication_(std::move(publication)),
          stream_id_(stream_id),
          epoch_(epoch),
          with_publish_time_(with_publish_time) {}

    // The writer is held until the descriptor is sent, so that descriptors are in the order of their frames. Nothing
    // throws after the commit: a caller that saw an exception would publish the frame again.

    // False: no pool holds it, and `seq` stays free.
    bool publish(std::uint64_t seq, const TensorLayout& layout, std::span<const std::uint8_t> bytes,
                 std::uint64_t timestamp_ns, std::uint32_t meta_version, std::uint64_t trace_id) {
        const RingWriter::Busy busy(writer_);
        check_time(timestamp_ns);
        if (!writer_.write(busy, seq, layout, bytes, timestamp_ns, meta_version, trace_id)) return false;
        note_time(timestamp_ns);
        announce(seq, meta_version, trace_id);
        bytes_.add(bytes.size());
        return true;
    }

    // Frames that are published one after the other, with one wake-up for all of them at the end.
    class Burst {
    public:
        explicit Burst(FramePublisher& publisher) : publisher_(publisher), busy_(publisher.writer_) {}
        ~Burst() {
            if (frames_ > 0) publisher_.writer_.wake(monotonic_ns(), frames_);
        }
        Burst(const Burst&) = delete;
        Burst& operator=(const Burst&) = delete;

        bool publish(const TensorLayout& layout, std::span<const std::uint8_t> bytes, std::uint64_t timestamp_ns,
                     std::uint32_t meta_version, std::uint64_t trace_id) {
            const std::uint64_t seq = publisher_.writer_.next_seq();
            publisher_.check_time(timestamp_ns);
            if (!publisher_.writer_.write(busy_, seq, layout, bytes, timestamp_ns, meta_version, trace_id))
                return false;
            ++frames_;
            publisher_.note_time(timestamp_ns);
            publisher_.send(seq, meta_version, trace_id, publisher_.with_publish_time_ ? monotonic_ns() : 0);
            publisher_.bytes_.add(bytes.size());
            return true;
        }

    private:
        FramePublisher& publisher_;
        const RingWriter::Busy busy_;
        std::uint64_t frames_ = 0;
    };

    void commit(std::uint64_t timestamp_ns, std::uint32_t meta_version, std::uint64_t trace_id) {
        const RingWriter::Busy busy(writer_);
        const std::uint64_t seq = writer_.commit(busy, timestamp_ns, meta_version, trace_id);
        note_time(timestamp_ns);
        announce(seq, meta_version, trace_id);
    }

    // Announces a frame that RingWriter::commit_image committed.
    void announce_committed(std::uint64_t seq, std::uint32_t meta_version, std::uint64_t trace_id,
                            std::uint64_t bytes) noexcept {
        announce(seq, meta_version, trace_id);
        bytes_.add(bytes);
    }

    // §15.7: where descriptors carry a time, too, the frames' own may not go back. Throws before anything is written.
    void check_time(std::uint64_t timestamp_ns) const {
        if (with_publish_time_ && is_time(timestamp_ns) && timestamp_ns < last_time_ns_)
            throw std::invalid_argument("timestamp_ns " + std::to_string(timestamp_ns) +
                                        " goes back: the frame before has " + std::to_string(last_time_ns_));
    }

    // When the lease may be over: from then on the caller publishes nothing.
    void set_until_ns(std::uint64_t until_ns) noexcept { until_ns_.set(until_ns); }
    std::uint64_t until_ns() const noexcept { return until_ns_.get(); }

    RingWriter& writer() noexcept { return writer_; }
    void add_bytes(std::uint64_t bytes) noexcept { bytes_.add(bytes); }

    // For any thread.
    std::uint64_t bytes() const noexcept { return bytes_.get(); }
    std::uint64_t unheard() const noexcept { return unheard_.get(); }
    std::uint64_t back_pressured() const noexcept { return back_pressured_.get(); }
    bool is_broken() const noexcept { return is_broken_.load(std::memory_order_relaxed); }
    bool is_back_pressured() const { return publication_->is_connected() && !publication_->has_room(); }

private:
    static bool is_time(std::uint64_t timestamp_ns) noexcept {  // B26
        return timestamp_ns != 0 && timestamp_ns != FrameDescriptor::kNullU64;
    }
    void note_time(std::uint64_t timestamp_ns) noexcept {
        if (is_time(timestamp_ns)) last_time_ns_ = timestamp_ns;
    }

    void announce(std::uint64_t seq, std::uint32_t meta_version, std::uint64_t trace_id) noexcept {
        const std::uint64_t now_ns = monotonic_ns();
        send(seq, meta_version, trace_id, now_ns);
        writer_.wake(now_ns);
    }

    void send(std::uint64_t seq, std::uint32_t meta_version, std::uint64_t trace_id, std::uint64_t now_ns) noexcept {
        const FrameDescriptor descriptor{stream_id_,
                                         epoch_,
                                         seq,
                                         with_publish_time_ ? now_ns : FrameDescriptor::kNullU64,
                                         meta_version == 0 ? FrameDescriptor::kNullU32 : meta_version,
                                         trace_id};
        try {
            const std::int64_t result =
                publication_->claim(FrameDescriptor::kBytes, [&](std::uint8_t* at) { descriptor.encode(at); });
            if (result == aeron::kNotConnected)
                unheard_.add();
            else if (result < 0)
                back_pressured_.add();
        } catch (const std::exception&) {
            unheard_.add();
            is_broken_.store(true,
                             std::memory_order_relaxed);  // the media driver is gone; the frame itself is in the ring
        }
    }

    RingWriter& writer_;
    const std::shared_ptr<aeron::Publication> publication_;
    const std::uint32_t stream_id_;
    const std::uint64_t epoch_;
    const bool with_publish_time_;
    std::uint64_t last_time_ns_ = 0;
    RelaxedCounter bytes_, unheard_, back_pressured_, until_ns_;
    std::atomic<bool> is_broken_{false};
};

}  // namespace tensorpool
