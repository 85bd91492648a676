// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "bindings/py_ring.hpp"
#include "descriptor_feed.hpp"

namespace tensorpool::bindings {

// A frame as users hold it: what every loop touches. tensorpool.client.frame.Frame derives from it and adds the rest.
struct PyFrame {
    nb::object mapped;  // the MappedEpoch; knows how to make a view
    nb::object reader_object;
    const PyRingReader* reader;
    ReceivedFrame slot;

    nb::object array() const {
        nb::object kept = reader->kept_view(slot);
        return kept.is_none() ? mapped.attr("view")(slot) : kept;
    }
    bool is_intact() const { return slot.noted(reader->reader.intact(slot)); }

    // None, and no copy, where `out` differs in shape, dtype or strides.
    std::optional<bool> copy_like(nb::handle out) const {
        const Buffer buffer(out, PyBUF_STRIDES | PyBUF_FORMAT | PyBUF_WRITABLE, std::nothrow);
        if (!buffer.is_there() || !is_like(buffer.array(), *slot.layout, slot.values_len_bytes)) return std::nullopt;
        return slot.noted(reader->copy(slot, buffer.writable_bytes().data()));
    }
};

}  // namespace tensorpool::bindings
