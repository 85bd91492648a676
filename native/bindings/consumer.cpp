// SPDX-License-Identifier: Apache-2.0
// FrameSource, ReceptionBase, and ConsumerBase: poll and iteration of tensorpool.client.consumer.Consumer.
#include "bindings/py_descriptor_feed.hpp"
#include "bindings/py_frame.hpp"
#include "bindings/py_subscription.hpp"

namespace tensorpool::bindings {

namespace {

// What a consumer reads from: a feed, the subscription that its descriptors come from, and what is mapped.
struct PyFrameSource {
    PyFrameSource(nb::object feed, nb::object subscription, nb::object mapped, nb::type_object type)
        : feed_object(std::move(feed)),
          subscription_object(std::move(subscription)),
          mapped(std::move(mapped)),
          type(std::move(type)),
          feed(nb::cast<PyDescriptorFeed&>(feed_object)),
          subscription(nb::cast<PySubscription&>(subscription_object).subscription) {}

    nb::object next() {
        ReceivedFrame slot;
        if (!feed.feed.next(*subscription, slot)) return nb::none();
        nb::object frame = nb::inst_alloc(type);
        new (nb::inst_ptr<PyFrame>(frame)) PyFrame{mapped, feed.reader_object, feed.reader, std::move(slot)};
        nb::inst_mark_ready(frame);
        return frame;
    }

    const nb::object feed_object;
    const nb::object subscription_object;
    const nb::object mapped;
    const nb::type_object type;
    PyDescriptorFeed& feed;
    const std::shared_ptr<aeron::Subscription> subscription;
};

// What a consumer's polling thread and its conductor share: where frames come from now.
struct PyReception {
    nb::object source_object = nb::none();
    PyFrameSource* source = nullptr;

    void set_source(nb::object object) {
        source = object.is_none() ? nullptr : &nb::cast<PyFrameSource&>(object);
        source_object = std::move(object);
    }
};

struct PyConsumer {
    nb::object reception_object;
    PyReception& reception;
    bool is_simple;  // nothing has to run before each poll
    OwningProcess process;

    // The next frame if it has arrived, or null. Does not take the reception's lock: while the GIL is held no other
    // thread changes the feed, and one that was stopped gives nothing. An error, such as a media driver that is gone,
    // also gives null: `_poll` and `_next` meet it again and report it.
    nb::object next() const noexcept {
        if (!is_simple || reception.source == nullptr || !process.is_current()) return {};
        const nb::object kept = reception.source_object;
        try {
            nb::object frame = reception.source->next();
            return frame.is_none() ? nb::object() : frame;
        } catch (const std::exception&) {
            return {};
        }
    }
};

PyObject* consumer_poll(PyObject* self, PyObject* const* arguments, Py_ssize_t count, PyObject* names) {
    if (count + count_of(names) <= 1 && nb::inst_ready(self))
        if (nb::object frame = nb::inst_ptr<PyConsumer>(self)->next()) return frame.release().ptr();
    return hand_on(self, "_poll", arguments, count, names);
}

PyObject* consumer_next(PyObject* self) {
    if (nb::inst_ready(self))
        if (nb::object frame = nb::inst_ptr<PyConsumer>(self)->next()) return frame.release().ptr();
    return hand_on(self, "_next", nullptr, 0, nullptr);
}

PyMethodDef consumer_methods[] = {
    {"poll", as_method(consumer_poll), METH_FASTCALL | METH_KEYWORDS,
     "poll($self, /, timeout=0.0)\n--\n\n"
     "The next frame, waiting up to `timeout` seconds for it; None when there is none, or after close()."},
    {nullptr, nullptr, 0, nullptr}};
PyType_Slot consumer_slots[] = {{Py_tp_methods, consumer_methods},
                                {Py_tp_iter, reinterpret_cast<void*>(PyObject_SelfIter)},
                                {Py_tp_iternext, reinterpret_cast<void*>(consumer_next)},
                                {0, nullptr}};

}  // namespace

void bind_consumer(nb::module_& m) {
    nb::class_<PyFrameSource>(m, "FrameSource", "What a consumer reads from, in one object: each frame costs one call.")
        .def(nb::init<nb::object, nb::object, nb::object, nb::type_object>(), "feed"_a, "descriptors"_a, "mapped"_a,
             "type"_a,
             nb::sig("def __init__(self, feed: DescriptorFeed, descriptors: Subscription, mapped: object, "
                     "type: builtins.type[FrameBase]) -> None"),
             "`mapped` is the epoch that the feed reads, `type` the class of its frames.")
        .def("next", &PyFrameSource::next, nb::sig("def next(self) -> typing.Any"),
             "The next frame that can be delivered, or None. Never waits.")
        .def_prop_ro(
            "feed", [](const PyFrameSource& self) { return self.feed_object; },
            nb::sig("def feed(self) -> DescriptorFeed"))
        .def_prop_ro(
            "descriptors", [](const PyFrameSource& self) { return self.subscription_object; },
            nb::sig("def descriptors(self) -> Subscription"))
        .def_prop_ro(
            "mapped", [](const PyFrameSource& self) { return self.mapped; }, nb::sig("def mapped(self) -> typing.Any"));

    nb::class_<PyReception>(m, "ReceptionBase", "Where a consumer's frames come from now.")
        .def(nb::init<>())
        .def_prop_rw(
            "source", [](const PyReception& self) { return self.source_object; },
            [](PyReception& self, nb::object source) { self.set_source(std::move(source)); },
            nb::for_setter(nb::arg("source").none()), nb::for_getter(nb::sig("def source(self) -> FrameSource | None")),
            nb::for_setter(nb::sig("def source(self, source: FrameSource | None, /) -> None")),
            "What poll reads from; None: nothing is mapped.");

    nb::class_<PyConsumer>(
        m, "ConsumerBase", nb::type_slots(consumer_slots),
        "What every loop calls of a consumer; the subclass's `_poll` and `_next` wait for frames that have "
        "not arrived yet.")
        .def(
            "__init__",
            [](PyConsumer* self, nb::object reception, bool is_simple) {
                PyReception& native = nb::cast<PyReception&>(reception);
                new (self) PyConsumer{std::move(reception), native, is_simple, {}};
            },
            "reception"_a, "is_simple"_a,
            nb::sig("def __init__(self, reception: ReceptionBase, is_simple: bool) -> None"),
            "`is_simple`: nothing has to run before each poll.");
}

}  // namespace tensorpool::bindings
