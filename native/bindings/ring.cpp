// SPDX-License-Identifier: Apache-2.0
// TensorLayout, SlotFrame, RingWriter and RingReader.
#include "bindings/py_ring.hpp"

#include "bindings/drop_reason.hpp"

namespace tensorpool::bindings {

namespace {

const PyMapping& as_mapping(const nb::object& region) {
    PyMapping* mapping = nullptr;
    if (!nb::try_cast(region, mapping) || mapping == nullptr) throw nb::type_error("a region must be a Mapping");
    return *mapping;
}

const PyMapping& checked(const nb::object& region, bool is_writer) {
    const PyMapping& mapping = as_mapping(region);
    if (is_writer && !mapping.is_writable()) throw nb::value_error("a writer needs writable mappings");
    return mapping;
}

template <typename Container>
nb::tuple to_tuple(const Container& values, std::size_t count) {
    nb::list list;
    for (std::size_t i = 0; i < count; ++i) list.append(values[i]);
    return nb::tuple(list);
}

nb::object frame_or_reason(Drop drop, SlotFrame&& frame) {
    return drop == Drop::NONE ? nb::cast(std::move(frame)) : nb::cast(drop);
}

void bind_layout(nb::module_& m) {
    nb::class_<TensorLayout>(m, "TensorLayout",
                             "dtype, order, shape and strides of a payload, checked once. Strides of 0 are inferred.")
        .def(nb::new_([](int dtype, int major_order, const std::vector<std::int32_t>& dims,
                         const std::vector<std::int32_t>& strides, int progress_unit,
                         std::uint32_t progress_stride_bytes) {
                 return std::make_shared<TensorLayout>(
                     checked_layout(dtype, major_order, dims, strides, progress_unit, progress_stride_bytes));
             }),
             "dtype"_a, "major_order"_a, "dims"_a, "strides"_a = std::vector<std::int32_t>{}, "progress_unit"_a = 0,
             "progress_stride_bytes"_a = 0)
        .def_prop_ro("dtype", [](const TensorLayout& self) { return static_cast<int>(self.dtype); })
        .def_prop_ro("major_order", [](const TensorLayout& self) { return static_cast<int>(self.major_order); })
        .def_prop_ro(
            "shape", [](const TensorLayout& self) { return to_tuple(self.dims, self.ndims); },
            nb::sig("def shape(self) -> tuple[int, ...]"))
        .def_prop_ro(
            "byte_strides", [](const TensorLayout& self) { return to_tuple(self.byte_strides, self.ndims); },
            nb::sig("def byte_strides(self) -> tuple[int, ...]"))
        .def_ro("extent_bytes", &TensorLayout::extent_bytes)
        .def_prop_ro("progress_unit", [](const TensorLayout& self) { return static_cast<int>(self.progress_unit); })
        .def_ro("progress_stride_bytes", &TensorLayout::progress_stride_bytes);

    nb::class_<SlotFrame>(m, "SlotFrame", "A frame that passed every check when it was read.")
        .def_ro("seq", &SlotFrame::seq)
        .def_ro("timestamp_ns", &SlotFrame::timestamp_ns)
        .def_ro("meta_version", &SlotFrame::meta_version)
        .def_ro("trace_id", &SlotFrame::trace_id, "0: none")
        .def_ro("slot", &SlotFrame::slot)
        .def_ro("pool", &SlotFrame::pool, "Index into the reader's pools.")
        .def_ro("values_len_bytes", &SlotFrame::values_len_bytes)
        .def_ro("payload_offset", &SlotFrame::payload_offset, "Where the payload starts in its pool's mapping.")
        .def_prop_ro("layout",
                     [](const SlotFrame& self) { return std::const_pointer_cast<TensorLayout>(self.layout); });
}

void bind_writer(nb::module_& m) {
    nb::class_<PyRingWriter>(m, "RingWriter", "The producer's side of a ring, bound once to writable mappings.")
        .def(nb::init<nb::object, const std::vector<PoolArgument>&, std::uint32_t>(), "header"_a, "pools"_a, "nslots"_a,
             nb::sig("def __init__(self, header: Mapping, pools: collections.abc.Sequence[tuple[int, int, Mapping]], "
                     "nslots: int) -> None"),
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
            nb::sig(
                "def write(self, seq: int, layout: TensorLayout, data: collections.abc.Buffer, timestamp_ns: int = 0, "
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
                return std::pair(self.regions.mapping_of(chosen),
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
        .def(
            "abandon", [](PyRingWriter& self, bool is_known) { self.own().abandon(is_known); }, "is_known"_a = false,
            "Give the open claim up: readers drop the slot. Its seq may be used again, unless consumers know of it.")
        .def(
            "wake", [](PyRingWriter& self) { self.own().wake(monotonic_ns()); },
            "Wake readers that sleep on the newest frame's slot; rate-limited.")
        .def_prop_ro("next_seq", [](const PyRingWriter& self) { return self.writer.next_seq(); })
        .def_prop_ro("is_claimed", [](const PyRingWriter& self) { return self.writer.is_claimed(); })
        .def_prop_ro("written", [](const PyRingWriter& self) { return self.writer.written(); })
        .def_prop_ro("no_pool_drops", [](const PyRingWriter& self) { return self.writer.no_pool_drops(); })
        .def_prop_ro("nslots", [](const PyRingWriter& self) { return self.writer.geometry().nslots(); })
        .def_rw("release_gil_from_bytes", &PyRingWriter::release_gil_from_bytes);
}

void bind_reader(nb::module_& m) {
    nb::class_<PyRingReader>(m, "RingReader", "The consumer's side of a ring, bound once; read-only mappings suffice.")
        .def(nb::init<nb::object, const std::vector<PoolArgument>&, std::uint32_t>(), "header"_a, "pools"_a, "nslots"_a,
             nb::sig("def __init__(self, header: Mapping, pools: collections.abc.Sequence[tuple[int, int, Mapping]], "
                     "nslots: int) -> None"),
             "`pools` are (pool_id, stride_bytes, mapping).")
        .def(
            "read",
            [](PyRingReader& self, std::uint64_t seq) {
                SlotFrame frame;
                const Drop drop = self.reader.read(seq, frame);
                return frame_or_reason(drop, std::move(frame));
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
        .def("kept_view", &PyRingReader::kept_view, "frame"_a,
             nb::sig("def kept_view(self, frame: SlotFrame) -> numpy.typing.NDArray[typing.Any] | None"),
             "A new array over the payload, made from the view that was kept for its slot; None where none was.")
        .def(
            "keep_view",
            [](PyRingReader& self, const SlotFrame& frame, nb::object view, bool is_of_any_version) {
                self.reader.check_own(frame);
                self.views.keep(frame, std::move(view), is_of_any_version);
            },
            "frame"_a, "view"_a, "is_of_any_version"_a = true,
            nb::sig("def keep_view(self, frame: SlotFrame, view: numpy.typing.NDArray[typing.Any], "
                    "is_of_any_version: bool = True) -> None"),
            "Keep a view of the frame's payload for later frames of its slot that have the same layout, and the same "
            "meta_version unless it is of any.")
        .def(
            "intact", [](const PyRingReader& self, const SlotFrame& frame) { return self.reader.intact(frame); },
            "frame"_a, "Whether the frame has not been overwritten so far.")
        .def(
            "read_partial",
            [](PyRingReader& self, std::uint64_t seq) {
                SlotFrame frame;
                const Drop drop = self.reader.read_partial(seq, frame);
                return frame_or_reason(drop, std::move(frame));
            },
            "seq"_a, nb::sig("def read_partial(self, seq: int) -> SlotFrame | DropReason"),
            "Validate the header of a frame that may still be being written.")
        .def(
            "is_held", [](const PyRingReader& self, const SlotFrame& frame) { return self.reader.is_held(frame); },
            "frame"_a, "Whether the slot still belongs to this frame, written to the end or not.")
        .def(
            "newest",
            [](const PyRingReader& self, std::optional<std::uint64_t> since) {
                return since ? self.reader.newest_from(*since) : self.reader.newest();
            },
            "since"_a = nb::none(),
            "The newest committed seq, or None. With `since`, a seq that the ring has had, a few looks from there on "
            "instead of one at every slot; a producer that left out more than 64 seqs may have later frames.")
        .def(
            "is_committed", [](const PyRingReader& self, std::uint64_t seq) { return self.reader.is_committed(seq); },
            "seq"_a, "Whether `seq` is committed, or its slot has moved on to a later frame.")
        .def(
            "wait",
            [](const PyRingReader& self, std::uint64_t seq, std::uint64_t timeout_ns) {
                const nb::gil_scoped_release release;
                return self.reader.wait(seq, timeout_ns);
            },
            "seq"_a, "timeout_ns"_a, "Sleep until is_committed(seq); False on timeout.")
        .def_prop_ro(
            "drops", [](const PyRingReader& self) { return counts_of(self.reader.drops()); },
            nb::sig("def drops(self) -> dict[DropReason, int]"), "How many reads failed, by reason.")
        .def_prop_ro("accepted", [](const PyRingReader& self) { return self.reader.drops().count(Drop::NONE); })
        .def_prop_ro(
            "pools",
            [](const PyRingReader& self) {
                nb::list pools;
                for (const Pool& pool : self.reader.geometry().pools())
                    pools.append(nb::make_tuple(pool.pool_id, pool.stride_bytes, self.regions.mapping_of(pool)));
                return pools;
            },
            nb::sig("def pools(self) -> list[tuple[int, int, Mapping]]"), "In the order that SlotFrame.pool indexes.")
        .def_prop_ro("nslots", [](const PyRingReader& self) { return self.reader.geometry().nslots(); })
        .def_rw("release_gil_from_bytes", &PyRingReader::release_gil_from_bytes);
}

}  // namespace

Regions::Regions(nb::object header, const std::vector<PoolArgument>& pools, bool is_writer)
    : header_(std::move(header)) {
    checked(header_, is_writer);
    for (const auto& [pool_id, stride_bytes, region] : pools) {
        pools_.push_back({pool_id, stride_bytes, checked(region, is_writer).bytes()});
        mappings_.push_back(region);
    }
}

RingGeometry Regions::geometry(std::uint32_t nslots) const { return {as_mapping(header_).bytes(), pools_, nslots}; }

nb::object Regions::mapping_of(const Pool& pool) const {
    for (std::size_t i = 0; i < pools_.size(); ++i)
        if (pools_[i].pool_id == pool.pool_id) return mappings_[i];
    return nb::none();
}

void bind_ring(nb::module_& m) {
    bind_layout(m);
    bind_writer(m);
    bind_reader(m);
}

}  // namespace tensorpool::bindings
