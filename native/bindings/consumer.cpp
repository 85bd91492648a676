// SPDX-License-Identifier: Apache-2.0
// FrameSource, ReceptionBase, and ConsumerBase: poll and iteration of tensorpool.client.consumer.Consumer; wait_any.
#include <chrono>
#include <mutex>

#include "bindings/py_descriptor_feed.hpp"
#include "bindings/py_frame.hpp"
#include "bindings/py_subscription.hpp"
#include "wait_any.hpp"

namespace tensorpool::bindings {

namespace {

// Held by the thread that reads or waits, and by the thread that changes what is read.
class ReceptionLock {
public:
    bool acquire(bool is_blocking) {
        if (mutex_.try_lock()) return true;
        if (!is_blocking) return false;
        const nb::gil_scoped_release release;
        return mutex_.lock(), true;
    }
    // For a thread that has locked others: two threads that wait for the same consumers must not block each other.
    void acquire_soon() {
        if (mutex_.try_lock()) return;
        const nb::gil_scoped_release release;
        if (!mutex_.try_lock_for(kLongest))
            throw LocalProtocolError("one of the consumers is given twice, or polled by another thread");
    }
    void release() { mutex_.unlock(); }

private:
    static constexpr std::chrono::milliseconds kLongest{750};  // a thread that waits holds it for 250 ms at a time
    std::timed_mutex mutex_;
};

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
    const std::shared_ptr<ReceptionLock> lock = std::make_shared<ReceptionLock>();
    Doorbell changed;  // rings when the source changes

    void set_source(nb::object object) {
        source = object.is_none() ? nullptr : &nb::cast<PyFrameSource&>(object);
        source_object = std::move(object);
        changed.ring();
    }
};

struct PyConsumer {
    nb::object reception_object;
    PyReception& reception;
    bool is_simple;  // nothing has to run before each poll
    OwningProcess process;

    // Whether a wait can begin without `_before_wait`.
    bool is_undisturbed() const noexcept {
        return is_simple && process.is_current() && reception.source != nullptr &&
               (reception.source->feed.feed.attention() & ~std::uint32_t{DescriptorFeed::kImageLost}) == 0;
    }

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

    nb::list take_arrived(std::size_t limit) const {
        nb::list frames;
        while (frames.size() < limit) {
            nb::object frame = next();
            if (!frame.is_valid()) break;
            frames.append(std::move(frame));
        }
        return frames;
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

// The consumers of a wait_any(), each with what it is waited for. The GIL is held where one is added and at the end.
class WaitedConsumers {
public:
    explicit WaitedConsumers(std::size_t count) { locks_.reserve(count), kept_.reserve(count), words_.reserve(count); }
    ~WaitedConsumers() {
        feeds_.clear();
        for (ReceptionLock* lock : locks_) lock->release();
    }
    WaitedConsumers(const WaitedConsumers&) = delete;
    WaitedConsumers& operator=(const WaitedConsumers&) = delete;

    // False: it is closed.
    bool add(nb::handle object) {
        if (!nb::isinstance<PyConsumer>(object) || !nb::inst_ready(object))
            throw LocalProtocolError("expected consumers, as client.consumer() makes them");
        const PyConsumer& consumer = *nb::inst_ptr<PyConsumer>(object);
        const std::uint32_t seen = consumer.reception.changed.rings();
        if (!consumer.is_undisturbed()) {
            const auto longest_ns = nb::cast<std::uint64_t>(object.attr("_before_wait")());
            if (longest_ns == 0) return false;
            longest_ns_ = std::min(longest_ns_, longest_ns);
        }
        consumer.reception.lock->acquire_soon();
        const PyFrameSource* const source = consumer.reception.source;
        const bool is_readable =
            source != nullptr && (source->feed.feed.attention() & DescriptorFeed::kSeqWentBack) == 0;
        if (!is_readable) {  // its conductor has to act, and needs the lock for that
            consumer.reception.lock->release();
            words_.push_back(consumer.reception.changed.since(seen));
            return true;
        }
        locks_.push_back(consumer.reception.lock.get());
        kept_.emplace_back(nb::borrow(object), consumer.reception.source_object);
        feeds_.emplace_back(source->feed.feed, source->subscription);
        return true;
    }
    void add(SleepWord word) { words_.push_back(word); }

    void wait(std::uint64_t timeout_ns) {
        const nb::gil_scoped_release release;
        wait_any(feeds_, words_, std::min(timeout_ns, longest_ns_));
    }

    void append_ready(nb::list& to) const {
        std::size_t index = 0;
        for (const WatchedFeed& feed : feeds_)
            if (const nb::object& consumer = kept_[index++].first; feed.has_frames()) to.append(consumer);
    }

private:
    std::uint64_t longest_ns_ = ~std::uint64_t{0};
    std::vector<ReceptionLock*> locks_;
    std::vector<std::pair<nb::object, nb::object>> kept_;  // each consumer that is read, and its source
    std::vector<SleepWord> words_;
    std::deque<WatchedFeed> feeds_;
};

nb::list wait_for_any(nb::list consumers, std::uint64_t timeout_ns, const Doorbell* bell, std::uint32_t rings) {
    const std::size_t count = consumers.size();
    WaitedConsumers waited(count);
    nb::list ready;
    for (nb::handle consumer : consumers)
        if (!waited.add(consumer)) ready.append(consumer);
    if (bell != nullptr) waited.add(bell->since(rings));
    waited.wait(ready.size() == 0 ? timeout_ns : 0);
    waited.append_ready(ready);
    return ready;
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

    nb::class_<ReceptionLock>(m, "ReceptionLock", "Held by the thread that reads a stream, or changes what is read.")
        .def("acquire", &ReceptionLock::acquire, "blocking"_a = true)
        .def("release", &ReceptionLock::release)
        .def("__enter__", [](ReceptionLock& self) { self.acquire(true); })
        .def(
            "__exit__", [](ReceptionLock& self, nb::args) { self.release(); },
            nb::sig("def __exit__(self, *error: object) -> None"));

    nb::class_<PyReception>(m, "ReceptionBase", "Where a consumer's frames come from now.")
        .def(nb::init<>())
        .def_prop_ro("lock", [](const PyReception& self) { return self.lock; })
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
            "`is_simple`: nothing has to run before each poll.")
        .def("_take_arrived", &PyConsumer::take_arrived, "limit"_a,
             nb::sig("def _take_arrived(self, limit: int) -> list[typing.Any]"),
             "Up to `limit` frames that have arrived; none where something has to run before each poll.");

    nb::class_<Doorbell>(m, "Doorbell", "Ends a wait_any from another thread.")
        .def(nb::init<>())
        .def("ring", &Doorbell::ring)
        .def_prop_ro("rings", &Doorbell::rings, "How often it has rung.");

    m.def("wait_any", &wait_for_any, "consumers"_a, "timeout_ns"_a, "bell"_a = nb::none(), "rings"_a = 0,
          nb::sig("def wait_any(consumers: list[typing.Any], timeout_ns: int, bell: Doorbell | None = None, "
                  "rings: int = 0) -> list[typing.Any]"),
          "Those that have frames or are closed. Sleeps without the GIL until there is one, one of them needs its "
          "conductor, the bell has rung more than `rings` times, or the time is over: then it may be none.");
}

}  // namespace tensorpool::bindings
