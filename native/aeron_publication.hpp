// SPDX-License-Identifier: Apache-2.0
// Appending messages to an Aeron log: whole, gathered from parts, or written in place.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "aeron_client.hpp"

namespace tensorpool::aeron {

class Publication final : public Resource {
public:
    // Asks again where the media driver is still closing the socket of an earlier publication to the same address.
    static std::shared_ptr<Publication> add(const std::shared_ptr<ClientCore>& client, const std::string& channel,
                                            std::int32_t stream_id, bool exclusive, const Interrupted& interrupted) {
        for (const std::uint64_t start_ns = monotonic_ns();;) {
            try {
                return add_once(client, channel, stream_id, exclusive, interrupted);
            } catch (const RefusedError& error) {
                const bool is_over = monotonic_ns() - start_ns > kAskAgainNs;
                if (error.code != kTemporarilyUnavailable || is_over || interrupted()) throw;
            }
            nap(kAskAgainEveryNs);
        }
    }
    ~Publication() override { close_now(); }

    // Each returns the new position, kNotConnected, kBackPressured or kAdminAction. A term rotation is retried at once.
    std::int64_t offer(std::span<const std::uint8_t> message) {
        const Inside inside(*this);
        check_length(message.size(), constants_.max_message_length);
        return settled([&] {
            return pub_ ? api().publication_offer(pub_, message.data(), message.size(), nullptr, nullptr)
                        : api().exclusive_publication_offer(xpub_, message.data(), message.size(), nullptr, nullptr);
        });
    }

    std::int64_t offerv(std::span<const IoVec> parts) {
        const Inside inside(*this);
        std::size_t length = 0;
        for (const IoVec& part : parts) length += part.length;
        check_length(length, constants_.max_message_length);
        return settled([&] {
            return pub_ ? api().publication_offerv(pub_, parts.data(), parts.size(), nullptr, nullptr)
                        : api().exclusive_publication_offerv(xpub_, parts.data(), parts.size(), nullptr, nullptr);
        });
    }

    // Claims a range of the log, lets `fill` write the message there, and commits it.
    template <typename Fill>
    std::int64_t claim(std::size_t length, Fill&& fill) {
        return claim_if(length, [&](std::uint8_t* at) { return fill(at), true; });
    }

    // Likewise, if `fill` returns true; otherwise the range becomes padding, and the result is 0.
    template <typename Fill>
    std::int64_t claim_if(std::size_t length, Fill&& fill) {
        const Inside inside(*this);
        check_length(length, constants_.max_payload_length);
        BufferClaim range{};
        const std::int64_t result = settled([&] {
            return pub_ ? api().publication_try_claim(pub_, length, &range)
                        : api().exclusive_publication_try_claim(xpub_, length, &range);
        });
        if (result <= 0) return result;
        if (!fill(range.data)) return api().buffer_claim_abort(&range), 0;
        api().buffer_claim_commit(&range);
        return result;
    }

    // Closes it, and takes the log away from subscribers that have not read it to its end, where Aeron can do that
    // (1.48). A log that is merely closed stays until every tethered subscriber has read it.
    void revoke() {
        is_revoked_.store(true, std::memory_order_relaxed);  // the gate orders it before tear_down
        close();
    }

    bool is_connected() {
        const Inside inside(*this);
        return pub_ ? api().publication_is_connected(pub_) : api().exclusive_publication_is_connected(xpub_);
    }
    // Whether a message would be accepted now. A log whose first reader has just come is connected, and has no room
    // yet: the media driver moves the limit a moment later.
    bool has_room() {
        const Inside inside(*this);
        return pub_ ? api().publication_is_connected(pub_) &&
                          api().publication_position_limit(pub_) > api().publication_position(pub_)
                    : api().exclusive_publication_is_connected(xpub_) &&
                          api().exclusive_publication_position_limit(xpub_) >
                              api().exclusive_publication_position(xpub_);
    }
    std::int64_t position() {
        const Inside inside(*this);
        return pub_ ? api().publication_position(pub_) : api().exclusive_publication_position(xpub_);
    }
    std::int32_t session_id() const noexcept { return constants_.session_id; }
    std::int32_t stream_id() const noexcept { return constants_.stream_id; }
    std::size_t max_message_length() const noexcept { return constants_.max_message_length; }
    std::size_t max_payload_length() const noexcept { return constants_.max_payload_length; }
    std::size_t term_buffer_length() const noexcept { return constants_.term_buffer_length; }
    const std::string& channel() const noexcept { return channel_; }

private:
    static constexpr int kTemporarilyUnavailable = -10;  // AERON_ERROR_CODE_RESOURCE_TEMPORARILY_UNAVAILABLE
    static constexpr std::uint64_t kAskAgainNs = 5'000'000'000, kAskAgainEveryNs = 2'000'000;

    static std::shared_ptr<Publication> add_once(const std::shared_ptr<ClientCore>& client, const std::string& channel,
                                                 std::int32_t stream_id, bool exclusive,
                                                 const Interrupted& interrupted) {
        auto publication = std::shared_ptr<Publication>(new Publication(client, channel, stream_id));
        const Api& api = client->api();
        Async* async = nullptr;
        const std::string& what = publication->name();
        if (exclusive) {
            if (client->command([&] {
                    return api.async_add_exclusive_publication(&async, client->raw(), channel.c_str(), stream_id);
                }) < 0)
                throw last_error(api, "cannot add " + what);
            publication->xpub_ =
                client->await<XPub>(async, api.async_add_exclusive_publication_poll, what, interrupted);
            api.exclusive_publication_constants(publication->xpub_, &publication->constants_);
        } else {
            if (client->command(
                    [&] { return api.async_add_publication(&async, client->raw(), channel.c_str(), stream_id); }) < 0)
                throw last_error(api, "cannot add " + what);
            publication->pub_ = client->await<Pub>(async, api.async_add_publication_poll, what, interrupted);
            api.publication_constants(publication->pub_, &publication->constants_);
        }
        client->adopt(publication);
        return publication;
    }
    Publication(const std::shared_ptr<ClientCore>& client, const std::string& channel, std::int32_t stream_id)
        : Resource(client, "publication " + channel + " stream " + std::to_string(stream_id)), channel_(channel) {}

    template <typename Offer>
    std::int64_t settled(Offer&& offer) {
        std::int64_t result = offer();
        for (int again = 0; result == kAdminAction && again < 8; ++again) result = offer();
        if (result > 0 || result >= kAdminAction) return result;
        if (result == kPublicationClosed)
            throw AeronError(name() + " was closed by Aeron: the media driver is gone or timed this client out", 0);
        if (result == kMaxPositionExceeded)
            throw AeronError(name() + " reached the end of its log; close it and add it again", 0);
        throw last_error(api(), name());
    }

    void check_length(std::size_t length, std::size_t limit) const {
        if (length > limit)
            throw std::invalid_argument(
                name() + ": a message of " + std::to_string(length) + " bytes exceeds the limit of " +
                std::to_string(limit) +
                (limit == constants_.max_payload_length ? " (one fragment)" : " (term-length / 8)"));
    }

    void tear_down() noexcept override {
        if (pub_) client_->command([&] { return api().publication_close(pub_, nullptr, nullptr); });
        if (!xpub_) return;
        using Revoke = int (*)(XPub*, Notification, void*);
        auto end = reinterpret_cast<Revoke>(api().find("aeron_exclusive_publication_revoke"));
        if (end == nullptr || !is_revoked_.load(std::memory_order_relaxed)) end = api().exclusive_publication_close;
        client_->command([&] { return end(xpub_, nullptr, nullptr); });
    }

    Pub* pub_ = nullptr;
    XPub* xpub_ = nullptr;
    PublicationConstants constants_{};
    std::atomic<bool> is_revoked_ = false;
    const std::string channel_;
};

}  // namespace tensorpool::aeron
