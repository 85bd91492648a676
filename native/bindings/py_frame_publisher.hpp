// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "bindings/py_ring.hpp"
#include "publisher.hpp"

namespace tensorpool::bindings {

struct PyFramePublisher {
    PyFramePublisher(nb::object object, const std::shared_ptr<aeron::Publication>& publication, std::uint32_t stream_id,
                     std::uint64_t epoch, bool with_publish_time)
        : writer_object(std::move(object)),
          writer(nb::cast<PyRingWriter&>(writer_object)),
          publisher(writer.writer, publication, stream_id, epoch, with_publish_time) {}

    // `layout` is owned: without the GIL, another thread may publish and replace the last one.
    bool publish(std::uint64_t seq, std::shared_ptr<const TensorLayout> layout, std::span<const std::uint8_t> bytes,
                 std::uint64_t timestamp_ns, std::uint32_t meta_version, std::uint64_t trace_id) {
        writer.own();
        if (bytes.size() < writer.release_gil_from_bytes)
            return publisher.publish(seq, *layout, bytes, timestamp_ns, meta_version, trace_id);
        const nb::gil_scoped_release release;
        return publisher.publish(seq, *layout, bytes, timestamp_ns, meta_version, trace_id);
    }

    nb::object writer_object;
    PyRingWriter& writer;
    FramePublisher publisher;
    RepeatedLayout last;
};

}  // namespace tensorpool::bindings
