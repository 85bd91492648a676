// SPDX-License-Identifier: Apache-2.0
// Subscription, with the messages and images that it reports, EventFilter and MessageFilter.
#include "bindings/py_subscription.hpp"

#include "event_filter.hpp"
#include "message_filter.hpp"

namespace tensorpool::bindings {

namespace {

// Calls Python handlers with what a poll brings.
class HandlerSink final : public aeron::Sink {
public:
    HandlerSink(nb::handle on_message, nb::handle on_image) : on_message_(on_message), on_image_(on_image) {}
    bool on_message(std::span<const std::uint8_t> message, const aeron::MessageInfo& info) override {
        // A copy: a handler may keep it, and Aeron reuses the memory of its log.
        on_message_(nb::bytes(reinterpret_cast<const char*>(message.data()), message.size()), info);
        return true;
    }
    void on_image(const aeron::ImageEvent& event) override {
        if (!on_image_.is_none()) on_image_(event);
    }

private:
    nb::handle on_message_;
    nb::handle on_image_;
};

void bind_events(nb::module_& m) {
    nb::class_<aeron::MessageInfo>(m, "MessageInfo", "What a subscription saw of a message besides its bytes.")
        .def_ro("session_id", &aeron::MessageInfo::session_id)
        .def_ro("stream_id", &aeron::MessageInfo::stream_id)
        .def_ro("reserved_value", &aeron::MessageInfo::reserved_value)
        .def_ro("position", &aeron::MessageInfo::position);

    nb::class_<aeron::ImageEvent>(m, "ImageEvent", "An image came (available) or went.")
        .def_ro("available", &aeron::ImageEvent::available)
        .def_ro("session_id", &aeron::ImageEvent::session_id)
        .def_ro("correlation_id", &aeron::ImageEvent::correlation_id)
        .def_ro("position", &aeron::ImageEvent::position)
        .def_ro("monotonic_ns", &aeron::ImageEvent::monotonic_ns, "When Aeron's own thread learned of it.")
        .def_ro("source", &aeron::ImageEvent::source);
}

void bind_event_filter(nb::module_& m) {
    nb::class_<EventFilter>(m, "EventFilter",
                            "The EventMessages that are for one service, by the exact bytes of their tag.")
        .def(nb::init<std::uint16_t, std::vector<std::string>>(), "schema_id"_a, "tags"_a)
        .def(
            "poll",
            [](EventFilter& self, PySubscription& subscription, nb::callable handler, std::int64_t limit) {
                HandlerSink messages(handler, subscription.on_image);
                FilteredSink sink(self, messages);
                return subscription.subscription->poll(sink, positive(limit));
            },
            "subscription"_a, "handler"_a, "limit"_a,
            nb::sig(
                "def poll(self, subscription: Subscription, handler: collections.abc.Callable[[bytes, MessageInfo], "
                "object], limit: int) -> int"),
            "As Subscription.poll, for messages to this service; all others are counted.")
        .def_prop_ro(
            "counts",
            [](const EventFilter& self) {
                nb::dict counts;
                counts["mine"] = self.counts().mine;
                counts["other_tag"] = self.counts().other_tag;
                counts["other_schema"] = self.counts().other_schema;
                counts["malformed"] = self.counts().malformed;
                counts["too_long"] = self.counts().too_long;
                return counts;
            },
            nb::sig("def counts(self) -> dict[str, int]"));
}

void bind_message_filter(nb::module_& m) {
    nb::class_<MessageFilter>(m, "MessageFilter",
                              "Which messages of several fragments are put together, by their kind and length.")
        .def(
            "__init__",
            [](MessageFilter* self, const std::vector<std::pair<std::uint16_t, std::uint16_t>>& kinds,
               std::int64_t max_bytes) {
                std::vector<MessageFilter::Kind> known;
                for (const auto& [schema_id, template_id] : kinds) known.push_back({template_id, schema_id});
                new (self) MessageFilter(std::move(known), positive(max_bytes));
            },
            "kinds"_a, "max_bytes"_a,
            nb::sig("def __init__(self, kinds: collections.abc.Sequence[tuple[int, int]], max_bytes: int) -> None"),
            "Kinds are pairs of schema and template.")
        .def(
            "poll",
            [](MessageFilter& self, PySubscription& subscription, nb::callable handler, std::int64_t limit) {
                HandlerSink messages(handler, subscription.on_image);
                BoundedSink sink(self, messages);
                return subscription.subscription->poll(sink, positive(limit));
            },
            "subscription"_a, "handler"_a, "limit"_a,
            nb::sig(
                "def poll(self, subscription: Subscription, handler: collections.abc.Callable[[bytes, MessageInfo], "
                "object], limit: int) -> int"),
            "As Subscription.poll; what is not put together is counted, and takes no memory.")
        .def_prop_ro(
            "counts",
            [](const MessageFilter& self) {
                nb::dict counts;
                counts["foreign"] = self.counts().foreign;
                counts["malformed"] = self.counts().malformed;
                counts["too_long"] = self.counts().too_long;
                return counts;
            },
            nb::sig("def counts(self) -> dict[str, int]"));
}

}  // namespace

void bind_subscription(nb::module_& m) {
    bind_events(m);
    nb::class_<PySubscription>(m, "Subscription")
        .def(
            "poll",
            [](PySubscription& self, nb::callable handler, std::int64_t limit) {
                HandlerSink sink(handler, self.on_image);
                return self.subscription->poll(sink, positive(limit));
            },
            "handler"_a, "limit"_a = 10,
            nb::sig("def poll(self, handler: collections.abc.Callable[[bytes, MessageInfo], object], "
                    "limit: int = 10) -> int"),
            "Give whole messages to the handler; returns the number of fragments consumed. When the handler raises, "
            "the poll ends, what was not yet delivered stays in the log, and the exception is the caller's.")
        .def(
            "has_news", [](PySubscription& self) { return self.subscription->has_news(); },
            "Whether a poll would find a message, or an image that came or went.")
        .def(
            "close", [](PySubscription& self) { self.subscription->close(); }, nb::call_guard<nb::gil_scoped_release>())
        .def_prop_ro("is_closed", [](const PySubscription& self) { return self.subscription->is_closed(); })
        .def_prop_ro("is_connected", [](PySubscription& self) { return self.subscription->is_connected(); })
        .def_prop_ro("image_count", [](PySubscription& self) { return self.subscription->image_count(); })
        .def_prop_ro("channel", [](const PySubscription& self) { return self.subscription->channel(); })
        .def_prop_ro("stream_id", [](const PySubscription& self) { return self.subscription->stream_id(); })
        .def_prop_ro(
            "partial_sessions", [](const PySubscription& self) { return self.subscription->partial_sessions(); },
            "Sessions for which a fragment assembler is kept.");
    bind_event_filter(m);
    bind_message_filter(m);
}

}  // namespace tensorpool::bindings
