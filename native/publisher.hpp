// SPDX-License-Identifier: Apache-2.0
// A producer's stream: slot, copy, commit, descriptor and wake-up in one call.
//
// The descriptor goes out after the commit (§10.2.1) and never holds the producer up: a log that is full, or that nobody
// reads, costs the descriptor, which consumers count as a gap. Wire §8.3, §10.2.1, §15.18; decision A20.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "aeron_publication.hpp"
#include "descriptor.hpp"
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

    // False: no pool holds it, and `seq` stays free.
    bool publish(std::uint64_t seq, const TensorLayout& layout, std::span<const std::uint8_t> bytes,
                 std::uint64_t timestamp_ns, std::uint32_t meta_version, std::uint64_t trace_id) {
        if (!writer_.write(seq, layout, bytes, timestamp_ns, meta_version)) return false;
        announce(seq, meta_version, trace_id);
        bytes_ += bytes.size();
        return true;
    }

    void commit(std::uint64_t timestamp_ns, std::uint32_t meta_version, std::uint64_t trace_id) {
        writer_.commit(timestamp_ns, meta_version);
        announce(writer_.next_seq() - 1, meta_version, trace_id);
    }

    // A frame that was committed to the ring itself: see RingWriter::commit_image.
    void tell(std::uint64_t seq, std::uint32_t meta_version, std::uint64_t bytes) {
        announce(seq, meta_version, 0);
        bytes_ += bytes;
    }

    RingWriter& writer() noexcept { return writer_; }
    std::uint64_t bytes() const noexcept { return bytes_; }
    void add_bytes(std::uint64_t bytes) noexcept { bytes_ += bytes; }
    std::uint64_t unheard() const noexcept { return unheard_; }
    std::uint64_t back_pressured() const noexcept { return back_pressured_; }
    bool is_broken() const noexcept { return is_broken_; }
    bool is_choked() const { return publication_->is_connected() && !publication_->has_room(); }

private:
    void announce(std::uint64_t seq, std::uint32_t meta_version, std::uint64_t trace_id) {
        const std::uint64_t now_ns = monotonic_ns();
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
                ++unheard_;
            else if (result < 0)
                ++back_pressured_;
        } catch (const std::exception&) {
            ++unheard_;
            is_broken_ = true;  // the media driver is gone; the frame itself stands in the ring
        }
        writer_.wake(now_ns);
    }

    RingWriter& writer_;
    const std::shared_ptr<aeron::Publication> publication_;
    const std::uint32_t stream_id_;
    const std::uint64_t epoch_;
    const bool with_publish_time_;
    std::uint64_t bytes_ = 0;
    std::uint64_t unheard_ = 0;
    std::uint64_t back_pressured_ = 0;
    bool is_broken_ = false;
};

}  // namespace tensorpool
