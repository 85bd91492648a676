// SPDX-License-Identifier: Apache-2.0
// Frames in chunks: how a payload is cut, and how it leaves the ring.
//
// A chunk is one message of one fragment: claimed in the log, copied there from shared memory, checked against the
// slot's commit word, and only then committed. So a frame that its producer overwrites meanwhile never gets its last
// chunk, and no torn byte of it is sent. Bridge §5.1, §5.2, §11; decisions G1-G3, G24, G26.
#pragma once

#include <algorithm>
#include <cstdint>
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

// How frames are sent.
struct SendOptions {
    ChunkLayout layout = ChunkLayout::SPECIFICATION;
    std::uint64_t max_payload_bytes = kMaxBridgedBytes;
    bool with_digest = false;
    std::vector<std::uint8_t> mac_key;  // of digests; none: CRC32C
};

// One frame at a time from a ring into a log. `Log` has claim_if(bytes, fill) as aeron::Publication has it. Never waits.
//
//   idle ──send──► open ──resume──► idle      SENT, or given up
template <typename Log>
class FrameSender {
public:
    FrameSender(RingReader& reader, std::shared_ptr<Log> log, std::uint32_t stream_id, std::uint64_t epoch,
                ChunkPlan plan, SendOptions options = {})
        : reader_(reader),
          log_(std::move(log)),
          plan_(plan),
          max_payload_bytes_(std::min(options.max_payload_bytes, plan.largest_bytes())),
          options_(std::move(options)) {
        head_.stream_id = stream_id;
        head_.epoch = epoch;
        head_.layout = options_.layout;
    }

    // Begins a frame.
    SendResult send(const SlotFrame& frame, std::uint64_t trace_id) {
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
        head_.trace_id = options_.layout == ChunkLayout::TRACED ? trace_id : 0;
        slot_ = reader_.geometry().slot(frame.slot);
        payload_ = reader_.geometry().pools()[frame.pool].region.data() + frame.payload_offset;
        if (options_.with_digest) digester_.emplace(options_.mac_key, head_);
        is_open_ = true;
        return resume();
    }

    SendResult resume() {
        if (!is_open_) throw LocalProtocolError("no frame is being sent");
        const CommitWord word(slot_);
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
                continue;
            }
            if (result == 0 || !is_whole(word)) return give_up(SendResult::TORN);
            if (result == aeron::kNotConnected) return give_up(SendResult::NOT_CONNECTED);
            return SendResult::BACK_PRESSURED;
        }
        is_open_ = false;
        bytes_.add(head_.payload_length);
        frames_.add();
        return SendResult::SENT;
    }

    // Its remaining chunks are never sent: the receiver drops the frame after its timeout.
    void abandon() noexcept { is_open_ = false; }

    bool is_open() const noexcept { return is_open_; }
    // When the open frame was begun.
    std::uint64_t began_ns() const noexcept { return began_ns_; }
    // Of the frame that was sent last, as it left; without content unless asked for.
    DigestMessage digest() const noexcept {
        return {head_.stream_id,
                head_.epoch,
                head_.seq,
                head_.payload_length,
                digester_ ? digester_->digest() : FrameDigest{},
                !options_.mac_key.empty()};
    }
    const SendOptions& options() const noexcept { return options_; }
    std::uint64_t frames() const noexcept { return frames_.get(); }
    std::uint64_t bytes() const noexcept { return bytes_.get(); }
    std::uint64_t chunks() const noexcept { return chunks_.get(); }

private:
    void fill(std::uint8_t* to, std::optional<FrameDigester>& digester) const noexcept {
        const ChunkHead::Places places = head_.encode(to);
        const std::span<const std::uint8_t> header{places.header, head_.header_bytes()};
        const std::span<const std::uint8_t> payload{places.payload, head_.length};
        if (head_.index == 0) {
            copy_racing(places.header + 8, slot_ + 8, kHeaderSlotBytes - 8);
            store<std::uint64_t>(places.header, committed(head_.seq));  // G24
            set_trace_id(places.header, head_.trace_id);                // K9: in the specified layout none leaves
        }
        copy_racing(places.payload, payload_ + head_.offset, head_.length);
        if (places.crc32c != nullptr) store<std::uint32_t>(places.crc32c, crc32c(payload, crc32c(header)));
        if (!digester) return;
        digester->update(header);
        digester->update(payload);
    }

    bool is_whole(const CommitWord& word) const noexcept { return word.recheck() == committed(head_.seq); }

    SendResult give_up(SendResult reason) noexcept { return is_open_ = false, reason; }

    RingReader& reader_;
    const std::shared_ptr<Log> log_;
    const ChunkPlan plan_;
    const std::uint64_t max_payload_bytes_;
    const SendOptions options_;
    std::optional<FrameDigester> digester_;
    ChunkHead head_;
    const std::uint8_t* slot_ = nullptr;
    const std::uint8_t* payload_ = nullptr;
    bool is_open_ = false;
    std::uint64_t began_ns_ = 0;
    RelaxedCounter frames_, bytes_, chunks_;
};

}  // namespace tensorpool
