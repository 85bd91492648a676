// SPDX-License-Identifier: Apache-2.0
// tensorpool._core: Python bindings of the headers beside this file, and nothing else.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include "aeron_counter.hpp"
#include "aeron_publication.hpp"
#include "assembler.hpp"
#include "chunker.hpp"
#include "descriptor.hpp"
#include "event_filter.hpp"
#include "feed.hpp"
#include "intake.hpp"
#include "mapping.hpp"
#include "media_driver.hpp"
#include "outflow.hpp"
#include "publisher.hpp"
#include "ring.hpp"

namespace nb = nanobind;
using namespace nb::literals;
using namespace tensorpool;

namespace {

// --- buffers

class Buffer {
public:
    Buffer(nb::handle object, int flags) {
        if (PyObject_GetBuffer(object.ptr(), &view_, flags) != 0) throw nb::python_error();
    }
    // Empty where the object has no such buffer.
    Buffer(nb::handle object, int flags, std::nothrow_t) {
        if (PyObject_GetBuffer(object.ptr(), &view_, flags) != 0) PyErr_Clear();
    }
    ~Buffer() { PyBuffer_Release(&view_); }
    bool is_there() const noexcept { return view_.obj != nullptr; }
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;
    std::span<const std::uint8_t> bytes() const noexcept {
        return {static_cast<const std::uint8_t*>(view_.buf), static_cast<std::size_t>(view_.len)};
    }
    std::span<std::uint8_t> writable_bytes() const noexcept {
        return {static_cast<std::uint8_t*>(view_.buf), static_cast<std::size_t>(view_.len)};
    }
    const Py_buffer& view() const noexcept { return view_; }

private:
    Py_buffer view_{};
};

// Goes without the GIL where it takes long: whoever drops the last view of gigabytes stops only itself.
class PyMapping final : public Mapping {
public:
    using Mapping::Mapping;
    ~PyMapping() {
        if (bytes().size() < kUnmapWithoutGilFromBytes) return;
        const nb::gil_scoped_release release;
        unmap();
    }

private:
    static constexpr std::size_t kUnmapWithoutGilFromBytes = std::size_t{16} << 20;
};

int mapping_getbuffer(PyObject* self, Py_buffer* view, int flags) {
    const PyMapping* const mapping = nb::inst_ptr<PyMapping>(self);
    const std::span<std::uint8_t> bytes = mapping->bytes();
    return PyBuffer_FillInfo(view, self, bytes.data(), static_cast<Py_ssize_t>(bytes.size()), !mapping->is_writable(),
                             flags);
}

void check_word(const Mapping& mapping, std::size_t offset) {
    if (offset % 8 != 0 || mapping.bytes().size() < 8 || offset > mapping.bytes().size() - 8)
        throw nb::value_error("offset must be a multiple of 8 inside the mapping");
}

PyType_Slot mapping_slots[] = {{Py_bf_getbuffer, reinterpret_cast<void*>(mapping_getbuffer)}, {0, nullptr}};

// --- rings: regions stay mapped for as long as a ring or a view refers to them

using PoolArgument = std::tuple<std::uint16_t, std::uint32_t, nb::object>;

PyMapping& as_mapping(const nb::object& region) {
    PyMapping* mapping = nullptr;
    if (!nb::try_cast(region, mapping) || mapping == nullptr) throw nb::type_error("a region must be a Mapping");
    return *mapping;
}

struct Regions {
    Regions(nb::object header, const std::vector<PoolArgument>& pools, bool writable) : header_(std::move(header)) {
        check(header_, writable);
        for (const auto& [pool_id, stride_bytes, region] : pools) {
            check(region, writable);
            pools_.push_back(region);
            geometry_.push_back({pool_id, stride_bytes, as_mapping(region).bytes()});
        }
    }
    static void check(const nb::object& region, bool writable) {
        if (writable && !as_mapping(region).is_writable()) throw nb::value_error("a writer needs writable mappings");
    }
    RingGeometry geometry(std::uint32_t nslots) const { return {as_mapping(header_).bytes(), geometry_, nslots}; }

    // The region of the i-th pool of a geometry, which sorts them.
    nb::object region_of(const Pool& pool) const {
        for (std::size_t i = 0; i < geometry_.size(); ++i)
            if (geometry_[i].pool_id == pool.pool_id) return pools_[i];
        return nb::none();
    }

    nb::object header_;
    std::vector<nb::object> pools_;
    std::vector<Pool> geometry_;
};

// Below this the GIL is held: giving it up can cost a whole switch interval to get back.
constexpr std::size_t kReleaseGilFromBytes = std::size_t{8} << 20;

struct PyRingWriter {
    PyRingWriter(nb::object header, const std::vector<PoolArgument>& pools, std::uint32_t nslots)
        : regions(std::move(header), pools, true), writer(regions.geometry(nslots)) {}
    RingWriter& own() {
        if (generation != fork_generation())
            throw aeron::ClosedError("this ring's writer belongs to the process that was forked; attach again here");
        return writer;
    }
    Regions regions;
    RingWriter writer;
    std::size_t release_gil_from_bytes = kReleaseGilFromBytes;
    std::uint32_t generation = fork_generation();
};

// Whether a buffer's elements are those of a wire dtype, as numpy and the struct module spell them.
bool is_format_of(const char* format, Py_ssize_t itemsize, std::int16_t dtype) noexcept {
    if (format == nullptr || format[0] == '\0' || format[1] != '\0') return false;
    const char* accepted = "";
    switch (static_cast<Dtype>(dtype)) {
        case Dtype::BOOLEAN: accepted = "?"; break;
        case Dtype::FLOAT32: accepted = "f"; break;
        case Dtype::FLOAT64: accepted = "d"; break;
        case Dtype::INT8:
        case Dtype::INT16:
        case Dtype::INT32:
        case Dtype::INT64: accepted = "bhilq"; break;
        case Dtype::UINT8:
        case Dtype::BYTES:
        case Dtype::UINT16:
        case Dtype::UINT32:
        case Dtype::UINT64: accepted = "BHILQ"; break;
        default: return false;
    }
    return std::strchr(accepted, format[0]) != nullptr && itemsize == static_cast<Py_ssize_t>(element_bytes(dtype));
}

struct PyRingReader {
    PyRingReader(nb::object header, const std::vector<PoolArgument>& pools, std::uint32_t nslots)
        : regions(std::move(header), pools, false), reader(regions.geometry(nslots)), kept(nslots) {}

    // Making a numpy view takes ten times as long as reading a slot, and a slot keeps its shape: views are kept.
    struct KeptView {
        std::shared_ptr<const TensorLayout> layout;
        std::uint32_t pool = 0;
        nb::object view;
    };

    nb::object view_of(const SlotFrame& frame) const {
        reader.check_own(frame);
        const KeptView& found = kept[frame.slot];
        if (found.layout != frame.layout || found.pool != frame.pool || frame.values_len_bytes == 0) return nb::none();
        const nb::object view = found.view;  // owned: code that runs meanwhile may keep another one for the slot
        return nb::steal(PyObject_GetItem(view.ptr(), Py_Ellipsis));
    }

    // Nothing where the array is not one of the frame's own kind.
    std::optional<bool> copy_like(const SlotFrame& frame, nb::handle out) const {
        const Buffer buffer(out, PyBUF_STRIDES | PyBUF_FORMAT | PyBUF_WRITABLE, std::nothrow);
        if (!buffer.is_there() || !is_like(buffer.view(), frame)) return std::nullopt;
        return copy(frame, buffer.writable_bytes().data());
    }

    bool copy(const SlotFrame& frame, std::uint8_t* to) const {
        if (frame.values_len_bytes < release_gil_from_bytes) return reader.copy(frame, to);
        const nb::gil_scoped_release release;
        return reader.copy(frame, to);
    }

    // Whether a buffer has the frame's very shape, dtype and order, without holes on either side.
    static bool is_like(const Py_buffer& view, const SlotFrame& frame) noexcept {
        const TensorLayout& layout = *frame.layout;
        if (layout.is_bits())  // shown as its packed bytes
            return view.ndim == 1 && view.len == static_cast<Py_ssize_t>(frame.values_len_bytes) && view.itemsize == 1 &&
                   view.strides[0] == 1 && layout.extent_bytes == frame.values_len_bytes &&
                   is_format_of(view.format, 1, static_cast<std::int16_t>(Dtype::UINT8));
        if (view.ndim != layout.ndims || view.len != static_cast<Py_ssize_t>(frame.values_len_bytes) ||
            layout.extent_bytes != frame.values_len_bytes || !is_format_of(view.format, view.itemsize, layout.dtype))
            return false;
        return std::equal(view.shape, view.shape + view.ndim, layout.dims.begin()) &&
               std::equal(view.strides, view.strides + view.ndim, layout.byte_strides.begin());
    }

    Regions regions;
    RingReader reader;
    std::vector<KeptView> kept;
    std::size_t release_gil_from_bytes = kReleaseGilFromBytes;
};

nb::dict counts_of(const DropTallies& drops) {
    nb::dict counts;
    for (std::size_t i = 1; i < kDropCount; ++i)
        if (const std::uint64_t count = drops[i].get()) counts[nb::cast(static_cast<Drop>(i))] = count;
    return counts;
}

nb::object drop_object(Drop drop) {
    return nb::cast(drop);
}

template <typename Container>
nb::tuple to_tuple(const Container& values, std::size_t count) {
    nb::list list;
    for (std::size_t i = 0; i < count; ++i) list.append(values[i]);
    return nb::tuple(list);
}

std::shared_ptr<TensorLayout> make_layout(int dtype, int major_order, const std::vector<std::int32_t>& dims,
                                          const std::vector<std::int32_t>& strides, int progress_unit,
                                          std::uint32_t progress_stride_bytes) {
    if (dims.size() > kMaxDims || (!strides.empty() && strides.size() != dims.size()))
        throw nb::value_error(dims.size() > kMaxDims ? "a tensor has at most 8 dimensions"
                                                     : "strides must be as many as dims, or none");
    const auto fits = [](int value, int high) { return value >= 0 && value <= high; };
    if (!fits(dtype, 0x7fff) || !fits(major_order, 0x7fff) || !fits(progress_unit, 0xff))
        throw nb::value_error("dtype, major_order and progress_unit are the numbers of the specification");
    auto layout = std::make_shared<TensorLayout>();
    layout->dtype = static_cast<std::int16_t>(dtype);
    layout->major_order = static_cast<std::int16_t>(major_order);
    layout->ndims = static_cast<std::uint8_t>(dims.size());
    layout->progress_unit = static_cast<std::uint8_t>(progress_unit);
    layout->progress_stride_bytes = progress_stride_bytes;
    std::copy(dims.begin(), dims.end(), layout->dims.begin());
    std::copy(strides.begin(), strides.end(), layout->strides.begin());
    switch (layout->resolve()) {
        case Drop::NONE: return layout;
        case Drop::BAD_NDIMS: throw nb::value_error("a tensor has 1 to 8 dimensions; reshape a scalar to (1,)");
        case Drop::BAD_DTYPE: throw nb::value_error("dtype is not one that a frame can carry");
        case Drop::BAD_MAJOR_ORDER: throw nb::value_error("major_order is 1 (row) or 2 (column)");
        case Drop::BAD_DIMS: throw nb::value_error("dims must not be negative and a frame stays below 4 GiB");
        case Drop::BAD_STRIDES: throw nb::value_error("strides must be positive, without overlap, and follow major_order");
        default: throw nb::value_error("progress_stride_bytes must be the real distance of rows or columns");
    }
}

// --- Aeron

aeron::Api& loaded_api(bool required = true) {
    static aeron::Api api{};
    if (required && api.libraries.empty()) throw aeron::LoadError("Aeron is not loaded; call load_aeron first");
    return api;
}

// Accepted, or one of three reasons to try again. False when not accepted.
struct OfferResult {
    std::int64_t code;
    const char* name;
};
constexpr OfferResult kOfferResults[] = {{1, "ACCEPTED"},
                                         {aeron::kNotConnected, "NOT_CONNECTED"},
                                         {aeron::kBackPressured, "BACK_PRESSURED"},
                                         {aeron::kAdminAction, "ADMIN_ACTION"}};
PyObject* offer_results[4];  // one Python object each, made at import and kept

nb::object to_offer_result(std::int64_t result) { return nb::borrow(offer_results[result > 0 ? 0 : -result]); }

// Lets Ctrl-C through while a call waits for the driver without the GIL.
aeron::Interrupted signals() {
    return [calls = 0]() mutable {
        if (++calls % 64 != 0) return false;
        const nb::gil_scoped_acquire gil;
        if (PyErr_CheckSignals() != 0) throw nb::python_error();
        return false;
    };
}

class PySink final : public aeron::Sink {
public:
    PySink(nb::handle on_message, nb::handle on_image) : on_message_(on_message), on_image_(on_image) {}
    bool on_message(std::span<const std::uint8_t> message, const aeron::MessageInfo& info) override {
        // A copy: a view of Aeron's log would dangle in the hands of a handler that keeps it.
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

struct PySubscription {
    std::shared_ptr<aeron::Subscription> subscription;
    nb::object on_image;
};

// Events of others end here, before Python hears of them.
class FilteredSink final : public aeron::Sink {
public:
    FilteredSink(EventFilter& filter, PySink& next) : filter_(filter), next_(next) {}
    bool on_message(std::span<const std::uint8_t> message, const aeron::MessageInfo& info) override {
        return !filter_.admits(message) || next_.on_message(message, info);
    }
    void on_image(const aeron::ImageEvent& event) override { next_.on_image(event); }

private:
    EventFilter& filter_;
    PySink& next_;
};

// --- streams of frames

struct PyFeed {
    PyFeed(nb::object object, std::uint32_t stream_id, std::uint64_t epoch, std::optional<std::uint64_t> expected,
           std::uint64_t max_outstanding, const std::shared_ptr<LateFrames>& late)
        : reader_object(std::move(object)),
          reader(&nb::cast<PyRingReader&>(reader_object)),
          feed(reader->reader, stream_id, epoch, expected, max_outstanding,
               late ? late : std::make_shared<LateFrames>()) {}
    nb::object reader_object;
    PyRingReader* reader;
    Feed feed;
};

// A frame as users hold it: what every loop touches. tensorpool.client.frame.Frame derives from it and adds the rest.
struct PyFrame {
    nb::object mapped;  // the MappedEpoch; knows how to make a view
    nb::object reader_object;
    const PyRingReader* reader;
    ReceivedFrame slot;

    nb::object view() const {
        nb::object kept = reader->view_of(slot);
        return kept.is_none() ? mapped.attr("view")(slot) : kept;
    }

    // What a look at the slot, after the frame was read, says about it; one that changed is no longer counted as received.
    bool settle(bool is_whole) const noexcept {
        if (!is_whole) slot.found_overwritten();
        return is_whole;
    }
};

// What a consumer reads from, as one: a feed, the subscription that its descriptors come from, and what is mapped.
struct PyFrameSource {
    PyFrameSource(nb::object feed, nb::object subscription, nb::object mapped, nb::type_object type)
        : feed_object(std::move(feed)),
          subscription_object(std::move(subscription)),
          mapped(std::move(mapped)),
          type(std::move(type)),
          feed(nb::cast<PyFeed&>(feed_object)),
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
    PyFeed& feed;
    const std::shared_ptr<aeron::Subscription> subscription;
};

// What a consumer's reader and its conductor share: where frames come from now.
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
    std::uint32_t generation = fork_generation();

    // The next frame if it is there already, or null. Without the reception's lock: with the GIL held nobody changes the
    // feed meanwhile, and one that was stopped gives nothing. What goes wrong, such as a media driver that is gone, is met
    // and told again by those who look after us.
    nb::object next() const noexcept {
        if (!is_simple || reception.source == nullptr || generation != fork_generation()) return {};
        const nb::object kept = reception.source_object;
        try {
            nb::object frame = reception.source->next();
            return frame.is_none() ? nb::object() : frame;
        } catch (const std::exception&) {
            return {};
        }
    }
};

// --- methods bound by hand, because loops call them: nanobind takes as long as the rest of them for arguments by name

// Hands a call on to a method of the Python subclass.
PyObject* hand_on(PyObject* self, const char* method, PyObject* const* arguments, Py_ssize_t count, PyObject* names) {
    std::vector<PyObject*> all{self};
    all.insert(all.end(), arguments, arguments + count + (names == nullptr ? 0 : PyTuple_Size(names)));
    const nb::object name = nb::steal(PyUnicode_InternFromString(method));
    return PyObject_VectorcallMethod(name.ptr(), all.data(), static_cast<std::size_t>(count) + 1, names);
}

template <typename Function>
PyCFunction as_method(Function* function) {
    return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

PyObject* consumer_poll(PyObject* self, PyObject* const* arguments, Py_ssize_t count, PyObject* names) {
    if (count + (names == nullptr ? 0 : PyTuple_Size(names)) <= 1 && nb::inst_ready(self))
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

PyFrame make_frame(nb::object mapped, const ReceivedFrame& slot) {
    nb::object reader = mapped.attr("reader");
    const PyRingReader& native = nb::cast<PyRingReader&>(reader);
    return {std::move(mapped), std::move(reader), &native, slot};
}

struct PyFramePublisher {
    PyFramePublisher(nb::object object, const std::shared_ptr<aeron::Publication>& publication, std::uint32_t stream_id,
                     std::uint64_t epoch, bool with_publish_time)
        : writer_object(std::move(object)),
          writer(nb::cast<PyRingWriter&>(writer_object)),
          publisher(writer.writer, publication, stream_id, epoch, with_publish_time) {}

    // Streams keep their shape: the layout of the last array serves the next one that looks the same. Without memory to
    // remember it, nothing is remembered: the frame is published, and an exception would have it published again.
    void remember(const Py_buffer& view, const std::shared_ptr<const TensorLayout>& layout) noexcept {
        last_layout.reset();
        try {
            last_format = view.format ? view.format : "B";
            last_shape.assign(view.shape, view.shape + view.ndim);
        } catch (const std::bad_alloc&) {
            return;
        }
        last_is_column = !layout->is_row_major();
        last_layout = layout;
    }
    bool is_same(const Py_buffer& view) const noexcept {
        return last_layout && static_cast<std::size_t>(view.ndim) == last_shape.size() &&
               std::equal(last_shape.begin(), last_shape.end(), view.shape) &&
               last_format == (view.format ? view.format : "B") &&
               PyBuffer_IsContiguous(&view, last_is_column ? 'F' : 'C');
    }

    nb::object writer_object;
    PyRingWriter& writer;
    FramePublisher publisher;
    std::shared_ptr<const TensorLayout> last_layout;
    std::string last_format;
    std::vector<Py_ssize_t> last_shape;
    bool last_is_column = false;
    std::uint64_t until_ns = 0;
};

// --- the bridge: a frame from a ring into a log

struct PyFrameSender {
    PyFrameSender(nb::object object, const std::shared_ptr<aeron::Publication>& publication, std::uint32_t stream_id,
                  std::uint64_t epoch, const ChunkPlan& plan, std::uint64_t max_payload_bytes, bool with_crc32c)
        : reader_object(std::move(object)),
          sender(nb::cast<PyRingReader&>(reader_object).reader, publication, stream_id, epoch, plan, max_payload_bytes,
                 with_crc32c),
          outflow(sender) {}

    // Small frames go with the GIL: giving it up can take longer than sending them.
    Sending send(const SlotFrame& frame, std::uint64_t patience_ns) {
        if (frame.values_len_bytes >= kSendWithoutGilFromBytes) {
            const nb::gil_scoped_release release;
            return sender.send(frame, patience_ns);
        }
        const Sending result = sender.send(frame, 0);
        return result == Sending::BACK_PRESSURED && patience_ns > 0 ? resume(patience_ns) : result;
    }
    Sending resume(std::uint64_t patience_ns) {
        const nb::gil_scoped_release release;
        return sender.resume(patience_ns);
    }
    std::optional<Sending> pump(PyFeed& feed, PySubscription& descriptors, const std::vector<PySubscription*>& others,
                                std::uint64_t patience_ns, std::uint64_t for_ns) {
        std::vector<std::shared_ptr<aeron::Subscription>> kept{descriptors.subscription};
        std::vector<aeron::Subscription*> watched;
        for (const PySubscription* other : others) {
            kept.push_back(other->subscription);
            watched.push_back(other->subscription.get());
        }
        const nb::gil_scoped_release release;
        return outflow.pump(feed.feed, *kept.front(), watched, patience_ns, for_ns);
    }

    static constexpr std::size_t kSendWithoutGilFromBytes = std::size_t{64} << 10;
    nb::object reader_object;
    FrameSender<aeron::Publication> sender;
    Outflow outflow;
};

// --- the bridge: chunks into a ring

// The local ring, and with a FramePublisher also its consumers.
class PyOutlet final : public Outlet {
public:
    explicit PyOutlet(nb::object target) : target_(std::move(target)) {
        if (nb::try_cast(target_, publisher_)) {
            writer_ = &publisher_->writer;
        } else if (!nb::try_cast(target_, writer_)) {
            throw nb::type_error("frames go to a FramePublisher or a RingWriter");
        }
        writer_->own();
    }
    RingWriter& ring() noexcept override { return writer_->writer; }
    void tell(std::uint64_t seq, std::uint32_t meta_version, std::uint64_t bytes) override {
        if (publisher_ != nullptr) publisher_->publisher.tell(seq, meta_version, bytes);
    }
    bool is_of(const nb::object& target) const noexcept { return target_.is(target); }

private:
    nb::object target_;
    PyFramePublisher* publisher_ = nullptr;
    PyRingWriter* writer_ = nullptr;
};

struct PyAssembler {
    PyAssembler(std::uint32_t stream_id, const AssemblyLimits& limits)
        : assembler(std::make_shared<Assembler>(stream_id, limits)) {}
    ~PyAssembler() {
        if (outlet) assembler->bind(nullptr, 0);  // an intake may still hold the assembler
    }
    PyAssembler(const PyAssembler&) = delete;
    PyAssembler& operator=(const PyAssembler&) = delete;

    void bind(const nb::object& target, std::uint64_t until_ns) {
        if (target.is_none()) {
            assembler->bind(nullptr, 0);
            outlet.reset();
        } else if (outlet && outlet->is_of(target)) {
            assembler->bind(outlet.get(), until_ns);
        } else {
            auto next = std::make_unique<PyOutlet>(target);
            assembler->bind(next.get(), until_ns);
            outlet = std::move(next);
        }
    }

    std::shared_ptr<Assembler> assembler;
    std::unique_ptr<PyOutlet> outlet;
};

constexpr const char* kChunkDropNames[] = {"",           "foreign",    "malformed",   "unknown_stream", "chunk_count",
                                           "chunk_index", "header",     "length",      "chunk_size",     "no_announce",
                                           "epoch",       "late",       "dropped_frame", "paused"};
constexpr const char* kFrameLossNames[] = {"",          "inconsistent", "conflict",     "timeout", "header",
                                           "source_pool", "source_stride", "too_large",  "no_pool", "out_of_order",
                                           "epoch",     "no_announce",  "no_lease",     "inflight", "crc",
                                           "paused"};
static_assert(std::size(kChunkDropNames) == static_cast<std::size_t>(ChunkDrop::COUNT_));
static_assert(std::size(kFrameLossNames) == static_cast<std::size_t>(FrameLoss::COUNT_));

void put_count(nb::dict& counts, const char* what, const char* reason, std::uint64_t count) {
    if (count != 0) counts[nb::make_tuple(what, reason)] = count;
}

std::uint64_t timestamp_or_now(std::optional<std::uint64_t> timestamp_ns) {
    return timestamp_ns ? *timestamp_ns : monotonic_ns();
}

// `layout` is owned: without the GIL, another thread may publish and replace the publisher's last one.
bool publish_bytes(PyFramePublisher& self, std::uint64_t seq, std::shared_ptr<const TensorLayout> layout,
                   std::span<const std::uint8_t> bytes, std::uint64_t stamp_ns, std::uint32_t meta_version,
                   std::uint64_t trace_id) {
    self.writer.own();
    if (bytes.size() < self.writer.release_gil_from_bytes)
        return self.publisher.publish(seq, *layout, bytes, stamp_ns, meta_version, trace_id);
    const nb::gil_scoped_release release;
    return self.publisher.publish(seq, *layout, bytes, stamp_ns, meta_version, trace_id);
}

// What a producer's side and its conductor share: where frames go, and how. With the GIL held, either sees
// what the other did last.
struct PyRoute {
    nb::object publisher_object = nb::none();  // of the epoch that the producer has adopted; none: it has to look
    PyFramePublisher* publisher = nullptr;
    std::uint32_t meta_version = 0;
    bool is_plain = true;
    nb::object array_type = nb::module_::import_("numpy").attr("ndarray");

    void set_publisher(nb::object object) {
        publisher = object.is_none() ? nullptr : &nb::cast<PyFramePublisher&>(object);
        publisher_object = std::move(object);
    }

    // The usual case: an array like the one before, and nobody with wishes of their own. -1: not here.
    std::int64_t publish_same(PyObject* data, std::optional<std::uint64_t> timestamp_ns,
                              std::optional<std::uint32_t> version, std::uint64_t trace_id) const {
        if (publisher == nullptr || !is_plain || Py_TYPE(data) != reinterpret_cast<PyTypeObject*>(array_type.ptr()))
            return -1;
        const nb::object kept = publisher_object;  // whoever gets the GIL while we copy may set another
        PyFramePublisher& own = *publisher;
        const Buffer buffer(data, PyBUF_FULL_RO, std::nothrow);  // numpy has dtypes that no buffer describes
        if (!buffer.is_there() || !own.is_same(buffer.view())) return -1;
        const std::uint64_t now_ns = monotonic_ns();
        if (now_ns >= own.until_ns) return -1;
        const std::uint64_t seq = own.writer.own().next_seq();
        const bool is_published = publish_bytes(own, seq, own.last_layout, buffer.bytes(), timestamp_ns.value_or(now_ns),
                                                version.value_or(meta_version), trace_id);
        return is_published ? static_cast<std::int64_t>(seq) : -1;
    }
};

struct PyProducer {
    nb::object route_object;
    PyRoute& route;
};

// An optional keyword of publish(). False: it is something else than a number that fits; the largest is the wire's null.
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

// What is not done here, and what goes wrong, is `_publish`'s: nothing has happened yet by then.
PyObject* producer_publish(PyObject* self, PyObject* const* arguments, Py_ssize_t count, PyObject* names) {
    const Py_ssize_t named = names == nullptr ? 0 : PyTuple_Size(names);
    std::optional<std::uint64_t> timestamp_ns, trace_id;
    std::optional<std::uint32_t> meta_version;
    bool is_usual = count == 1 && nb::inst_ready(self);
    for (Py_ssize_t i = 0; is_usual && i < named; ++i) {
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
            const std::int64_t seq = nb::inst_ptr<PyProducer>(self)->route.publish_same(
                arguments[0], timestamp_ns, meta_version, trace_id.value_or(0));
            if (seq >= 0) return PyLong_FromLongLong(seq);
        } catch (const std::exception&) {  // such as an open claim: the long way says so in its own words
        }
    }
    return hand_on(self, "_publish", arguments, count, names);
}

constexpr const char* kPublishDoc =
    "publish($self, /, array, *, timestamp_ns=None, meta_version=None, trace_id=0, parents=(), seq=None, dtype=None, "
    "shape=None, keep_strides=False)\n--\n\n"
    "Copy an array into shared memory and tell everybody; its seq, or None: dropped and counted.\n\n"
    ">>> producer.publish(np.zeros((480, 640), np.uint8), trace_id=7, parents=[3, 5])     # doctest: +SKIP\n\n"
    "`timestamp_ns` is when it was captured (CLOCK_MONOTONIC; now by default), `meta_version` the metadata that\n"
    "applies (what `set_metadata` set last). Strided and Fortran-ordered arrays go without an extra copy; strided ones\n"
    "arrive contiguous, or with `keep_strides` as they are, in one block with what lies between their rows.\n"
    "`dtype=Dtype.BIT` takes packed bytes and the `shape` of the bits, `dtype=Dtype.BYTES` any bytes. Raises\n"
    "LocalProtocolError for what no frame can carry, Closed after close().";

PyMethodDef producer_methods[] = {
    {"publish", as_method(producer_publish), METH_FASTCALL | METH_KEYWORDS, kPublishDoc},
    {nullptr, nullptr, 0, nullptr}};
PyType_Slot producer_slots[] = {{Py_tp_methods, producer_methods}, {0, nullptr}};

std::size_t positive(std::int64_t limit) {
    if (limit < 1) throw nb::value_error("limit must be positive");
    return static_cast<std::size_t>(limit);
}

void raise(const char* name, const nb::tuple& arguments) {
    const nb::object type = nb::module_::import_("tensorpool.errors").attr(name);
    PyErr_SetObject(type.ptr(), arguments.ptr());
}

void translate(const std::exception_ptr& thrown, void*) {
    try {
        std::rethrow_exception(thrown);
    } catch (const aeron::AeronError& error) {
        raise("TransportError", nb::make_tuple(error.what(), error.code));
    } catch (const aeron::LoadError& error) {
        raise("TransportError", nb::make_tuple(error.what(), 0));
    } catch (const aeron::ClosedError& error) {
        raise("Closed", nb::make_tuple(error.what()));
    } catch (const Misuse& error) {
        raise("LocalProtocolError", nb::make_tuple(error.what()));
    } catch (const std::system_error& error) {
        const nb::object arguments = nb::make_tuple(error.code().value(), error.what());
        PyErr_SetObject(PyExc_OSError, arguments.ptr());
    }
}

void bind_rings(nb::module_& m) {
    nb::enum_<Drop>(m, "DropReason", nb::is_arithmetic(), "Why a frame was not delivered.")
        .value("NOT_COMMITTED", Drop::NOT_COMMITTED, "the producer is still writing this very frame")
        .value("OVERWRITTEN", Drop::OVERWRITTEN, "the slot moved on to a later frame, before or during the read")
        .value("STALE", Drop::STALE, "the slot still holds an earlier frame")
        .value("BAD_EMBEDDED_HEADER", Drop::BAD_EMBEDDED_HEADER)
        .value("BAD_PAYLOAD_OFFSET", Drop::BAD_PAYLOAD_OFFSET)
        .value("BAD_PAYLOAD_SLOT", Drop::BAD_PAYLOAD_SLOT)
        .value("BAD_POOL", Drop::BAD_POOL)
        .value("BAD_LENGTH", Drop::BAD_LENGTH)
        .value("BAD_DTYPE", Drop::BAD_DTYPE)
        .value("BAD_MAJOR_ORDER", Drop::BAD_MAJOR_ORDER)
        .value("BAD_NDIMS", Drop::BAD_NDIMS)
        .value("BAD_DIMS", Drop::BAD_DIMS)
        .value("BAD_STRIDES", Drop::BAD_STRIDES)
        .value("BAD_PROGRESS", Drop::BAD_PROGRESS)
        .value("NO_POOL", Drop::NO_POOL, "larger than every pool of the stream")
        .value("DETACHED", Drop::DETACHED, "published while the producer had no lease")
        .value("ABANDONED", Drop::ABANDONED, "given up after its progress was told")
        .value("GAP", Drop::GAP, "its descriptor never came")
        .value("RESYNC", Drop::RESYNC, "passed over to catch up after max_outstanding_seq_gap")
        .value("UNMAPPED", Drop::UNMAPPED, "published while the consumer did not have its epoch mapped")
        .value("EPOCH_ENDED", Drop::EPOCH_ENDED, "committed, but not yet seen when the epoch ended")
        .value("RATE_LIMITED", Drop::RATE_LIMITED, "passed over to keep to max_rate_hz")
        .value("SKIPPED", Drop::SKIPPED, "passed over by somebody who asked for the newest frame")
        .value("BAD_TIMESTAMP", Drop::BAD_TIMESTAMP, "its capture or publish time went back, though it has both");
    m.def("is_late", &is_late, "drop"_a, "Whether QosConsumer.drops_late counts this reason.");
    m.def("is_gap", &is_gap, "drop"_a, "Whether QosConsumer.drops_gap counts this reason.");

    nb::class_<PyMapping>(m, "Mapping", nb::type_slots(mapping_slots),
                        "A mapped file; exports the buffer protocol and is unmapped with its last view. Made by "
                        "tensorpool.shm only.")
        .def(nb::init<int, std::size_t, bool>(), "fd"_a, "length"_a, nb::kw_only(), "writable"_a)
        .def("__len__", [](const PyMapping& self) { return self.bytes().size(); })
        .def_prop_ro("is_writable", &PyMapping::is_writable)
        .def("prefault", &PyMapping::prefault, "begin"_a = 0, "end"_a = SIZE_MAX,
             nb::call_guard<nb::gil_scoped_release>(),
             "Bring the pages of [begin, end) in; the GIL is released meanwhile.")
        .def("collapse", &PyMapping::collapse, "begin"_a = 0, "end"_a = SIZE_MAX,
             nb::call_guard<nb::gil_scoped_release>(),
             "Give [begin, end) of a new tmpfs file huge pages, as far as the kernel has any; the bytes in them.")
        .def("lock", &PyMapping::lock, nb::kw_only(), "on_fault"_a = false, nb::call_guard<nb::gil_scoped_release>(),
             "mlock the pages; with `on_fault` each from when it is first touched.")
        .def(
            "load_u64",
            [](const PyMapping& self, std::size_t offset) {
                check_word(self, offset);
                return std::atomic_ref(*reinterpret_cast<std::uint64_t*>(self.bytes().data() + offset))
                    .load(std::memory_order_acquire);
            },
            "offset"_a, "Load an aligned u64 with acquire ordering.")
        .def(
            "store_u64",
            [](const PyMapping& self, std::size_t offset, std::uint64_t value) {
                if (!self.is_writable()) throw nb::value_error("the mapping is read-only");
                check_word(self, offset);
                std::atomic_ref(*reinterpret_cast<std::uint64_t*>(self.bytes().data() + offset))
                    .store(value, std::memory_order_release);
            },
            "offset"_a, "value"_a, "Store an aligned u64 with release ordering.");

    nb::class_<TensorLayout>(m, "TensorLayout",
                             "dtype, order, shape and strides of a payload, checked once. Strides of 0 are inferred.")
        .def(nb::new_(&make_layout), "dtype"_a, "major_order"_a, "dims"_a, "strides"_a = std::vector<std::int32_t>{},
             "progress_unit"_a = 0, "progress_stride_bytes"_a = 0)
        .def_prop_ro("dtype", [](const TensorLayout& self) { return static_cast<int>(self.dtype); })
        .def_prop_ro("major_order", [](const TensorLayout& self) { return static_cast<int>(self.major_order); })
        .def_prop_ro("shape", [](const TensorLayout& self) { return to_tuple(self.dims, self.ndims); },
                     nb::sig("def shape(self) -> tuple[int, ...]"))
        .def_prop_ro("byte_strides", [](const TensorLayout& self) { return to_tuple(self.byte_strides, self.ndims); },
                     nb::sig("def byte_strides(self) -> tuple[int, ...]"))
        .def_ro("extent_bytes", &TensorLayout::extent_bytes)
        .def_prop_ro("progress_unit", [](const TensorLayout& self) { return static_cast<int>(self.progress_unit); })
        .def_ro("progress_stride_bytes", &TensorLayout::progress_stride_bytes);

    nb::class_<SlotFrame>(m, "SlotFrame", "A frame that passed every check when it was read.")
        .def_ro("seq", &SlotFrame::seq)
        .def_ro("timestamp_ns", &SlotFrame::timestamp_ns)
        .def_ro("meta_version", &SlotFrame::meta_version)
        .def_ro("slot", &SlotFrame::slot)
        .def_ro("pool", &SlotFrame::pool, "Index into the reader's pools.")
        .def_ro("values_len_bytes", &SlotFrame::values_len_bytes)
        .def_ro("payload_offset", &SlotFrame::payload_offset, "Where the payload starts in its pool's mapping.")
        .def_prop_ro("layout", [](const SlotFrame& self) { return std::const_pointer_cast<TensorLayout>(self.layout); });

    nb::class_<PyRingWriter>(m, "RingWriter", "The producer's side of a ring, bound once to writable mappings.")
        .def(nb::init<nb::object, const std::vector<PoolArgument>&, std::uint32_t>(), "header"_a, "pools"_a, "nslots"_a,
             nb::sig("def __init__(self, header: Mapping, pools: collections.abc.Sequence[tuple[int, int, Mapping]], nslots: int) -> None"),
             "`pools` are (pool_id, stride_bytes, mapping).")
        .def(
            "write",
            [](PyRingWriter& self, std::uint64_t seq, const TensorLayout& layout, nb::handle data,
               std::uint64_t timestamp_ns, std::uint32_t meta_version) {
                const Buffer buffer(data, PyBUF_ANY_CONTIGUOUS);
                RingWriter& writer = self.own();
                if (buffer.bytes().size() < self.release_gil_from_bytes)
                    return writer.write(seq, layout, buffer.bytes(), timestamp_ns, meta_version);
                const nb::gil_scoped_release release;
                return writer.write(seq, layout, buffer.bytes(), timestamp_ns, meta_version);
            },
            "seq"_a, "layout"_a, "data"_a, "timestamp_ns"_a = 0, "meta_version"_a = 0,
            nb::sig("def write(self, seq: int, layout: TensorLayout, data: collections.abc.Buffer, timestamp_ns: int = 0, "
                    "meta_version: int = 0) -> bool"),
            "Copy a contiguous buffer into the slot of `seq` and commit it. False: no pool is large enough.")
        .def(
            "begin",
            [](PyRingWriter& self, std::uint64_t seq, const TensorLayout& layout, std::uint64_t timestamp_ns,
               std::uint32_t meta_version, bool header_first) -> std::optional<std::pair<nb::object, std::size_t>> {
                RingWriter& writer = self.own();
                const std::size_t pool = writer.begin(seq, layout, timestamp_ns, meta_version, header_first);
                if (pool == RingGeometry::npos) return std::nullopt;
                const Pool& chosen = writer.geometry().pools()[pool];
                return std::pair(self.regions.region_of(chosen),
                                 RingGeometry::payload_offset(chosen, writer.geometry().index_of(seq)));
            },
            "seq"_a, "layout"_a, "timestamp_ns"_a = 0, "meta_version"_a = 0, "header_first"_a = false,
            nb::sig("def begin(self, seq: int, layout: TensorLayout, timestamp_ns: int = 0, meta_version: int = 0, "
                    "header_first: bool = False) -> tuple[Mapping, int] | None"),
            "Open the slot of `seq` for writing in place: the pool's mapping and the payload's offset in it. None: no "
            "pool is large enough.")
        .def(
            "commit",
            [](PyRingWriter& self, std::uint64_t timestamp_ns, std::uint32_t meta_version) {
                self.own().commit(timestamp_ns, meta_version);
            },
            "timestamp_ns"_a = 0, "meta_version"_a = 0, "Commit the open claim.")
        .def("abandon", [](PyRingWriter& self, bool is_told) { self.own().abandon(is_told); }, "is_told"_a = false,
             "Give the open claim up: readers drop the slot. The seq may be used again unless others were told of it.")
        .def("wake", [](PyRingWriter& self) { self.own().wake(monotonic_ns()); },
             "Wake readers that sleep on the newest frame's slot; rate-limited.")
        .def_prop_ro("next_seq", [](const PyRingWriter& self) { return self.writer.next_seq(); })
        .def_prop_ro("is_claimed", [](const PyRingWriter& self) { return self.writer.is_claimed(); })
        .def_prop_ro("written", [](const PyRingWriter& self) { return self.writer.written(); })
        .def_prop_ro("no_pool_drops", [](const PyRingWriter& self) { return self.writer.no_pool_drops(); })
        .def_prop_ro("nslots", [](const PyRingWriter& self) { return self.writer.geometry().nslots(); })
        .def_rw("release_gil_from_bytes", &PyRingWriter::release_gil_from_bytes);

    nb::class_<PyRingReader>(m, "RingReader", "The consumer's side of a ring, bound once; read-only mappings suffice.")
        .def(nb::init<nb::object, const std::vector<PoolArgument>&, std::uint32_t>(), "header"_a, "pools"_a, "nslots"_a,
             nb::sig("def __init__(self, header: Mapping, pools: collections.abc.Sequence[tuple[int, int, Mapping]], nslots: int) -> None"),
             "`pools` are (pool_id, stride_bytes, mapping).")
        .def(
            "read",
            [](PyRingReader& self, std::uint64_t seq) -> nb::object {
                SlotFrame frame;
                const Drop drop = self.reader.read(seq, frame);
                return drop == Drop::NONE ? nb::cast(std::move(frame)) : drop_object(drop);
            },
            "seq"_a, nb::sig("def read(self, seq: int) -> SlotFrame | DropReason"),
            "Validate the slot of `seq`; never waits.")
        .def(
            "copy_into",
            [](const PyRingReader& self, const SlotFrame& frame, nb::handle out) {
                const Buffer buffer(out, PyBUF_ANY_CONTIGUOUS | PyBUF_WRITABLE);
                if (buffer.bytes().size() != frame.values_len_bytes)
                    throw nb::value_error("the output buffer must have exactly values_len_bytes bytes");
                return self.copy(frame, buffer.writable_bytes().data());
            },
            "frame"_a, "out"_a, nb::sig("def copy_into(self, frame: SlotFrame, out: collections.abc.Buffer) -> bool"),
            "Copy the payload; True when it stayed whole.")
        .def("kept_view", &PyRingReader::view_of, "frame"_a,
             nb::sig("def kept_view(self, frame: SlotFrame) -> numpy.typing.NDArray[typing.Any] | None"),
             "A new array over the payload, made from the view that was kept for its slot; None where none was.")
        .def(
            "keep_view",
            [](PyRingReader& self, const SlotFrame& frame, nb::object view) {
                self.reader.check_own(frame);
                self.kept[frame.slot] = {frame.layout, frame.pool, std::move(view)};
            },
            "frame"_a, "view"_a,
            nb::sig("def keep_view(self, frame: SlotFrame, view: numpy.typing.NDArray[typing.Any]) -> None"),
            "Keep a view of the frame's payload for later frames of its slot that have the same layout.")
        .def("intact", [](const PyRingReader& self, const SlotFrame& frame) { return self.reader.intact(frame); },
             "frame"_a, "Whether the frame has not been overwritten so far.")
        .def(
            "read_partial",
            [](PyRingReader& self, std::uint64_t seq) -> nb::object {
                SlotFrame frame;
                const Drop drop = self.reader.read_partial(seq, frame);
                return drop == Drop::NONE ? nb::cast(std::move(frame)) : drop_object(drop);
            },
            "seq"_a, nb::sig("def read_partial(self, seq: int) -> SlotFrame | DropReason"),
            "Validate the header of a frame that may still be being written.")
        .def("is_held", [](const PyRingReader& self, const SlotFrame& frame) { return self.reader.is_held(frame); },
             "frame"_a, "Whether the slot still belongs to this frame, written to the end or not.")
        .def("newest", [](const PyRingReader& self) { return self.reader.newest(); },
             "The newest committed seq, or None.")
        .def("is_committed", [](const PyRingReader& self, std::uint64_t seq) { return self.reader.is_committed(seq); },
             "seq"_a, "Whether `seq` is committed, or its slot has moved on to a later frame.")
        .def(
            "wait",
            [](const PyRingReader& self, std::uint64_t seq, std::uint64_t timeout_ns) {
                const nb::gil_scoped_release release;
                return self.reader.wait(seq, timeout_ns);
            },
            "seq"_a, "timeout_ns"_a, "Sleep until is_committed(seq); False on timeout.")
        .def_prop_ro(
            "drops",
            [](const PyRingReader& self) { return counts_of(self.reader.drops()); },
            nb::sig("def drops(self) -> dict[DropReason, int]"), "How many reads failed, by reason.")
        .def_prop_ro("accepted", [](const PyRingReader& self) { return self.reader.drops().count(Drop::NONE); })
        .def_prop_ro(
            "pools",
            [](const PyRingReader& self) {
                nb::list pools;
                for (const Pool& pool : self.reader.geometry().pools())
                    pools.append(nb::make_tuple(pool.pool_id, pool.stride_bytes, self.regions.region_of(pool)));
                return pools;
            },
            nb::sig("def pools(self) -> list[tuple[int, int, Mapping]]"), "In the order that SlotFrame.pool indexes.")
        .def_prop_ro("nslots", [](const PyRingReader& self) { return self.reader.geometry().nslots(); })
        .def_rw("release_gil_from_bytes", &PyRingReader::release_gil_from_bytes);
}

void bind_aeron(nb::module_& m) {
    m.def(
        "load_aeron",
        [](const std::vector<std::string>& paths) {
            aeron::Api& api = loaded_api(false);
            if (api.libraries.empty()) api = aeron::load(paths);
        },
        "paths"_a, "Resolve Aeron's C API from these shared objects; once per process.");
    m.def("aeron_version", [] { return std::string(loaded_api().version_full()); });
    m.def(
        "aeron_default_dir",
        [] {
            char path[4096] = {};
            if (loaded_api().default_path(path, sizeof path) < 0) throw aeron::last_error(loaded_api(), "default path");
            return std::string(path);
        },
        "The directory that Aeron uses when none is named.");
    m.def(
        "is_driver_active",
        [](const std::string& dir, std::int64_t timeout_ms) {
            const nb::gil_scoped_release release;
            return loaded_api().is_driver_active(dir.c_str(), timeout_ms, [](const char*) {});
        },
        "dir"_a, "timeout_ms"_a, "Whether a media driver has given a sign of life at `dir` within the timeout.");
    m.def("monotonic_ns", &monotonic_ns, "CLOCK_MONOTONIC.");

    nb::class_<aeron::MediaDriver>(m, "MediaDriver", nb::is_weak_referenceable(), "Aeron's C media driver inside this process.")
        .def(nb::new_([](const std::vector<std::pair<std::string, aeron::Setting>>& settings) {
                 const nb::gil_scoped_release release;
                 return std::make_shared<aeron::MediaDriver>(loaded_api(), settings);
             }),
             "settings"_a, "`settings` are (name, value) for aeron_driver_context_set_<name>.")
        .def("close", &aeron::MediaDriver::close, nb::call_guard<nb::gil_scoped_release>())
        .def_prop_ro("is_closed", &aeron::MediaDriver::is_closed);

    auto offer_result = nb::class_<OfferResult>(
        m, "OfferResult", "What became of an offer: true when accepted, else why it should be tried again or dropped.");
    offer_result.def("__bool__", [](const OfferResult& self) { return self.code > 0; })
        .def("__repr__", [](const OfferResult& self) { return std::string("OfferResult.") + self.name; })
        .def_ro("code", &OfferResult::code, "1, or Aeron's own number.")
        .def_prop_ro("name", [](const OfferResult& self) { return self.name; });
    for (int i = 0; i < 4; ++i) {
        nb::object object = nb::cast(kOfferResults[i]);
        offer_result.attr(kOfferResults[i].name) = object;
        offer_results[i] = object.release().ptr();
    }

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

    nb::class_<aeron::Publication>(m, "Publication")
        .def(
            "offer",
            [](aeron::Publication& self, nb::handle message) {
                const Buffer buffer(message, PyBUF_SIMPLE);
                return to_offer_result(self.offer(buffer.bytes()));
            },
            "message"_a, nb::sig("def offer(self, message: collections.abc.Buffer) -> OfferResult"),
            "Append a message to the log, fragmented where it exceeds the MTU.")
        .def(
            "offerv",
            [](aeron::Publication& self, nb::sequence parts) {
                std::vector<std::unique_ptr<Buffer>> buffers;
                std::vector<aeron::IoVec> vectors;
                for (nb::handle part : parts) {
                    buffers.push_back(std::make_unique<Buffer>(part, PyBUF_SIMPLE));
                    vectors.push_back({buffers.back()->bytes().data(), buffers.back()->bytes().size()});
                }
                return to_offer_result(self.offerv(vectors));
            },
            "parts"_a, nb::sig("def offerv(self, parts: collections.abc.Sequence[collections.abc.Buffer]) -> OfferResult"),
            "Gather the parts into one message.")
        .def(
            "try_claim",
            [](aeron::Publication& self, nb::handle message) {
                const Buffer buffer(message, PyBUF_SIMPLE);
                const std::span<const std::uint8_t> bytes = buffer.bytes();
                return to_offer_result(
                    self.claim(bytes.size(), [&](std::uint8_t* at) { std::memcpy(at, bytes.data(), bytes.size()); }));
            },
            "message"_a, nb::sig("def try_claim(self, message: collections.abc.Buffer) -> OfferResult"),
            "Write a message of one fragment straight into the log: claim, fill and commit in one call.")
        .def(
            "offer_descriptor",
            [](aeron::Publication& self, std::uint32_t stream_id, std::uint64_t epoch, std::uint64_t seq,
               std::optional<std::uint64_t> timestamp_ns, std::optional<std::uint32_t> meta_version,
               std::uint64_t trace_id) {
                const FrameDescriptor descriptor{stream_id,
                                                 epoch,
                                                 seq,
                                                 timestamp_ns.value_or(FrameDescriptor::kNullU64),
                                                 meta_version.value_or(FrameDescriptor::kNullU32),
                                                 trace_id};
                return to_offer_result(
                    self.claim(FrameDescriptor::kBytes, [&](std::uint8_t* at) { descriptor.encode(at); }));
            },
            "stream_id"_a, "epoch"_a, "seq"_a, "timestamp_ns"_a = nb::none(), "meta_version"_a = nb::none(),
            "trace_id"_a = 0, nb::sig("def offer_descriptor(self, stream_id: int, epoch: int, seq: int, timestamp_ns: int | "
                                      "None = None, meta_version: int | None = None, trace_id: int = 0) -> OfferResult"),
            "Encode a FrameDescriptor straight into the log.")
        .def("close", &aeron::Publication::close, nb::call_guard<nb::gil_scoped_release>())
        .def("revoke", &aeron::Publication::revoke, nb::call_guard<nb::gil_scoped_release>(),
             "Close it without waiting for subscribers that have not read its log; a plain close before Aeron 1.48.")
        .def_prop_ro("is_closed", &aeron::Publication::is_closed)
        .def_prop_ro("is_connected", &aeron::Publication::is_connected)
        .def_prop_ro("has_room", &aeron::Publication::has_room,
                     "Whether a message would go now: somebody reads, and the log is not full.")
        .def_prop_ro("position", &aeron::Publication::position)
        .def_prop_ro("channel", &aeron::Publication::channel)
        .def_prop_ro("stream_id", &aeron::Publication::stream_id)
        .def_prop_ro("session_id", &aeron::Publication::session_id)
        .def_prop_ro("max_message_length", &aeron::Publication::max_message_length)
        .def_prop_ro("max_payload_length", &aeron::Publication::max_payload_length)
        .def_prop_ro("term_buffer_length", &aeron::Publication::term_buffer_length);

    nb::class_<PySubscription>(m, "Subscription")
        .def(
            "poll",
            [](PySubscription& self, nb::callable handler, std::int64_t limit) {
                PySink sink(handler, self.on_image);
                return self.subscription->poll(sink, positive(limit));
            },
            "handler"_a, "limit"_a = 10,
            nb::sig("def poll(self, handler: collections.abc.Callable[[bytes, MessageInfo], object], limit: int = 10) -> int"),
            "Give whole messages to the handler; returns the number of fragments consumed. When the handler raises, "
            "the poll ends, what was not yet delivered stays in the log, and the exception is the caller's.")
        .def("close", [](PySubscription& self) { self.subscription->close(); }, nb::call_guard<nb::gil_scoped_release>())
        .def_prop_ro("is_closed", [](const PySubscription& self) { return self.subscription->is_closed(); })
        .def_prop_ro("is_connected", [](PySubscription& self) { return self.subscription->is_connected(); })
        .def_prop_ro("image_count", [](PySubscription& self) { return self.subscription->image_count(); })
        .def_prop_ro("channel", [](const PySubscription& self) { return self.subscription->channel(); })
        .def_prop_ro("stream_id", [](const PySubscription& self) { return self.subscription->stream_id(); })
        .def_prop_ro("partial_sessions", [](const PySubscription& self) { return self.subscription->partial_sessions(); },
                     "Sessions for which a fragment assembler is kept.");

    nb::class_<EventFilter>(m, "EventFilter", "The EventMessages that are for one service, by the exact bytes of their tag.")
        .def(nb::init<std::uint16_t, std::vector<std::string>>(), "schema_id"_a, "tags"_a)
        .def(
            "poll",
            [](EventFilter& self, PySubscription& subscription, nb::callable handler, std::int64_t limit,
               std::uint32_t allowance) {
                PySink messages(handler, subscription.on_image);
                FilteredSink sink(self, messages);
                self.allowance = allowance;
                return subscription.subscription->poll(sink, positive(limit));
            },
            "subscription"_a, "handler"_a, "limit"_a, "allowance"_a,
            nb::sig("def poll(self, subscription: Subscription, handler: collections.abc.Callable[[bytes, MessageInfo], "
                    "object], limit: int, allowance: int) -> int"),
            "As Subscription.poll, for messages of ours, of which at most `allowance` pass; what does not pass is counted.")
        .def_prop_ro(
            "counts",
            [](const EventFilter& self) {
                nb::dict counts;
                counts["mine"] = self.counts().mine;
                counts["other_tag"] = self.counts().other_tag;
                counts["other_schema"] = self.counts().other_schema;
                counts["malformed"] = self.counts().malformed;
                counts["over_rate"] = self.counts().over_rate;
                return counts;
            },
            nb::sig("def counts(self) -> dict[str, int]"));

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
        .def_prop_ro("key", [](const aeron::CounterReading& self) {
            return nb::bytes(self.key.data(), self.key.size());
        });

    nb::class_<aeron::ClientCore>(m, "Client", nb::is_weak_referenceable(), "A connection to a media driver.")
        .def(nb::new_([](const std::string& dir, const std::string& client_name, std::uint64_t driver_timeout_ms,
                         std::uint64_t keepalive_interval_ns, std::uint64_t resource_linger_ns,
                         std::uint64_t idle_sleep_ns, bool pre_touch) {
                 const aeron::ClientOptions options{dir,           client_name,  driver_timeout_ms, keepalive_interval_ns,
                                                    resource_linger_ns, idle_sleep_ns, pre_touch};
                 const nb::gil_scoped_release release;
                 return std::make_shared<aeron::ClientCore>(loaded_api(), options);
             }),
             "dir"_a, nb::kw_only(), "client_name"_a = "tensorpool", "driver_timeout_ms"_a = 10'000,
             "keepalive_interval_ns"_a = 500'000'000, "resource_linger_ns"_a = 3'000'000'000,
             "idle_sleep_ns"_a = 16'000'000, "pre_touch"_a = false)
        .def(
            "add_publication",
            [](const std::shared_ptr<aeron::ClientCore>& self, const std::string& channel, std::int32_t stream_id,
               bool exclusive) {
                const nb::gil_scoped_release release;
                return aeron::Publication::add(self, channel, stream_id, exclusive, signals());
            },
            "channel"_a, "stream_id"_a, "exclusive"_a = false)
        .def(
            "add_subscription",
            [](const std::shared_ptr<aeron::ClientCore>& self, const std::string& channel, std::int32_t stream_id,
               nb::object on_image) {
                std::shared_ptr<aeron::Subscription> subscription;
                {
                    const nb::gil_scoped_release release;
                    subscription = aeron::Subscription::add(self, channel, stream_id, signals());
                }
                return PySubscription{std::move(subscription), std::move(on_image)};
            },
            "channel"_a, "stream_id"_a, "on_image"_a = nb::none(),
            nb::sig("def add_subscription(self, channel: str, stream_id: int, on_image: collections.abc.Callable[[ImageEvent], object] | "
                    "None = None) -> Subscription"),
            "`on_image` is called by poll, on the polling thread.")
        .def(
            "add_counter",
            [](const std::shared_ptr<aeron::ClientCore>& self, std::int32_t type_id, nb::bytes key,
               const std::string& label) {
                const std::string owned(key.c_str(), key.size());
                if (owned.size() > 112 || label.size() > 380)
                    throw nb::value_error("a counter's key has at most 112 bytes, its label 380");
                const nb::gil_scoped_release release;
                return aeron::Counter::add(
                    self, type_id, {reinterpret_cast<const std::uint8_t*>(owned.data()), owned.size()}, label, signals());
            },
            "type_id"_a, "key"_a, "label"_a)
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
        .def_prop_ro("dir", &aeron::ClientCore::dir);
}

void bind_streams(nb::module_& m) {
    nb::class_<ReceivedFrame, SlotFrame>(m, "ReceivedFrame", "A frame with what its descriptor said about it.")
        .def_prop_ro("publish_timestamp_ns",
                     [](const ReceivedFrame& self) {
                         return self.publish_timestamp_ns == FrameDescriptor::kNullU64
                                    ? std::nullopt
                                    : std::optional(self.publish_timestamp_ns);
                     })
        .def_ro("trace_id", &ReceivedFrame::trace_id, "0: none")
        .def_ro("dropped_before", &ReceivedFrame::dropped_before, "Lost since the frame delivered before this one.");

    nb::class_<PyFrame>(m, "FrameBase", "What every loop touches of a frame.")
        .def("__init__", [](PyFrame* self, nb::object mapped, const ReceivedFrame& slot) {
                 new (self) PyFrame(make_frame(std::move(mapped), slot));
             },
             "mapped"_a, "slot"_a, nb::sig("def __init__(self, mapped: object, slot: ReceivedFrame) -> None"))
        .def_prop_ro("array", &PyFrame::view, nb::sig("def array(self) -> numpy.typing.NDArray[typing.Any]"),
                     "A read-only view of the payload, without a copy. BIT frames show their packed bytes.")
        .def("is_intact", [](const PyFrame& self) { return self.settle(self.reader->reader.intact(self.slot)); },
             "Whether everything read from the view so far was this frame. One that is not counts as dropped.")
        .def("_copy_like",
             [](const PyFrame& self, nb::handle out) {
                 const std::optional<bool> is_whole = self.reader->copy_like(self.slot, out);
                 return is_whole ? std::optional(self.settle(*is_whole)) : std::nullopt;
             },
             "out"_a, nb::sig("def _copy_like(self, out: collections.abc.Buffer) -> bool | None"),
             "Whether the copy is whole; None, and no copy, where `out` differs in shape, dtype or strides.")
        .def_prop_ro("nbytes", [](const PyFrame& self) { return self.slot.values_len_bytes; })
        .def_prop_ro("seq", [](const PyFrame& self) { return self.slot.seq; })
        .def_prop_ro("meta_version", [](const PyFrame& self) { return self.slot.meta_version; },
                     "Which metadata applies; 0 is none. See `Consumer.metadata`.")
        .def_prop_ro("trace_id", [](const PyFrame& self) { return self.slot.trace_id; }, "0: not traced.")
        .def_prop_ro("dropped_before", [](const PyFrame& self) { return self.slot.dropped_before; },
                     "How many frames were lost between the one delivered before and this one.")
        .def_prop_ro("_mapped", [](const PyFrame& self) { return self.mapped; }, nb::sig("def _mapped(self) -> typing.Any"))
        .def_prop_ro("_slot", [](const PyFrame& self) { return &self.slot; }, nb::rv_policy::reference_internal);

    nb::class_<LateFrames>(m, "LateFrames", "How many delivered frames their readers found overwritten, in all epochs.")
        .def(nb::new_([] { return std::make_shared<LateFrames>(); }))
        .def_prop_ro("count", &LateFrames::count);

    nb::class_<PyFeed>(m, "Feed", "A consumer's stream in one epoch: descriptors in, validated frames out.")
        .def(nb::init<nb::object, std::uint32_t, std::uint64_t, std::optional<std::uint64_t>, std::uint64_t,
                      const std::shared_ptr<LateFrames>&>(),
             "reader"_a, "stream_id"_a, "epoch"_a, "expected"_a = nb::none(), "max_outstanding"_a = 0,
             "late"_a = nb::none(),
             nb::sig("def __init__(self, reader: RingReader, stream_id: int, epoch: int, expected: int | None = None, "
                     "max_outstanding: int = 0, late: LateFrames | None = None) -> None"),
             "`expected` is the first seq that counts; without it the first descriptor decides. `received` and `drops` are "
             "as of each delivery; `late` counts the frames that moved from the one to the other since.")
        .def(
            "next",
            [](PyFeed& self, PySubscription& subscription) -> std::optional<ReceivedFrame> {
                ReceivedFrame frame;
                if (!self.feed.next(*subscription.subscription, frame)) return std::nullopt;
                return frame;
            },
            "subscription"_a, "The next frame that can be delivered, or None. Never waits.")
        .def(
            "latest",
            [](PyFeed& self, PySubscription& subscription) -> std::optional<ReceivedFrame> {
                ReceivedFrame frame;
                if (!self.feed.latest(*subscription.subscription, frame)) return std::nullopt;
                return frame;
            },
            "subscription"_a, "The newest frame of the ring, delivered before or not. Never waits.")
        .def(
            "wait",
            [](PyFeed& self, PySubscription& subscription, std::uint64_t timeout_ns) {
                const std::shared_ptr<aeron::Subscription> kept = subscription.subscription;
                const nb::gil_scoped_release release;
                return self.feed.wait(*kept, timeout_ns);
            },
            "subscription"_a, "timeout_ns"_a,
            "Sleep until there is something for next(), the owner is needed, or the time is over: then False.")
        .def("finish", [](PyFeed& self) { return self.feed.finish(); },
             "No more frames; the next seq that is not accounted for, or None where none was heard of.")
        .def("discard", [](PyFeed& self, PySubscription& subscription) { self.feed.discard(*subscription.subscription); },
             "subscription"_a, "Pass over everything that was told before now.")
        .def("refuse", [](PyFeed& self, const ReceivedFrame& frame, Drop reason) { self.feed.refuse(frame, reason); },
             "frame"_a, "reason"_a, "Count the frame, which was handed out last, as dropped instead.")
        .def("stop", [](PyFeed& self) { self.feed.stop(); }, "From any thread: no more frames; a wait returns.")
        .def("set_min_interval_ns", [](PyFeed& self, std::uint64_t ns) { self.feed.set_min_interval_ns(ns); },
             "interval_ns"_a, "Deliver at most one frame per interval; 0: all.")
        .def("set_throttled", [](PyFeed& self, bool throttled) { self.feed.set_throttled(throttled); }, "is_throttled"_a,
             "Whether the publisher leaves descriptors out for us: then they are no gaps.")
        .def("set_switching", [](PyFeed& self) { self.feed.set_switching(); },
             "Pass over seqs that are not higher, until the first that is.")
        .def("forget", [](PyFeed& self, std::uint32_t attention) { self.feed.forget(attention); }, "attention"_a)
        .def("carry_lost", [](PyFeed& self, std::uint64_t lost) { self.feed.carry_lost(lost); }, "lost"_a,
             "Add to the next frame's dropped_before.")
        .def_prop_ro("attention", [](const PyFeed& self) { return self.feed.attention(); },
                     "Bits: 1 stopped, 2 newer epoch, 4 seq went back, 8 image lost.")
        .def_prop_ro("drops", [](const PyFeed& self) { return counts_of(self.feed.drops()); },
                     nb::sig("def drops(self) -> dict[DropReason, int]"))
        .def_prop_ro("received", [](const PyFeed& self) { return self.feed.received(); })
        .def_prop_ro("duplicates", [](const PyFeed& self) { return self.feed.duplicates(); })
        .def_prop_ro("ignored", [](const PyFeed& self) { return self.feed.ignored(); }, "Descriptors of other epochs.")
        .def_prop_ro("foreign", [](const PyFeed& self) { return self.feed.foreign(); },
                     "Messages that are not version-1 FrameDescriptors.")
        .def_prop_ro("lost", [](const PyFeed& self) { return self.feed.lost(); },
                     "Lost since the last frame that was delivered.")
        .def_prop_ro("last_seq_seen", [](const PyFeed& self) { return self.feed.last_seq_seen(); });

    nb::class_<PyFrameSource>(m, "FrameSource", "What a consumer reads from, as one: every frame costs one call.")
        .def(nb::init<nb::object, nb::object, nb::object, nb::type_object>(), "feed"_a, "descriptors"_a, "mapped"_a,
             "type"_a,
             nb::sig("def __init__(self, feed: Feed, descriptors: Subscription, mapped: object, "
                     "type: builtins.type[FrameBase]) -> None"),
             "`mapped` is the epoch that the feed reads, `type` what its frames are handed out as.")
        .def("next", &PyFrameSource::next, nb::sig("def next(self) -> typing.Any"),
             "The next frame that can be delivered, or None. Never waits.")
        .def_prop_ro("feed", [](const PyFrameSource& self) { return self.feed_object; }, nb::sig("def feed(self) -> Feed"))
        .def_prop_ro("descriptors", [](const PyFrameSource& self) { return self.subscription_object; },
                     nb::sig("def descriptors(self) -> Subscription"))
        .def_prop_ro("mapped", [](const PyFrameSource& self) { return self.mapped; },
                     nb::sig("def mapped(self) -> typing.Any"));

    nb::class_<PyReception>(m, "ReceptionBase", "Where a consumer's frames come from now.")
        .def(nb::init<>())
        .def_prop_rw("source", [](const PyReception& self) { return self.source_object; },
                     [](PyReception& self, nb::object source) { self.set_source(std::move(source)); },
                     nb::for_setter(nb::arg("source").none()),
                     nb::for_getter(nb::sig("def source(self) -> FrameSource | None")),
                     nb::for_setter(nb::sig("def source(self, source: FrameSource | None, /) -> None")),
                     "What poll needs, as one.");

    nb::class_<PyConsumer>(m, "ConsumerBase", nb::type_slots(consumer_slots),
                           "What every loop calls of a consumer; what is not there yet is waited for by `_poll` and `_next`.")
        .def("__init__", [](PyConsumer* self, nb::object reception, bool is_simple) {
                 PyReception& native = nb::cast<PyReception&>(reception);
                 new (self) PyConsumer{std::move(reception), native, is_simple};
             },
             "reception"_a, "is_simple"_a, nb::sig("def __init__(self, reception: ReceptionBase, is_simple: bool) -> None"),
             "`is_simple`: nothing has to run before each poll.");

    nb::class_<PyFramePublisher>(m, "FramePublisher", "A producer's stream in one epoch: slot, copy, commit, descriptor, wake-up.")
        .def(nb::init<nb::object, const std::shared_ptr<aeron::Publication>&, std::uint32_t, std::uint64_t, bool>(),
             "writer"_a, "publication"_a, "stream_id"_a, "epoch"_a, "with_publish_time"_a = false,
             nb::sig("def __init__(self, writer: RingWriter, publication: Publication, stream_id: int, epoch: int, "
                     "with_publish_time: bool = False) -> None"))
        .def(
            "publish",
            [](PyFramePublisher& self, const std::shared_ptr<TensorLayout>& layout, nb::handle data,
               std::optional<std::uint64_t> timestamp_ns, std::uint32_t meta_version, std::uint64_t trace_id,
               std::optional<std::uint64_t> seq, bool is_usual) -> std::optional<std::uint64_t> {
                const Buffer buffer(data, PyBUF_ANY_CONTIGUOUS | PyBUF_FORMAT);
                const std::uint64_t number = seq ? *seq : self.writer.own().next_seq();
                if (!publish_bytes(self, number, layout, buffer.bytes(), timestamp_or_now(timestamp_ns), meta_version,
                                   trace_id))
                    return std::nullopt;
                if (is_usual) self.remember(buffer.view(), layout);
                return number;
            },
            "layout"_a, "data"_a, "timestamp_ns"_a = nb::none(), "meta_version"_a = 0, "trace_id"_a = 0,
            "seq"_a = nb::none(), "is_usual"_a = true,
            nb::sig("def publish(self, layout: TensorLayout, data: collections.abc.Buffer, timestamp_ns: int | None = None, "
                    "meta_version: int = 0, trace_id: int = 0, seq: int | None = None, is_usual: bool = True) -> int | None"),
            "Copy, commit and announce a frame; its seq, or None when no pool holds it. `is_usual`: `layout` is what every "
            "array of the shape and dtype of `data` has.")
        .def(
            "commit",
            [](PyFramePublisher& self, std::optional<std::uint64_t> timestamp_ns, std::uint32_t meta_version,
               std::uint64_t trace_id, std::uint64_t bytes) {
                self.writer.own();
                self.publisher.commit(timestamp_or_now(timestamp_ns), meta_version, trace_id);
                self.publisher.add_bytes(bytes);
            },
            "timestamp_ns"_a = nb::none(), "meta_version"_a = 0, "trace_id"_a = 0, "bytes"_a = 0,
            "Commit the writer's open claim and announce it.")
        .def("check_time", [](const PyFramePublisher& self, std::uint64_t timestamp_ns) { self.publisher.check_time(timestamp_ns); },
             "timestamp_ns"_a, "Raise ValueError for a time before the last frame's, where descriptors carry a time too.")
        .def_rw("until_ns", &PyFramePublisher::until_ns,
                "After this (CLOCK_MONOTONIC) a producer writes nothing: the lease may be over. Whoever publishes asks.")
        .def_prop_ro("bytes", [](const PyFramePublisher& self) { return self.publisher.bytes(); })
        .def_prop_ro("is_choked", [](const PyFramePublisher& self) { return self.publisher.is_choked(); },
                     "Whether a descriptor would be lost now though somebody listens: the log is full, or not yet open.")
        .def_prop_ro("unheard", [](const PyFramePublisher& self) { return self.publisher.unheard(); },
                     "Descriptors for which nobody listened.")
        .def_prop_ro("back_pressured", [](const PyFramePublisher& self) { return self.publisher.back_pressured(); },
                     "Descriptors that the log had no room for.")
        .def_prop_ro("is_broken", [](const PyFramePublisher& self) { return self.publisher.is_broken(); },
                     "Whether the media driver is gone.");
}

void bind_producing(nb::module_& m) {
    nb::class_<PyRoute>(m, "Route", "Where a producer's frames go, and how: set by its session, used by publish.")
        .def(nb::init<>())
        .def_prop_rw("publisher", [](const PyRoute& self) { return self.publisher_object; },
                     [](PyRoute& self, nb::object publisher) { self.set_publisher(std::move(publisher)); },
                     nb::for_setter(nb::arg("publisher").none()),
                     nb::for_getter(nb::sig("def publisher(self) -> FramePublisher | None")),
                     nb::for_setter(nb::sig("def publisher(self, publisher: FramePublisher | None, /) -> None")),
                     "Of the epoch that the producer has adopted; None: it has to look.")
        .def_rw("meta_version", &PyRoute::meta_version, "Of frames that name none.")
        .def_rw("is_plain", &PyRoute::is_plain, "No consumer has a descriptor stream of its own.");

    nb::class_<PyProducer>(m, "ProducerBase", nb::type_slots(producer_slots),
                           "What every loop calls of a producer; what it cannot do itself goes to `_publish`.")
        .def("__init__", [](PyProducer* self, nb::object route) {
                 PyRoute& native = nb::cast<PyRoute&>(route);
                 new (self) PyProducer{std::move(route), native};
             },
             "route"_a, nb::sig("def __init__(self, route: Route) -> None"));
}

void bind_sending(nb::module_& m) {
    nb::class_<ChunkPlan>(m, "ChunkPlan", "How the bridge cuts payloads: chunk 0 is smaller, it carries the slot header too.")
        .def(nb::init<std::uint32_t, std::uint32_t>(), "first_bytes"_a, "next_bytes"_a)
        .def("count", &ChunkPlan::count, "payload_bytes"_a, "How many chunks a payload takes; 0: it cannot be carried.")
        .def(
            "slice",
            [](const ChunkPlan& self, std::uint32_t index, std::uint32_t payload_bytes) {
                if (index >= self.count(payload_bytes)) throw nb::value_error("index must be below count(payload_bytes)");
                const ChunkPlan::Slice slice = self.slice(index, payload_bytes);
                return std::pair(slice.offset, slice.length);
            },
            "index"_a, "payload_bytes"_a, "Offset and length of a chunk.")
        .def_prop_ro("largest_bytes", &ChunkPlan::largest_bytes, "The largest payload that can be carried.");

    nb::enum_<Sending>(m, "Sending", "What became of a frame so far.")
        .value("SENT", Sending::SENT, "every chunk is in the log")
        .value("BACK_PRESSURED", Sending::BACK_PRESSURED, "the log has no room now: resume")
        .value("NOT_CONNECTED", Sending::NOT_CONNECTED, "nobody listens: given up")
        .value("TORN", Sending::TORN, "its producer has overwritten it: given up")
        .value("TOO_LARGE", Sending::TOO_LARGE, "more than 65535 chunks, or than the limit: nothing was sent");

    nb::class_<PyFrameSender>(m, "FrameSender", "Sends frames of one mapped epoch as BridgeFrameChunks, one at a time.")
        .def(nb::init<nb::object, const std::shared_ptr<aeron::Publication>&, std::uint32_t, std::uint64_t,
                      const ChunkPlan&, std::uint64_t, bool>(),
             "reader"_a, "publication"_a, "stream_id"_a, "epoch"_a, "plan"_a, "max_payload_bytes"_a, "with_crc32c"_a = false,
             nb::sig("def __init__(self, reader: RingReader, publication: Publication, stream_id: int, epoch: int, "
                     "plan: ChunkPlan, max_payload_bytes: int, with_crc32c: bool = False) -> None"))
        .def("send", &PyFrameSender::send, "frame"_a, "patience_ns"_a = 0,
             "Begin a frame; wait at most `patience_ns` for room at a time, without the GIL.")
        .def("resume", &PyFrameSender::resume, "patience_ns"_a = 0, "Go on with the frame that had no room.")
        .def("pump", &PyFrameSender::pump, "feed"_a, "descriptors"_a, "others"_a, "patience_ns"_a, "for_ns"_a,
             nb::sig("def pump(self, feed: Feed, descriptors: Subscription, "
                     "others: collections.abc.Sequence[Subscription], patience_ns: int, for_ns: int) -> Sending | None"),
             "Send what the feed brings, and sleep while it brings nothing, without the GIL; until the time is over, one of "
             "the others has something, the feed needs its owner, it is stopped, or a frame is not sent: then why.")
        .def("set_stopped", [](PyFrameSender& self, bool is_stopped) { self.outflow.set_stopped(is_stopped); },
             "is_stopped"_a, "From any thread: whether pump ends after the frame it is at.")
        .def("abandon", [](PyFrameSender& self) { self.sender.abandon(); }, "Send no more of the open frame.")
        .def_prop_ro("is_open", [](const PyFrameSender& self) { return self.sender.is_open(); },
                     "Whether a frame was begun and not finished.")
        .def_prop_ro("seq", [](const PyFrameSender& self) { return self.sender.seq(); },
                     "Of the frame that was begun last, or refused.")
        .def_prop_ro("began_ns", [](const PyFrameSender& self) { return self.sender.began_ns(); },
                     "When the frame was begun that was begun last, by the monotonic clock.")
        .def_prop_ro("crc32c", [](const PyFrameSender& self) { return self.sender.crc32c_sent(); },
                     "Of the slot header and the payload of the frame that was sent last; 0 unless asked for.")
        .def_prop_ro("payload_bytes", [](const PyFrameSender& self) { return self.sender.payload_bytes(); },
                     "Of the frame that was begun last.")
        .def_prop_ro("frames", [](const PyFrameSender& self) { return self.sender.frames(); }, "Sent completely.")
        .def_prop_ro("bytes", [](const PyFrameSender& self) { return self.sender.bytes(); }, "Payload bytes of those.")
        .def_prop_ro("chunks", [](const PyFrameSender& self) { return self.sender.chunks(); }, "Of all frames.");
}

void bind_receiving(nb::module_& m) {
    m.def(
        "crc32c",
        [](nb::handle data, std::uint32_t before) {
            const Buffer buffer(data, PyBUF_ANY_CONTIGUOUS);
            return crc32c(buffer.bytes(), before);
        },
        "data"_a, "before"_a = 0, nb::sig("def crc32c(data: collections.abc.Buffer, before: int = 0) -> int"),
        "CRC32C of a buffer, after bytes whose checksum is `before`.");

    nb::class_<PyAssembler>(m, "Assembler", "One bridged stream: chunks in, whole frames out, every loss counted.")
        .def(
            "__init__",
            [](PyAssembler* self, std::uint32_t stream_id, std::uint32_t max_chunk_bytes, std::uint32_t max_payload_bytes,
               std::uint32_t max_inflight, std::uint64_t timeout_ns, bool needs_checksum) {
                if (max_inflight == 0 || timeout_ns == 0)
                    throw nb::value_error("max_inflight and timeout_ns must be positive");
                new (self) PyAssembler(stream_id,
                                       {max_chunk_bytes, max_payload_bytes, max_inflight, timeout_ns, needs_checksum});
            },
            "stream_id"_a, nb::kw_only(), "max_chunk_bytes"_a, "max_payload_bytes"_a, "max_inflight"_a, "timeout_ns"_a,
            "needs_checksum"_a = false)
        .def(
            "set_source",
            [](PyAssembler& self, std::uint64_t epoch, const std::vector<std::pair<std::uint16_t, std::uint32_t>>& pools) {
                std::vector<Assembler::SourcePool> source;
                for (const auto& [pool_id, stride_bytes] : pools) source.push_back({pool_id, stride_bytes});
                self.assembler->set_source(epoch, std::move(source));
            },
            "epoch"_a, "pools"_a,
            "The latest announce of the source: its epoch, and (pool_id, stride_bytes) of its pools.")
        .def("bind", &PyAssembler::bind, "target"_a.none(), "until_ns"_a = 0,
             nb::sig("def bind(self, target: FramePublisher | RingWriter | None, until_ns: int = 0) -> None"),
             "Publish with this until then; None: there is nothing to publish with.")
        .def(
            "set_paused", [](PyAssembler& self, bool is_paused) { self.assembler->set_paused(is_paused); }, "is_paused"_a)
        .def(
            "set_checksum",
            [](PyAssembler& self, std::uint64_t epoch, std::uint64_t seq, std::uint32_t payload_length, std::uint32_t crc,
               std::uint64_t now_ns) { self.assembler->set_checksum(epoch, seq, payload_length, crc, now_ns); },
            "epoch"_a, "seq"_a, "payload_length"_a, "crc32c"_a, "now_ns"_a, "The sender's checksum of a frame.")
        .def("expire", [](PyAssembler& self, std::uint64_t now_ns) { return self.assembler->expire(now_ns); }, "now_ns"_a,
             "Drop what waited too long; how many frames that were.")
        .def("is_lost", [](const PyAssembler& self, std::uint64_t seq) { return self.assembler->is_lost(seq); }, "seq"_a,
             "Whether this frame was dropped lately.")
        .def_prop_ro("stream_id", [](const PyAssembler& self) { return self.assembler->stream_id(); })
        .def_prop_ro("epoch", [](const PyAssembler& self) { return self.assembler->epoch(); },
                     "Of the latest announce, or None.")
        .def_prop_ro("newest_epoch", [](const PyAssembler& self) { return self.assembler->newest_epoch(); },
                     "The highest that announce or chunks told of.")
        .def_prop_ro("heard_ns", [](const PyAssembler& self) { return self.assembler->heard_ns(); },
                     "When the last chunk of the newest epoch came.")
        .def_prop_ro("published", [](const PyAssembler& self) { return self.assembler->published(); },
                     "The last seq that was published, or None.")
        .def_prop_ro("inflight", [](const PyAssembler& self) { return self.assembler->inflight(); },
                     "Frames under assembly.")
        .def_prop_ro("buffered_bytes", [](const PyAssembler& self) { return self.assembler->buffered_bytes(); },
                     "Of frames that are not assembled in their slot.")
        .def_prop_ro("longest_assembly_ns", [](const PyAssembler& self) { return self.assembler->longest_assembly_ns(); })
        .def_prop_ro(
            "counts",
            [](const PyAssembler& self) {
                const Assembler& assembler = *self.assembler;
                nb::dict counts;
                put_count(counts, "frames_received", "", assembler.frames());
                put_count(counts, "bytes_received", "", assembler.bytes());
                put_count(counts, "chunks_received", "", assembler.chunks());
                put_count(counts, "chunks_duplicate", "", assembler.duplicates());
                put_count(counts, "frames_in_place", "", assembler.in_place());
                put_count(counts, "frames_unseen", "", assembler.unseen());
                put_count(counts, "assembly_ns", "", assembler.assembly_ns());
                for (std::size_t i = 1; i < std::size(kChunkDropNames); ++i)
                    put_count(counts, "chunks_dropped", kChunkDropNames[i], assembler.drops(static_cast<ChunkDrop>(i)));
                for (std::size_t i = 1; i < std::size(kFrameLossNames); ++i)
                    put_count(counts, "frames_dropped", kFrameLossNames[i], assembler.losses(static_cast<FrameLoss>(i)));
                return counts;
            },
            nb::sig("def counts(self) -> dict[tuple[str, str], int]"), "(what, reason): how many; for any thread.");

    nb::class_<Intake>(m, "Intake", "The payload stream of a bridge: each chunk goes to the assembler of its stream.")
        .def(nb::init<>())
        .def("add", [](Intake& self, const PyAssembler& assembler) { self.add(assembler.assembler); }, "assembler"_a,
             nb::keep_alive<1, 2>())
        .def("remove", &Intake::remove, "stream_id"_a)
        .def(
            "poll",
            [](Intake& self, PySubscription& subscription, std::int64_t limit, std::uint64_t now_ns) {
                const std::shared_ptr<aeron::Subscription> kept = subscription.subscription;
                const std::size_t most = positive(limit);
                const nb::gil_scoped_release release;
                return self.poll(*kept, most, now_ns);
            },
            "subscription"_a, "limit"_a, "now_ns"_a, "Take at most `limit` fragments, without the GIL; how many there were.")
        .def(
            "pump",
            [](Intake& self, PySubscription& subscription, const std::vector<PySubscription*>& others, std::int64_t limit,
               std::uint64_t for_ns) {
                std::vector<std::shared_ptr<aeron::Subscription>> kept{subscription.subscription};
                std::vector<aeron::Subscription*> watched;
                for (const PySubscription* other : others) {
                    kept.push_back(other->subscription);
                    watched.push_back(other->subscription.get());
                }
                const std::size_t most = positive(limit);
                const nb::gil_scoped_release release;
                return self.pump(*kept.front(), watched, most, for_ns);
            },
            "subscription"_a, "others"_a, "limit"_a, "for_ns"_a,
            nb::sig("def pump(self, subscription: Subscription, others: collections.abc.Sequence[Subscription], limit: int, "
                    "for_ns: int) -> int"),
            "Take what comes, and sleep while nothing does, without the GIL; until one of the others has something.")
        .def(
            "take",
            [](Intake& self, nb::handle message, std::uint64_t now_ns) {
                const Buffer buffer(message, PyBUF_ANY_CONTIGUOUS);
                self.take(buffer.bytes(), now_ns);
            },
            "message"_a, "now_ns"_a,
            nb::sig("def take(self, message: collections.abc.Buffer, now_ns: int) -> None"),
            "One message, as if it had arrived then.")
        .def_prop_ro(
            "counts",
            [](const Intake& self) {
                nb::dict counts;
                for (std::size_t i = 1; i < std::size(kChunkDropNames); ++i)
                    put_count(counts, "chunks_dropped", kChunkDropNames[i], self.drops(static_cast<ChunkDrop>(i)));
                return counts;
            },
            nb::sig("def counts(self) -> dict[tuple[str, str], int]"),
            "Chunks that belong to no assembler: (what, reason): how many.");
}

}  // namespace

NB_MODULE(_core, m) {
    m.doc() = "The native core of tensorpool: rings in shared memory and Aeron's C API.";
    nb::set_leak_warnings(false);  // objects alive at interpreter exit are not a mistake of the user
    nb::register_exception_translator(translate);
    m.attr("SUPERBLOCK_BYTES") = kSuperblockBytes;
    m.attr("SLOT_BYTES") = kSlotBytes;
    m.attr("MAX_DIMS") = kMaxDims;
    m.attr("MAX_SEQ") = kMaxSeq;
    bind_rings(m);
    bind_aeron(m);
    bind_streams(m);
    bind_producing(m);
    bind_sending(m);
    bind_receiving(m);
}
