// SPDX-License-Identifier: Apache-2.0
// The string copy of x86, for which GCC has no intrinsic. Its stores may become visible in any order among themselves,
// but stay between the stores before and after it (Intel SDM, volume 3, 9.2.4.1).
#pragma once

#include <cstddef>
#include <cstdint>

namespace tensorpool {

#if defined(__x86_64__)
inline void rep_movsb(std::uint8_t* to, const std::uint8_t* from, std::size_t bytes) noexcept {
    asm volatile("rep movsb" : "+D"(to), "+S"(from), "+c"(bytes) : : "memory");
}
#endif

}  // namespace tensorpool
