// SPDX-License-Identifier: Apache-2.0
// Frames in chunks: how a payload is cut, and how it leaves the ring.
//
// A chunk is one message of one fragment: claimed in the log, copied there from shared memory, checked against the
// slot's commit word, and only then committed. So a frame that its producer overwrites meanwhile never gets its last
// chunk, and no torn byte of it is sent. Bridge §5.1, §5.2, §11; decisions G1-G3, G24, G26.
#pragma once

#include <algorithm>
#include <cstdint>
#include <ctime>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "aeron_api.hpp"
#include "chunk.hpp"
#include "copy.hpp"
#include "frame_digest.hpp"
#include "layout.hpp"
#include "local_protocol_error.hpp"
#include "relaxed_counter.hpp"
#include "ring.hpp"
#include "wake.hpp"

namespace tensorpool {

// How payloads are cut: chunk 0 is smaller, because it carries the slot header too (G1).
class ChunkPlan {
public:
    struct Slice {
        std::uint32_t offset;
        std::uint32_t length;
    };

    ChunkPlan(std::uint32_t first_bytes, std::uint32_t next_bytes)
        : first_bytes_(first_bytes), next_bytes_(next_bytes) {
        check("first_bytes", first_bytes, next_bytes);
        check("next_bytes", next_bytes, kMaxChunkBytes);
    }

    // How many chunks a payload takes; 0 when it cannot be carried (G2). An empty one takes one (G26).
    std::uint32_t count(std::uint64_t payload_bytes) const noexcept {
        if (payload_bytes <= first_bytes_) return 1;
        if (payload_bytes > kMaxBridgedBytes) return 0;
        const std::uint64_t chunks = 1 + (payload_bytes - first_bytes_ + next_bytes_ - 1) / next_bytes_;
        return chunks > kMaxChunks ? 0 : static_cast<std::uint32_t>(chunks);
    }

    // `index` is below count(payload_bytes).
    Slice slice(std::uint32_t index, std::uint32_t payload_bytes) const noexcept {
        const std::uint32_t offset = index == 0 ? 0 : first_bytes_ + (index - 1) * next_bytes_;
        return {offset, std::min(index == 0 ? first_bytes_ : next_bytes_, payload_bytes - offset)};
    }

    std::uint32_t first_bytes() const noexcept { return first_bytes_; }
    std::uint32_t next_bytes() const noexcept { return next_bytes_; }
    std::uint64_t largest_bytes() const noexcept {
        return std::min<std::uint64_t>(first_bytes_ + std::uint64_t{kMaxChunks - 1} * next_bytes_, kMaxBridgedBytes);
    }

private:
    static void check(const char* what, std::uint32_t bytes, std::uint32_t most) {
        if (bytes == 0 || bytes > most)
            throw std::invalid_argument(std::string(what) + " is " + std::to_string(bytes) + ", must be 1 to " +
                                        std::to_string(most));
    }

    std::uint32_t first_bytes_;
    std::uint32_t next_bytes_;
};

// What became of a frame so far.
enum class SendResult : std::uint8_t {
    SENT,            // every chunk is in the log
    BACK_PRESSURED,  // the log has no room now: resume
    NOT_CONNECTED,   // there is no subscriber: given up
    TORN,            // its producer has overwritten it: given up (G3)
    TOO_LARGE,       // more than 65535 chunks, or than the limit: nothing was sent (G2)
};

// One frame at a time from a ring into a log. `Log` has claim_if(bytes, fill) as aeron::Publication has it.
//
//   idle ──send──► open ──resume──► idle      SENT, or given up
template <typename Log>
class FrameSender {
public:
    FrameSender(RingReader& reader, std::shared_ptr<Log> log, std::uint32_t stream_id, std::uint64_t epoch,
                ChunkPlan plan, std::uint64_t max_payload_bytes, bool with_digest = false,
                std::vector<std::uint8_t> mac_key = {})
        : reader_(reader),
          log_(std::move(log)),
          plan_(plan),
          max_payload_bytes_(std::min(max_payload_bytes, plan.largest_bytes())),
          with_digest_(with_digest),
          mac_key_(std::move(mac_key)) {
        head_.stream_id = stream_id;
        head_.epoch = epoch;
    }

    // Begins a frame, and waits at most `patience_ns` for room at a time.
    SendResult send(const SlotFrame& frame, std::uint64_t patience_ns) {
        if (is_open_)
            throw LocalProtocolError("frame " + std::to_string(head_.seq) +
                                     " is still being sent; resume or abandon it");
        reader_.check_own(frame);
        head_.seq = frame.seq;
        if (frame.values_len_bytes > max_payload_bytes_) return SendResult::TOO_LARGE;
        began_ns_ = monotonic_ns();
        head_.index = 0;
        head_.count = plan_.count(frame.values_len_bytes);
        head_.payload_length = frame.values_len_bytes;
        slot_ = reader_.geometry().slot(frame.slot);
        payload_ = reader_.geometry().pools()[frame.pool].region.data() + frame.payload_offset;
        if (with_digest_) digester_.emplace(mac_key_, head_);
        is_open_ = true;
        return resume(patience_ns);
    }

    SendResult resume(std::uint64_t patience_ns) {
        if (!is_open_) throw LocalProtocolError("no frame is being sent");
        const CommitWord word(slot_);
        std::uint64_t waiting_since_ns = 0;
        int refused = 0;  // since there was room
        while (head_.index < head_.count) {
            const ChunkPlan::Slice slice = plan_.slice(head_.index, head_.payload_length);
            head_.offset = slice.offset;
            head_.length = slice.length;
            std::optional<FrameDigester> digester = digester_;
            const std::int64_t result = log_->claim_if(head_.message_bytes(), [&](std::uint8_t* to) {
                fill(to, digester);
                return is_whole(word);
            });
            if (result > 0) {
                digester_ = digester;
                chunks_.add();
                ++head_.index;
                waiting_since_ns = 0;
                refused = 0;
                continue;
            }
            if (result == 0 || !is_whole(word)) return give_up(SendResult::TORN);
            if (result == aeron::kNotConnected) return give_up(SendResult::NOT_CONNECTED);
            const std::uint64_t now_ns = monotonic_ns();
            if (waiting_since_ns == 0) waiting_since_ns = now_ns;
            if (now_ns - waiting_since_ns >= patience_ns) return SendResult::BACK_PRESSURED;
            rest(++refused, now_ns - waiting_since_ns);
        }
        is_open_ = false;
        bytes_.add(head_.payload_length);
        frames_.add();
        return SendResult::SENT;
    }

    // Its remaining chunks are never sent: the receiver drops the frame after its timeout.
    void abandon() noexcept { is_open_ = false; }

    bool is_open() const noexcept { return is_open_; }
    // Of the frame that was begun last, or refused.
    std::uint64_t seq() const noexcept { return head_.seq; }
    // When the open frame was begun.
    std::uint64_t began_ns() const noexcept { return began_ns_; }
    // Of the frame that was sent last, as it left; nothing unless asked for.
    FrameDigest digest() const noexcept { return digester_ ? digester_->digest() : FrameDigest{}; }
    std::uint32_t payload_bytes() const noexcept { return head_.payload_length; }
    std::uint64_t frames() const noexcept { return frames_.get(); }
    std::uint64_t bytes() const noexcept { return bytes_.get(); }
    std::uint64_t chunks() const noexcept { return chunks_.get(); }

private:
    static constexpr int kYields = 20;
    static constexpr std::uint64_t kLongestNapNs = 100'000;

    void fill(std::uint8_t* to, std::optional<FrameDigester>& digester) const noexcept {
        const ChunkHead::Places places = head_.encode(to);
        if (head_.index == 0) {
            copy_racing(places.header + 8, slot_ + 8, kHeaderSlotBytes - 8);
            store<std::uint64_t>(places.header, committed(head_.seq));  // G24
            if (digester) digester->update({places.header, kHeaderSlotBytes});
        }
        copy_racing(places.payload, payload_ + head_.offset, head_.length);
        if (digester) digester->update({places.payload, head_.length});
    }

    bool is_whole(const CommitWord& word) const noexcept { return word.recheck() == committed(head_.seq); }

    SendResult give_up(SendResult reason) noexcept { return is_open_ = false, reason; }

    // Yields first: the media driver that makes room needs a core, too.
    static void rest(int refused, std::uint64_t waited_ns) noexcept {
        if (refused <= kYields) {
            sched_yield();
            return;
        }
        const timespec nap{0, static_cast<long>(std::min(waited_ns / 2, kLongestNapNs))};
        nanosleep(&nap, nullptr);
    }

    RingReader& reader_;
    const std::shared_ptr<Log> log_;
    const ChunkPlan plan_;
    const std::uint64_t max_payload_bytes_;
    const bool with_digest_;
    const std::vector<std::uint8_t> mac_key_;
    std::optional<FrameDigester> digester_;
    ChunkHead head_;
    const std::uint8_t* slot_ = nullptr;
    const std::uint8_t* payload_ = nullptr;
    bool is_open_ = false;
    std::uint64_t began_ns_ = 0;
    RelaxedCounter frames_, bytes_, chunks_;
};

}  // namespace tensorpool
