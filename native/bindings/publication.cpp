// SPDX-License-Identifier: Apache-2.0
// Publication, and OfferResult: what became of a message that was offered.
#include "aeron_publication.hpp"

#include <cstring>

#include "bindings/python.hpp"
#include "descriptor.hpp"

namespace tensorpool::bindings {

namespace {

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

void bind_offer_result(nb::module_& m) {
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
}

nb::object offer_parts(aeron::Publication& publication, nb::sequence parts) {
    std::vector<std::unique_ptr<Buffer>> buffers;
    std::vector<aeron::IoVec> vectors;
    for (nb::handle part : parts) {
        buffers.push_back(std::make_unique<Buffer>(part, PyBUF_SIMPLE));
        vectors.push_back({buffers.back()->bytes().data(), buffers.back()->bytes().size()});
    }
    return to_offer_result(publication.offerv(vectors));
}

nb::object claim_message(aeron::Publication& publication, nb::handle message) {
    const Buffer buffer(message, PyBUF_SIMPLE);
    const std::span<const std::uint8_t> bytes = buffer.bytes();
    return to_offer_result(
        publication.claim(bytes.size(), [bytes](std::uint8_t* at) { std::memcpy(at, bytes.data(), bytes.size()); }));
}

nb::object claim_descriptor(aeron::Publication& publication, std::uint32_t stream_id, std::uint64_t epoch,
                            std::uint64_t seq, std::optional<std::uint64_t> timestamp_ns,
                            std::optional<std::uint32_t> meta_version, std::uint64_t trace_id) {
    const FrameDescriptor descriptor{stream_id,
                                     epoch,
                                     seq,
                                     timestamp_ns.value_or(FrameDescriptor::kNullU64),
                                     meta_version.value_or(FrameDescriptor::kNullU32),
                                     trace_id};
    return to_offer_result(
        publication.claim(FrameDescriptor::kBytes, [&](std::uint8_t* at) { descriptor.encode(at); }));
}

}  // namespace

void bind_publication(nb::module_& m) {
    bind_offer_result(m);
    nb::class_<aeron::Publication>(m, "Publication")
        .def(
            "offer",
            [](aeron::Publication& self, nb::handle message) {
                const Buffer buffer(message, PyBUF_SIMPLE);
                return to_offer_result(self.offer(buffer.bytes()));
            },
            "message"_a, nb::sig("def offer(self, message: collections.abc.Buffer) -> OfferResult"),
            "Append a message to the log, fragmented where it exceeds the MTU.")
        .def("offerv", &offer_parts, "parts"_a,
             nb::sig("def offerv(self, parts: collections.abc.Sequence[collections.abc.Buffer]) -> OfferResult"),
             "Gather the parts into one message.")
        .def("try_claim", &claim_message, "message"_a,
             nb::sig("def try_claim(self, message: collections.abc.Buffer) -> OfferResult"),
             "Write a message of one fragment straight into the log: claim, fill and commit in one call.")
        .def(
            "offer_descriptor", &claim_descriptor, "stream_id"_a, "epoch"_a, "seq"_a, "timestamp_ns"_a = nb::none(),
            "meta_version"_a = nb::none(), "trace_id"_a = 0,
            nb::sig("def offer_descriptor(self, stream_id: int, epoch: int, seq: int, timestamp_ns: int | None = None, "
                    "meta_version: int | None = None, trace_id: int = 0) -> OfferResult"),
            "Encode a FrameDescriptor straight into the log.")
        .def("close", &aeron::Publication::close, nb::call_guard<nb::gil_scoped_release>())
        .def("revoke", &aeron::Publication::revoke, nb::call_guard<nb::gil_scoped_release>(),
             "Close it without waiting for subscribers that have not read its log; a plain close before Aeron 1.48.")
        .def_prop_ro("is_closed", &aeron::Publication::is_closed)
        .def_prop_ro("is_connected", &aeron::Publication::is_connected)
        .def_prop_ro("has_room", &aeron::Publication::has_room,
                     "Whether a message would be accepted now: there is a subscriber, and the log is not full.")
        .def_prop_ro("position", &aeron::Publication::position)
        .def_prop_ro("channel", &aeron::Publication::channel)
        .def_prop_ro("stream_id", &aeron::Publication::stream_id)
        .def_prop_ro("session_id", &aeron::Publication::session_id)
        .def_prop_ro("max_message_length", &aeron::Publication::max_message_length)
        .def_prop_ro("max_payload_length", &aeron::Publication::max_payload_length)
        .def_prop_ro("term_buffer_length", &aeron::Publication::term_buffer_length);
}

}  // namespace tensorpool::bindings
