// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "bindings/python.hpp"
#include "drops.hpp"

namespace tensorpool::bindings {

// How many frames were dropped, by reason; reasons that did not occur are left out.
nb::dict counts_of(const DropCounters& drops);

}  // namespace tensorpool::bindings
