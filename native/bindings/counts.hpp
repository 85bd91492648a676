// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "bindings/python.hpp"

namespace tensorpool::bindings {

using Counts = nb::dict;  // (what, reason): how many; what did not occur is left out

inline void put_count(Counts& counts, const char* what, const char* reason, std::uint64_t count) {
    if (count != 0) counts[nb::make_tuple(what, reason)] = count;
}

}  // namespace tensorpool::bindings
