// SPDX-License-Identifier: Apache-2.0
// One thread that waits for several feeds at once, on the words of all their rings.
#pragma once

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <deque>
#include <exception>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "descriptor_feed.hpp"

namespace tensorpool {

// A feed that a thread waits for. While it lives, no other thread reads the feed.
class WatchedFeed {
public:
    WatchedFeed(DescriptorFeed& feed, std::shared_ptr<aeron::Subscription> subscription)
        : busy_(feed), subscription_(std::move(subscription)) {}

    DescriptorFeed::Step step(std::uint64_t now_ns) noexcept {
        DescriptorFeed::Step next{DescriptorFeed::Step::kFrames};
        try {
            next = busy_.feed.step(busy_, *subscription_, now_ns);
        } catch (const std::exception&) {  // the media driver is gone: the next poll finds it, too, and reports it
        }
        has_frames_ = next.kind == DescriptorFeed::Step::kFrames;
        return next;
    }

    void slept(bool is_woken) noexcept { busy_.feed.slept(busy_, is_woken); }

    // Whether next() has something to do, as of the last step.
    bool has_frames() const noexcept { return has_frames_; }

private:
    const DescriptorFeed::Busy busy_;
    const std::shared_ptr<aeron::Subscription> subscription_;
    bool has_frames_ = false;
};

// Sleeps until one of the feeds has frames or needs its owner, one of the other words has changed, a signal came, or the
// time is over.
// Takes every feed one step at least, so that all that have frames say so.
inline void wait_any(std::deque<WatchedFeed>& feeds, std::span<const SleepWord> others, std::uint64_t timeout_ns) {
    using Step = DescriptorFeed::Step;
    std::vector<SleepWord> words;
    std::vector<WatchedFeed*> sleepers;  // whose words follow the others
    words.reserve(feeds.size() + others.size());
    sleepers.reserve(feeds.size());
    const std::uint64_t start_ns = monotonic_ns();
    std::uint64_t now_ns = start_ns;
    bool is_interrupted = false;
    for (std::size_t turn = 0;; ++turn, now_ns = monotonic_ns()) {
        bool is_over = now_ns - start_ns >= timeout_ns ||
                       std::any_of(others.begin(), others.end(), [](const auto& word) { return word.has_changed(); });
        bool is_soon = false;
        std::uint64_t sleep_ns = kLongestIdleSleepNs;
        words.assign(others.begin(), others.end());
        sleepers.clear();
        for (WatchedFeed& feed : feeds) {
            const Step next = feed.step(now_ns);
            is_over = is_over || next.kind == Step::kFrames || next.kind == Step::kOwner;
            is_soon = is_soon || next.kind == Step::kLull;
            if (next.kind != Step::kSleep) continue;
            sleep_ns = std::min(sleep_ns, next.longest_ns);
            if (next.word) words.push_back(*next.word), sleepers.push_back(&feed);
        }
        if (is_over || is_interrupted) return;
        sleep_ns = std::min(sleep_ns, timeout_ns - (now_ns - start_ns));
        if (is_soon) {
            lull();
        } else if (words.empty()) {
            nap(sleep_ns);
        } else {
            const std::size_t woken = sleep_on_any(words, sleep_ns, turn);
            is_interrupted = woken == words.size() && errno == EINTR;
            for (std::size_t i = 0; i < sleepers.size(); ++i) sleepers[i]->slept(woken == others.size() + i);
        }
    }
}

}  // namespace tensorpool
