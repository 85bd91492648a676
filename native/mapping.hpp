// SPDX-License-Identifier: Apache-2.0
// A mapped file: unmapped when the last view of it is gone, never before. Only tensorpool.shm creates one.
//
// Large files are mapped at addresses where huge pages can begin: a tmpfs file that collapse() gave huge pages is then
// mapped by 2 MiB instead of 4 KiB in every process, which makes copies faster, and faults and unmapping next to free.
#pragma once

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <span>
#include <stdexcept>
#include <system_error>

#include <sys/mman.h>
#include <unistd.h>

#if defined(__linux__) && !defined(MADV_POPULATE_READ)
#define MADV_POPULATE_READ 22
#define MADV_POPULATE_WRITE 23
#endif
#if defined(__linux__) && !defined(MADV_COLLAPSE)
#define MADV_COLLAPSE 25
#endif

namespace tensorpool {

// The size of the kernel's transparent huge pages, 2 MiB with pages of 4 KiB; 0 where it has none.
inline std::size_t transparent_huge_page_bytes() noexcept {
    static const std::size_t bytes = []() -> std::size_t {
        constexpr unsigned long kMost = 32ul << 20;  // kernels with pages of 64 KiB have 512 MiB, which no ring fills
        unsigned long found = 0;
        if (std::FILE* const file = std::fopen("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size", "re")) {
            if (std::fscanf(file, "%lu", &found) != 1 || found > kMost || (found & (found - 1)) != 0) found = 0;
            std::fclose(file);
        }
        return found;
    }();
    return bytes;
}

class Mapping {
public:
    // The caller has checked that the file has at least `length` bytes: a shorter one would fault later (B22).
    Mapping(int fd, std::size_t length, bool writable) : length_(length), writable_(writable) {
        const int protection = writable ? PROT_READ | PROT_WRITE : PROT_READ;
        for (int attempt = 1; data_ == nullptr; ++attempt) {
            void* const hint = free_aligned(length);
            void* const at = mmap(hint, length, protection, MAP_SHARED, fd, 0);
            if (at == MAP_FAILED) throw std::system_error(errno, std::generic_category(), "mmap");
            if (hint == nullptr || aligned(at) == at || attempt == kAttempts)
                data_ = static_cast<std::uint8_t*>(at);
            else
                munmap(at, length);  // another thread took those addresses first
        }
    }
    ~Mapping() { unmap(); }
    Mapping(const Mapping&) = delete;
    Mapping& operator=(const Mapping&) = delete;

    // Takes about 0.1 s per GiB. Only for the destruction of the object: views of it would dangle.
    void unmap() noexcept {
        if (data_ != nullptr) munmap(data_, length_);
        data_ = nullptr;
    }

    std::span<std::uint8_t> bytes() const noexcept { return {data_, length_}; }
    bool is_writable() const noexcept { return writable_; }

    // Brings the pages of [begin, end) in, so that the first frame costs no faults. Slow: the kernel provides 0.5 to
    // 2.5 GiB/s of new memory for each thread, so call without locks, and from several threads for different parts. In
    // pieces: during each, the kernel holds the address space's lock, for which all threads that map or fault wait.
    void prefault(std::size_t begin = 0, std::size_t end = SIZE_MAX) {
        end = std::min(end, length_);
        std::size_t at = begin;
#if defined(__linux__)
        const int advice = writable_ ? MADV_POPULATE_WRITE : MADV_POPULATE_READ;
        while (at < end && madvise(data_ + at, std::min(kPrefaultBytes, end - at), advice) == 0)
            at += std::min(kPrefaultBytes, end - at);
        if (at >= end) return;
        if (errno != EINVAL) throw std::system_error(errno, std::generic_category(), "madvise");
#endif
        const long page = sysconf(_SC_PAGESIZE);
        for (; at < end; at += static_cast<std::size_t>(page)) {
            auto* const byte = static_cast<volatile std::uint8_t*>(data_ + at);
            if (writable_)
                *byte = *byte;
            else
                (void)*byte;
        }
    }

    // Gives [begin, end) of a new tmpfs file huge pages, as far as the kernel has any, and returns how many bytes are
    // in them; the file stays usable where it has none. `begin` is where a huge page may begin. The kernel only extends
    // pages that exist, so each huge page gets a small one first; the rest is zeroed at once, which is faster than
    // prefault(). In one call: at its start the kernel waits for a worker on every processor, which takes long where
    // all are busy; it takes the address space's lock for one huge page at a time.
    std::size_t collapse(std::size_t begin = 0, std::size_t end = SIZE_MAX) noexcept {
#if defined(__linux__)
        const std::size_t page = transparent_huge_page_bytes();
        const std::size_t whole = page == 0 ? 0 : std::min(end, length_) / page * page;
        if (whole <= begin) return 0;
        for (std::size_t at = begin; at < whole; at += page)
            if (madvise(data_ + at, 1, MADV_POPULATE_WRITE) != 0) return 0;
        if (madvise(data_ + begin, whole - begin, MADV_COLLAPSE) == 0) return whole - begin;
#endif
        return 0;
    }

    // Keeps pages in memory: all of them, or with `on_fault` each from when it is first touched, which takes no memory
    // for the holes of a sparse file.
    void lock(bool on_fault = false) {
#if defined(MLOCK_ONFAULT)
        if (on_fault) {
            if (mlock2(data_, length_, MLOCK_ONFAULT) != 0)
                throw std::system_error(errno, std::generic_category(), "mlock");
            return;
        }
#endif
        if (mlock(data_, length_) != 0) throw std::system_error(errno, std::generic_category(), "mlock");
    }

    // Loads with acquire and stores with release an aligned u64 that processes share. Throws std::invalid_argument for
    // an offset that is not a multiple of 8 inside the mapping, and for a store into a read-only one.
    std::uint64_t load_u64(std::size_t offset) const { return word(offset).load(std::memory_order_acquire); }
    void store_u64(std::size_t offset, std::uint64_t value) const {
        if (!writable_) throw std::invalid_argument("the mapping is read-only");
        word(offset).store(value, std::memory_order_release);
    }

private:
    std::atomic_ref<std::uint64_t> word(std::size_t offset) const {
        if (offset % 8 != 0 || length_ < 8 || offset > length_ - 8)
            throw std::invalid_argument("offset must be a multiple of 8 inside the mapping");
        return std::atomic_ref(*reinterpret_cast<std::uint64_t*>(data_ + offset));
    }

    // A free address for `length` bytes where a huge page may begin; null: any address. Only a hint for mmap, which
    // maps elsewhere when another thread takes the address first. MAP_FIXED would need no hint, but where it fails, the
    // kernel may have unmapped what was there, and another thread may have mapped something there since.
    static void* free_aligned(std::size_t length) noexcept {
        const std::size_t page = transparent_huge_page_bytes();
        if (page == 0 || length < page || length > SIZE_MAX - page) return nullptr;
        void* const at = mmap(nullptr, length + page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (at == MAP_FAILED) return nullptr;
        munmap(at, length + page);
        return aligned(at);
    }

    // The first address from here on where a huge page may begin.
    static void* aligned(void* at) noexcept {
        const std::size_t page = transparent_huge_page_bytes();
        return reinterpret_cast<void*>((reinterpret_cast<std::uintptr_t>(at) + page - 1) / page * page);
    }

    static constexpr int kAttempts = 8;
    static constexpr std::size_t kPrefaultBytes = std::size_t{8} << 20;
    std::uint8_t* data_ = nullptr;
    std::size_t length_;
    bool writable_;
};

}  // namespace tensorpool
