// SPDX-License-Identifier: Apache-2.0
// The receiving end of a bridge: Assembler and ChunkRouter.
#include "assembler.hpp"

#include "bindings/counts.hpp"
#include "bindings/py_frame_publisher.hpp"
#include "bindings/py_subscription.hpp"
#include "chunk_router.hpp"

namespace tensorpool::bindings {

namespace {

// A local ring and, with a FramePublisher, the consumers of its stream.
class PyFrameTarget final : public FrameTarget {
public:
    explicit PyFrameTarget(nb::object object) : object_(std::move(object)) {
        if (nb::try_cast(object_, publisher_)) {
            writer_ = &publisher_->writer;
        } else if (!nb::try_cast(object_, writer_)) {
            throw nb::type_error("frames go to a FramePublisher or a RingWriter");
        }
        writer_->own();
    }
    RingWriter& ring() noexcept override { return writer_->writer; }
    void announce(std::uint64_t seq, std::uint32_t meta_version, std::uint64_t trace_id, std::uint64_t bytes) override {
        if (publisher_ != nullptr) publisher_->publisher.announce_committed(seq, meta_version, trace_id, bytes);
    }
    bool is_of(const nb::object& object) const noexcept { return object_.is(object); }

private:
    nb::object object_;
    PyFramePublisher* publisher_ = nullptr;
    PyRingWriter* writer_ = nullptr;
};

struct PyAssembler {
    PyAssembler(std::uint32_t stream_id, const AssemblyLimits& limits)
        : assembler(std::make_shared<Assembler>(stream_id, limits)) {}
    ~PyAssembler() {
        if (target) assembler->bind(nullptr, 0);  // a router may still hold the assembler
    }
    PyAssembler(const PyAssembler&) = delete;
    PyAssembler& operator=(const PyAssembler&) = delete;

    void bind(const nb::object& object, std::uint64_t until_ns) {
        if (object.is_none()) {
            assembler->bind(nullptr, 0);
            target.reset();
        } else if (target && target->is_of(object)) {
            assembler->bind(target.get(), until_ns);
        } else {
            auto next = std::make_unique<PyFrameTarget>(object);
            assembler->bind(next.get(), until_ns);
            target = std::move(next);
        }
    }

    std::shared_ptr<Assembler> assembler;
    std::unique_ptr<PyFrameTarget> target;
};

// `source` has drops(ChunkDrop).
template <typename Source>
void put_chunk_drops(Counts& counts, const Source& source) {
    for (std::size_t i = 1; i < kChunkDropNames.size(); ++i)
        put_count(counts, "chunks_dropped", kChunkDropNames[i], source.drops(static_cast<ChunkDrop>(i)));
}

Counts counts_of(const Assembler& assembler) {
    Counts counts;
    put_count(counts, "frames_received", "", assembler.frames());
    put_count(counts, "bytes_received", "", assembler.bytes());
    put_count(counts, "chunks_received", "", assembler.chunks());
    put_count(counts, "chunks_duplicate", "", assembler.duplicates());
    put_count(counts, "frames_in_place", "", assembler.in_place());
    put_count(counts, "frames_unseen", "", assembler.unseen());
    put_count(counts, "assembly_ns", "", assembler.assembly_ns());
    put_count(counts, "control_dropped", "session", assembler.digests_dropped());
    put_chunk_drops(counts, assembler);
    for (std::size_t i = 1; i < kFrameLossNames.size(); ++i)
        put_count(counts, "frames_dropped", kFrameLossNames[i], assembler.losses(static_cast<FrameLoss>(i)));
    return counts;
}

void bind_one_assembler(nb::module_& m) {
    using Self = PyAssembler;
    nb::class_<Self>(m, "Assembler", "One bridged stream: chunks in, whole frames out, every loss counted.")
        .def(
            "__init__",
            [](Self* self, std::uint32_t stream_id, std::uint32_t max_chunk_bytes, std::uint32_t max_payload_bytes,
               std::uint32_t max_inflight, std::uint64_t timeout_ns, bool needs_digest, const nb::bytes& mac_key) {
                const auto* const key = reinterpret_cast<const std::uint8_t*>(mac_key.c_str());
                new (self) Self(stream_id, {max_chunk_bytes,
                                            max_payload_bytes,
                                            max_inflight,
                                            timeout_ns,
                                            needs_digest,
                                            {key, key + mac_key.size()}});
            },
            "stream_id"_a, nb::kw_only(), "max_chunk_bytes"_a, "max_payload_bytes"_a, "max_inflight"_a, "timeout_ns"_a,
            "needs_digest"_a = false, "mac_key"_a = nb::bytes("", 0))
        .def(
            "set_source",
            [](Self& self, std::uint64_t epoch, const std::vector<std::pair<std::uint16_t, std::uint32_t>>& pools,
               std::uint64_t epoch_limit, std::uint64_t max_jump) {
                std::vector<Assembler::SourcePool> source;
                for (const auto& [pool_id, stride_bytes] : pools) source.push_back({pool_id, stride_bytes});
                self.assembler->set_source(epoch, std::move(source), epoch_limit, max_jump);
            },
            "epoch"_a, "pools"_a, nb::kw_only(), "epoch_limit"_a = ~std::uint64_t{0}, "max_jump"_a = 0,
            "The latest announce of the source: its epoch, and (pool_id, stride_bytes) of its pools; the highest epoch "
            "that a chunk may have, and how many seqs a frame may be ahead of what is possible by time, 0: any.")
        .def(
            "set_origin",
            [](Self& self, std::optional<std::int32_t> session_id, std::string address) {
                self.assembler->session().set_origin(session_id, std::move(address));
            },
            "session_id"_a.none(), "address"_a = "",
            "The session whose announce counts, and where it comes from: chunks of its session are taken, else those "
            "of the first session from its address. None: only the session that is followed already.")
        .def_prop_ro(
            "session_id", [](const Self& self) { return self.assembler->session().pinned(); },
            "The session whose chunks are taken, or None.")
        .def("bind", &Self::bind, "target"_a.none(), "until_ns"_a = 0,
             nb::sig("def bind(self, target: FramePublisher | RingWriter | None, until_ns: int = 0) -> None"),
             "Publish with this until then; None: there is nothing to publish with.")
        .def(
            "set_paused", [](Self& self, bool is_paused) { self.assembler->set_paused(is_paused); }, "is_paused"_a)
        .def(
            "expire", [](Self& self, std::uint64_t now_ns) { return self.assembler->expire(now_ns); }, "now_ns"_a,
            "Drop frames that waited too long; how many there were.")
        .def(
            "is_lost", [](const Self& self, std::uint64_t seq) { return self.assembler->is_lost(seq); }, "seq"_a,
            "Whether this frame was dropped lately.")
        .def_prop_ro("stream_id", [](const Self& self) { return self.assembler->stream_id(); })
        .def_prop_ro(
            "epoch", [](const Self& self) { return self.assembler->epoch(); }, "Of the latest announce, or None.")
        .def_prop_ro(
            "newest_epoch", [](const Self& self) { return self.assembler->newest_epoch(); },
            "The highest epoch of the announce and of all chunks.")
        .def_prop_ro(
            "last_chunk_ns", [](const Self& self) { return self.assembler->last_chunk_ns(); },
            "When the last chunk of the newest epoch came.")
        .def_prop_ro(
            "published", [](const Self& self) { return self.assembler->published(); },
            "The last seq that was published, or None.")
        .def_prop_ro(
            "inflight", [](const Self& self) { return self.assembler->inflight(); }, "Frames under assembly.")
        .def_prop_ro(
            "buffered_bytes", [](const Self& self) { return self.assembler->buffered_bytes(); },
            "Of frames that are not assembled in their slot.")
        .def_prop_ro("longest_assembly_ns", [](const Self& self) { return self.assembler->longest_assembly_ns(); })
        .def_prop_ro(
            "counts", [](const Self& self) { return counts_of(*self.assembler); },
            nb::sig("def counts(self) -> dict[tuple[str, str], int]"), "(what, reason): how many; for any thread.");
}

void bind_router(nb::module_& m) {
    nb::class_<ChunkRouter>(m, "ChunkRouter",
                            "The payload stream of a bridge: each chunk goes to the assembler of its stream.")
        .def(
            "__init__",
            [](ChunkRouter* self, const std::vector<std::string>& allow_from) {
                new (self) ChunkRouter(AllowedSources(allow_from));
            },
            "allow_from"_a = std::vector<std::string>())
        .def(
            "add", [](ChunkRouter& self, const PyAssembler& assembler) { self.add(assembler.assembler); },
            "assembler"_a, nb::keep_alive<1, 2>())
        .def("remove", &ChunkRouter::remove, "stream_id"_a)
        .def(
            "poll",
            [](ChunkRouter& self, PySubscription& subscription, std::int64_t limit, std::uint64_t now_ns) {
                const std::shared_ptr<aeron::Subscription> kept = subscription.subscription;
                const std::size_t most = positive(limit);
                const nb::gil_scoped_release release;
                const ChunkRouter::Busy busy(self);
                return self.poll(busy, *kept, most, now_ns);
            },
            "subscription"_a, "limit"_a, "now_ns"_a,
            "Take at most `limit` fragments, without the GIL; how many there were.")
        .def(
            "take",
            [](ChunkRouter& self, nb::handle message, std::uint64_t now_ns) {
                const Buffer buffer(message, PyBUF_ANY_CONTIGUOUS);
                self.take(buffer.bytes(), now_ns);
            },
            "message"_a, "now_ns"_a, nb::sig("def take(self, message: collections.abc.Buffer, now_ns: int) -> None"),
            "One message, as if it had arrived then.")
        .def(
            "take_digest",
            [](ChunkRouter& self, nb::handle message, std::uint64_t now_ns, std::optional<std::int32_t> session_id) {
                const Buffer buffer(message, PyBUF_ANY_CONTIGUOUS);
                return self.take_digest(buffer.bytes(), session_id, now_ns);
            },
            "message"_a, "now_ns"_a, "session_id"_a = nb::none(),
            nb::sig(
                "def take_digest(self, message: collections.abc.Buffer, now_ns: int, session_id: int | None = None) "
                "-> bool"),
            "A frame's checksum or authentication code, of the given session, or of the one that is followed. False for "
            "any other message.")
        .def_prop_ro(
            "counts",
            [](const ChunkRouter& self) {
                Counts counts;
                put_chunk_drops(counts, self);
                put_count(counts, "control_dropped", "unknown_stream", self.digests_unknown());
                return counts;
            },
            nb::sig("def counts(self) -> dict[tuple[str, str], int]"),
            "Chunks and digests that belong to no assembler: (what, reason): how many.");
}

}  // namespace

void bind_assembler(nb::module_& m) {
    nb::class_<AllowedSources>(m, "AllowedSources", "Addresses and networks; none allow every address.")
        .def(nb::init<const std::vector<std::string>&>(), "networks"_a)
        .def("allows", &AllowedSources::allows, "address"_a);
    nb::class_<SessionPin>(m, "SessionPin", "One session of a subscription: messages of any other are not used.")
        .def(nb::init<>())
        .def("set_origin", &SessionPin::set_origin, "session_id"_a.none(), "address"_a = "",
             "The session whose announce counts, and where it comes from; no address is any.")
        .def(
            "admits",
            [](SessionPin& self, std::int32_t session_id, const std::string& address) {
                return self.admits(session_id, address);
            },
            "session_id"_a, "address"_a,
            "Whether it is the session that is followed; where there is none yet, whether it becomes that.")
        .def("on_image_gone", &SessionPin::on_image_gone, "session_id"_a);
    m.def(
        "address_of", [](const std::string& source) { return address_of(source); }, "source"_a,
        "The address in an image's source, without port and scope.");
    m.def(
        "crc32c",
        [](nb::handle data, std::uint32_t before) {
            const Buffer buffer(data, PyBUF_ANY_CONTIGUOUS);
            return crc32c(buffer.bytes(), before);
        },
        "data"_a, "before"_a = 0, nb::sig("def crc32c(data: collections.abc.Buffer, before: int = 0) -> int"),
        "CRC32C of a buffer, after bytes whose checksum is `before`.");
    m.def(
        "blake2b",
        [](nb::handle data, const nb::bytes& key, std::size_t digest_bytes) {
            const Buffer buffer(data, PyBUF_ANY_CONTIGUOUS);
            Blake2b hash({reinterpret_cast<const std::uint8_t*>(key.c_str()), key.size()}, digest_bytes);
            hash.update(buffer.bytes());
            std::array<std::uint8_t, Blake2b::kMaxDigestBytes> digest{};
            hash.finish(std::span(digest).first(digest_bytes));
            return nb::bytes(reinterpret_cast<const char*>(digest.data()), digest_bytes);
        },
        "data"_a, "key"_a, "digest_bytes"_a = 16,
        nb::sig("def blake2b(data: collections.abc.Buffer, key: bytes, digest_bytes: int = 16) -> bytes"),
        "BLAKE2b of a buffer with a key.");
    bind_one_assembler(m);
    bind_router(m);
}

}  // namespace tensorpool::bindings
