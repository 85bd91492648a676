// SPDX-License-Identifier: Apache-2.0
// Client: a connection to a media driver, and the counters of that driver.
#include "aeron_client.hpp"

#include "aeron_counter.hpp"
#include "aeron_publication.hpp"
#include "bindings/py_subscription.hpp"
#include "bindings/python.hpp"

namespace tensorpool::bindings {

namespace {

// Lets Ctrl-C through while a call waits for the media driver without the GIL.
aeron::Interrupted signals() {
    return [calls = 0]() mutable {
        if (++calls % 64 != 0) return false;
        const nb::gil_scoped_acquire gil;
        if (PyErr_CheckSignals() != 0) throw nb::python_error();
        return false;
    };
}

std::shared_ptr<aeron::ClientCore> connect(const std::string& dir, const std::string& client_name,
                                           std::uint64_t driver_timeout_ms, std::uint64_t keepalive_interval_ns,
                                           std::uint64_t resource_linger_ns, std::uint64_t idle_sleep_ns,
                                           bool pre_touch) {
    const aeron::ClientOptions options{
        dir, client_name, driver_timeout_ms, keepalive_interval_ns, resource_linger_ns, idle_sleep_ns, pre_touch};
    const nb::gil_scoped_release release;
    return std::make_shared<aeron::ClientCore>(aeron::loaded_api(), options);
}

std::shared_ptr<aeron::Publication> add_publication(const std::shared_ptr<aeron::ClientCore>& client,
                                                    const std::string& channel, std::int32_t stream_id,
                                                    bool exclusive) {
    const nb::gil_scoped_release release;
    return aeron::Publication::add(client, channel, stream_id, exclusive, signals());
}

PySubscription add_subscription(const std::shared_ptr<aeron::ClientCore>& client, const std::string& channel,
                                std::int32_t stream_id, nb::object on_image) {
    std::shared_ptr<aeron::Subscription> subscription;
    {
        const nb::gil_scoped_release release;
        subscription = aeron::Subscription::add(client, channel, stream_id, signals());
    }
    return {std::move(subscription), std::move(on_image)};
}

std::shared_ptr<aeron::Counter> add_counter(const std::shared_ptr<aeron::ClientCore>& client, std::int32_t type_id,
                                            nb::bytes key, const std::string& label) {
    const std::string owned(key.c_str(), key.size());
    const nb::gil_scoped_release release;
    return aeron::Counter::add(client, type_id, {reinterpret_cast<const std::uint8_t*>(owned.data()), owned.size()},
                               label, signals());
}

void bind_counters(nb::module_& m) {
    nb::class_<aeron::Counter>(m, "Counter")
        .def_prop_rw("value", &aeron::Counter::get, &aeron::Counter::set)
        .def("add", &aeron::Counter::add_and_get, "delta"_a, "Add and return the sum.")
        .def("close", &aeron::Counter::close, nb::call_guard<nb::gil_scoped_release>())
        .def_prop_ro("is_closed", &aeron::Counter::is_closed);

    nb::class_<aeron::CounterReading>(m, "CounterReading")
        .def_ro("counter_id", &aeron::CounterReading::counter_id)
        .def_ro("type_id", &aeron::CounterReading::type_id)
        .def_ro("value", &aeron::CounterReading::value)
        .def_ro("owner_id", &aeron::CounterReading::owner_id,
                "The id of the client that the counter belongs to; -1 where Aeron does not say.")
        .def_prop_ro("label",
                     [](const aeron::CounterReading& self) {
                         return nb::steal<nb::str>(PyUnicode_DecodeUTF8(
                             self.label.data(), static_cast<Py_ssize_t>(self.label.size()), "replace"));
                     })
        .def_prop_ro("key",
                     [](const aeron::CounterReading& self) { return nb::bytes(self.key.data(), self.key.size()); });
}

}  // namespace

void bind_aeron_client(nb::module_& m) {
    bind_counters(m);
    nb::class_<aeron::ClientCore>(m, "Client", nb::is_weak_referenceable(), "A connection to a media driver.")
        .def(nb::new_(&connect), "dir"_a, nb::kw_only(), "client_name"_a = "tensorpool", "driver_timeout_ms"_a = 10'000,
             "keepalive_interval_ns"_a = 500'000'000, "resource_linger_ns"_a = 3'000'000'000,
             "idle_sleep_ns"_a = 16'000'000, "pre_touch"_a = false)
        .def("add_publication", &add_publication, "channel"_a, "stream_id"_a, "exclusive"_a = false)
        .def("add_subscription", &add_subscription, "channel"_a, "stream_id"_a, "on_image"_a = nb::none(),
             nb::sig("def add_subscription(self, channel: str, stream_id: int, on_image: "
                     "collections.abc.Callable[[ImageEvent], object] | None = None) -> Subscription"),
             "`on_image` is called by poll, on the polling thread.")
        .def("add_counter", &add_counter, "type_id"_a, "key"_a, "label"_a)
        .def("counters", &aeron::read_counters, "Every counter of the media driver.")
        .def(
            "take_errors",
            [](aeron::ClientCore& self) {
                nb::list errors;
                for (const aeron::ErrorRecord& error : self.take_errors())
                    errors.append(nb::make_tuple(error.code, error.message));
                return errors;
            },
            nb::sig("def take_errors(self) -> list[tuple[int, str]]"),
            "What Aeron reported since the last call: (code, message), at most 64.")
        .def("close", &aeron::ClientCore::close, nb::call_guard<nb::gil_scoped_release>(),
             "Close all resources, then the client; waits for calls that other threads are inside of.")
        .def_prop_ro("is_closed", &aeron::ClientCore::is_closed,
                     "True after close, after a fork, and when the media driver is gone.")
        .def("ring", &aeron::ClientCore::ring, "bell"_a, "Wake those that sleep in wait_for_ring at this media driver.")
        .def("wait_for_ring", &aeron::ClientCore::wait_for_ring, "bell"_a, "timeout_ns"_a,
             nb::call_guard<nb::gil_scoped_release>(),
             "Sleep until a process rings that bell, or the time is over. A ring that comes just before is missed.")
        .def("expect_polls", &aeron::ClientCore::expect_polls,
             "Subscriptions are polled all the time from now on: after a pause of four seconds a poll raises.")
        .def_prop_ro("has_missed_events", &aeron::ClientCore::has_missed_events,
                     "True when this process was too slow for the media driver's events: connect anew.")
        .def_prop_ro("dir", &aeron::ClientCore::dir);
}

}  // namespace tensorpool::bindings
