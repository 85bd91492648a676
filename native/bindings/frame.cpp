// SPDX-License-Identifier: Apache-2.0
// ReceivedFrame, and FrameBase: the native half of tensorpool.client.frame.Frame.
#include "bindings/py_frame.hpp"

namespace tensorpool::bindings {

namespace {

std::optional<std::uint64_t> publish_timestamp_ns(const ReceivedFrame& frame) {
    return frame.publish_timestamp_ns == FrameDescriptor::kNullU64 ? std::nullopt
                                                                   : std::optional(frame.publish_timestamp_ns);
}

}  // namespace

void bind_frame(nb::module_& m) {
    nb::class_<ReceivedFrame, SlotFrame>(m, "ReceivedFrame", "A frame with what its descriptor said about it.")
        .def_prop_ro("publish_timestamp_ns", &publish_timestamp_ns)
        .def_ro("dropped_before", &ReceivedFrame::dropped_before, "Lost since the frame delivered before this one.");

    nb::class_<PyFrame>(m, "FrameBase", "What every loop touches of a frame.")
        .def(
            "__init__",
            [](PyFrame* self, nb::object mapped, const ReceivedFrame& slot) {
                nb::object reader = mapped.attr("reader");
                const PyRingReader& native = nb::cast<PyRingReader&>(reader);
                new (self) PyFrame{std::move(mapped), std::move(reader), &native, slot};
            },
            "mapped"_a, "slot"_a, nb::sig("def __init__(self, mapped: object, slot: ReceivedFrame) -> None"))
        .def_prop_ro("array", &PyFrame::array, nb::sig("def array(self) -> numpy.typing.NDArray[typing.Any]"),
                     "A read-only view of the payload, without a copy. BIT frames show their packed bytes.")
        .def("is_intact", &PyFrame::is_intact,
             "Whether everything read from the view so far was this frame. One that is not counts as dropped.")
        .def("_copy_like", &PyFrame::copy_like, "out"_a,
             nb::sig("def _copy_like(self, out: collections.abc.Buffer) -> bool | None"),
             "Whether the copy is whole; None, and no copy, where `out` differs in shape, dtype or strides.")
        .def_prop_ro("nbytes", [](const PyFrame& self) { return self.slot.values_len_bytes; })
        .def_prop_ro("seq", [](const PyFrame& self) { return self.slot.seq; })
        .def_prop_ro(
            "meta_version", [](const PyFrame& self) { return self.slot.meta_version; },
            "Which metadata applies; 0 is none. See `Consumer.metadata`.")
        .def_prop_ro(
            "trace_id", [](const PyFrame& self) { return self.slot.trace_id; }, "0: not traced.")
        .def_prop_ro(
            "dropped_before", [](const PyFrame& self) { return self.slot.dropped_before; },
            "How many frames were lost between the one delivered before and this one.")
        .def_prop_ro(
            "_mapped", [](const PyFrame& self) { return self.mapped; }, nb::sig("def _mapped(self) -> typing.Any"))
        .def_prop_ro("_slot", [](const PyFrame& self) { return &self.slot; }, nb::rv_policy::reference_internal);
}

}  // namespace tensorpool::bindings
