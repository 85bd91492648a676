// SPDX-License-Identifier: Apache-2.0
// Thrown for a call that the protocol forbids, before anything is written or sent. Python raises its namesake.
#pragma once

#include <stdexcept>

namespace tensorpool {

class LocalProtocolError : public std::logic_error {
    using std::logic_error::logic_error;
};

}  // namespace tensorpool
