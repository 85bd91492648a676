// SPDX-License-Identifier: Apache-2.0
// Chunks in, frames out: one bridged stream's frames put together and published in a local ring.
//
//   chunk ──checks──► frame under assembly ──all chunks──► committed in the local ring, announced to consumers
//                            └──conflict, inconsistency, timeout, …──► tombstone ──timeout──► forgotten
//
// Does no IO, and the caller passes the time; only a commit reads the clock, so that a process that was stopped past
// the end of its lease writes nothing more. A frame whose chunk 0 arrives first is written straight into its slot,
// which stays in-progress until the frame is whole; any other frame into a buffer, from which it is copied when it is
// whole. Memory is allocated only for a frame whose size passed every limit, and at most max_inflight frames have a
// buffer. Every chunk and every frame that is not published is counted under one reason. Bridge §5, §6, §8; decisions
// G18-G21, G24-G27.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <utility>
#include <vector>

#include "chunk.hpp"
#include "chunk_sources.hpp"
#include "frame_digest.hpp"
#include "frame_loss.hpp"
#include "frame_target.hpp"
#include "layout.hpp"
#include "local_protocol_error.hpp"
#include "relaxed_counter.hpp"
#include "ring.hpp"
#include "tensor.hpp"

namespace tensorpool {

class Assembler {
public:
    struct SourcePool {
        std::uint16_t pool_id;
        std::uint32_t stride_bytes;
    };

    Assembler(std::uint32_t stream_id, const AssemblyLimits& limits) : stream_id_(stream_id), limits_(limits) {
        if (limits.max_inflight == 0 || limits.timeout_ns == 0)
            throw std::invalid_argument("max_inflight and timeout_ns must be positive");
    }

    // --- what the owner knows

    // The latest announce of the source. A change of epoch drops every frame of the previous one. No chunk is believed
    // whose epoch is above `epoch_limit`, or whose seq is ahead of the last published one by more than `max_jump` and
    // the frames that a source may have published since; 0: any.
    void set_source(std::uint64_t epoch, std::vector<SourcePool> pools, std::uint64_t epoch_limit = ~std::uint64_t{0},
                    std::uint64_t max_jump = 0) {
        const Busy busy(*this);
        epoch_limit_ = epoch_limit;
        max_jump_ = max_jump;
        pools_ = std::move(pools);
        largest_source_ = 0;
        for (const SourcePool& pool : pools_) largest_source_ = std::max(largest_source_, pool.stride_bytes);
        newest_epoch_ = epoch;
        if (epoch_ == epoch) return;
        lose_all(FrameLoss::EPOCH);
        tombs_.clear();
        digests_.clear();
        ahead_.clear();
        published_.reset();
        jumped_ns_.reset();
        epoch_ = epoch;
    }

    // Local memory to publish in until `until_ns`; null: none.
    void bind(FrameTarget* target, std::uint64_t until_ns) {
        const Busy busy(*this);
        if (target == target_) return until_ns_ = until_ns, void();
        for (std::size_t i = frames_.size(); i-- > 0;)
            if (!frames_[i]->buffer) lose(*frames_[i], FrameLoss::NO_LEASE, now_ns_);
        target_ = target;
        until_ns_ = until_ns;
    }

    void set_paused(bool is_paused) {
        const Busy busy(*this);
        if (is_paused && !is_paused_) lose_all(FrameLoss::PAUSED);
        is_paused_ = is_paused;
    }

    // Drops the frames that waited too long; returns how many.
    std::size_t expire(std::uint64_t now_ns) {
        const Busy busy(*this);
        now_ns_ = now_ns;
        std::size_t expired = 0;
        for (std::size_t i = frames_.size(); i-- > 0;) {
            if (!is_expired(*frames_[i], now_ns)) continue;
            lose(*frames_[i], frames_[i]->is_whole() ? unproven() : FrameLoss::TIMEOUT, now_ns);
            ++expired;
        }
        std::erase_if(tombs_, [&](const Tomb& tomb) { return now_ns >= tomb.until_ns; });
        return expired;
    }

    // --- chunks

    // `chunk` was decoded without fault and is of this stream.
    void take(const ArrivedChunk& chunk, std::uint64_t now_ns) {
        now_ns_ = now_ns;
        chunks_.add();
        ChunkDrop drop = judge(chunk);
        if (drop == ChunkDrop::NONE && !chunk.is_unharmed()) drop = ChunkDrop::CRC;
        if (drop != ChunkDrop::NONE) return drop_chunk(drop, chunk);
        if (last_ == nullptr || last_->seq != chunk.seq) last_ = find(chunk.seq);
        if (last_ != nullptr && is_expired(*last_, now_ns))
            lose(*last_, FrameLoss::TIMEOUT, now_ns);  // expire() has not been called since
        if (last_ == nullptr) {
            if (is_tomb(chunk.seq)) return drop_chunk(ChunkDrop::DROPPED_FRAME, chunk);
            last_ = begin(chunk);
            if (last_ == nullptr) return;
        }
        add(*last_, chunk);
    }

    // A chunk of this stream with a fault of its own.
    void drop_chunk(ChunkDrop drop, const ArrivedChunk& chunk) noexcept {
        chunk_drops_[static_cast<std::size_t>(drop)].add();
        if (chunk.index != 0) return;
        if (drop == ChunkDrop::NO_ANNOUNCE) count(FrameLoss::NO_ANNOUNCE);
        if (drop == ChunkDrop::EPOCH) count(FrameLoss::EPOCH);
        if (drop == ChunkDrop::PAUSED) count(FrameLoss::PAUSED);
        if (drop == ChunkDrop::SEQ_JUMP) count(FrameLoss::SEQ_JUMP);
    }

    // The sender's digest of a frame of this stream, before or after its chunks.
    void take(const DigestMessage& sum, std::uint64_t now_ns) {
        now_ns_ = now_ns;
        if (!limits_.needs_digest || epoch_ != sum.epoch || (published_ && sum.seq <= *published_)) return;
        digests_.push_back(sum);
        if (digests_.size() > std::size_t{4} * limits_.max_inflight) digests_.erase(digests_.begin());
        if (Frame* const frame = find(sum.seq); frame != nullptr && frame->is_whole())
            is_expired(*frame, now_ns) ? lose(*frame, unproven(), now_ns) : finish(*frame);
    }

    // A digest of a session that is not followed.
    void drop_digest() noexcept { digests_dropped_.add(); }

    // --- what happened

    std::uint32_t stream_id() const noexcept { return stream_id_; }
    const AssemblyLimits& limits() const noexcept { return limits_; }
    std::size_t inflight() const noexcept { return inflight_.get(); }
    std::optional<std::uint64_t> published() const noexcept { return published_; }
    std::optional<std::uint64_t> epoch() const noexcept { return epoch_; }
    // The highest epoch of all chunks and of set_source(), and when its last chunk came.
    std::uint64_t newest_epoch() const noexcept { return newest_epoch_; }
    std::uint64_t last_chunk_ns() const noexcept { return last_chunk_ns_; }
    // Whether the frame was dropped, of those above the last published one.
    bool is_lost(std::uint64_t seq) const noexcept {
        return is_tomb(seq) || std::find(ahead_.begin(), ahead_.end(), seq) != ahead_.end();
    }
    SessionPin& session() noexcept { return session_; }

    std::uint64_t frames() const noexcept { return frames_out_.get(); }
    std::uint64_t bytes() const noexcept { return bytes_out_.get(); }
    std::uint64_t chunks() const noexcept { return chunks_.get(); }
    std::uint64_t in_place() const noexcept { return in_place_.get(); }
    std::uint64_t duplicates() const noexcept { return duplicates_.get(); }
    std::uint64_t unseen() const noexcept { return unseen_.get(); }
    std::uint64_t assembly_ns() const noexcept { return assembly_ns_.get(); }
    std::uint64_t longest_assembly_ns() const noexcept { return longest_assembly_ns_.get(); }
    std::uint64_t buffered_bytes() const noexcept { return buffered_bytes_.get(); }
    std::uint64_t digests_dropped() const noexcept { return digests_dropped_.get(); }
    std::uint64_t drops(ChunkDrop drop) const noexcept { return chunk_drops_[static_cast<std::size_t>(drop)].get(); }
    std::uint64_t losses(FrameLoss loss) const noexcept { return losses_[static_cast<std::size_t>(loss)].get(); }

    // One thread at a time; a chunk router holds it during a poll.
    struct Busy {
        explicit Busy(Assembler& assembler) : assembler(assembler) {
            if (assembler.busy_.exchange(true, std::memory_order_acquire))
                throw LocalProtocolError("this assembler is being fed by another thread; one thread uses it at a time");
        }
        ~Busy() { assembler.busy_.store(false, std::memory_order_release); }  // pairs with the exchange above
        Busy(const Busy&) = delete;
        Busy& operator=(const Busy&) = delete;
        Assembler& assembler;
    };

private:
    static constexpr std::size_t kMaxTombs = 1024;
    static constexpr std::size_t kMaxAhead = 4096;
    static constexpr std::uint32_t kStreamedChunkBytes = 4096;  // smaller ones are mostly ends of cache lines
    static constexpr std::uint64_t kFastestFrameNs = 1'000;     // no source publishes more than a million a second
    static constexpr std::uint64_t kJumpPatienceNs = 1'000'000'000;

    struct Piece {
        std::uint32_t length;
        std::uint32_t index;
    };

    // Chunks 0 to n-1 that came in order are `starts`; every other one is in `pieces`, by offset.
    struct Frame {
        std::uint64_t seq = 0;
        std::uint64_t first_ns = 0;
        std::uint32_t count = 0;
        std::uint32_t payload_length = 0;
        std::uint64_t trace_id = 0;
        std::uint32_t received = 0;
        std::uint64_t bytes = 0;
        std::uint8_t* at = nullptr;
        FrameBuffer buffer;  // null: in its slot
        std::size_t pool = RingGeometry::npos;
        bool is_streamed = false;
        std::uint32_t contiguous_bytes = 0;
        std::vector<std::uint32_t> starts;
        std::map<std::uint32_t, Piece> pieces;
        std::vector<bool> known;  // indices that are, or were, in `pieces`
        alignas(8) std::array<std::uint8_t, kHeaderSlotBytes> image;

        bool is_whole() const noexcept { return received == count && bytes == payload_length; }
    };

    struct Tomb {
        std::uint64_t seq;
        std::uint64_t until_ns;
    };

    // --- checks that need no frame

    ChunkDrop judge(const ArrivedChunk& chunk) noexcept {
        if (chunk.length > limits_.max_chunk_bytes) return ChunkDrop::CHUNK_SIZE;
        if (!epoch_) return ChunkDrop::NO_ANNOUNCE;
        if (chunk.epoch > epoch_limit_) return ChunkDrop::EPOCH;
        if (chunk.epoch > newest_epoch_) {  // §8: older epochs are over, although its pools are not known yet
            newest_epoch_ = chunk.epoch;
            lose_all(FrameLoss::EPOCH);
        }
        if (chunk.epoch == newest_epoch_) last_chunk_ns_ = now_ns_;
        if (chunk.epoch != *epoch_ || chunk.epoch != newest_epoch_) return ChunkDrop::EPOCH;
        if (is_paused_) return ChunkDrop::PAUSED;
        if (published_ && chunk.seq <= *published_) return ChunkDrop::LATE;
        return is_jump(chunk.seq) ? ChunkDrop::SEQ_JUMP : ChunkDrop::NONE;
    }

    // A seq that the source cannot have reached would make every frame below it late. It is believed only when frames
    // of no other kind have come for kJumpPatienceNs: then the source has jumped.
    bool is_jump(std::uint64_t seq) noexcept {
        if (max_jump_ == 0 || !published_) return false;
        if (seq - *published_ <= max_jump_ + (now_ns_ - std::min(now_ns_, published_ns_)) / kFastestFrameNs)
            return false;
        if (!jumped_ns_) jumped_ns_ = now_ns_;
        return now_ns_ - std::min(now_ns_, *jumped_ns_) < kJumpPatienceNs;
    }

    bool is_expired(const Frame& frame, std::uint64_t now_ns) const noexcept {
        return now_ns >= frame.first_ns && now_ns - frame.first_ns >= limits_.timeout_ns;
    }

    // --- frames under assembly

    Frame* find(std::uint64_t seq) const noexcept {
        for (const std::unique_ptr<Frame>& frame : frames_)
            if (frame->seq == seq) return frame.get();
        return nullptr;
    }

    // The frame that is being written in a slot of the bound ring.
    Frame* in_slot(std::uint32_t index) const noexcept {
        for (const std::unique_ptr<Frame>& frame : frames_)
            if (!frame->buffer && target_->ring().geometry().index_of(frame->seq) == index) return frame.get();
        return nullptr;
    }

    bool is_tomb(std::uint64_t seq) const noexcept {
        return std::any_of(tombs_.begin(), tombs_.end(), [seq](const Tomb& tomb) { return tomb.seq == seq; });
    }

    // Begins a frame with the first of its chunks to arrive. Null: the frame is refused.
    Frame* begin(const ArrivedChunk& chunk) {
        const FrameLoss refusal = refuse(chunk);
        if (refusal != FrameLoss::NONE) return bury(chunk.seq, refusal, now_ns_), nullptr;
        if (frames_.size() >= limits_.max_inflight) {
            const auto oldest = std::min_element(frames_.begin(), frames_.end(), [](const auto& a, const auto& b) {
                return a->first_ns != b->first_ns ? a->first_ns < b->first_ns : a->seq < b->seq;
            });
            lose(**oldest, (*oldest)->is_whole() ? unproven() : FrameLoss::INFLIGHT, now_ns_);
        }
        std::unique_ptr<Frame> frame = spare_ ? std::move(spare_) : std::make_unique<Frame>();
        frame->seq = chunk.seq;
        frame->first_ns = now_ns_;
        frame->count = chunk.count;
        frame->payload_length = chunk.payload_length;
        frame->trace_id = chunk.trace_id;
        RingWriter& ring = target_->ring();
        const std::uint32_t index = ring.geometry().index_of(chunk.seq);
        if (chunk.index == 0 && in_slot(index) == nullptr) {
            frame->pool = ring.open_image(chunk.seq, chunk.payload_length);
            frame->at = RingGeometry::payload(ring.geometry().pools()[frame->pool], index);
            frame->is_streamed = is_streamed(ring, frame->pool, chunk.payload_length);
        } else {
            frame->buffer = make_frame_buffer(std::max(chunk.payload_length, 1u));
            frame->at = frame->buffer.get();
            buffered_bytes_.add(chunk.payload_length);
        }
        frames_.push_back(std::move(frame));
        inflight_.set(frames_.size());
        return frames_.back().get();
    }

    // Whether the first chunk already shows that the frame is refused; before anything is allocated for it (G21).
    FrameLoss refuse(const ArrivedChunk& chunk) noexcept {
        if (chunk.payload_length > limits_.max_payload_bytes) return FrameLoss::TOO_LARGE;
        if (chunk.payload_length > largest_source_) return FrameLoss::SOURCE_STRIDE;
        if (target_ == nullptr) return FrameLoss::NO_LEASE;
        if (chunk.seq < target_->ring().next_seq()) return FrameLoss::OUT_OF_ORDER;
        if (chunk.payload_length > target_->ring().geometry().largest_stride_bytes()) return FrameLoss::NO_POOL;
        const FrameLoss fault = fault_of(chunk);
        return fault != FrameLoss::NONE || chunk.index != 0 ? fault : check_header(chunk.header.data(), chunk);
    }

    // Rules between the fields of one chunk that concern the whole frame.
    static FrameLoss fault_of(const ArrivedChunk& chunk) noexcept {
        const bool is_inside =
            chunk.offset <= chunk.payload_length && chunk.length <= chunk.payload_length - chunk.offset;
        const bool is_sized = chunk.payload_length == 0 ? chunk.count == 1  // G26
                                                        : chunk.length > 0 && chunk.count <= chunk.payload_length;
        const bool is_first_at_0 = chunk.index != 0 || chunk.offset == 0;
        return is_inside && is_sized && is_first_at_0 ? FrameLoss::NONE : FrameLoss::INCONSISTENT;
    }

    FrameLoss check_header(const std::uint8_t* image, const ArrivedChunk& chunk) noexcept {
        if (load<std::uint64_t>(image) >> 1 != chunk.seq ||  // G24
            load<std::uint32_t>(image + slot::kValuesLenBytes) != chunk.payload_length ||
            load<std::uint32_t>(image + slot::kPayloadOffset) != 0)
            return FrameLoss::HEADER;
        if (!is_same_layout(image)) {
            is_layout_known_ = parse_tensor_header(image, layout_) == Drop::NONE;
            if (!is_layout_known_) return FrameLoss::HEADER;
            std::memcpy(layout_bytes_.data(), image + slot::kHeaderLength, layout_bytes_.size());
        }
        if (chunk.payload_length != 0 && (layout_.has_zero_dim() || layout_.extent_bytes > chunk.payload_length))
            return FrameLoss::HEADER;  // B13, B14
        const auto pool_id = load<std::uint16_t>(image + slot::kPoolId);
        const auto pool = std::find_if(pools_.begin(), pools_.end(),
                                       [pool_id](const SourcePool& each) { return each.pool_id == pool_id; });
        if (pool == pools_.end()) return FrameLoss::SOURCE_POOL;
        return chunk.payload_length > pool->stride_bytes ? FrameLoss::SOURCE_STRIDE : FrameLoss::NONE;
    }

    // Streams keep their shape: what was parsed once is compared from then on.
    bool is_same_layout(const std::uint8_t* image) const noexcept {
        return is_layout_known_ &&
               std::memcmp(image + slot::kHeaderLength, layout_bytes_.data(), layout_bytes_.size()) == 0;
    }

    void add(Frame& frame, const ArrivedChunk& chunk) {
        FrameLoss loss = FrameLoss::NONE;
        if (chunk.count != frame.count || chunk.payload_length != frame.payload_length ||
            chunk.trace_id != frame.trace_id)
            loss = FrameLoss::INCONSISTENT;
        else
            loss = fault_of(chunk);
        if (loss == FrameLoss::NONE && frame.received > 0) {
            if (const std::optional<bool> is_same = repeated(frame, chunk)) {
                if (*is_same) return duplicates_.add();
                loss = FrameLoss::CONFLICT;
            }
        }
        if (loss == FrameLoss::NONE && chunk.index == 0 && frame.received > 0)
            loss = check_header(chunk.header.data(), chunk);  // begin() checked that of the first chunk to arrive
        if (loss == FrameLoss::NONE) loss = place(frame, chunk);
        if (loss != FrameLoss::NONE) return lose(frame, loss, now_ns_);
        if (chunk.index == 0) std::memcpy(frame.image.data(), chunk.header.data(), kHeaderSlotBytes);
        if (frame.is_streamed && chunk.length >= kStreamedChunkBytes)  // open_image and commit_image have the fences
            copy_streaming(frame.at + chunk.offset, chunk.payload.data(), chunk.length);
        else
            copy_racing(frame.at + chunk.offset, chunk.payload.data(), chunk.length);
        ++frame.received;
        frame.bytes += chunk.length;
        if (frame.received < frame.count) return;
        if (frame.bytes != frame.payload_length) return lose(frame, FrameLoss::INCONSISTENT, now_ns_);
        finish(frame);
    }

    // Whether a chunk of this index came before: with the same content, or with another.
    static std::optional<bool> repeated(const Frame& frame, const ArrivedChunk& chunk) noexcept {
        std::uint32_t offset = 0;
        std::uint32_t length = 0;
        if (chunk.index < frame.starts.size()) {
            offset = frame.starts[chunk.index];
            length = (chunk.index + 1 < frame.starts.size() ? frame.starts[chunk.index + 1] : frame.contiguous_bytes) -
                     offset;
        } else if (frame.known.empty() || !frame.known[chunk.index]) {
            return std::nullopt;
        } else {
            const auto same = frame.pieces.find(chunk.offset);
            if (same == frame.pieces.end() || same->second.index != chunk.index) return false;
            offset = chunk.offset;
            length = same->second.length;
        }
        if (offset != chunk.offset || length != chunk.length) return false;
        if (chunk.index == 0 && std::memcmp(frame.image.data(), chunk.header.data(), kHeaderSlotBytes) != 0)
            return false;
        return length == 0 || std::memcmp(frame.at + offset, chunk.payload.data(), length) == 0;
    }

    // Records a new chunk; CONFLICT where it overlaps another one.
    static FrameLoss place(Frame& frame, const ArrivedChunk& chunk) {
        const std::uint32_t end = chunk.offset + chunk.length;
        if (chunk.index == frame.starts.size() && chunk.offset == frame.contiguous_bytes) {
            if (!frame.pieces.empty() && frame.pieces.begin()->first < end) return FrameLoss::CONFLICT;
            frame.starts.push_back(chunk.offset);
            frame.contiguous_bytes = end;
            for (auto next = frame.pieces.begin();
                 next != frame.pieces.end() && next->first == frame.contiguous_bytes &&
                 next->second.index == frame.starts.size();
                 next = frame.pieces.erase(next)) {
                frame.starts.push_back(next->first);
                frame.contiguous_bytes = next->first + next->second.length;
            }
            return FrameLoss::NONE;
        }
        if (chunk.offset < frame.contiguous_bytes) return FrameLoss::CONFLICT;
        const auto after = frame.pieces.lower_bound(chunk.offset);
        if (after != frame.pieces.end() && after->first < end) return FrameLoss::CONFLICT;
        if (after != frame.pieces.begin()) {
            const auto before = std::prev(after);
            if (before->first + before->second.length > chunk.offset) return FrameLoss::CONFLICT;
        }
        frame.pieces.emplace_hint(after, chunk.offset, Piece{chunk.length, chunk.index});
        if (frame.known.empty()) frame.known.resize(frame.count);
        frame.known[chunk.index] = true;
        return FrameLoss::NONE;
    }

    // --- the end of a frame

    // Every chunk is there.
    void finish(Frame& frame) {
        if (limits_.needs_digest) {
            const auto sum = std::find_if(digests_.begin(), digests_.end(),
                                          [&](const DigestMessage& each) { return each.seq == frame.seq; });
            if (sum == digests_.end()) return;  // it comes on another stream, and may come later
            if (sum->payload_length != frame.payload_length || !(sum->digest == digest_of(frame)))
                return lose(frame, unproven(), now_ns_);
        }
        const std::uint64_t now_ns = std::max(now_ns_, monotonic_ns());
        if (target_ == nullptr || now_ns >= until_ns_) return lose(frame, FrameLoss::NO_LEASE, now_ns_);
        RingWriter& ring = target_->ring();
        if (frame.seq < ring.next_seq()) return lose(frame, FrameLoss::OUT_OF_ORDER, now_ns_);
        if (frame.buffer) {
            const std::uint32_t index = ring.geometry().index_of(frame.seq);
            if (Frame* const other = in_slot(index)) {  // the later one has the slot
                if (frame.seq < other->seq) return lose(frame, FrameLoss::OUT_OF_ORDER, now_ns_);
                lose(*other, FrameLoss::OUT_OF_ORDER, now_ns_);
            }
            frame.pool = ring.open_image(frame.seq, frame.payload_length);
            if (frame.pool == RingGeometry::npos) return lose(frame, FrameLoss::NO_POOL, now_ns_);
            const Pool& pool = ring.geometry().pools()[frame.pool];
            write_payload(RingGeometry::payload(pool, index), frame.at, frame.payload_length,
                          ring.geometry().pool_bytes(pool));
        }
        count_published(frame, now_ns);  // before a consumer can see the frame
        set_trace_id(frame.image.data(), frame.trace_id);
        ring.commit_image(frame.seq, frame.pool, frame.image.data());
        target_->announce(frame.seq, load<std::uint32_t>(frame.image.data() + slot::kMetaVersion), frame.trace_id,
                          frame.payload_length);
        advance_to(frame);
    }

    FrameDigest digest_of(const Frame& frame) const {
        FrameDigester digester(limits_.mac_key,
                               {stream_id_, *epoch_, frame.seq, 0, 0, 0, 0, frame.payload_length, frame.trace_id});
        digester.update(frame.image);
        digester.update({frame.at, frame.payload_length});
        return digester.digest();
    }

    // Why a frame is lost whose digest is wrong, or did not come.
    FrameLoss unproven() const noexcept { return limits_.mac_key.empty() ? FrameLoss::CRC : FrameLoss::MAC; }

    static bool is_streamed(const RingWriter& ring, std::size_t pool, std::uint32_t bytes) noexcept {
        const RingGeometry& geometry = ring.geometry();
        return prefers_streaming(bytes, geometry.pool_bytes(geometry.pools()[pool]));
    }

    void count_published(const Frame& frame, std::uint64_t now_ns) noexcept {
        if (!frame.buffer) in_place_.add();
        frames_out_.add();
        bytes_out_.add(frame.payload_length);
        const std::uint64_t taken_ns = now_ns > frame.first_ns ? now_ns - frame.first_ns : 0;
        assembly_ns_.add(taken_ns);
        longest_assembly_ns_.raise_to(taken_ns);
    }

    void advance_to(Frame& frame) {
        const std::uint64_t seq = frame.seq;
        remove(frame);
        for (std::size_t i = frames_.size(); i-- > 0;)  // G19: they cannot be published any more
            if (frames_[i]->seq < seq) lose(*frames_[i], FrameLoss::OUT_OF_ORDER, now_ns_);
        count_unseen(seq);
        published_ = seq;
        published_ns_ = now_ns_;
        jumped_ns_.reset();
        std::erase_if(tombs_, [seq](const Tomb& tomb) { return tomb.seq <= seq; });
        std::erase_if(digests_, [seq](const DigestMessage& sum) { return sum.seq <= seq; });
    }

    // Frames between the last published one and this one of which no chunk came at all.
    void count_unseen(std::uint64_t seq) noexcept {
        const auto seen = static_cast<std::uint64_t>(
            std::count_if(ahead_.begin(), ahead_.end(), [seq](std::uint64_t lost) { return lost < seq; }));
        std::erase_if(ahead_, [seq](std::uint64_t lost) { return lost <= seq; });
        if (!published_) return;
        const std::uint64_t between = seq - *published_ - 1;
        unseen_.add(between > seen ? between - seen : 0);
    }

    void lose(Frame& frame, FrameLoss loss, std::uint64_t now_ns) {
        bury(frame.seq, loss, now_ns);
        remove(frame);
    }

    void lose_all(FrameLoss loss) {
        while (!frames_.empty()) lose(*frames_.back(), loss, now_ns_);
    }

    // G18: a dropped frame stays dropped. Its remaining chunks may arrive after its tombstone has expired; the frame is
    // not counted a second time.
    void bury(std::uint64_t seq, FrameLoss loss, std::uint64_t now_ns) {
        if (tombs_.size() >= kMaxTombs) tombs_.erase(tombs_.begin());
        tombs_.push_back({seq, now_ns + limits_.timeout_ns});
        if (std::find(ahead_.begin(), ahead_.end(), seq) != ahead_.end()) return;
        count(loss);
        if (ahead_.size() < kMaxAhead) ahead_.push_back(seq);
    }

    void remove(Frame& frame) {
        if (last_ == &frame) last_ = nullptr;
        const auto found =
            std::find_if(frames_.begin(), frames_.end(), [&](const auto& each) { return each.get() == &frame; });
        if (frame.buffer) buffered_bytes_.set(buffered_bytes_.get() - frame.payload_length);
        spare_ = std::move(*found);
        frames_.erase(found);
        inflight_.set(frames_.size());
        spare_->buffer.reset();
        spare_->pieces.clear();
        spare_->starts.clear();
        spare_->known.clear();
        spare_->received = spare_->contiguous_bytes = 0;
        spare_->bytes = 0;
        spare_->pool = RingGeometry::npos;
        spare_->is_streamed = false;
    }

    void count(FrameLoss loss) noexcept { losses_[static_cast<std::size_t>(loss)].add(); }

    const std::uint32_t stream_id_;
    const AssemblyLimits limits_;
    std::uint64_t now_ns_ = 0;

    std::optional<std::uint64_t> epoch_;  // of the latest announce
    std::uint64_t newest_epoch_ = 0;
    std::uint64_t epoch_limit_ = 0;
    std::uint64_t max_jump_ = 0;
    std::uint64_t last_chunk_ns_ = 0;
    std::vector<SourcePool> pools_;
    std::uint32_t largest_source_ = 0;

    FrameTarget* target_ = nullptr;
    std::uint64_t until_ns_ = 0;
    bool is_paused_ = false;

    std::vector<std::unique_ptr<Frame>> frames_;
    std::unique_ptr<Frame> spare_;
    Frame* last_ = nullptr;  // what the chunk before belonged to
    std::vector<Tomb> tombs_;
    std::vector<DigestMessage> digests_;
    std::vector<std::uint64_t> ahead_;  // dropped, above the last published one
    std::optional<std::uint64_t> published_;
    std::uint64_t published_ns_ = 0;
    std::optional<std::uint64_t> jumped_ns_;  // since when every frame has been too far ahead
    SessionPin session_;

    TensorLayout layout_;
    std::array<std::uint8_t, slot::kTail - slot::kHeaderLength> layout_bytes_;
    bool is_layout_known_ = false;

    RelaxedCounter inflight_, buffered_bytes_, digests_dropped_;
    RelaxedCounter chunks_, frames_out_, bytes_out_, in_place_, duplicates_, unseen_, assembly_ns_,
        longest_assembly_ns_;
    std::array<RelaxedCounter, static_cast<std::size_t>(ChunkDrop::COUNT_)> chunk_drops_;
    std::array<RelaxedCounter, static_cast<std::size_t>(FrameLoss::COUNT_)> losses_;
    std::atomic<bool> busy_{false};
};

}  // namespace tensorpool
