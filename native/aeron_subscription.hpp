// SPDX-License-Identifier: Apache-2.0
// Reading messages from an Aeron log: fragments assembled per session, delivered to a sink on the polling thread.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "aeron_client.hpp"
#include "layout.hpp"
#include "local_protocol_error.hpp"

namespace tensorpool::aeron {

// What a subscription saw of a message besides its bytes.
struct MessageInfo {
    std::int32_t session_id;
    std::int32_t stream_id;
    std::int64_t reserved_value;
    std::int64_t position;
};

// Takes whole messages during a poll. False ends the poll after this message; the rest stays in the log.
class Sink {
public:
    virtual ~Sink() = default;
    virtual bool on_message(std::span<const std::uint8_t> message, const MessageInfo& info) = 0;
    // The first fragment of a message of several: false passes over the message, and no memory is taken for it.
    virtual bool wants(std::span<const std::uint8_t>, const MessageInfo&) { return true; }
    // A message of several fragments that is longer is given up, and reported, at the fragment that exceeds this.
    virtual std::size_t max_bytes() const { return std::numeric_limits<std::size_t>::max(); }
    virtual void on_too_long(const MessageInfo&) {}
    virtual void on_image(const ImageEvent&) {}
};

// A frame of the log, as Aeron lays it out: a data header of 32 bytes, then the fragment.
struct LoggedFrame {
    static constexpr std::size_t kHeaderBytes = 32;
    static constexpr std::size_t kAlignment = 32;

    std::uint8_t flags;
    bool is_padding;
    std::span<const std::uint8_t> fragment;
    std::size_t logged_bytes;  // after which the next one begins

    // `at` is the beginning of a frame that was committed; its length came over the network.
    explicit LoggedFrame(const std::uint8_t* at) noexcept {
        const std::size_t bytes = std::max<std::size_t>(tensorpool::load<std::uint32_t>(at), kHeaderBytes);
        flags = at[5];
        is_padding = tensorpool::load<std::uint16_t>(at + 6) == 0;
        fragment = {at + kHeaderBytes, bytes - kHeaderBytes};
        logged_bytes = (bytes + kAlignment - 1) & ~(kAlignment - 1);
    }
};

// Takes fragments during a poll of blocks. Throws nothing that is not std::exception.
class FragmentSink {
public:
    virtual ~FragmentSink() = default;
    // `is_first`, `is_last`: of its message; both for a message of one fragment.
    virtual void on_fragment(std::span<const std::uint8_t> fragment, std::int32_t session_id, bool is_first,
                             bool is_last) = 0;
    virtual void on_image(const ImageEvent&) = 0;
};

class Subscription final : public Resource {
public:
    static std::shared_ptr<Subscription> add(const std::shared_ptr<ClientCore>& client, const std::string& channel,
                                             std::int32_t stream_id, const Interrupted& interrupted) {
        auto subscription = std::shared_ptr<Subscription>(new Subscription(client, channel, stream_id));
        const Api& api = client->api();
        ImageEvents* const images = subscription->images_.get();
        Async* async = nullptr;
        try {
            const int result = client->command([&] {
                return api.async_add_subscription(&async, client->raw(), channel.c_str(), stream_id,
                                                  &ImageEvents::on_available, images, &ImageEvents::on_unavailable,
                                                  images);
            });
            if (result < 0) throw RefusedError(last_error(api, "cannot add " + subscription->name()));
            subscription->sub_ =
                client->await<Sub>(async, api.async_add_subscription_poll, subscription->name(), interrupted);
        } catch (const RefusedError&) {
            client->release_images(images);
            throw;
        }
        client->adopt(subscription);
        return subscription;
    }
    ~Subscription() override { close_now(); }

    // Reports to the sink which images came and went, then hands it at most `limit` fragments as whole messages;
    // returns how many fragments were consumed. One thread at a time, and not from inside the sink.
    int poll(Sink& sink, std::size_t limit) {
        const Inside inside(*this);
        const Polling polling(*this);
        require_fresh();
        for (ImageEvent event; images_->take(event);) {
            if (!event.available) forget_session(event.session_id);
            sink.on_image(event);
        }
        sink_ = &sink;
        stop_ = false;
        failure_ = nullptr;
        const int fragments = api().subscription_controlled_poll(sub_, &Subscription::on_fragment, this, limit);
        sink_ = nullptr;
        if (failure_) std::rethrow_exception(std::exchange(failure_, nullptr));
        if (fragments < 0) throw last_error(api(), name());
        return fragments;
    }

    // Likewise with fragments as they lie in the log, a block of `block_bytes` of each image: where datagrams are small,
    // most of a poll's time goes into its call for each of them.
    int poll_blocks(FragmentSink& sink, std::size_t block_bytes) {
        const Inside inside(*this);
        const Polling polling(*this);
        require_fresh();
        for (ImageEvent event; images_->take(event);) sink.on_image(event);
        struct Blocks {
            FragmentSink& sink;
            int fragments = 0;
            std::exception_ptr failure = nullptr;
        } blocks{sink};
        const auto take = [](void* to, const std::uint8_t* at, std::size_t bytes, std::int32_t session_id,
                             std::int32_t) {
            auto& taken = *static_cast<Blocks*>(to);
            if (taken.failure) return;
            try {
                while (bytes >= LoggedFrame::kHeaderBytes) {
                    const LoggedFrame frame(at);
                    if (frame.logged_bytes > bytes) return;
                    at += frame.logged_bytes;
                    bytes -= frame.logged_bytes;
                    if (frame.is_padding) continue;
                    ++taken.fragments;
                    taken.sink.on_fragment(frame.fragment, session_id, (frame.flags & kBegin) != 0,
                                           (frame.flags & kEnd) != 0);
                }
            } catch (...) {
                taken.failure = std::current_exception();
            }
        };
        if (api().subscription_block_poll(sub_, take, &blocks, block_bytes) < 0) throw last_error(api(), name());
        if (blocks.failure) std::rethrow_exception(blocks.failure);
        return blocks.fragments;
    }

    // Hands messages of one fragment to `take` until it refuses one, which stays in the log, as do those after it; so does
    // a longer message. Whether there was such a one. `take` does not throw.
    template <typename Take>
    bool take_front(Take&& take) {
        const Inside inside(*this);
        const Polling polling(*this);
        require_fresh();
        struct Front {
            Subscription& subscription;
            Take& take;
            bool is_refused = false;
        } front{*this, take};
        const auto look = [](void* found, const std::uint8_t* data, std::size_t length, Header* header) -> Action {
            auto& in_front = *static_cast<Front*>(found);
            HeaderValues values{};
            in_front.subscription.api().header_values(header, &values);
            in_front.is_refused =
                in_front.is_refused || (values.flags & kUnfragmented) != kUnfragmented ||
                !in_front.take(std::span(data, length), in_front.subscription.info_of(values, header));
            return in_front.is_refused ? kAbort : kContinue;
        };
        if (api().subscription_controlled_poll(sub_, look, &front, kFrontLimit) < 0) throw last_error(api(), name());
        return front.is_refused;
    }

    // Whether a poll would find something now; takes nothing.
    bool has_fragment() {
        return take_front([](std::span<const std::uint8_t>, const MessageInfo&) noexcept { return false; });
    }

    // Likewise, or an image has come or gone.
    bool has_news() { return images_->pending.load(std::memory_order_acquire) || has_fragment(); }

    bool is_connected() {
        const Inside inside(*this);
        return api().subscription_is_connected(sub_);
    }
    int image_count() {
        const Inside inside(*this);
        return api().subscription_image_count(sub_);
    }
    std::int32_t stream_id() const noexcept { return stream_id_; }
    const std::string& channel() const noexcept { return channel_; }
    std::size_t partial_sessions() const noexcept { return partials_.size(); }

private:
    static constexpr std::size_t kFrontLimit = 64;

    struct Polling {
        explicit Polling(Subscription& subscription) : subscription(subscription) {
            if (subscription.polled_.exchange(true, std::memory_order_acquire))
                throw LocalProtocolError(subscription.name() +
                                         " is already being polled; one thread polls a subscription");
            ++handler_depth();
        }
        ~Polling() {
            --handler_depth();
            subscription.polled_.store(false, std::memory_order_release);  // pairs with the exchange above
        }
        Polling(const Polling&) = delete;
        Polling& operator=(const Polling&) = delete;
        Subscription& subscription;
    };

    Subscription(const std::shared_ptr<ClientCore>& client, const std::string& channel, std::int32_t stream_id)
        : Resource(client, "subscription " + channel + " stream " + std::to_string(stream_id)),
          images_(client->retain_images()),
          channel_(channel),
          stream_id_(stream_id) {}

    void require_fresh() {
        if (!client_->may_poll())
            throw AeronError(name() + ": this process stood still and missed events of the media driver", 0);
    }

    // After a stop nothing more is consumed: ABORT leaves the fragment in the log, also on the other images.
    static Action on_fragment(void* self, const std::uint8_t* data, std::size_t length, Header* header) {
        auto* const subscription = static_cast<Subscription*>(self);
        if (subscription->stop_) return kAbort;
        HeaderValues values{};
        subscription->api().header_values(header, &values);
        if ((values.flags & kUnfragmented) == kUnfragmented) return on_message(self, data, length, header);
        try {
            if (!subscription->is_wanted(values, {data, length}, header)) return kContinue;
            Partial& partial = subscription->partial_for(values.session_id);
            partial.bytes = (values.flags & kBegin) != 0 ? length : partial.bytes + length;
            if (partial.bytes > subscription->sink_->max_bytes()) return subscription->give_up(values, header);
            return subscription->api().image_controlled_fragment_assembler_handler(partial.assembler, data, length,
                                                                                   header);
        } catch (...) {
            return subscription->fail();
        }
    }

    // The sink judges a message by its first fragment; those that follow share its fate.
    bool is_wanted(const HeaderValues& values, std::span<const std::uint8_t> fragment, Header* header) {
        if ((values.flags & kBegin) != 0) {
            if (sink_->wants(fragment, info_of(values, header)))
                unwanted_.erase(values.session_id);
            else
                unwanted_.insert(values.session_id);
        }
        return !unwanted_.contains(values.session_id);
    }

    // The message is too long: what came of it is freed, and its other fragments are passed over.
    Action give_up(const HeaderValues& values, Header* header) {
        forget_session(values.session_id);
        unwanted_.insert(values.session_id);
        sink_->on_too_long(info_of(values, header));
        return kContinue;
    }

    MessageInfo info_of(const HeaderValues& values, Header* header) const {
        return {values.session_id, values.stream_id, values.reserved_value, api().header_position(header)};
    }

    static Action on_message(void* self, const std::uint8_t* data, std::size_t length, Header* header) {
        auto* const subscription = static_cast<Subscription*>(self);
        HeaderValues values{};
        subscription->api().header_values(header, &values);
        const MessageInfo info = subscription->info_of(values, header);
        try {
            if (subscription->sink_->on_message({data, length}, info) && !subscription->gate_.is_shut())
                return kContinue;
        } catch (...) {
            return subscription->fail();
        }
        subscription->stop_ = true;
        return kBreak;
    }

    Action fail() noexcept {
        failure_ = std::current_exception();
        stop_ = true;
        return kBreak;
    }

    // A message of which fragments came.
    struct Partial {
        Assembler* assembler = nullptr;
        std::size_t bytes = 0;
    };

    // One assembler per session that sent fragments, deleted with its image: memory is bounded by the live images.
    Partial& partial_for(std::int32_t session_id) {
        const auto found = partials_.find(session_id);
        if (found != partials_.end()) return found->second;
        Assembler* assembler = nullptr;
        if (api().image_controlled_fragment_assembler_create(&assembler, &Subscription::on_message, this) < 0)
            throw last_error(api(), name());
        return partials_.emplace(session_id, Partial{assembler}).first->second;
    }
    void forget_session(std::int32_t session_id) {
        unwanted_.erase(session_id);
        const auto found = partials_.find(session_id);
        if (found == partials_.end()) return;
        api().image_controlled_fragment_assembler_delete(found->second.assembler);
        partials_.erase(found);
    }

    // Aeron may call the image callbacks until it reports that the close is complete: the queue outlives this object.
    void tear_down() noexcept override {
        for (const auto& [session_id, partial] : partials_)
            api().image_controlled_fragment_assembler_delete(partial.assembler);
        partials_.clear();
        const auto release = [](void* images) {
            auto* const events = static_cast<ImageEvents*>(images);
            events->client->release_images(events);
        };
        if (sub_) client_->command([&] { return api().subscription_close(sub_, release, images_.get()); });
        // An add that was given up may still complete: the client keeps its queue until it closes.
    }

    Sub* sub_ = nullptr;
    Sink* sink_ = nullptr;
    bool stop_ = false;
    std::exception_ptr failure_;
    std::atomic<bool> polled_{false};
    std::unordered_map<std::int32_t, Partial> partials_;
    std::unordered_set<std::int32_t> unwanted_;  // sessions in the middle of a message that is passed over
    std::shared_ptr<ImageEvents> images_;
    const std::string channel_;
    const std::int32_t stream_id_;
};

}  // namespace tensorpool::aeron
