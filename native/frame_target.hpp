// SPDX-License-Identifier: Apache-2.0
// Where frames that arrive over a bridge are put together and published, and how much of them there may be.
#pragma once

#include <cstdint>
#include <memory>
#include <new>
#include <vector>

#include <sys/mman.h>

#include "chunk.hpp"
#include "ring.hpp"

namespace tensorpool {

// Where whole frames go: a ring, and the stream that announces them.
class FrameTarget {
public:
    virtual ~FrameTarget() = default;
    virtual RingWriter& ring() noexcept = 0;
    virtual void announce(std::uint64_t seq, std::uint32_t meta_version, std::uint64_t trace_id,
                          std::uint64_t bytes) = 0;
};

// A mapping of its own, unmapped with its frame: malloc would keep memory of this size.
struct Unmap {
    std::size_t bytes = 0;
    void operator()(std::uint8_t* at) const noexcept { munmap(at, bytes); }
};
using FrameBuffer = std::unique_ptr<std::uint8_t[], Unmap>;

inline FrameBuffer make_frame_buffer(std::size_t bytes) {
    void* const at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED) throw std::bad_alloc();
    return FrameBuffer(static_cast<std::uint8_t*>(at), Unmap{bytes});
}

struct AssemblyLimits {
    std::uint32_t max_chunk_bytes = kMaxChunkBytes;
    std::uint32_t max_payload_bytes = kMaxBridgedBytes;
    std::uint32_t max_inflight = 16;
    std::uint64_t timeout_ns = 250'000'000;
    bool needs_digest = false;
    std::vector<std::uint8_t> mac_key;  // of digests; none: CRC32C
};

}  // namespace tensorpool
