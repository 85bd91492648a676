// SPDX-License-Identifier: Apache-2.0
// DescriptorFeed and LateFrames.
#include "bindings/py_descriptor_feed.hpp"

#include "bindings/drop_reason.hpp"
#include "bindings/py_subscription.hpp"

namespace tensorpool::bindings {

void bind_descriptor_feed(nb::module_& m) {
    nb::class_<LateFrames>(m, "LateFrames", "How many delivered frames their readers found overwritten, in all epochs.")
        .def(nb::new_([] { return std::make_shared<LateFrames>(); }))
        .def_prop_ro("count", &LateFrames::count);

    using Self = PyDescriptorFeed;
    nb::class_<Self>(m, "DescriptorFeed", "A consumer's stream in one epoch: descriptors in, validated frames out.")
        .def(nb::init<nb::object, std::uint32_t, std::uint64_t, std::optional<std::uint64_t>, std::uint64_t,
                      const std::shared_ptr<LateFrames>&>(),
             "reader"_a, "stream_id"_a, "epoch"_a, "expected"_a = nb::none(), "max_outstanding"_a = 0,
             "late"_a = nb::none(),
             nb::sig("def __init__(self, reader: RingReader, stream_id: int, epoch: int, expected: int | None = None, "
                     "max_outstanding: int = 0, late: LateFrames | None = None) -> None"),
             "`expected` is the first seq that counts; without it the first descriptor decides. `received` and `drops` "
             "are as of each delivery; `late` counts the frames that moved from the one to the other since.")
        .def(
            "next",
            [](Self& self, PySubscription& subscription) -> std::optional<ReceivedFrame> {
                ReceivedFrame frame;
                if (!self.feed.next(*subscription.subscription, frame)) return std::nullopt;
                return frame;
            },
            "subscription"_a, "The next frame that can be delivered, or None. Never waits.")
        .def(
            "latest",
            [](Self& self, PySubscription& subscription) -> std::optional<ReceivedFrame> {
                ReceivedFrame frame;
                if (!self.feed.latest(*subscription.subscription, frame)) return std::nullopt;
                return frame;
            },
            "subscription"_a, "The newest frame of the ring, delivered before or not. Never waits.")
        .def(
            "wait",
            [](Self& self, PySubscription& subscription, std::uint64_t timeout_ns) {
                const std::shared_ptr<aeron::Subscription> kept = subscription.subscription;
                const nb::gil_scoped_release release;
                return self.feed.wait(*kept, timeout_ns);
            },
            "subscription"_a, "timeout_ns"_a,
            "Sleep until there is something for next(), the owner is needed, or the time is over: then False.")
        .def(
            "finish", [](Self& self) { return self.feed.finish(); },
            "No more frames; the next seq that is not accounted for, or None where no frame was announced.")
        .def(
            "discard", [](Self& self, PySubscription& subscription) { self.feed.discard(*subscription.subscription); },
            "subscription"_a, "Skip every descriptor that was sent before now.")
        .def(
            "refuse", [](Self& self, const ReceivedFrame& frame, Drop reason) { self.feed.refuse(frame, reason); },
            "frame"_a, "reason"_a, "Count the frame, which was handed out last, as dropped instead.")
        .def(
            "stop", [](Self& self) { self.feed.stop(); }, "From any thread: no more frames; a wait returns.")
        .def(
            "set_min_interval_ns", [](Self& self, std::uint64_t ns) { self.feed.set_min_interval_ns(ns); },
            "interval_ns"_a, "Deliver at most one frame per interval; 0: all.")
        .def(
            "set_throttled", [](Self& self, bool is_throttled) { self.feed.set_throttled(is_throttled); },
            "is_throttled"_a, "Whether the publisher leaves descriptors out for this consumer: then they are no gaps.")
        .def(
            "set_switching", [](Self& self) { self.feed.set_switching(); },
            "Skip seqs that are not higher, until the first that is.")
        .def(
            "forget", [](Self& self, std::uint32_t attention) { self.feed.forget(attention); }, "attention"_a)
        .def(
            "carry_lost", [](Self& self, std::uint64_t lost) { self.feed.carry_lost(lost); }, "lost"_a,
            "Add to the next frame's dropped_before.")
        .def_prop_ro(
            "attention", [](const Self& self) { return self.feed.attention(); },
            "Bits: 1 stopped, 2 newer epoch, 4 seq went back, 8 image lost.")
        .def_prop_ro(
            "drops", [](const Self& self) { return counts_of(self.feed.drops()); },
            nb::sig("def drops(self) -> dict[DropReason, int]"))
        .def_prop_ro("received", [](const Self& self) { return self.feed.received(); })
        .def_prop_ro("duplicates", [](const Self& self) { return self.feed.duplicates(); })
        .def_prop_ro(
            "ignored", [](const Self& self) { return self.feed.ignored(); }, "Descriptors of other epochs.")
        .def_prop_ro(
            "foreign", [](const Self& self) { return self.feed.foreign(); },
            "Messages that are not version-1 FrameDescriptors.")
        .def_prop_ro(
            "lost", [](const Self& self) { return self.feed.lost(); }, "Lost since the last frame that was delivered.")
        .def_prop_ro("last_seq_seen", [](const Self& self) { return self.feed.last_seq_seen(); });
}

}  // namespace tensorpool::bindings
