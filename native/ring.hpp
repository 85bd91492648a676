// SPDX-License-Identifier: Apache-2.0
// A header ring with its payload pools, bound once: the writer's and the reader's side of the slot protocol.
// Regions are spans of mapped memory that the caller keeps alive and has validated (superblock, size).
// Wire §8, §9, §15.4, §15.5, §15.18, §15.21; decisions B1-B4, B13-B18, B21.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "copy.hpp"
#include "drops.hpp"
#include "local_protocol_error.hpp"
#include "relaxed_counter.hpp"
#include "seqlock.hpp"
#include "tensor.hpp"
#include "wake.hpp"

namespace tensorpool {

// A pool's mapped region. A reader's memory is mapped read-only; nothing in RingReader writes through the span.
struct Pool {
    std::uint16_t pool_id = 0;
    std::uint32_t stride_bytes = 0;
    std::span<std::uint8_t> region;
};

// Slot arithmetic over regions whose sizes were checked against it. Throws std::invalid_argument when they do not fit.
class RingGeometry {
public:
    RingGeometry(std::span<std::uint8_t> header, std::vector<Pool> pools, std::uint32_t nslots)
        : header_(header), pools_(std::move(pools)), mask_(nslots - 1) {
        if (!std::has_single_bit(nslots)) throw std::invalid_argument(text("nslots", nslots, "a power of two"));
        require("header ring", header_, nslots, kHeaderSlotBytes);
        if (pools_.empty()) throw std::invalid_argument("a ring needs at least one payload pool");
        for (const Pool& pool : pools_) {
            if (pool.stride_bytes == 0 || pool.stride_bytes % 64 != 0)  // K7: ours are powers of two, see PoolSpec
                throw std::invalid_argument(text("stride_bytes", pool.stride_bytes, "a multiple of 64"));
            require("pool " + std::to_string(pool.pool_id), pool.region, nslots, pool.stride_bytes);
        }
        // B18: among equal strides the lowest id comes first.
        std::sort(pools_.begin(), pools_.end(), [](const Pool& a, const Pool& b) {
            return a.stride_bytes != b.stride_bytes ? a.stride_bytes < b.stride_bytes : a.pool_id < b.pool_id;
        });
        for (std::size_t i = 0; i < pools_.size(); ++i)
            for (std::size_t j = i + 1; j < pools_.size(); ++j)
                if (pools_[i].pool_id == pools_[j].pool_id)
                    throw std::invalid_argument("pool id " + std::to_string(pools_[i].pool_id) + " occurs twice");
    }

    std::uint32_t nslots() const noexcept { return mask_ + 1; }
    std::uint32_t index_of(std::uint64_t seq) const noexcept { return static_cast<std::uint32_t>(seq) & mask_; }
    const std::vector<Pool>& pools() const noexcept { return pools_; }
    std::uint32_t largest_stride_bytes() const noexcept { return pools_.back().stride_bytes; }

    std::uint8_t* slot(std::uint32_t index) const noexcept {
        return header_.data() + kSuperblockBytes + std::size_t{index} * kHeaderSlotBytes;
    }
    static std::size_t payload_offset(const Pool& pool, std::uint32_t index) noexcept {
        return kSuperblockBytes + std::size_t{index} * pool.stride_bytes;  // B21: past the superblock
    }
    static std::uint8_t* payload(const Pool& pool, std::uint32_t index) noexcept {
        return pool.region.data() + payload_offset(pool, index);
    }

    std::size_t pool_bytes(const Pool& pool) const noexcept { return std::size_t{nslots()} * pool.stride_bytes; }

    // §9: the smallest pool that holds it; npos when none does.
    static constexpr std::size_t npos = static_cast<std::size_t>(-1);
    std::size_t pool_for(std::uint64_t bytes) const noexcept {
        for (std::size_t i = 0; i < pools_.size(); ++i)
            if (pools_[i].stride_bytes >= bytes) return i;
        return npos;
    }
    std::size_t pool_by_id(std::uint16_t id) const noexcept {
        for (std::size_t i = 0; i < pools_.size(); ++i)
            if (pools_[i].pool_id == id) return i;
        return npos;
    }

private:
    static std::string text(const char* what, std::uint64_t value, const char* wanted) {
        return std::string(what) + " is " + std::to_string(value) + ", must be " + wanted;
    }
    static void require(const std::string& what, std::span<std::uint8_t> region, std::uint32_t nslots,
                        std::uint64_t slot_bytes) {
        const std::uint64_t needed = kSuperblockBytes + std::uint64_t{nslots} * slot_bytes;
        if (region.size() < needed)
            throw std::invalid_argument(what + " has " + std::to_string(region.size()) + " bytes, needs " +
                                        std::to_string(needed));
    }

    std::span<std::uint8_t> header_;
    std::vector<Pool> pools_;
    std::uint32_t mask_;
};

// The producer's side. One thread at a time; calls from a second one are refused, never interleaved.
//
//   idle ──write──► idle            begin, copy, header, commit in one call
//   idle ──begin──► claimed ──commit──► idle
//                       └────abandon──► idle     the slot stays in-progress: readers drop it, the seq may be used again
class RingWriter {
public:
    explicit RingWriter(RingGeometry geometry) : geometry_(std::move(geometry)) {}

    const RingGeometry& geometry() const noexcept { return geometry_; }

    // For any thread.
    std::uint64_t next_seq() const noexcept { return next_seq_.get(); }
    bool is_claimed() const noexcept { return claimed_.load(std::memory_order_relaxed); }
    std::uint64_t written() const noexcept { return written_.get(); }
    std::uint64_t no_pool_drops() const noexcept { return no_pool_drops_.get(); }

    // While it lives, its thread is the ring's only writer.
    struct Busy {
        explicit Busy(RingWriter& writer) : writer_(writer) {
            if (writer_.busy_.exchange(true, std::memory_order_acquire))
                throw LocalProtocolError("this ring is being written by another thread; a ring has one writer");
        }
        ~Busy() { writer_.busy_.store(false, std::memory_order_release); }  // pairs with the exchange above
        Busy(const Busy&) = delete;
        Busy& operator=(const Busy&) = delete;
        RingWriter& writer_;
    };

    // Publishes `bytes` as frame `seq`. False: no pool holds it, counted (§9). `bytes` must be the layout's extent.
    bool write(std::uint64_t seq, const TensorLayout& layout, std::span<const std::uint8_t> bytes,
               std::uint64_t timestamp_ns, std::uint32_t meta_version) {
        return write(Busy(*this), seq, layout, bytes, timestamp_ns, meta_version, 0);
    }
    bool write(const Busy&, std::uint64_t seq, const TensorLayout& layout, std::span<const std::uint8_t> bytes,
               std::uint64_t timestamp_ns, std::uint32_t meta_version, std::uint64_t trace_id) {
        const std::size_t pool_index = open(seq, layout);
        if (bytes.size() != layout.extent_bytes)
            throw std::invalid_argument("the payload has " + std::to_string(bytes.size()) + " bytes, its layout " +
                                        std::to_string(layout.extent_bytes));
        if (pool_index == RingGeometry::npos) return no_pool_drops_.add(), false;
        const Pool& pool = geometry_.pools()[pool_index];
        const std::uint32_t index = geometry_.index_of(seq);
        std::uint8_t* const slot = geometry_.slot(index);
        CommitWord word(slot);
        word.begin(seq);
        write_payload(RingGeometry::payload(pool, index), bytes.data(), bytes.size(), geometry_.pool_bytes(pool));
        write_header(slot, layout, pool, index, timestamp_ns, meta_version, trace_id);
        word.commit(seq);
        finish(seq);
        return true;
    }

    // Opens the slot of `seq` for writing in place and returns the pool's index, or npos when none fits (counted).
    // `header_first` writes the header now, for readers of partial frames (B4).
    std::size_t begin(std::uint64_t seq, const TensorLayout& layout, std::uint64_t timestamp_ns,
                      std::uint32_t meta_version, bool header_first) {
        const Busy busy(*this);
        const std::size_t pool_index = open(seq, layout);
        if (pool_index == RingGeometry::npos) return no_pool_drops_.add(), pool_index;
        const std::uint32_t index = geometry_.index_of(seq);
        std::uint8_t* const slot = geometry_.slot(index);
        CommitWord(slot).begin(seq);
        streaming_fence();  // the owner of the claim may use streaming stores, which could pass the in-progress word
        if (header_first)
            write_header(slot, layout, geometry_.pools()[pool_index], index, timestamp_ns, meta_version, 0);
        set_claimed(true);
        claim_seq_ = seq;
        claim_pool_ = pool_index;
        claim_layout_ = layout;
        return pool_index;
    }

    // Returns the seq of the frame that was claimed.
    std::uint64_t commit(std::uint64_t timestamp_ns, std::uint32_t meta_version) {
        return commit(Busy(*this), timestamp_ns, meta_version, 0);
    }
    std::uint64_t commit(const Busy&, std::uint64_t timestamp_ns, std::uint32_t meta_version, std::uint64_t trace_id) {
        if (!is_claimed()) throw LocalProtocolError("no claim is open on this ring");
        const std::uint32_t index = geometry_.index_of(claim_seq_);
        std::uint8_t* const slot = geometry_.slot(index);
        streaming_fence();  // the owner of the claim may have used streaming stores or DMA (§8.3)
        write_header(slot, claim_layout_, geometry_.pools()[claim_pool_], index, timestamp_ns, meta_version, trace_id);
        CommitWord(slot).commit(claim_seq_);
        set_claimed(false);
        finish(claim_seq_);
        return claim_seq_;
    }

    // `is_known`: consumers have received progress of this seq, so it is not used again.
    void abandon(bool is_known = false) {
        const Busy busy(*this);
        if (!is_claimed()) throw LocalProtocolError("no claim is open on this ring");
        set_claimed(false);
        if (is_known) next_seq_.set(claim_seq_ + 1);
    }

    // For a frame that arrives in pieces, with a header from another host (Bridge §6). Opens its slot, beside other
    // open ones, and returns the pool's index, or npos when none fits. A slot that is never committed stays
    // in-progress.
    std::size_t open_image(std::uint64_t seq, std::uint64_t payload_bytes) {
        const Busy busy(*this);
        check_next(seq);
        const std::size_t pool_index = geometry_.pool_for(payload_bytes);
        if (pool_index == RingGeometry::npos) return no_pool_drops_.add(), pool_index;
        CommitWord(geometry_.slot(geometry_.index_of(seq))).begin(seq);
        streaming_fence();  // a copy of the pieces may use streaming stores, which could pass the in-progress word
        return pool_index;
    }

    // Commits what open_image opened. `image` is a whole slot header, in which pool and payload slot are replaced.
    void commit_image(std::uint64_t seq, std::size_t pool_index, const std::uint8_t* image) {
        const Busy busy(*this);
        check_next(seq);
        const std::uint32_t index = geometry_.index_of(seq);
        std::uint8_t* const slot = geometry_.slot(index);
        std::uint8_t own[kHeaderSlotBytes];
        std::memcpy(own, image, kHeaderSlotBytes);
        store<std::uint32_t>(own + slot::kPayloadSlot, index);
        store<std::uint16_t>(own + slot::kPoolId, geometry_.pools()[pool_index].pool_id);
        streaming_fence();
        copy_racing(slot + 8, own + 8, kHeaderSlotBytes - 8);
        CommitWord(slot).commit(seq);
        finish(seq);
    }

    // Wakes readers that sleep on the slot of the first of the newest `frames`: they have read all before it. Once per
    // kWakeEveryNs, and once in advance. From any thread, and never fails: it comes after a commit, and a caller that saw an exception
    // would publish the frame again.
    void wake(std::uint64_t now_ns, std::uint64_t frames = 1) noexcept {
        const std::uint64_t due_ns = wake_due_ns_.load(std::memory_order_relaxed);
        if (now_ns + kWakeEveryNs < due_ns || written() == 0) return;
        wake_due_ns_.store(std::max(now_ns, due_ns) + kWakeEveryNs, std::memory_order_relaxed);
        wake_all(CommitWord(geometry_.slot(geometry_.index_of(next_seq() - frames))).low_half());
    }

private:
    std::size_t open(std::uint64_t seq, const TensorLayout& layout) const {
        if (is_claimed())
            throw LocalProtocolError("frame " + std::to_string(claim_seq_) +
                                     " is claimed and not committed; commit or abandon it first");
        check_next(seq);
        return geometry_.pool_for(layout.extent_bytes);
    }

    void check_next(std::uint64_t seq) const {
        if (seq > kMaxSeq) throw std::invalid_argument("seq " + std::to_string(seq) + " exceeds 2^63 - 1");
        if (seq < next_seq())
            throw std::invalid_argument("seq " + std::to_string(seq) + " goes back; the next one is " +
                                        std::to_string(next_seq()));
    }

    // Bytes 8..255; the commit word is only ever stored atomically (B2).
    static void write_header(std::uint8_t* slot, const TensorLayout& layout, const Pool& pool, std::uint32_t index,
                             std::uint64_t timestamp_ns, std::uint32_t meta_version, std::uint64_t trace_id) noexcept {
        std::uint8_t image[kHeaderSlotBytes];
        store<std::uint32_t>(image + slot::kValuesLenBytes, static_cast<std::uint32_t>(layout.extent_bytes));
        store<std::uint32_t>(image + slot::kPayloadSlot, index);
        store<std::uint16_t>(image + slot::kPoolId, pool.pool_id);
        store<std::uint32_t>(image + slot::kPayloadOffset, 0);
        store<std::uint64_t>(image + slot::kTimestampNs, timestamp_ns);
        store<std::uint32_t>(image + slot::kMetaVersion, meta_version);
        write_tensor_header(image, layout);
        set_trace_id(image, trace_id);
        copy_racing(slot + 8, image + 8, kHeaderSlotBytes - 8);
    }

    void finish(std::uint64_t seq) noexcept {
        next_seq_.set(seq + 1);
        written_.add();
    }
    void set_claimed(bool is_claimed) noexcept { claimed_.store(is_claimed, std::memory_order_relaxed); }

    RingGeometry geometry_;
    RelaxedCounter next_seq_, written_, no_pool_drops_;
    std::atomic<std::uint64_t> wake_due_ns_{0};  // when a wake-up would not be in advance
    std::atomic<bool> claimed_{false};
    std::uint64_t claim_seq_ = 0;
    std::size_t claim_pool_ = 0;
    TensorLayout claim_layout_;
    std::atomic<bool> busy_{false};
};

// A frame that passed every check at the moment of the read. Its payload may be overwritten at any time: ask intact().
struct SlotFrame {
    std::uint64_t seq = 0;
    std::uint64_t timestamp_ns = 0;
    std::uint64_t trace_id = 0;  // 0: none
    std::uint32_t meta_version = 0;
    std::uint32_t slot = 0;
    std::uint32_t pool = 0;  // index into geometry().pools()
    std::uint32_t values_len_bytes = 0;
    std::size_t payload_offset = 0;  // into the pool's region
    std::uint64_t reader = 0;        // which reader made it: its offsets mean nothing to another
    std::shared_ptr<const TensorLayout> layout;
};

// The consumer's side: reads only, never waits for a commit (§15.21), trusts no header value before it was checked.
class RingReader {
public:
    explicit RingReader(RingGeometry geometry) : geometry_(std::move(geometry)) {}

    const RingGeometry& geometry() const noexcept { return geometry_; }
    const DropCounters& drops() const noexcept { return drops_; }  // for any thread; NONE: frames that were read

    void check_own(const SlotFrame& frame) const {
        if (frame.reader != id_)
            throw LocalProtocolError("frame " + std::to_string(frame.seq) + " was read by another reader");
    }

    // §15.18, B3: copy the slot, re-check the commit word, then parse the copy.
    Drop read(std::uint64_t seq, SlotFrame& out) {
        const Drop drop = read_slot(seq, out);
        drops_.of(drop).add();
        return drop;
    }

    // A frame that may still be being written: its header is there because its producer reports progress (B4). Payload
    // bytes are provisional; ask is_held() after reading them (B5).
    Drop read_partial(std::uint64_t seq, SlotFrame& out) {
        if (seq > kMaxSeq) return Drop::STALE;
        const CommitWord word(geometry_.slot(geometry_.index_of(seq)));
        const std::uint64_t seen = word.peek();
        return seen >> 1 == seq ? read_held(seq, seen, word, out) : not_held(seen, seq);
    }

    // Whether the slot still belongs to this frame, written to the end or not.
    bool is_held(const SlotFrame& frame) const {
        check_own(frame);
        return CommitWord(geometry_.slot(frame.slot)).recheck() >> 1 == frame.seq;
    }

    // Copies the payload and says whether it stayed whole; `to` holds values_len_bytes.
    bool copy(const SlotFrame& frame, std::uint8_t* to) const {
        check_own(frame);
        const Pool& pool = geometry_.pools()[frame.pool];
        read_payload(to, pool.region.data() + frame.payload_offset, frame.values_len_bytes, geometry_.pool_bytes(pool));
        return intact(frame);
    }

    bool intact(const SlotFrame& frame) const {
        check_own(frame);
        return CommitWord(geometry_.slot(frame.slot)).recheck() == committed(frame.seq);
    }

    // The newest committed frame. A full scan: for joining a stream that is already running.
    std::optional<std::uint64_t> newest() const noexcept {
        std::optional<std::uint64_t> newest;
        for (std::uint32_t i = 0; i < geometry_.nslots(); ++i) {
            const std::uint64_t word = CommitWord(geometry_.slot(i)).peek();
            if ((word & 1) == 0) continue;
            const std::uint64_t seq = word >> 1;
            if (geometry_.index_of(seq) == i && (!newest || seq > *newest)) newest = seq;
        }
        return newest;
    }

    // The same from a seq on that the ring has had, by a few looks: at the slots that follow, then in ever larger steps,
    // and again from the newest that was found. Nothing where none of them holds that frame or a later one. A producer
    // that left out more than kNextSlots seqs may have later frames.
    std::optional<std::uint64_t> newest_from(std::uint64_t seq) const noexcept {
        std::optional<std::uint64_t> newest;
        std::uint64_t from = seq;
        for (int pass = 0; pass < kPasses; ++pass) {
            const std::optional<std::uint64_t> before = newest;
            for (std::uint64_t step = 0; step < geometry_.nslots(); step = step < kNextSlots ? step + 1 : 2 * step)
                newest = std::max(newest, committed_in(geometry_.index_of(from + step)));
            if (newest == before || *newest < seq) break;
            from = *newest;
        }
        return newest >= seq ? newest : std::nullopt;
    }

    bool is_committed(std::uint64_t seq) const noexcept {
        return has_reached(CommitWord(geometry_.slot(geometry_.index_of(seq))).peek(), seq);
    }

    // Whether the slot of `seq` was opened for it, or for a later frame.
    bool has_begun(std::uint64_t seq) const noexcept {
        return CommitWord(geometry_.slot(geometry_.index_of(seq))).peek() >= in_progress(seq);
    }

    // Sleeps until frame `seq`, or a later one in its slot, is committed; false on timeout. See wake.hpp.
    bool wait(std::uint64_t seq, std::uint64_t timeout_ns) const noexcept {
        const CommitWord word(geometry_.slot(geometry_.index_of(seq)));
        const std::uint64_t start = monotonic_ns();
        while (true) {
            const std::uint64_t seen = word.peek();
            if (has_reached(seen, seq)) return true;
            const std::uint64_t elapsed = monotonic_ns() - start;
            if (elapsed >= timeout_ns) return false;
            if (elapsed < kSpinNs) {
                lull();
                continue;
            }
            // The writer may have skipped the wake-up for a frame that followed another at once: looks again soon.
            const std::uint64_t longest_ns = elapsed < kGraceNs ? kGraceNs - elapsed : bounded_sleep_ns(elapsed);
            sleep_on(word.low_half(), static_cast<std::uint32_t>(seen), std::min(timeout_ns - elapsed, longest_ns));
        }
    }

private:
    static constexpr std::uint64_t kNextSlots = 64;
    static constexpr int kPasses = 32;  // each halves the distance; a writer that is faster must not hold us here

    std::optional<std::uint64_t> committed_in(std::uint32_t index) const noexcept {
        const std::uint64_t word = CommitWord(geometry_.slot(index)).peek();
        const bool is_own = (word & 1) != 0 && geometry_.index_of(word >> 1) == index;
        return is_own ? std::optional(word >> 1) : std::nullopt;
    }
    static bool has_reached(std::uint64_t word, std::uint64_t seq) noexcept {
        return seq <= kMaxSeq && word >= committed(seq);
    }

    Drop read_slot(std::uint64_t seq, SlotFrame& out) {
        if (seq > kMaxSeq) return Drop::STALE;
        const CommitWord word(geometry_.slot(geometry_.index_of(seq)));
        const std::uint64_t seen = word.peek();
        if (seen != committed(seq)) return not_held(seen, seq);
        return read_held(seq, seen, word, out);
    }

    Drop read_held(std::uint64_t seq, std::uint64_t seen, const CommitWord& word, SlotFrame& out) {
        const std::uint32_t index = geometry_.index_of(seq);
        alignas(64) std::uint8_t image[kHeaderSlotBytes];
        copy_racing(image, geometry_.slot(index), kHeaderSlotBytes);
        if (word.recheck() != seen) return Drop::OVERWRITTEN;

        const auto values_len = load<std::uint32_t>(image + slot::kValuesLenBytes);
        if (load<std::uint32_t>(image + slot::kPayloadOffset) != 0) return Drop::BAD_PAYLOAD_OFFSET;
        if (load<std::uint32_t>(image + slot::kPayloadSlot) != index) return Drop::BAD_PAYLOAD_SLOT;  // B15
        const Drop header = same_layout(image) ? Drop::NONE : parse(image);
        if (header != Drop::NONE) return header;
        const TensorLayout& layout = *layout_;
        std::size_t pool = geometry_.pool_by_id(load<std::uint16_t>(image + slot::kPoolId));
        if (values_len == 0) {
            pool = pool == RingGeometry::npos ? 0 : pool;  // B17: ignored for an empty payload
        } else {
            if (pool == RingGeometry::npos) return Drop::BAD_POOL;  // B16
            if (values_len > geometry_.pools()[pool].stride_bytes) return Drop::BAD_LENGTH;
            if (layout.has_zero_dim()) return Drop::BAD_LENGTH;             // B13
            if (layout.extent_bytes > values_len) return Drop::BAD_LENGTH;  // B14
        }
        out.seq = seq;
        out.timestamp_ns = load<std::uint64_t>(image + slot::kTimestampNs);
        out.meta_version = load<std::uint32_t>(image + slot::kMetaVersion);
        // K11: whether the frame is accepted does not depend on its padding (§8.2).
        out.trace_id = trace_id_of(image);
        out.slot = index;
        out.pool = static_cast<std::uint32_t>(pool);
        out.values_len_bytes = values_len;
        out.payload_offset = RingGeometry::payload_offset(geometry_.pools()[pool], index);
        out.reader = id_;
        out.layout = layout_;
        return Drop::NONE;
    }

    static Drop not_held(std::uint64_t word, std::uint64_t seq) noexcept {
        if (word == in_progress(seq)) return Drop::NOT_COMMITTED;
        return word >> 1 > seq ? Drop::OVERWRITTEN : Drop::STALE;
    }

    // Streams keep their shape: the last layout is parsed once and compared from then on.
    static constexpr std::size_t kLayoutBytes = slot::kTail - slot::kHeaderLength;
    bool same_layout(const std::uint8_t* image) const noexcept {
        return layout_ && std::memcmp(image + slot::kHeaderLength, layout_bytes_, kLayoutBytes) == 0;
    }
    Drop parse(const std::uint8_t* image) {
        auto parsed = std::make_shared<TensorLayout>();
        const Drop drop = parse_tensor_header(image, *parsed);
        if (drop != Drop::NONE) return drop;
        layout_ = std::move(parsed);
        std::memcpy(layout_bytes_, image + slot::kHeaderLength, kLayoutBytes);
        return Drop::NONE;
    }

    static std::uint64_t next_id() noexcept {
        static std::atomic<std::uint64_t> last{0};
        return last.fetch_add(1, std::memory_order_relaxed) + 1;
    }

    RingGeometry geometry_;
    const std::uint64_t id_ = next_id();
    DropCounters drops_;
    std::shared_ptr<const TensorLayout> layout_;
    std::uint8_t layout_bytes_[kLayoutBytes];
};

}  // namespace tensorpool
