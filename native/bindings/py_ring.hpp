// SPDX-License-Identifier: Apache-2.0
// Rings that keep the mappings alive that they read and write.
#pragma once

#include <tuple>

#include "aeron_client.hpp"
#include "bindings/py_mapping.hpp"
#include "bindings/python.hpp"
#include "fork_generation.hpp"
#include "ring.hpp"
#include "slot_views.hpp"

namespace tensorpool::bindings {

using PoolArgument = std::tuple<std::uint16_t, std::uint32_t, nb::object>;  // pool_id, stride_bytes, mapping

// The mappings of a ring.
class Regions {
public:
    Regions(nb::object header, const std::vector<PoolArgument>& pools, bool is_writer);
    RingGeometry geometry(std::uint32_t nslots) const;
    nb::object mapping_of(const Pool& pool) const;

private:
    nb::object header_;
    std::vector<nb::object> mappings_;
    std::vector<Pool> pools_;
};

struct PyRingWriter {
    PyRingWriter(nb::object header, const std::vector<PoolArgument>& pools, std::uint32_t nslots)
        : regions(std::move(header), pools, true), writer(regions.geometry(nslots)) {}

    // For everything that writes; throws in a forked child.
    RingWriter& own() {
        if (!process.is_current())
            throw aeron::ClosedError("this ring's writer belongs to the process that was forked; attach again here");
        return writer;
    }

    Regions regions;
    RingWriter writer;
    std::size_t release_gil_from_bytes = kReleaseGilFromBytes;
    OwningProcess process;
};

struct PyRingReader {
    PyRingReader(nb::object header, const std::vector<PoolArgument>& pools, std::uint32_t nslots)
        : regions(std::move(header), pools, false), reader(regions.geometry(nslots)), views(nslots) {}

    // A new array over the payload, made from the view that was kept for its slot; None where none was.
    nb::object kept_view(const SlotFrame& frame) const {
        reader.check_own(frame);
        const nb::object* const found = views.find(frame);
        if (found == nullptr) return nb::none();
        const nb::object view = *found;  // owned: code that runs meanwhile may keep another one for the slot
        return nb::steal(PyObject_GetItem(view.ptr(), Py_Ellipsis));
    }

    bool copy(const SlotFrame& frame, std::uint8_t* to) const {
        if (frame.values_len_bytes < release_gil_from_bytes) return reader.copy(frame, to);
        const nb::gil_scoped_release release;
        return reader.copy(frame, to);
    }

    Regions regions;
    RingReader reader;
    SlotViews<nb::object> views;
    std::size_t release_gil_from_bytes = kReleaseGilFromBytes;
};

}  // namespace tensorpool::bindings
