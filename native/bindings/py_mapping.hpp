// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "bindings/python.hpp"
#include "mapping.hpp"

namespace tensorpool::bindings {

// Unmaps large files without the GIL: the thread that drops the last view of gigabytes delays only itself.
class PyMapping final : public Mapping {
public:
    using Mapping::Mapping;
    ~PyMapping() {
        if (bytes().size() < kUnmapWithoutGilFromBytes) return;
        const nb::gil_scoped_release release;
        unmap();
    }

private:
    static constexpr std::size_t kUnmapWithoutGilFromBytes = std::size_t{16} << 20;
};

}  // namespace tensorpool::bindings
