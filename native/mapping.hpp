// SPDX-License-Identifier: Apache-2.0
// A mapped file: unmapped when the last view of it is gone, never before. Only tensorpool.shm creates one.
#pragma once

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <span>
#include <system_error>

#include <sys/mman.h>
#include <unistd.h>

#if defined(__linux__) && !defined(MADV_POPULATE_READ)
#define MADV_POPULATE_READ 22
#define MADV_POPULATE_WRITE 23
#endif

namespace tensorpool {

class Mapping {
public:
    // The caller has checked that the file has at least `length` bytes: a shorter one would fault later (B22).
    Mapping(int fd, std::size_t length, bool writable) : length_(length), writable_(writable) {
        void* const at = mmap(nullptr, length, writable ? PROT_READ | PROT_WRITE : PROT_READ, MAP_SHARED, fd, 0);
        if (at == MAP_FAILED) throw std::system_error(errno, std::generic_category(), "mmap");
        data_ = static_cast<std::uint8_t*>(at);
    }
    ~Mapping() { unmap(); }
    Mapping(const Mapping&) = delete;
    Mapping& operator=(const Mapping&) = delete;

    // Takes about 0.1 s per GiB. Only for whoever destroys the object: views of it would dangle.
    void unmap() noexcept {
        if (data_ != nullptr) munmap(data_, length_);
        data_ = nullptr;
    }

    std::span<std::uint8_t> bytes() const noexcept { return {data_, length_}; }
    bool is_writable() const noexcept { return writable_; }

    // Brings every page in, so that the first frame costs no faults. Slow (about 0.4 s per GiB): call without locks.
    // In pieces: the kernel holds the address space's lock during each, and every other thread that maps, unmaps or
    // faults waits for it.
    void prefault() {
#if defined(__linux__)
        const int advice = writable_ ? MADV_POPULATE_WRITE : MADV_POPULATE_READ;
        std::size_t done = 0;
        while (done < length_ && madvise(data_ + done, std::min(kPrefaultBytes, length_ - done), advice) == 0)
            done += std::min(kPrefaultBytes, length_ - done);
        if (done == length_) return;
        if (errno != EINVAL) throw std::system_error(errno, std::generic_category(), "madvise");
#endif
        const long page = sysconf(_SC_PAGESIZE);
        for (std::size_t at = 0; at < length_; at += static_cast<std::size_t>(page)) {
            auto* const byte = static_cast<volatile std::uint8_t*>(data_ + at);
            if (writable_)
                *byte = *byte;
            else
                (void)*byte;
        }
    }

    void lock() {
        if (mlock(data_, length_) != 0) throw std::system_error(errno, std::generic_category(), "mlock");
    }

private:
    static constexpr std::size_t kPrefaultBytes = std::size_t{8} << 20;
    std::uint8_t* data_ = nullptr;
    std::size_t length_;
    bool writable_;
};

}  // namespace tensorpool
