// SPDX-License-Identifier: Apache-2.0
// The sending end of a bridge: ChunkPlan and StreamSender; and BridgePump, which turns both ends.
#include "bindings/counts.hpp"
#include "bindings/py_descriptor_feed.hpp"
#include "bindings/py_subscription.hpp"
#include "bridge_pump.hpp"

namespace tensorpool::bindings {

namespace {

struct PyStreamSender {
    PyStreamSender(nb::object object, const std::shared_ptr<aeron::Publication>& payload,
                   const std::shared_ptr<aeron::Publication>& control, std::uint32_t stream_id, std::uint64_t epoch,
                   const ChunkPlan& plan, SendOptions options, std::uint64_t timeout_ns)
        : reader_object(std::move(object)),
          sender(nb::cast<PyRingReader&>(reader_object).reader, payload, control, stream_id, epoch, plan,
                 std::move(options), timeout_ns) {}

    nb::object reader_object;
    StreamSender sender;
};

std::pair<std::uint32_t, std::uint32_t> slice_of(const ChunkPlan& plan, std::uint32_t index,
                                                 std::uint32_t payload_bytes) {
    if (index >= plan.count(payload_bytes)) throw nb::value_error("index must be below count(payload_bytes)");
    const ChunkPlan::Slice slice = plan.slice(index, payload_bytes);
    return {slice.offset, slice.length};
}

Counts counts_of(const StreamSender& sender) {
    Counts counts;
    put_count(counts, "frames_sent", "", sender.frames());
    put_count(counts, "bytes_sent", "", sender.bytes());
    put_count(counts, "chunks_sent", "", sender.chunks());
    put_count(counts, "messages_forwarded", "checksum", sender.digests());
    put_count(counts, "messages_dropped", "checksum", sender.digests_dropped());
    for (std::size_t i = 0; i < kSendDropNames.size(); ++i)
        put_count(counts, "frames_dropped", kSendDropNames[i], sender.drops(static_cast<SendDrop>(i)));
    return counts;
}

using PyOutflow = std::tuple<PyStreamSender*, PyDescriptorFeed*, PySubscription*>;
using PyInflow = std::tuple<ChunkRouter*, PySubscription*, PySubscription*>;

int pump(BridgePump& self, const std::vector<PyOutflow>& outflows, const std::optional<PyInflow>& inflow,
         const std::vector<PySubscription*>& others, std::uint64_t for_ns) {
    std::vector<BridgePump::Outflow> streams;
    for (const auto& [sender, feed, descriptors] : outflows)
        streams.push_back({sender->sender, feed->feed, descriptors->subscription});
    const WatchedSubscriptions watched(others);
    if (!inflow) {
        const nb::gil_scoped_release release;
        return self.pump(streams, nullptr, watched.all(), for_ns);
    }
    const auto& [router, payload, control] = *inflow;
    const std::shared_ptr<aeron::Subscription> chunks = payload->subscription, messages = control->subscription;
    const nb::gil_scoped_release release;
    const ChunkRouter::Busy busy(*router);
    const BridgePump::Inflow received{busy, *chunks, *messages};
    return self.pump(streams, &received, watched.all(), for_ns);
}

void bind_stream_sender(nb::module_& m) {
    using Self = PyStreamSender;
    nb::class_<Self>(m, "StreamSender",
                     "Sends the frames of one mapped epoch as BridgeFrameChunks; every loss counted.")
        .def(
            "__init__",
            [](Self* self, nb::object reader, const std::shared_ptr<aeron::Publication>& payload,
               const std::shared_ptr<aeron::Publication>& control, std::uint32_t stream_id, std::uint64_t epoch,
               const ChunkPlan& plan, std::uint64_t max_payload_bytes, std::uint64_t timeout_ns, bool is_traced,
               bool with_digest, const nb::bytes& mac_key) {
                const auto* const key = reinterpret_cast<const std::uint8_t*>(mac_key.c_str());
                SendOptions options{is_traced ? ChunkLayout::TRACED : ChunkLayout::SPECIFICATION,
                                    max_payload_bytes,
                                    with_digest,
                                    {key, key + mac_key.size()}};
                new (self)
                    Self(std::move(reader), payload, control, stream_id, epoch, plan, std::move(options), timeout_ns);
            },
            "reader"_a, "payload"_a, "control"_a, "stream_id"_a, "epoch"_a, "plan"_a, nb::kw_only(),
            "max_payload_bytes"_a, "timeout_ns"_a, "is_traced"_a = false, "with_digest"_a = false,
            "mac_key"_a = nb::bytes("", 0),
            nb::sig(
                "def __init__(self, reader: RingReader, payload: Publication, control: Publication, stream_id: int, "
                "epoch: int, plan: ChunkPlan, *, max_payload_bytes: int, timeout_ns: int, is_traced: bool = False, "
                "with_digest: bool = False, mac_key: bytes = b\"\") -> None"),
            "Chunks go to `payload`, digests to `control`. A frame that is not sent in `timeout_ns` is given up.")
        .def(
            "set_announced", [](Self& self, bool is_announced) { self.sender.set_announced(is_announced); },
            "is_announced"_a, "Whether the receiver knows the epoch: before that no frame is sent.")
        .def(
            "set_paused", [](Self& self, bool is_paused) { self.sender.set_paused(is_paused); }, "is_paused"_a,
            "From any thread: whether frames are dropped and counted instead of sent.")
        .def(
            "take_failure", [](Self& self) { return self.sender.take_failure(); },
            "Whether reading the descriptors failed since this was asked last.")
        .def(
            "end", [](Self& self) { self.sender.end(); }, "The epoch is over: give up what is not sent.")
        .def_prop_ro(
            "is_open", [](const Self& self) { return self.sender.is_open(); },
            "Whether a frame was begun and not finished.")
        .def_prop_ro(
            "counts", [](const Self& self) { return counts_of(self.sender); },
            nb::sig("def counts(self) -> dict[tuple[str, str], int]"), "(what, reason): how many; for any thread.");
}

}  // namespace

void bind_frame_sender(nb::module_& m) {
    nb::class_<ChunkPlan>(m, "ChunkPlan",
                          "How the bridge cuts payloads: chunk 0 is smaller, it carries the slot header too.")
        .def(nb::init<std::uint32_t, std::uint32_t>(), "first_bytes"_a, "next_bytes"_a)
        .def("count", &ChunkPlan::count, "payload_bytes"_a, "How many chunks a payload takes; 0: it cannot be carried.")
        .def("slice", &slice_of, "index"_a, "payload_bytes"_a, "Offset and length of a chunk.")
        .def_prop_ro("largest_bytes", &ChunkPlan::largest_bytes, "The largest payload that can be carried.");
    bind_stream_sender(m);
    nb::class_<BridgePump>(m, "BridgePump",
                           "The payload of all mappings of a bridge, sent and received without Python.")
        .def(nb::init<>())
        .def(
            "pump", &pump, "outflows"_a, "inflow"_a.none(), "others"_a, "for_ns"_a,
            nb::sig("def pump(self, outflows: collections.abc.Sequence[tuple[StreamSender, DescriptorFeed, "
                    "Subscription]], inflow: tuple[ChunkRouter, Subscription, Subscription] | None, others: "
                    "collections.abc.Sequence[Subscription], for_ns: int) -> int"),
            "Send the frames of the feeds, and take chunks and digests from the payload and the control stream, without "
            "the GIL; sleep while there are none. At least one round; until the time is over, the control stream or one "
            "of the others has a message for the owner, or a feed or a sender needs it. How many frames and fragments "
            "there were.");
}

}  // namespace tensorpool::bindings
