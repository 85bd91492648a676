// SPDX-License-Identifier: Apache-2.0
// The payload of a bridge, all mappings and both directions: frames leave and chunks arrive without calling Python.
// Bridge §4, §5, §6; decisions G3, G16.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include <sched.h>

#include "chunk_router.hpp"
#include "stream_sender.hpp"
#include "wait_any.hpp"
#include "wake.hpp"

namespace tensorpool {

class BridgePump {
public:
    // A stream that is sent.
    struct Outflow {
        StreamSender& sender;
        DescriptorFeed& feed;
        std::shared_ptr<aeron::Subscription> descriptors;
    };
    // Every stream that is received.
    struct Inflow {
        const ChunkRouter::Busy& router;
        aeron::Subscription& payload;
        aeron::Subscription& control;
    };

    // Sends and receives, and sleeps while there is nothing to do, for `for_ns`; 0: one round. Ends as soon as one of
    // `others` or the control stream has a message for the owner, because the owner may have to forward it before the
    // next frame, or the next chunks are judged by it; one round goes on all the same, or a flood of messages would stop
    // the frames. Also ends when a feed or a sender needs its owner. In a round each stream sends one frame. All of them
    // share a log: where it has no room, the open frame is finished before another one is begun. Returns how many frames
    // and fragments there were.
    int pump(std::span<Outflow> outflows, const Inflow* inflow, std::span<aeron::Subscription* const> others,
             std::uint64_t for_ns) {
        const std::uint64_t start_ns = monotonic_ns();
        int work = 0;
        while (true) {
            const std::uint64_t now_ns = monotonic_ns();
            const bool has_message =
                (inflow != nullptr && inflow->router.router.poll_digests(inflow->router, inflow->control, now_ns)) ||
                std::any_of(others.begin(), others.end(), [](auto* other) { return other->has_fragment(); });
            if (has_message && for_ns > 0) return work;
            const Round round = go_round(outflows, inflow, now_ns);
            work += round.work;
            if (round.work > 0) idle_ = 0, worked_ns_ = now_ns;
            if (round.needs_owner || now_ns - start_ns >= for_ns) return work;
            if (round.work > 0) continue;
            ++idle_;
            if (!rest(outflows, inflow != nullptr, round.is_full, now_ns - worked_ns_, start_ns + for_ns - now_ns))
                return work;
        }
    }

private:
    static constexpr std::size_t kFragmentLimit = 256;
    static constexpr std::size_t kYields = 20;
    static constexpr std::uint64_t kLongestFullNapNs = 100'000;
    static constexpr std::uint64_t kShortestNapNs = 20'000;
    static constexpr std::uint64_t kLongestNapNs = 1'000'000;

    struct Round {
        int work = 0;
        bool is_full = false;  // something waits for room
        bool needs_owner = false;
    };

    Round go_round(std::span<Outflow> outflows, const Inflow* inflow, std::uint64_t now_ns) {
        Round round;
        if (inflow != nullptr)
            round.work += inflow->router.router.poll(inflow->router, inflow->payload, kFragmentLimit, now_ns);
        const std::size_t count = outflows.size();
        const auto open =
            std::find_if(outflows.begin(), outflows.end(), [](const auto& it) { return it.sender.is_open(); });
        if (open != outflows.end()) next_ = static_cast<std::size_t>(open - outflows.begin());
        for (std::size_t i = 0; i < count; ++i) {
            next_ %= count;
            const Outflow& outflow = outflows[next_];
            const StreamSender::Turn turn = outflow.sender.turn(outflow.feed, *outflow.descriptors);
            round.is_full = round.is_full || turn == StreamSender::Turn::FULL || outflow.sender.has_digests();
            if (turn == StreamSender::Turn::FULL) break;
            round.work += turn == StreamSender::Turn::WORKED ? 1 : 0;
            round.needs_owner = round.needs_owner || turn == StreamSender::Turn::OWNER;
            ++next_;
        }
        return round;
    }

    // A pause after a round without work; false: the owner is needed. The media driver, which makes room and receives the
    // next chunks, may need this core: yields come first. Aeron cannot wake us, so naps for chunks are short.
    bool rest(std::span<Outflow> outflows, bool is_receiving, bool is_full, std::uint64_t idle_ns,
              std::uint64_t left_ns) const {
        if (is_full) {
            if (idle_ <= kYields)
                sched_yield();
            else
                nap(std::min({idle_ns / 2, kLongestFullNapNs, left_ns}));
            return true;
        }
        std::vector<SleepWord> words;
        std::uint64_t sleep_ns = std::min(kLongestIdleSleepNs, left_ns);
        bool is_soon = false;
        for (Outflow& outflow : outflows) {
            using Step = DescriptorFeed::Step;
            const Step next = WatchedFeed(outflow.feed, outflow.descriptors).step(monotonic_ns());
            if (next.kind == Step::kFrames) return true;
            if (next.kind == Step::kOwner) return false;
            is_soon = is_soon || next.kind == Step::kLull;
            if (next.kind != Step::kSleep) continue;
            sleep_ns = std::min(sleep_ns, next.longest_ns);
            if (next.word) words.push_back(*next.word);
        }
        if (is_receiving) sleep_ns = std::min(sleep_ns, std::clamp(idle_ns / 8, kShortestNapNs, kLongestNapNs));
        if (is_soon)
            lull();
        else if (is_receiving && idle_ <= kYields)
            sched_yield();
        else if (words.empty())
            nap(sleep_ns);
        else
            sleep_on_any(words, sleep_ns, idle_);
        return true;
    }

    std::size_t next_ = 0;         // the stream whose turn it is
    std::size_t idle_ = 0;         // rounds since the last one with work
    std::uint64_t worked_ns_ = 0;  // when that was
};

}  // namespace tensorpool
