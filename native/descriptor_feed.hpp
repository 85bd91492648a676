// SPDX-License-Identifier: Apache-2.0
// A consumer's stream: descriptors in, validated frames out, and every seq in between accounted for once.
//
// Bound to one mapped epoch. Only a descriptor announces a frame; the ring is watched to know when to poll for one (a
// commit wakes a sleeper before the descriptor arrives). Nothing here calls Python, so a poll and a wait need no GIL.
// Wire §10.2.1, §11, §15.3, §15.4, §15.18, §15.21; decisions B27-B30, B33, B34.
#pragma once

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <ctime>
#include <deque>
#include <memory>
#include <optional>

#include "aeron_subscription.hpp"
#include "descriptor.hpp"
#include "relaxed_counter.hpp"
#include "ring.hpp"

namespace tensorpool {

// How many delivered frames their readers found overwritten: one count for all epochs of a consumer. From any thread.
class LateFrames {
public:
    void add() noexcept { count_.fetch_add(1, std::memory_order_relaxed); }
    std::uint64_t count() const noexcept { return count_.load(std::memory_order_relaxed); }

private:
    std::atomic<std::uint64_t> count_{0};
};

// A frame that was counted as received. All copies of the frame share it, so that it is uncounted once (K3).
struct Delivery {
    explicit Delivery(std::shared_ptr<LateFrames> late) : late(std::move(late)) {}
    bool uncount() noexcept { return !is_uncounted.exchange(true, std::memory_order_relaxed); }

    const std::shared_ptr<LateFrames> late;
    std::atomic<bool> is_uncounted{false};
};

// A frame with what its descriptor said about it.
struct ReceivedFrame : SlotFrame {
    std::uint64_t publish_timestamp_ns = FrameDescriptor::kNullU64;
    std::uint64_t dropped_before = 0;    // lost since the frame delivered before this one
    std::shared_ptr<Delivery> delivery;  // none: latest() shows a frame that was counted as lost before

    // Its reader found the slot changed: the frame no longer counts as received. From any thread.
    void found_overwritten() const noexcept {
        if (delivery && delivery->uncount()) delivery->late->add();
    }
    // Takes note of what a look at the slot found, and returns it.
    bool noted(bool is_intact) const noexcept {
        if (!is_intact) found_overwritten();
        return is_intact;
    }
};

class DescriptorFeed final : public aeron::Sink {
public:
    // Why the owner has to act before more frames are delivered.
    enum Attention : std::uint32_t {
        kNothing = 0,
        kStopped = 1,      // the owner called stop()
        kNewerEpoch = 2,   // a descriptor of a later epoch arrived
        kSeqWentBack = 4,  // B29: remap
        kImageLost = 8,    // the publisher is gone, or Aeron disconnected us as too slow: subscribe again
    };

    // While it lives, its thread is the only one that reads.
    struct Busy {
        explicit Busy(DescriptorFeed& feed) : feed(feed) {
            if (feed.busy_.exchange(true, std::memory_order_acquire))
                throw LocalProtocolError(
                    "this consumer is being polled by another thread; one thread polls a consumer");
        }
        ~Busy() { feed.busy_.store(false, std::memory_order_release); }  // pairs with the exchange above
        Busy(const Busy&) = delete;
        Busy& operator=(const Busy&) = delete;
        DescriptorFeed& feed;
    };

    // `expected` is the first seq that counts; without it the first descriptor decides. received() and drops() count at
    // delivery; `late` counts the delivered frames that were found overwritten since.
    DescriptorFeed(RingReader& reader, std::uint32_t stream_id, std::uint64_t epoch,
                   std::optional<std::uint64_t> expected, std::uint64_t max_outstanding,
                   std::shared_ptr<LateFrames> late)
        : reader_(reader),
          stream_id_(stream_id),
          epoch_(epoch),
          max_outstanding_(max_outstanding),
          late_(std::move(late)),
          expected_(expected) {
        const std::optional<std::uint64_t> newest = reader.newest();
        watched_ = newest ? *newest + 1 : 0;
        arrived_ns_ = monotonic_ns();
    }

    // --- settings, from the polling thread

    void set_min_interval_ns(std::uint64_t interval_ns) noexcept { min_interval_ns_ = interval_ns, due_ns_ = 0; }
    void set_throttled(bool is_throttled) noexcept { is_throttled_ = is_throttled; }  // B28
    // B34: descriptors now come from another stream. Until the first seq that only it announces, repeats are
    // duplicates.
    void set_switching() noexcept { is_switching_ = true, switch_seq_ = queue_.empty() ? 0 : queue_.back().seq + 1; }

    // --- from any thread

    void stop() noexcept { attention_.fetch_or(kStopped, std::memory_order_relaxed); }
    std::uint32_t attention() const noexcept { return attention_.load(std::memory_order_relaxed); }
    void forget(std::uint32_t attention) noexcept { attention_.fetch_and(~attention, std::memory_order_relaxed); }

    // --- frames

    // The next frame that can be delivered, or false. Never waits.
    bool next(aeron::Subscription& subscription, ReceivedFrame& out) {
        const Busy busy(*this);
        while (true) {
            if (queue_.empty() || ++taken_ % kPollEvery == 0 || bytes_since_fill_ >= kPollEveryBytes)
                fill(subscription);
            if (queue_.empty() || (attention() & (kSeqWentBack | kStopped)) != 0) return false;
            catch_up();
            const FrameDescriptor descriptor = queue_.front();
            const bool is_gone = queue_.back().seq >= descriptor.seq + reader_.geometry().nslots();
            queue_.pop_front();
            if (!account(descriptor)) continue;
            if (is_gone)
                count(Drop::OVERWRITTEN, 1);  // a later frame has its slot: no need to read it
            else if (deliver(descriptor, out))
                return true;
        }
    }

    // The newest frame of the ring, delivered before or not; false when there is none. Never waits.
    bool latest(aeron::Subscription& subscription, ReceivedFrame& out) {
        const Busy busy(*this);
        if ((attention() & kStopped) != 0) return false;
        const std::uint64_t unseen_from = expected_.value_or(0);
        while (fill(subscription) > 0 && (attention() & kSeqWentBack) == 0) skip_queue();
        skip_queue();
        for (int attempt = 0; attempt < kLatestAttempts; ++attempt) {
            if (!has_last_ || attempt > 0) adopt_newest();
            if (!has_last_) return false;
            const std::uint64_t seq = last_.seq;
            const Drop drop = reader_.read(seq, out);
            if (drop != Drop::NONE) continue;  // overwritten since: look for a later one
            out.publish_timestamp_ns = last_.timestamp_ns;
            if (trace_of(last_) != 0) out.trace_id = last_.trace_id;  // else what the slot says: K8, K11
            out.dropped_before = 0;
            if (is_delivered(seq)) {
                dropped_before_ = 0;
                out.delivery = delivery_;
            } else if (seq >= unseen_from) {
                if (drops_.count(Drop::SKIPPED) > 0) drops_.of(Drop::SKIPPED).take_back();
                note_delivered(out);
            } else {
                out.delivery = nullptr;
            }
            return true;
        }
        return false;
    }

    // What a thread that waits for this feed does next.
    struct Step {
        enum Kind { kFrames, kOwner, kLull, kSleep };  // it may poll; the owner is needed; look again soon; sleep

        Kind kind;
        std::uint64_t longest_ns = 0;
        std::optional<SleepWord> word = std::nullopt;  // changes with the next frame; none: sleep for the time only
    };

    // Decides it, for wait() and wait_any(). A poll for descriptors is expensive where many producers share their
    // stream, so it is left out while the ring shows that there is no next frame; now and then it is made all the same,
    // for seqs that were left out and for later epochs.
    Step step(const Busy&, aeron::Subscription& subscription, std::uint64_t now_ns) {
        const std::uint64_t quiet_ns = now_ns - arrived_ns_;
        const std::uint64_t bound_ns = bounded_sleep_ns(quiet_ns);
        const std::uint64_t patience_ns = std::clamp(2 * interval_ns_, kLongestSleepNs, kLongestIdleSleepNs);
        const bool is_settled = quiet_ns >= kGraceNs;
        const std::uint64_t seq = expected_.value_or(watched_);
        const CommitWord word(reader_.geometry().slot(reader_.geometry().index_of(seq)));
        if (queue_.empty() && (!is_settled || now_ns - polled_ns_ >= bound_ns || word.peek() >= committed(seq))) {
            polled_ns_ = now_ns;
            fill(subscription);
        }
        if (!queue_.empty()) {
            if (!is_woken_ && quiet_ns >= patience_ns) is_trusted_ = false;
            return {Step::kFrames};
        }
        if ((attention() & (kStopped | kSeqWentBack | kNewerEpoch)) != 0) return {Step::kOwner};
        if (!is_settled && interval_ns_ < kSlowNs) return {Step::kLull};
        const std::uint64_t seen = word.peek();
        if (seen < committed(seq)) {
            committed_since_ns_ = 0;
            // Its next wake-up comes: it has sent the last one kWakeEveryNs ago, or only one after a pause.
            const bool is_owed = quiet_ns >= kWakeEveryNs || (is_alone_ && interval_ns_ >= kSlowNs);
            const bool is_called = is_trusted_ && is_owed && quiet_ns < patience_ns;
            const std::uint64_t longest_ns = is_called    ? patience_ns - quiet_ns
                                             : is_settled ? std::max(bound_ns - (now_ns - polled_ns_), bound_ns / 2)
                                                          : kSlowNs - quiet_ns;
            return {Step::kSleep, longest_ns, SleepWord(word.low_half(), static_cast<std::uint32_t>(seen))};
        }
        // The descriptor is still to arrive, or lost; then later ones come, but no commit in this slot.
        if (committed_since_ns_ == 0) committed_since_ns_ = now_ns;
        if (now_ns - committed_since_ns_ < kGraceNs) return {Step::kLull};
        return {Step::kSleep, std::min(kLongestNapNs, std::max(kNapNs, (now_ns - committed_since_ns_) / 4))};
    }

    // How a sleep on a step's word ended. A producer that has woken us before is waited for, instead of looked for every
    // few milliseconds, for up to two intervals of its frames: by then a seq that it left out has been followed by another.
    void slept(const Busy&, bool is_woken) noexcept { is_woken_ = is_woken, is_trusted_ = is_trusted_ || is_woken; }

    // Sleeps until there is something for next(), the owner is needed, a signal came, or the time is over. True unless it is
    // over.
    bool wait(aeron::Subscription& subscription, std::uint64_t timeout_ns) {
        const Busy busy(*this);
        const std::uint64_t start_ns = monotonic_ns();
        for (std::uint64_t now_ns = start_ns;; now_ns = monotonic_ns()) {
            const Step next = step(busy, subscription, now_ns);
            if (next.kind == Step::kFrames || next.kind == Step::kOwner) return true;
            if (now_ns - start_ns >= timeout_ns) return false;
            if (next.kind == Step::kLull) {
                lull();
                continue;
            }
            const std::uint64_t sleep_ns = std::min(next.longest_ns, timeout_ns - (now_ns - start_ns));
            if (!next.word) {
                nap(sleep_ns);
                continue;
            }
            const bool is_woken =
                sleep_on(next.word->word(), static_cast<std::uint32_t>(next.word->expected), sleep_ns);
            slept(busy, is_woken);
            if (!is_woken && errno == EINTR) return true;  // the caller may have a handler for the signal
        }
    }

    // §15.21: drops the descriptors that arrived while nothing was mapped, even if their frames can be read by now.
    void discard(aeron::Subscription& subscription) {
        const Busy busy(*this);
        is_discarding_ = true;
        for (int turn = 0; turn < kDiscardTurns && subscription.poll(*this, kFragmentLimit) > 0; ++turn) {
        }
        is_discarding_ = false;
    }

    // The caller rejects the frame that was delivered last: it is counted under `reason` instead.
    void refuse(const ReceivedFrame& frame, Drop reason) {
        const Busy busy(*this);
        if (!frame.delivery || !frame.delivery->uncount()) return;
        received_.take_back();
        lost_.add(std::exchange(dropped_before_, 0));  // reported with the next frame instead
        count(reason, 1);
    }

    // The end of our mapping of this epoch. Returns the next seq that is not accounted for.
    std::optional<std::uint64_t> finish() {
        const Busy busy(*this);
        stop();
        queue_.clear();
        return expected_;
    }

    void carry_lost(std::uint64_t lost) noexcept { lost_.add(lost); }

    // --- counts, for any thread

    const DropCounters& drops() const noexcept { return drops_; }
    std::uint64_t received() const noexcept { return received_.get(); }
    std::uint64_t duplicates() const noexcept { return duplicates_.get(); }
    std::uint64_t ignored() const noexcept { return ignored_.get(); }
    std::uint64_t foreign() const noexcept { return foreign_.get(); }
    std::optional<std::uint64_t> last_seq_seen() const noexcept {
        const std::uint64_t after = after_delivered_.get();
        return after > 0 ? std::optional(after - 1) : std::nullopt;
    }
    std::uint64_t lost() const noexcept { return lost_.get(); }
    const RingReader& reader() const noexcept { return reader_; }

    // --- aeron::Sink

    bool on_message(std::span<const std::uint8_t> message, const aeron::MessageInfo&) override {
        FrameDescriptor descriptor;
        if (!descriptor.decode(message)) return foreign_.add(), true;
        if (descriptor.stream_id != stream_id_) return true;
        if (is_discarding_ || descriptor.epoch != epoch_ || descriptor.seq > kMaxSeq || is_invented(descriptor.seq)) {
            ignored_.add();
            if (descriptor.epoch > epoch_) attention_.fetch_or(kNewerEpoch, std::memory_order_relaxed);
            return true;
        }
        queue_.push_back(descriptor);
        return queue_.size() < kMaxQueue;
    }
    void on_image(const aeron::ImageEvent& event) override {
        if (!event.available) attention_.fetch_or(kImageLost, std::memory_order_relaxed);
    }

private:
    static constexpr std::size_t kMaxQueue = 1 << 16;
    static constexpr std::size_t kFragmentLimit = 1024;
    static constexpr std::uint32_t kPollEvery = 32;
    static constexpr std::uint64_t kPollEveryBytes = 256 << 10;  // reading much takes long: later frames have come
    static constexpr std::uint64_t kNapNs = 100'000;
    static constexpr std::uint64_t kLongestNapNs = 20'000'000;
    static constexpr std::uint64_t kSlowNs =
        4 * kGraceNs;  // frames that far apart are slept for, and looked for after as long
    static constexpr std::uint64_t kScanEveryNs = 100'000'000;
    static constexpr int kLatestAttempts = 8;
    static constexpr int kDiscardTurns = 100;  // a publisher that is as fast as we are must not hold us here

    static std::uint64_t trace_of(const FrameDescriptor& descriptor) noexcept {
        return descriptor.trace_id == FrameDescriptor::kNullU64 ? 0 : descriptor.trace_id;  // A4
    }

    void count(Drop drop, std::uint64_t frames) noexcept {
        drops_.of(drop).add(frames);
        if (drop != Drop::RATE_LIMITED && drop != Drop::SKIPPED) lost_.add(frames);
    }

    int fill(aeron::Subscription& subscription) {
        bytes_since_fill_ = 0;
        const std::size_t before = queue_.size();
        const int polled = before < kMaxQueue ? subscription.poll(*this, kFragmentLimit) : 0;
        if (queue_.size() > before) {
            interval_ns_ = monotonic_ns() - arrived_ns_, arrived_ns_ += interval_ns_;
            is_alone_ = queue_.size() == before + 1;
        }
        return polled;
    }

    // §15.4: too far behind: goes on with the newest frame.
    void catch_up() {
        const std::uint64_t newest = queue_.back().seq, oldest = queue_.front().seq;
        if (max_outstanding_ == 0 || newest < oldest || newest - oldest < max_outstanding_) return;
        while (queue_.size() > 1) {
            if (account(queue_.front())) count(Drop::RESYNC, 1);
            queue_.pop_front();
        }
    }

    // §10.2.1: a frame is announced after its commit, so the slot of a seq far ahead must have been opened. Otherwise
    // one forged message would count all frames up to it as lost, and all that follow as old.
    bool is_invented(std::uint64_t seq) const noexcept {
        const std::uint64_t known = queue_.empty() ? expected_.value_or(0) : queue_.back().seq;
        return seq > known && seq - known > reader_.geometry().nslots() && !reader_.has_begun(seq);
    }

    // Whether a producer began its epoch with this seq, as a replay does: earlier ones, which the ring never had, are not
    // lost. The slot of a frame that was published holds it, or a later one.
    bool begins_epoch(std::uint64_t seq) const noexcept {
        return is_fresh_ && expected_ == 0 && !reader_.has_begun(seq - 1);
    }

    // Counts what is missing before this descriptor; false when the descriptor itself is not a new frame.
    bool account(const FrameDescriptor& descriptor) {
        if (expected_ && descriptor.seq < *expected_) {
            if (descriptor.seq + 1 == *expected_ || is_switching_)
                duplicates_.add();
            else
                attention_.fetch_or(kSeqWentBack, std::memory_order_relaxed);
            return false;
        }
        if (expected_ && descriptor.seq > *expected_ && !begins_epoch(descriptor.seq))
            count(is_throttled_ ? Drop::RATE_LIMITED
                  : is_fresh_   ? Drop::UNMAPPED
                                : Drop::GAP,
                  descriptor.seq - *expected_);
        is_fresh_ = false;
        if (descriptor.seq >= switch_seq_) is_switching_ = false;
        expected_ = descriptor.seq + 1;
        committed_since_ns_ = 0;
        last_ = descriptor;
        has_last_ = true;
        return true;
    }

    bool deliver(const FrameDescriptor& descriptor, ReceivedFrame& out) {
        const Drop drop = reader_.read(descriptor.seq, out);
        if (drop != Drop::NONE) return count(drop, 1), false;
        if (!is_in_time_order(descriptor, out)) return count(Drop::BAD_TIMESTAMP, 1), false;
        if (min_interval_ns_ != 0 && !is_due(descriptor, out)) return count(Drop::RATE_LIMITED, 1), false;
        out.publish_timestamp_ns = descriptor.timestamp_ns;
        out.trace_id = trace_of(descriptor);
        note_delivered(out);
        bytes_since_fill_ += out.values_len_bytes;
        return true;
    }

    void note_delivered(ReceivedFrame& out) {
        out.dropped_before = dropped_before_ = lost_.reset();
        renew_delivery();
        out.delivery = delivery_;
        received_.add();
        after_delivered_.set(out.seq + 1);
    }
    bool is_delivered(std::uint64_t seq) const noexcept { return after_delivered_.get() == seq + 1; }

    // Reuses memory: a loop holds one frame while it polls for the next, so the delivery before the last is free by
    // then.
    void renew_delivery() {
        std::swap(delivery_, spare_delivery_);
        if (delivery_.use_count() == 1) {
            std::atomic_thread_fence(std::memory_order_acquire);  // pairs with the release of the last other reference
            delivery_->is_uncounted.store(false, std::memory_order_relaxed);
        } else {
            delivery_ = std::make_shared<Delivery>(late_);
        }
    }

    // §15.7: of frames that have both times, neither goes back. Compared with the frame before, dropped or not: a clock
    // that was set back costs one frame.
    bool is_in_time_order(const FrameDescriptor& descriptor, const SlotFrame& frame) noexcept {
        const bool has_capture = frame.timestamp_ns != 0 && frame.timestamp_ns != FrameDescriptor::kNullU64;  // B26
        if (!has_capture || descriptor.timestamp_ns == FrameDescriptor::kNullU64) return true;
        const std::uint64_t capture_ns = std::exchange(capture_ns_, frame.timestamp_ns);
        const std::uint64_t publish_ns = std::exchange(publish_ns_, descriptor.timestamp_ns);
        return capture_ns_ >= capture_ns && publish_ns_ >= publish_ns;
    }

    // §11: by the publisher's clock where the frame has its time, so that the rate does not depend on when we poll.
    bool is_due(const FrameDescriptor& descriptor, const SlotFrame& frame) noexcept {
        const bool has_capture = frame.timestamp_ns != 0 && frame.timestamp_ns != FrameDescriptor::kNullU64;  // B26
        const std::uint64_t at_ns = descriptor.timestamp_ns != FrameDescriptor::kNullU64 ? descriptor.timestamp_ns
                                    : has_capture                                        ? frame.timestamp_ns
                                                                                         : monotonic_ns();
        const bool is_behind = due_ns_ != 0 && at_ns < due_ns_;
        if (is_behind && due_ns_ - at_ns <= min_interval_ns_) return false;
        const bool is_steady = due_ns_ != 0 && !is_behind && at_ns - due_ns_ < min_interval_ns_;
        due_ns_ = (is_steady ? due_ns_ : at_ns) + min_interval_ns_;
        return true;
    }

    void skip_queue() {
        for (; !queue_.empty(); queue_.pop_front())
            if (account(queue_.front())) count(Drop::SKIPPED, 1);
    }

    // From the last frame that we know of. All slots are looked at where none is found there, and not each time.
    std::optional<std::uint64_t> find_newest() noexcept {
        const std::uint64_t known = has_last_ ? last_.seq : watched_ - (watched_ > 0);
        const std::optional<std::uint64_t> newest = reader_.newest_from(known);
        if (newest) return newest;
        const std::uint64_t now_ns = monotonic_ns();
        if (now_ns - scanned_ns_ < kScanEveryNs) return std::nullopt;
        scanned_ns_ = now_ns;
        return reader_.newest();
    }

    // Takes the newest frame of the ring; its descriptor may come later, or be lost.
    void adopt_newest() {
        const std::optional<std::uint64_t> newest = find_newest();
        if (!newest || (expected_ && *newest < *expected_)) return;
        FrameDescriptor descriptor;
        descriptor.stream_id = stream_id_;
        descriptor.epoch = epoch_;
        descriptor.seq = *newest;
        if (account(descriptor)) count(Drop::SKIPPED, 1);
        is_switching_ = true;
    }

    RingReader& reader_;
    const std::uint32_t stream_id_;
    const std::uint64_t epoch_;
    const std::uint64_t max_outstanding_;
    const std::shared_ptr<LateFrames> late_;
    std::optional<std::uint64_t> expected_;
    std::uint64_t watched_ = 0;
    std::uint64_t arrived_ns_ = 0;          // when the last descriptor came; kGraceNs later the next one wakes us
    std::uint64_t interval_ns_ = 0;         // between the last two times that descriptors came
    bool is_alone_ = false;                 // the last time one came
    std::uint64_t polled_ns_ = 0;           // when a wait last polled for descriptors
    bool is_woken_ = false;                 // the last sleep ended by a wake-up of the producer
    bool is_trusted_ = false;               // the producer wakes its readers
    std::uint64_t committed_since_ns_ = 0;  // the next frame is in the ring, without its descriptor; 0: it is not
    std::uint64_t scanned_ns_ = 0;          // when find_newest last looked at all slots
    std::deque<FrameDescriptor> queue_;
    FrameDescriptor last_;
    bool has_last_ = false;
    bool is_fresh_ = true;
    bool is_switching_ = false;
    std::uint64_t switch_seq_ = 0;
    bool is_throttled_ = false;
    bool is_discarding_ = false;
    std::shared_ptr<Delivery> delivery_;  // of the frame delivered last
    std::shared_ptr<Delivery> spare_delivery_;
    std::uint64_t min_interval_ns_ = 0;
    std::uint64_t due_ns_ = 0;
    std::uint64_t capture_ns_ = 0, publish_ns_ = 0;  // of the last frame that had both
    std::uint64_t dropped_before_ = 0;               // dropped_before of the frame delivered last
    std::uint32_t taken_ = 0;
    std::uint64_t bytes_since_fill_ = 0;
    RelaxedCounter lost_, received_, duplicates_, ignored_, foreign_;
    RelaxedCounter after_delivered_;  // the seq after the last one that was delivered; 0: none was
    DropCounters drops_;
    std::atomic<std::uint32_t> attention_{kNothing};
    std::atomic<bool> busy_{false};
};

}  // namespace tensorpool
