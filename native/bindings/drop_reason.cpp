// SPDX-License-Identifier: Apache-2.0
// DropReason: why a frame was not delivered.
#include "bindings/drop_reason.hpp"

namespace tensorpool::bindings {

nb::dict counts_of(const DropCounters& drops) {
    nb::dict counts;
    for (std::size_t i = 1; i < kDropCount; ++i)
        if (const std::uint64_t count = drops[i].get()) counts[nb::cast(static_cast<Drop>(i))] = count;
    return counts;
}

void bind_drop_reason(nb::module_& m) {
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
        .value("ABANDONED", Drop::ABANDONED, "given up after its progress was reported")
        .value("GAP", Drop::GAP, "its descriptor never came")
        .value("RESYNC", Drop::RESYNC, "skipped to catch up after max_outstanding_seq_gap")
        .value("UNMAPPED", Drop::UNMAPPED, "published while the consumer did not have its epoch mapped")
        .value("EPOCH_ENDED", Drop::EPOCH_ENDED, "committed, but not yet seen when the epoch ended")
        .value("RATE_LIMITED", Drop::RATE_LIMITED, "skipped to keep to max_rate_hz")
        .value("SKIPPED", Drop::SKIPPED, "skipped because the caller asked for the newest frame")
        .value("BAD_TIMESTAMP", Drop::BAD_TIMESTAMP, "its capture or publish time went back, though it has both");
    m.def("is_late", &is_late, "drop"_a, "Whether QosConsumer.drops_late counts this reason.");
    m.def("is_gap", &is_gap, "drop"_a, "Whether QosConsumer.drops_gap counts this reason.");
}

}  // namespace tensorpool::bindings
