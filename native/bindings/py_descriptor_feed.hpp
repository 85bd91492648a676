// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "bindings/py_ring.hpp"
#include "descriptor_feed.hpp"

namespace tensorpool::bindings {

struct PyDescriptorFeed {
    PyDescriptorFeed(nb::object object, std::uint32_t stream_id, std::uint64_t epoch,
                     std::optional<std::uint64_t> expected, std::uint64_t max_outstanding,
                     const std::shared_ptr<LateFrames>& late)
        : reader_object(std::move(object)),
          reader(&nb::cast<PyRingReader&>(reader_object)),
          feed(reader->reader, stream_id, epoch, expected, max_outstanding,
               late ? late : std::make_shared<LateFrames>()) {}

    nb::object reader_object;
    PyRingReader* reader;
    DescriptorFeed feed;
};

}  // namespace tensorpool::bindings
