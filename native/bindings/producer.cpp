// SPDX-License-Identifier: Apache-2.0
// FramePublisher, Route, and ProducerBase: publish of tensorpool.client.producer.Producer.
#include <limits>

#include "bindings/py_frame_publisher.hpp"
#include "trace_ids.hpp"

namespace tensorpool::bindings {

namespace {

// What a producer and its conductor share: where frames go. With the GIL held, each sees what the other did last.
struct PyRoute {
    nb::object publisher_object = nb::none();  // of the epoch that the producer has adopted; none: it has to look
    PyFramePublisher* publisher = nullptr;
    std::uint32_t meta_version = 0;
    bool is_plain = true;
    std::shared_ptr<TraceIds> trace_ids;  // of frames that name none; null: they have none
    nb::object array_type = nb::module_::import_("numpy").attr("ndarray");

    void set_publisher(nb::object object) {
        publisher = object.is_none() ? nullptr : &nb::cast<PyFramePublisher&>(object);
        publisher_object = std::move(object);
    }

    // Publishes an array like the one before, for consumers that all read the common descriptor stream. -1: not done.
    std::int64_t publish_same(PyObject* data, std::optional<std::uint64_t> timestamp_ns,
                              std::optional<std::uint32_t> version, std::optional<std::uint64_t> trace_id) const {
        if (publisher == nullptr || !is_plain || Py_TYPE(data) != reinterpret_cast<PyTypeObject*>(array_type.ptr()))
            return -1;
        const nb::object kept = publisher_object;  // a thread that gets the GIL while we copy may set another
        PyFramePublisher& own = *publisher;
        const Buffer buffer(data, PyBUF_FULL_RO, std::nothrow);  // numpy has dtypes that no buffer describes
        if (!buffer.is_there()) return -1;
        std::shared_ptr<const TensorLayout> layout = own.last.find(buffer.array());
        if (!layout) return -1;
        const std::uint64_t now_ns = monotonic_ns();
        if (now_ns >= own.publisher.until_ns()) return -1;
        const std::uint64_t seq = own.writer.own().next_seq();
        const bool is_published = own.publish(seq, std::move(layout), buffer.bytes(), timestamp_ns.value_or(now_ns),
                                              version.value_or(meta_version), trace_id ? *trace_id : new_trace_id());
        return is_published ? static_cast<std::int64_t>(seq) : -1;
    }

    // Publishes arrays like the one before from number `first` on, up to one that differs; returns how many. `arrays` is
    // a list of them, or one array with a frame for each index of its first axis.
    std::size_t publish_many_same(nb::handle arrays, std::size_t first) const {
        if (publisher == nullptr || !is_plain) return 0;
        const nb::object kept = publisher_object;
        PyFramePublisher& own = *publisher;
        own.writer.own();
        Burst burst(own, *this);
        if (PyList_CheckExact(arrays.ptr())) {
            const auto count = static_cast<std::size_t>(PyList_Size(arrays.ptr()));
            std::size_t index = first;
            for (; index < count; ++index) {
                const nb::object array = nb::borrow(PyList_GetItem(arrays.ptr(), static_cast<Py_ssize_t>(index)));
                if (Py_TYPE(array.ptr()) != reinterpret_cast<PyTypeObject*>(array_type.ptr())) break;
                const Buffer buffer(array, PyBUF_FULL_RO, std::nothrow);
                if (!buffer.is_there() || !burst.publish(buffer.array(), buffer.bytes())) break;
            }
            return index - first;
        }
        const Buffer buffer(arrays, PyBUF_FULL_RO, std::nothrow);
        if (!buffer.is_there() || buffer.array().shape.empty()) return 0;
        const ArrayBuffer all = buffer.array(), row = all.row();
        const auto count = static_cast<std::size_t>(all.shape[0]);
        std::size_t index = first;
        for (; index < count; ++index) {
            const std::uint8_t* const at = buffer.bytes().data() + static_cast<std::ptrdiff_t>(index) * all.strides[0];
            if (!burst.publish(row, {at, static_cast<std::size_t>(row.bytes)})) break;
        }
        return index - first;
    }

    std::uint64_t new_trace_id() const noexcept { return trace_ids ? trace_ids->next() : 0; }

private:
    // The frames of one call: the lease and the clock are looked at now and then, not for each small frame.
    class Burst {
    public:
        Burst(PyFramePublisher& own, const PyRoute& route) : own_(own), route_(route), burst_(own.publisher) {}

        bool publish(const ArrayBuffer& array, std::span<const std::uint8_t> bytes) {
            const std::shared_ptr<const TensorLayout> layout = own_.last.find(array);
            if (!layout) return false;
            unchecked_bytes_ += bytes.size() + kFrameBytes;
            if (now_ns_ == 0 || unchecked_bytes_ >= kCheckEveryBytes) {
                now_ns_ = monotonic_ns();
                unchecked_bytes_ = 0;
                if (now_ns_ >= own_.publisher.until_ns()) return false;
            }
            if (bytes.size() < own_.writer.release_gil_from_bytes)
                return burst_.publish(*layout, bytes, now_ns_, meta_version_, route_.new_trace_id());
            const std::uint64_t trace_id = route_.new_trace_id();
            const nb::gil_scoped_release release;
            return burst_.publish(*layout, bytes, now_ns_, meta_version_, trace_id);
        }

    private:
        static constexpr std::size_t kFrameBytes = 256;  // that each frame takes besides its payload
        static constexpr std::size_t kCheckEveryBytes = 8 << 10;
        PyFramePublisher& own_;
        const PyRoute& route_;
        const std::uint32_t meta_version_ = route_.meta_version;
        FramePublisher::Burst burst_;
        std::uint64_t now_ns_ = 0;
        std::size_t unchecked_bytes_ = 0;
    };
};

struct PyProducer {
    nb::object route_object;
    PyRoute& route;
};

// An optional keyword of publish(). False: it is not a number that fits; the largest is the wire's null.
template <typename T>
bool take_number(PyObject* value, std::optional<T>& out) {
    if (Py_IsNone(value)) return true;
    if (!PyLong_CheckExact(value)) return false;
    const unsigned long long number = PyLong_AsUnsignedLongLong(value);
    if (PyErr_Occurred()) return PyErr_Clear(), false;
    if (number >= std::numeric_limits<T>::max()) return false;
    out = static_cast<T>(number);
    return true;
}

// Calls that are not served here, and errors, go to `_publish`: nothing has been published by then.
PyObject* producer_publish(PyObject* self, PyObject* const* arguments, Py_ssize_t count, PyObject* names) {
    std::optional<std::uint64_t> timestamp_ns, trace_id;
    std::optional<std::uint32_t> meta_version;
    bool is_usual = count == 1 && nb::inst_ready(self);
    for (Py_ssize_t i = 0, named = count_of(names); is_usual && i < named; ++i) {
        PyObject* const name = PyTuple_GetItem(names, i);
        PyObject* const value = arguments[count + i];
        if (PyUnicode_CompareWithASCIIString(name, "timestamp_ns") == 0)
            is_usual = take_number(value, timestamp_ns);
        else if (PyUnicode_CompareWithASCIIString(name, "meta_version") == 0)
            is_usual = take_number(value, meta_version);
        else
            is_usual = PyUnicode_CompareWithASCIIString(name, "trace_id") == 0 && take_number(value, trace_id);
    }
    if (is_usual) {
        try {
            const std::int64_t seq =
                nb::inst_ptr<PyProducer>(self)->route.publish_same(arguments[0], timestamp_ns, meta_version, trace_id);
            if (seq >= 0) return PyLong_FromLongLong(seq);
        } catch (const std::exception&) {  // such as an open claim, which _publish reports
        }
    }
    return hand_on(self, "_publish", arguments, count, names);
}

constexpr const char* kPublishDoc =
    "publish($self, /, array, *, timestamp_ns=None, meta_version=None, trace_id=None, parents=(), seq=None, dtype=None, "
    "shape=None, keep_strides=False)\n--\n\n"
    "Copy an array into shared memory and announce it to all consumers; its seq, or None without a lease: dropped and counted.\n\n"
    ">>> producer.publish(result, parents=[left, right])     # frames, or their trace ids     # doctest: +SKIP\n\n"
    "`timestamp_ns` is when it was captured (CLOCK_MONOTONIC; now by default), `meta_version` the metadata that\n"
    "applies (what `set_metadata` set last). A frame with `parents` gets a `trace_id` and is linked to theirs. Strided and Fortran-ordered arrays go without an extra copy; strided\n"
    "ones arrive contiguous, or with `keep_strides` as they are, in one block with what lies between their rows.\n"
    "`dtype=Dtype.BIT` takes packed bytes and the `shape` of the bits, `dtype=Dtype.BYTES` any bytes. Raises\n"
    "FrameTooLarge for what no pool of the stream holds, LocalProtocolError for what no frame can carry, Closed after\n"
    "close().";

PyMethodDef producer_methods[] = {{"publish", as_method(producer_publish), METH_FASTCALL | METH_KEYWORDS, kPublishDoc},
                                  {nullptr, nullptr, 0, nullptr}};
PyType_Slot producer_slots[] = {{Py_tp_methods, producer_methods}, {0, nullptr}};

std::uint64_t timestamp_or_now(std::optional<std::uint64_t> timestamp_ns) {
    return timestamp_ns ? *timestamp_ns : monotonic_ns();
}

void bind_frame_publisher(nb::module_& m) {
    using Self = PyFramePublisher;
    nb::class_<Self>(m, "FramePublisher", "A producer's stream in one epoch: slot, copy, commit, descriptor, wake-up.")
        .def(nb::init<nb::object, const std::shared_ptr<aeron::Publication>&, std::uint32_t, std::uint64_t, bool>(),
             "writer"_a, "publication"_a, "stream_id"_a, "epoch"_a, "with_publish_time"_a = false,
             nb::sig("def __init__(self, writer: RingWriter, publication: Publication, stream_id: int, epoch: int, "
                     "with_publish_time: bool = False) -> None"))
        .def(
            "publish",
            [](Self& self, const std::shared_ptr<TensorLayout>& layout, nb::handle data,
               std::optional<std::uint64_t> timestamp_ns, std::uint32_t meta_version, std::uint64_t trace_id,
               std::optional<std::uint64_t> seq, bool is_usual) -> std::optional<std::uint64_t> {
                const Buffer buffer(data, PyBUF_ANY_CONTIGUOUS | PyBUF_FORMAT);
                const std::uint64_t number = seq ? *seq : self.writer.own().next_seq();
                if (!self.publish(number, layout, buffer.bytes(), timestamp_or_now(timestamp_ns), meta_version,
                                  trace_id))
                    return std::nullopt;
                if (is_usual) self.last.remember(buffer.array(), layout);
                return number;
            },
            "layout"_a, "data"_a, "timestamp_ns"_a = nb::none(), "meta_version"_a = 0, "trace_id"_a = 0,
            "seq"_a = nb::none(), "is_usual"_a = true,
            nb::sig("def publish(self, layout: TensorLayout, data: collections.abc.Buffer, timestamp_ns: int | None = "
                    "None, meta_version: int = 0, trace_id: int = 0, seq: int | None = None, is_usual: bool = True) "
                    "-> int | None"),
            "Copy, commit and announce a frame; its seq, or None when no pool holds it. `is_usual`: `layout` is what "
            "every array of the shape and dtype of `data` has.")
        .def(
            "forget_layout", [](Self& self) { self.last.forget(); },
            "From now on the layout of the last array means something else: ask for it again.")
        .def(
            "commit",
            [](Self& self, std::optional<std::uint64_t> timestamp_ns, std::uint32_t meta_version,
               std::uint64_t trace_id, std::uint64_t bytes) {
                self.writer.own();
                self.publisher.commit(timestamp_or_now(timestamp_ns), meta_version, trace_id);
                self.publisher.add_bytes(bytes);
            },
            "timestamp_ns"_a = nb::none(), "meta_version"_a = 0, "trace_id"_a = 0, "bytes"_a = 0,
            "Commit the writer's open claim and announce it.")
        .def(
            "check_time", [](const Self& self, std::uint64_t timestamp_ns) { self.publisher.check_time(timestamp_ns); },
            "timestamp_ns"_a,
            "Raise ValueError for a time before the last frame's, where descriptors carry a time too.")
        .def_prop_rw(
            "until_ns", [](const Self& self) { return self.publisher.until_ns(); },
            [](Self& self, std::uint64_t until_ns) { self.publisher.set_until_ns(until_ns); },
            "When the lease may be over (CLOCK_MONOTONIC). The caller of publish and commit checks it.")
        .def_prop_ro("bytes", [](const Self& self) { return self.publisher.bytes(); })
        .def_prop_ro(
            "is_back_pressured", [](const Self& self) { return self.publisher.is_back_pressured(); },
            "Whether a descriptor would be lost now though there are subscribers: the log is full, or not yet "
            "open.")
        .def_prop_ro(
            "unheard", [](const Self& self) { return self.publisher.unheard(); },
            "Descriptors that were sent while there was no subscriber.")
        .def_prop_ro(
            "back_pressured", [](const Self& self) { return self.publisher.back_pressured(); },
            "Descriptors that the log had no room for.")
        .def_prop_ro(
            "is_broken", [](const Self& self) { return self.publisher.is_broken(); },
            "Whether the media driver is gone.");
}

}  // namespace

void bind_producer(nb::module_& m) {
    bind_frame_publisher(m);
    nb::class_<TraceIds>(m, "TraceIds", "Makes the trace ids of one producer: unique, and in the order of time.")
        .def(nb::init<>())
        .def("set_node", &TraceIds::set_node, "node_id"_a, "is_derived"_a)
        .def("next", &TraceIds::next, "A new id, from 1 to 2^63 - 1.");
    nb::class_<PyRoute>(m, "Route", "Where a producer's frames go: set by its session, used by publish.")
        .def(nb::init<>())
        .def_prop_rw(
            "publisher", [](const PyRoute& self) { return self.publisher_object; },
            [](PyRoute& self, nb::object publisher) { self.set_publisher(std::move(publisher)); },
            nb::for_setter(nb::arg("publisher").none()),
            nb::for_getter(nb::sig("def publisher(self) -> FramePublisher | None")),
            nb::for_setter(nb::sig("def publisher(self, publisher: FramePublisher | None, /) -> None")),
            "Of the epoch that the producer has adopted; None: it has to look.")
        .def_rw("meta_version", &PyRoute::meta_version, "Of frames that name none.")
        .def("new_trace_id", &PyRoute::new_trace_id, "Of a frame that names none; 0: it has none.")
        .def_rw("is_plain", &PyRoute::is_plain, "No consumer has a descriptor stream of its own.")
        .def_rw("trace_ids", &PyRoute::trace_ids, nb::for_setter(nb::arg("trace_ids").none()),
                nb::for_getter(nb::sig("def trace_ids(self) -> TraceIds | None")),
                nb::for_setter(nb::sig("def trace_ids(self, trace_ids: TraceIds | None, /) -> None")),
                "Of frames that name none; None: they have none.");

    nb::class_<PyProducer>(m, "ProducerBase", nb::type_slots(producer_slots),
                           "What every loop calls of a producer; other calls go to the subclass's `_publish`.")
        .def(
            "__init__",
            [](PyProducer* self, nb::object route) {
                PyRoute& native = nb::cast<PyRoute&>(route);
                new (self) PyProducer{std::move(route), native};
            },
            "route"_a, nb::sig("def __init__(self, route: Route) -> None"))
        .def(
            "_publish_same",
            [](PyProducer& self, nb::handle arrays, std::size_t first) {
                return self.route.publish_many_same(arrays, first);
            },
            "arrays"_a, "first"_a, nb::sig("def _publish_same(self, arrays: object, first: int) -> int"),
            "Publish arrays like the one before, from number `first` on, up to one that differs; how many.");
}

}  // namespace tensorpool::bindings
