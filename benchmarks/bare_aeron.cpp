// SPDX-License-Identifier: Apache-2.0
// The limit that the bridge is measured against: one Aeron publication and one subscription that move frames as chunks of
// the bridge's size, and nothing else. No Python, no rings, no checks: each chunk is one try_claim and one memcpy out of
// a ring of frames, and at the other end one memcpy into such a ring.
//
// A shared object with one function, for a Python process that does nothing but call it (pyaeron's library needs one):
//
//   bare_aeron("pub"|"sub", library, aeron_dir, channel, stream_id, frame_bytes, depth, chunk_bytes, first_bytes, frames,
//              stop)
//
// The publisher waits for a subscriber; both go on until *stop is not 0, the subscriber counting whole frames in *frames.
// Returns 0, or 1 with what went wrong on stderr.
#include <atomic>
#include <cstdio>
#include <cstring>
#include <vector>

#include "aeron_publication.hpp"
#include "aeron_subscription.hpp"
#include "layout.hpp"

using namespace tensorpool;

namespace {

constexpr std::size_t kHeadBytes = 57;  // of a BridgeFrameChunk without its payload
constexpr std::size_t kFragmentLimit = 256;

// Yields, then naps: what the bridge's own ends do.
class Backoff {
public:
    void rest() {
        if (++turns_ < 20) {
            sched_yield();
            return;
        }
        const timespec nap{0, 20'000};
        nanosleep(&nap, nullptr);
    }
    void reset() { turns_ = 0; }

private:
    int turns_ = 0;
};

// What the caller shares with us.
struct Shared {
    std::uint64_t* frames;
    const std::uint32_t* stop;

    bool is_over() const { return std::atomic_ref(*const_cast<std::uint32_t*>(stop)).load(std::memory_order_relaxed) != 0; }
    void count() const { std::atomic_ref(*frames).fetch_add(1, std::memory_order_relaxed); }
};

struct Frames {
    Frames(std::size_t frame, std::size_t ring_depth, std::size_t chunk, std::size_t first)
        : frame_bytes(frame), depth(ring_depth), chunk_bytes(chunk), first_bytes(first), memory(depth * frame, 1) {}
    std::uint8_t* at(std::uint64_t number) { return memory.data() + number % depth * frame_bytes; }
    std::size_t frame_bytes, depth, chunk_bytes, first_bytes;
    std::vector<std::uint8_t> memory;
};

void publish(aeron::Publication& publication, Frames frames, const Shared& shared) {
    Backoff backoff;
    for (std::uint64_t number = 0; !shared.is_over(); ++number) {
        const std::uint8_t* const frame = frames.at(number);
        for (std::size_t offset = 0; offset < frames.frame_bytes && !shared.is_over();) {
            const std::size_t head = kHeadBytes + (offset == 0 ? kHeaderSlotBytes : 0);
            const std::size_t most = offset == 0 ? frames.first_bytes : frames.chunk_bytes;
            const std::size_t length = std::min(most, frames.frame_bytes - offset);
            const std::int64_t result = publication.claim(head + length, [&](std::uint8_t* to) {
                store<std::uint64_t>(to, number);
                store<std::uint64_t>(to + 8, offset);
                store<std::uint64_t>(to + 16, length);
                std::memcpy(to + head, frame + offset, length);
            });
            if (result > 0) {
                offset += length;
                backoff.reset();
            } else {
                backoff.rest();
            }
        }
    }
}

class Reader final : public aeron::Sink {
public:
    Reader(Frames frames, const Shared& shared) : frames_(std::move(frames)), shared_(shared) {}
    bool on_message(std::span<const std::uint8_t> message, const aeron::MessageInfo&) override {
        const auto number = load<std::uint64_t>(message.data());
        const auto offset = load<std::uint64_t>(message.data() + 8);
        const auto length = load<std::uint64_t>(message.data() + 16);
        std::memcpy(frames_.at(number) + offset, message.data() + message.size() - length, length);
        if (offset + length == frames_.frame_bytes) shared_.count();
        return true;
    }

private:
    Frames frames_;
    const Shared& shared_;
};

void subscribe(aeron::Subscription& subscription, Frames frames, const Shared& shared) {
    Reader reader(std::move(frames), shared);
    Backoff backoff;
    while (!shared.is_over()) {
        if (subscription.poll(reader, kFragmentLimit) > 0)
            backoff.reset();
        else
            backoff.rest();
    }
}

}  // namespace

extern "C" int bare_aeron(const char* role, const char* library, const char* dir, const char* channel,
                          std::int32_t stream_id, std::uint64_t frame_bytes, std::uint64_t depth,
                          std::uint64_t chunk_bytes, std::uint64_t first_bytes, std::uint64_t* counted, const std::uint32_t* stop) {
    try {
        const aeron::Api api = aeron::load({library});
        aeron::ClientOptions options;
        options.dir = dir;
        options.client_name = "bare_aeron";
        const auto client = std::make_shared<aeron::ClientCore>(api, options);
        Frames frames(frame_bytes, depth, chunk_bytes, first_bytes);
        const Shared shared{counted, stop};
        const auto never = [] { return false; };
        if (std::strcmp(role, "pub") == 0)
            publish(*aeron::Publication::add(client, channel, stream_id, true, never), std::move(frames), shared);
        else
            subscribe(*aeron::Subscription::add(client, channel, stream_id, never), std::move(frames), shared);
        client->close();
        return 0;
    } catch (const std::exception& error) {
        return std::fprintf(stderr, "bare_aeron: %s\n", error.what()), 1;
    }
}
