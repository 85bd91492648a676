// SPDX-License-Identifier: Apache-2.0
// The sending end of a bridge: ChunkPlan, SendResult and FrameSender.
#include "bindings/py_descriptor_feed.hpp"
#include "bindings/py_subscription.hpp"
#include "frame_pump.hpp"

namespace tensorpool::bindings {

namespace {

std::vector<std::uint8_t> bytes_of(const nb::bytes& bytes) {
    const auto* const at = reinterpret_cast<const std::uint8_t*>(bytes.c_str());
    return {at, at + bytes.size()};
}

struct PyFrameSender {
    PyFrameSender(nb::object object, const std::shared_ptr<aeron::Publication>& publication, std::uint32_t stream_id,
                  std::uint64_t epoch, const ChunkPlan& plan, std::uint64_t max_payload_bytes, bool with_digest,
                  const nb::bytes& mac_key)
        : reader_object(std::move(object)),
          sender(nb::cast<PyRingReader&>(reader_object).reader, publication, stream_id, epoch, plan, max_payload_bytes,
                 with_digest, bytes_of(mac_key)),
          frame_pump(sender) {}

    // Small frames go with the GIL: giving it up can take longer than sending them.
    SendResult send(const SlotFrame& frame, std::uint64_t patience_ns) {
        if (frame.values_len_bytes >= kSendWithoutGilFromBytes) {
            const nb::gil_scoped_release release;
            return sender.send(frame, patience_ns);
        }
        const SendResult result = sender.send(frame, 0);
        return result == SendResult::BACK_PRESSURED && patience_ns > 0 ? resume(patience_ns) : result;
    }
    SendResult resume(std::uint64_t patience_ns) {
        const nb::gil_scoped_release release;
        return sender.resume(patience_ns);
    }
    std::optional<SendResult> pump(PyDescriptorFeed& feed, PySubscription& descriptors,
                                   const std::vector<PySubscription*>& others, std::uint64_t patience_ns,
                                   std::uint64_t for_ns) {
        const std::shared_ptr<aeron::Subscription> kept = descriptors.subscription;
        const WatchedSubscriptions watched(others);
        const nb::gil_scoped_release release;
        return frame_pump.pump(feed.feed, *kept, watched.all(), patience_ns, for_ns);
    }

    static constexpr std::size_t kSendWithoutGilFromBytes = std::size_t{64} << 10;
    nb::object reader_object;
    FrameSender<aeron::Publication> sender;
    FramePump frame_pump;
};

std::pair<std::uint32_t, std::uint32_t> slice_of(const ChunkPlan& plan, std::uint32_t index,
                                                 std::uint32_t payload_bytes) {
    if (index >= plan.count(payload_bytes)) throw nb::value_error("index must be below count(payload_bytes)");
    const ChunkPlan::Slice slice = plan.slice(index, payload_bytes);
    return {slice.offset, slice.length};
}

}  // namespace

void bind_frame_sender(nb::module_& m) {
    nb::class_<ChunkPlan>(m, "ChunkPlan",
                          "How the bridge cuts payloads: chunk 0 is smaller, it carries the slot header too.")
        .def(nb::init<std::uint32_t, std::uint32_t>(), "first_bytes"_a, "next_bytes"_a)
        .def("count", &ChunkPlan::count, "payload_bytes"_a, "How many chunks a payload takes; 0: it cannot be carried.")
        .def("slice", &slice_of, "index"_a, "payload_bytes"_a, "Offset and length of a chunk.")
        .def_prop_ro("largest_bytes", &ChunkPlan::largest_bytes, "The largest payload that can be carried.");

    nb::enum_<SendResult>(m, "SendResult", "What became of a frame so far.")
        .value("SENT", SendResult::SENT, "every chunk is in the log")
        .value("BACK_PRESSURED", SendResult::BACK_PRESSURED, "the log has no room now: resume")
        .value("NOT_CONNECTED", SendResult::NOT_CONNECTED, "there is no subscriber: given up")
        .value("TORN", SendResult::TORN, "its producer has overwritten it: given up")
        .value("TOO_LARGE", SendResult::TOO_LARGE, "more than 65535 chunks, or than the limit: nothing was sent");

    using Self = PyFrameSender;
    nb::class_<Self>(m, "FrameSender", "Sends frames of one mapped epoch as BridgeFrameChunks, one at a time.")
        .def(nb::init<nb::object, const std::shared_ptr<aeron::Publication>&, std::uint32_t, std::uint64_t,
                      const ChunkPlan&, std::uint64_t, bool, const nb::bytes&>(),
             "reader"_a, "publication"_a, "stream_id"_a, "epoch"_a, "plan"_a, "max_payload_bytes"_a,
             "with_digest"_a = false, "mac_key"_a = nb::bytes("", 0),
             nb::sig(
                 "def __init__(self, reader: RingReader, publication: Publication, stream_id: int, epoch: int, "
                 "plan: ChunkPlan, max_payload_bytes: int, with_digest: bool = False, mac_key: bytes = b\"\") -> None"))
        .def("send", &Self::send, "frame"_a, "patience_ns"_a = 0,
             "Begin a frame; wait at most `patience_ns` for room at a time, without the GIL.")
        .def("resume", &Self::resume, "patience_ns"_a = 0, "Go on with the frame that had no room.")
        .def("pump", &Self::pump, "feed"_a, "descriptors"_a, "others"_a, "patience_ns"_a, "for_ns"_a,
             nb::sig("def pump(self, feed: DescriptorFeed, descriptors: Subscription, "
                     "others: collections.abc.Sequence[Subscription], patience_ns: int, for_ns: int) "
                     "-> SendResult | None"),
             "Send the frames of the feed, and sleep while there is none, without the GIL; until the time is over, one "
             "of the others has a message, the feed needs its owner, it is stopped, or a frame is not sent: then why.")
        .def(
            "set_stopped", [](Self& self, bool is_stopped) { self.frame_pump.set_stopped(is_stopped); }, "is_stopped"_a,
            "From any thread: whether pump ends after the frame it is at.")
        .def(
            "abandon", [](Self& self) { self.sender.abandon(); }, "Send no more of the open frame.")
        .def_prop_ro(
            "is_open", [](const Self& self) { return self.sender.is_open(); },
            "Whether a frame was begun and not finished.")
        .def_prop_ro(
            "seq", [](const Self& self) { return self.sender.seq(); }, "Of the frame that was begun last, or refused.")
        .def_prop_ro(
            "began_ns", [](const Self& self) { return self.sender.began_ns(); },
            "When the last frame was begun, by the monotonic clock.")
        .def_prop_ro(
            "crc32c", [](const Self& self) { return self.sender.digest().crc32c; },
            "Of the slot header and the payload of the frame that was sent last; 0 unless asked for without a key.")
        .def_prop_ro(
            "mac",
            [](const Self& self) {
                const FrameDigest digest = self.sender.digest();
                return nb::bytes(reinterpret_cast<const char*>(digest.mac.data()), digest.mac.size());
            },
            "Of the frame that was sent last, with the key.")
        .def_prop_ro(
            "payload_bytes", [](const Self& self) { return self.sender.payload_bytes(); },
            "Of the frame that was begun last.")
        .def_prop_ro(
            "frames", [](const Self& self) { return self.sender.frames(); }, "Sent completely.")
        .def_prop_ro(
            "bytes", [](const Self& self) { return self.sender.bytes(); }, "Payload bytes of those.")
        .def_prop_ro("chunks", [](const Self& self) { return self.sender.chunks(); }, "Of all frames.");
}

}  // namespace tensorpool::bindings
