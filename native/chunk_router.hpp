// SPDX-License-Identifier: Apache-2.0
// Hands each chunk that arrives on a bridge's payload stream to the assembler of its stream: a poll never calls Python.
// Bridge §4, §5, §6.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "aeron_subscription.hpp"
#include "assembler.hpp"

namespace tensorpool {

class ChunkRouter final : public aeron::Sink {
public:
    explicit ChunkRouter(AllowedSources allowed) : allowed_(std::move(allowed)) {}

    void add(std::shared_ptr<Assembler> assembler) {
        const Busy busy(*this);
        if (find(assembler->stream_id()) != nullptr)
            throw std::invalid_argument("stream " + std::to_string(assembler->stream_id()) +
                                        " has an assembler already");
        assemblers_.push_back(std::move(assembler));
    }

    void remove(std::uint32_t stream_id) {
        const Busy busy(*this);
        std::erase_if(assemblers_, [stream_id](const auto& each) { return each->stream_id() == stream_id; });
        last_ = nullptr;
    }

    // While it lives, its thread is the only one that uses the router and its assemblers.
    struct Busy {
        explicit Busy(ChunkRouter& router) : router(router) {
            if (router.busy_.exchange(true, std::memory_order_acquire))
                throw LocalProtocolError("this chunk router is being polled by another thread; one thread polls it");
            try {
                for (const auto& assembler : router.assemblers_)
                    held.push_back(std::make_unique<Assembler::Busy>(*assembler));
            } catch (...) {
                router.busy_.store(false, std::memory_order_release);
                throw;
            }
        }
        ~Busy() { router.busy_.store(false, std::memory_order_release); }  // pairs with the exchange above
        Busy(const Busy&) = delete;
        Busy& operator=(const Busy&) = delete;
        ChunkRouter& router;
        std::vector<std::unique_ptr<Assembler::Busy>> held;
    };

    // At most `limit` fragments, as if they had arrived at `now_ns`; returns how many there were.
    int poll(const Busy&, aeron::Subscription& subscription, std::size_t limit, std::uint64_t now_ns) {
        now_ns_ = now_ns;
        return subscription.poll(*this, limit);
    }

    // Takes the digests of frames that are next on the control stream; whether another message follows them.
    bool poll_digests(const Busy&, aeron::Subscription& control, std::uint64_t now_ns) {
        return control.take_front([&](std::span<const std::uint8_t> message, const aeron::MessageInfo& info) {
            return route_digest(message, info.session_id, now_ns);
        });
    }

    // One message of the session that its mapping follows, as if it had arrived at `now_ns`.
    void take(std::span<const std::uint8_t> message, std::uint64_t now_ns) {
        const Busy busy(*this);
        now_ns_ = now_ns;
        route(message, nullptr);
    }

    // The digest of a frame, likewise, or of the given session. False for any other message.
    bool take_digest(std::span<const std::uint8_t> message, std::optional<std::int32_t> session_id,
                     std::uint64_t now_ns) {
        const Busy busy(*this);
        return route_digest(message, session_id, now_ns);
    }

    // Digests of streams that have no mapping.
    std::uint64_t digests_unknown() const noexcept { return digests_unknown_.get(); }
    std::uint64_t drops(ChunkDrop drop) const noexcept { return drops_[static_cast<std::size_t>(drop)].get(); }

    bool on_message(std::span<const std::uint8_t> message, const aeron::MessageInfo& info) override {
        if (source_ == nullptr || source_->session_id != info.session_id) source_ = find_source(info.session_id);
        if (source_ == nullptr || !source_->is_allowed)
            count(ChunkDrop::ADDRESS);
        else
            route(message, source_);
        return true;
    }

    // A chunk is one datagram (§5.2): what is not is no chunk, and takes no memory.
    bool wants(std::span<const std::uint8_t>, const aeron::MessageInfo&) override {
        count(ChunkDrop::FRAGMENTED);
        return false;
    }

    void on_image(const aeron::ImageEvent& event) override {
        source_ = nullptr;
        std::erase_if(sources_, [&](const Source& each) { return each.session_id == event.session_id; });
        if (event.available) {
            std::string address = address_of(event.source);
            const bool is_allowed = allowed_.allows(address);
            const auto most_bytes = static_cast<std::uint32_t>(std::max(event.mtu_bytes, kMtuMargin) - kMtuMargin);
            sources_.push_back({event.session_id, std::move(address), is_allowed, most_bytes});
        } else {
            for (const auto& assembler : assemblers_) assembler->session().on_image_gone(event.session_id);
        }
    }

private:
    // A session that sends to us.
    struct Source {
        std::int32_t session_id;
        std::string address;
        bool is_allowed;
        std::uint32_t max_chunk_bytes;  // by its MTU (§5.2)
    };

    static constexpr std::size_t kMtuMargin = 128;

    // Null: the session that the mapping follows.
    void route(std::span<const std::uint8_t> message, const Source* source) {
        ArrivedChunk chunk;
        const ChunkDrop drop = chunk.decode(message);
        if (drop == ChunkDrop::FOREIGN || drop == ChunkDrop::MALFORMED) return count(drop);
        if (last_ == nullptr || last_->stream_id() != chunk.stream_id) last_ = find(chunk.stream_id);
        if (last_ == nullptr) return count(ChunkDrop::UNKNOWN_STREAM);
        if (source != nullptr && last_->epoch() && !last_->session().admits(source->session_id, source->address))
            return last_->drop_chunk(ChunkDrop::SESSION, chunk);
        if (drop != ChunkDrop::NONE) return last_->drop_chunk(drop, chunk);
        if (source != nullptr && chunk.length > source->max_chunk_bytes)
            return last_->drop_chunk(ChunkDrop::CHUNK_SIZE, chunk);
        last_->take(chunk, now_ns_);
    }

    bool route_digest(std::span<const std::uint8_t> message, std::optional<std::int32_t> session_id,
                      std::uint64_t now_ns) {
        DigestMessage sum;
        if (!sum.decode(message)) return false;
        Assembler* const assembler = find(sum.stream_id);
        if (assembler == nullptr)
            digests_unknown_.add();
        else if (session_id && assembler->session().origin() != session_id)
            assembler->drop_digest();
        else
            assembler->take(sum, now_ns);
        return true;
    }

    const Source* find_source(std::int32_t session_id) const noexcept {
        const auto found = std::find_if(sources_.begin(), sources_.end(),
                                        [&](const Source& each) { return each.session_id == session_id; });
        return found == sources_.end() ? nullptr : &*found;
    }

    Assembler* find(std::uint32_t stream_id) const noexcept {
        for (const auto& assembler : assemblers_)
            if (assembler->stream_id() == stream_id) return assembler.get();
        return nullptr;
    }

    void count(ChunkDrop drop) noexcept { drops_[static_cast<std::size_t>(drop)].add(); }

    const AllowedSources allowed_;
    std::vector<Source> sources_;
    const Source* source_ = nullptr;  // of the chunk before
    std::vector<std::shared_ptr<Assembler>> assemblers_;
    Assembler* last_ = nullptr;
    std::uint64_t now_ns_ = 0;
    std::array<RelaxedCounter, static_cast<std::size_t>(ChunkDrop::COUNT_)> drops_;
    RelaxedCounter digests_unknown_;
    std::atomic<bool> busy_{false};
};

}  // namespace tensorpool
