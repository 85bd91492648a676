// SPDX-License-Identifier: Apache-2.0
// Words of a media driver's cnc.dat to sleep on and to wake others by, mapped read-only. Aeron wakes no one; our media
// driver and our clients do, and sleep the longer where they were woken before.
//
//   commands   changes when a client asks the media driver for something
//   answers    changes when the media driver answers, or reports an image that came or went
//   bell(n)    never changes: who rings it after a message, and who sleeps on it between polls, agree on n. A ring that
//              comes between the poll and the sleep is missed, so such sleeps are short enough.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

namespace tensorpool::aeron {

class CncFile {
public:
    static constexpr std::size_t kBells = 4;

    // Maps nothing where the file is missing or not laid out as Aeron 1.4x and later does: then no word is there.
    explicit CncFile(const std::string& dir) noexcept {
        const int file = open((dir + "/cnc.dat").c_str(), O_RDONLY | O_CLOEXEC);
        if (file < 0) return;
        struct stat status{};
        if (fstat(file, &status) == 0 && status.st_size > static_cast<off_t>(kMetadataBytes)) {
            size_ = static_cast<std::size_t>(status.st_size);
            void* const at = mmap(nullptr, size_, PROT_READ, MAP_SHARED, file, 0);
            if (at != MAP_FAILED) begin_ = static_cast<const std::uint8_t*>(at);
        }
        close(file);
        if (begin_ != nullptr) find_words();
    }
    ~CncFile() { unmap(); }
    CncFile(const CncFile&) = delete;
    CncFile& operator=(const CncFile&) = delete;

    // From now on no word is there. The caller makes sure that no thread uses one.
    void unmap() noexcept {
        if (begin_ != nullptr) munmap(const_cast<std::uint8_t*>(begin_), size_);
        begin_ = counters_ = nullptr;
        commands_ = answers_ = nullptr;
    }

    // Null where there is none.
    const std::uint32_t* commands() const noexcept { return commands_; }
    const std::uint32_t* answers() const noexcept { return answers_; }
    const std::uint32_t* bell(std::size_t number) const noexcept {
        return answers_ != nullptr && number < kBells ? word_at(number * sizeof(std::uint32_t)) : nullptr;
    }

    // Bytes that went over UDP, sent and received: does not change while only IPC is used.
    std::int64_t udp_bytes() const noexcept {
        return counters_ == nullptr ? 0 : counter(kBytesSent) + counter(kBytesReceived);
    }

private:
    static constexpr std::size_t kMetadataBytes = 128;
    static constexpr std::size_t kRingTrailerBytes = 768, kRingTailOffset = 128;
    static constexpr std::size_t kBroadcastTrailerBytes = 128;
    static constexpr std::size_t kCounterBytes = 128;
    static constexpr std::size_t kBytesSent = 0, kBytesReceived = 1;  // Aeron's system counters

    void find_words() noexcept {
        std::array<std::int32_t, 5> head{};  // version; lengths of to-driver, to-clients, counters' labels and values
        std::memcpy(head.data(), begin_, sizeof head);
        std::size_t lengths[4];
        std::size_t needed = kMetadataBytes;
        for (std::size_t i = 0; i < 4; ++i) {
            if (head[i + 1] <= static_cast<std::int32_t>(kRingTrailerBytes)) return;
            needed += lengths[i] = static_cast<std::size_t>(head[i + 1]);
        }
        if (needed > size_ || !std::has_single_bit(lengths[0] - kRingTrailerBytes) ||
            !std::has_single_bit(lengths[1] - kBroadcastTrailerBytes))
            return;
        commands_ = word_at(kMetadataBytes + lengths[0] - kRingTrailerBytes + kRingTailOffset);
        answers_ = word_at(kMetadataBytes + lengths[0] + lengths[1] - kBroadcastTrailerBytes);
        counters_ = begin_ + kMetadataBytes + lengths[0] + lengths[1] + lengths[2];
    }

    const std::uint32_t* word_at(std::size_t offset) const noexcept {
        return reinterpret_cast<const std::uint32_t*>(begin_ + offset);
    }
    std::int64_t counter(std::size_t id) const noexcept {
        return __atomic_load_n(reinterpret_cast<const std::int64_t*>(counters_ + id * kCounterBytes), __ATOMIC_RELAXED);
    }

    const std::uint8_t* begin_ = nullptr;
    std::size_t size_ = 0;
    const std::uint32_t* commands_ = nullptr;
    const std::uint32_t* answers_ = nullptr;
    const std::uint8_t* counters_ = nullptr;
};

}  // namespace tensorpool::aeron
