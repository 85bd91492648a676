// SPDX-License-Identifier: Apache-2.0
// What the caller must not do: refused before anything was written or sent. Python sees LocalProtocolError.
#pragma once

#include <stdexcept>

namespace tensorpool {

class Misuse : public std::logic_error {
    using std::logic_error::logic_error;
};

}  // namespace tensorpool
