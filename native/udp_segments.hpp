// SPDX-License-Identifier: Apache-2.0
// Datagrams that the kernel takes and hands over many at a time: which of a batch may leave as one segmented send
// (UDP_SEGMENT), and where the datagrams are in what it coalesced (UDP_GRO). Arithmetic only: no socket, no Aeron.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

#include <netinet/udp.h>
#include <sys/socket.h>
#include <sys/uio.h>

namespace tensorpool::udp {

// What one send may carry under IPv4 and IPv6 alike: 65,535 less the largest headers.
inline constexpr std::size_t kMostBytes = 65'535 - 40 - 8;
inline constexpr std::size_t kMostSegments = 64;   // the limit of the first kernels that have UDP_SEGMENT
inline constexpr std::size_t kControlBytes = 128;  // for a segment size, and more than a kernel adds to it unasked

// Datagrams [first, first + count) of a batch: one send, cut by the kernel every `segment_bytes`.
struct Group {
    std::size_t first;
    std::size_t count;
    std::size_t segment_bytes;
};

// The next group of a batch, from `first` on: datagrams of one size and at most one shorter, which ends it.
// A datagram of more than `most_segment_bytes` is a group of its own.
inline Group next_group(std::span<const iovec> batch, std::size_t first, std::size_t most_segment_bytes) noexcept {
    const std::size_t size = batch[first].iov_len;
    Group group{first, 1, size};
    if (size == 0 || size > most_segment_bytes) return group;
    std::size_t bytes = size;
    for (std::size_t next = first + 1; next < batch.size() && group.count < kMostSegments; ++next) {
        const std::size_t length = batch[next].iov_len;
        if (length == 0 || length > size || bytes + length > kMostBytes) break;
        bytes += length;
        ++group.count;
        if (length < size) break;
    }
    return group;
}

// Calls each(offset, length) for every datagram in a buffer of `length` bytes. `segment_bytes` is what the kernel said;
// 0 where it coalesced nothing.
template <typename Each>
void split(std::size_t length, std::size_t segment_bytes, Each&& each) {
    if (segment_bytes == 0 || segment_bytes >= length) {
        each(std::size_t{0}, length);
        return;
    }
    for (std::size_t offset = 0; offset < length; offset += segment_bytes)
        each(offset, std::min(segment_bytes, length - offset));
}

// The segment size that came with a message; 0 where none did, or where what came is no such size.
inline std::size_t segment_bytes(const msghdr& message) noexcept {
    for (const cmsghdr* at = CMSG_FIRSTHDR(&message); at != nullptr;
         at = CMSG_NXTHDR(const_cast<msghdr*>(&message), const_cast<cmsghdr*>(at))) {
        if (at->cmsg_level != SOL_UDP || at->cmsg_type != UDP_GRO || at->cmsg_len < CMSG_LEN(sizeof(int))) continue;
        int size;
        std::memcpy(&size, CMSG_DATA(at), sizeof size);
        return size > 0 ? static_cast<std::size_t>(size) : 0;
    }
    return 0;
}

// Whether a datagram is a SETUP frame of Aeron whose active term is before its initial one. Term ids wrap around.
inline bool is_impossible_setup(std::span<const std::uint8_t> datagram) noexcept {
    constexpr std::size_t kType = 6, kInitialTermId = 20, kActiveTermId = 24;
    constexpr std::uint16_t kSetup = 5;
    const auto load = [&]<typename T>(T value, std::size_t at) {
        std::memcpy(&value, datagram.data() + at, sizeof value);
        return value;
    };
    if (datagram.size() < kActiveTermId + 4 || load(std::uint16_t{}, kType) != kSetup) return false;
    const std::uint32_t terms = load(std::uint32_t{}, kActiveTermId) - load(std::uint32_t{}, kInitialTermId);
    return terms > 0x7fff'ffff;
}

// Makes a message a segmented send; `control` has to live as long as the message.
inline void ask_for_segments(msghdr& message, std::span<std::uint8_t, CMSG_SPACE(sizeof(std::uint16_t))> control,
                             std::size_t bytes) noexcept {
    message.msg_control = control.data();
    message.msg_controllen = control.size();
    cmsghdr* const header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_UDP;
    header->cmsg_type = UDP_SEGMENT;
    header->cmsg_len = CMSG_LEN(sizeof(std::uint16_t));
    const auto size = static_cast<std::uint16_t>(bytes);
    std::memcpy(CMSG_DATA(header), &size, sizeof size);
}

}  // namespace tensorpool::udp
