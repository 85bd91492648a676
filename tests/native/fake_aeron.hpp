// SPDX-License-Identifier: Apache-2.0
// A log that lives in this process, behind the table of functions that our code calls Aeron by: what one publication
// commits, every subscription of the same stream id reads. Aeron's own library is not built for sanitizers.
#pragma once

#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "aeron_publication.hpp"
#include "aeron_subscription.hpp"

namespace tensorpool::aeron {

struct Header {};
struct Sub {
    std::int32_t stream_id;
    std::deque<std::vector<std::uint8_t>> messages;
};
struct XPub {
    std::int32_t stream_id;
    std::vector<std::uint8_t> claimed;
};
struct Async {
    std::int32_t stream_id;
};

}  // namespace tensorpool::aeron

namespace tensorpool::test {

using namespace tensorpool::aeron;

class FakeAeron {
public:
    FakeAeron() {
        current() = this;
        api_.errcode = [] { return 77; };
        api_.errmsg = [] { return "refused"; };
        api_.context_init = [](Context**) { return 0; };
        api_.context_close = [](Context*) { return 0; };
        api_.context_set_dir = [](Context*, const char*) { return 0; };
        api_.context_set_client_name = [](Context*, const char*) { return 0; };
        api_.context_set_driver_timeout_ms = [](Context*, std::uint64_t) { return 0; };
        api_.context_set_keepalive_interval_ns = [](Context*, std::uint64_t) { return 0; };
        api_.context_set_resource_linger_duration_ns = [](Context*, std::uint64_t) { return 0; };
        api_.context_set_use_conductor_agent_invoker = [](Context*, bool) { return 0; };
        api_.main_do_work = [](Client*) { return 0; };
        api_.context_set_pre_touch_mapped_memory = [](Context*, bool) { return 0; };
        api_.context_set_error_handler = [](Context*, ErrorHandler, void*) { return 0; };
        api_.init = [](Client**, Context*) { return 0; };
        api_.start = [](Client*) { return 0; };
        api_.close = [](Client*) { return 0; };
        api_.is_closed = [](Client*) { return false; };
        api_.async_add_exclusive_publication = [](Async** async, Client*, const char*, std::int32_t stream_id) {
            *async = new Async{stream_id};
            return 0;
        };
        api_.async_add_exclusive_publication_poll = [](XPub** publication, Async* async) {
            *publication = new XPub{async->stream_id, {}};
            delete async;
            return 1;
        };
        api_.exclusive_publication_constants = [](XPub*, PublicationConstants* constants) {
            constants->max_payload_length = 1408;
            constants->max_message_length = 8192;
            return 0;
        };
        api_.exclusive_publication_close = [](XPub* publication, Notification, void*) { return delete publication, 0; };
        api_.exclusive_publication_try_claim = [](XPub* publication, std::size_t length, BufferClaim* claim) {
            const std::int64_t result = current()->on_claim();
            if (result <= 0) return result;
            publication->claimed.assign(length, 0xEE);
            *claim = {reinterpret_cast<std::uint8_t*>(publication), publication->claimed.data(), length};
            return result;
        };
        api_.buffer_claim_commit = [](BufferClaim* claim) {
            return current()->commit(*reinterpret_cast<XPub*>(claim->frame_header)), 0;
        };
        api_.async_add_subscription = [](Async** async, Client*, const char* channel, std::int32_t stream_id,
                                         ImageHandler, void*, ImageHandler, void*) {
            *async = new Async{std::string(channel) == kRefused ? -1 : stream_id};
            return 0;
        };
        api_.async_add_subscription_poll = [](Sub** subscription, Async* async) {
            const std::int32_t stream_id = async->stream_id;
            delete async;
            if (stream_id < 0) return -1;
            *subscription = current()->subscribe(stream_id);
            return 1;
        };
        api_.subscription_close = [](Sub* subscription, Notification on_closed, void* closed) {
            current()->unsubscribe(subscription);
            if (on_closed) on_closed(closed);
            return 0;
        };
        api_.subscription_controlled_poll = [](Sub* subscription, FragmentHandler handler, void* to,
                                               std::size_t limit) {
            return current()->poll(*subscription, handler, to, limit);
        };
        api_.header_values = [](Header*, HeaderValues* values) { return values->flags = kUnfragmented, 0; };
        api_.header_position = [](Header*) { return std::int64_t{0}; };
        client = std::make_shared<ClientCore>(api_, ClientOptions{});
    }
    ~FakeAeron() { client->close(); }
    FakeAeron(const FakeAeron&) = delete;
    FakeAeron& operator=(const FakeAeron&) = delete;

    static constexpr const char* kRefused = "refused";  // a channel that no subscription can be added on

    std::shared_ptr<Publication> publication(std::int32_t stream_id) {
        return Publication::add(client, "fake", stream_id, true, never());
    }
    std::shared_ptr<Subscription> subscription(std::int32_t stream_id, const char* channel = "fake") {
        return Subscription::add(client, channel, stream_id, never());
    }

    std::function<std::int64_t()> on_claim = [] { return 1; };  // a position, or why there is none
    std::shared_ptr<ClientCore> client;

private:
    static FakeAeron*& current() {
        static FakeAeron* fake = nullptr;
        return fake;
    }
    static Interrupted never() {
        return [] { return false; };
    }

    void commit(XPub& publication) {
        const std::lock_guard lock(mutex_);
        for (const auto& subscription : subscriptions_)
            if (subscription->stream_id == publication.stream_id) subscription->messages.push_back(publication.claimed);
    }
    Sub* subscribe(std::int32_t stream_id) {
        const std::lock_guard lock(mutex_);
        subscriptions_.push_back(std::make_unique<Sub>(Sub{stream_id, {}}));
        return subscriptions_.back().get();
    }
    void unsubscribe(Sub* subscription) {
        const std::lock_guard lock(mutex_);
        std::erase_if(subscriptions_, [subscription](const auto& each) { return each.get() == subscription; });
    }
    int poll(Sub& subscription, FragmentHandler handler, void* to, std::size_t limit) {
        int taken = 0;
        for (Header header; taken < static_cast<int>(limit); ++taken) {
            std::vector<std::uint8_t> message;
            {
                const std::lock_guard lock(mutex_);
                if (subscription.messages.empty()) break;
                message = std::move(subscription.messages.front());
                subscription.messages.pop_front();
            }
            const Action action = handler(to, message.data(), message.size(), &header);
            if (action == kAbort) {
                const std::lock_guard lock(mutex_);
                subscription.messages.push_front(std::move(message));
                break;
            }
            if (action == kBreak) return taken + 1;
        }
        return taken;
    }

    Api api_{};
    std::mutex mutex_;
    std::vector<std::unique_ptr<Sub>> subscriptions_;
};

}  // namespace tensorpool::test
