// SPDX-License-Identifier: Apache-2.0
// Rings to test with: on the heap with exact sizes, so that AddressSanitizer sees every byte outside; or in shared
// files, so that processes meet in them and readers map them read-only.
#pragma once

#include <cerrno>
#include <cstdint>
#include <memory>
#include <new>
#include <span>
#include <system_error>
#include <utility>
#include <vector>

#include <sys/mman.h>
#include <unistd.h>

#include "mapping.hpp"
#include "ring.hpp"

namespace tensorpool::test {

struct PoolSpec {
    std::uint16_t pool_id;
    std::uint32_t stride_bytes;
};

// Exactly `size` bytes from the heap, zeroed, aligned like a mapping is to a cache line.
class HeapRegion {
public:
    explicit HeapRegion(std::size_t size)
        : size_(size), data_(static_cast<std::uint8_t*>(::operator new(size, std::align_val_t{64}))) {
        std::memset(data_.get(), 0, size_);
    }
    std::span<std::uint8_t> bytes() const noexcept { return {data_.get(), size_}; }

private:
    struct Free {
        void operator()(std::uint8_t* at) const noexcept { ::operator delete(at, std::align_val_t{64}); }
    };
    std::size_t size_;
    std::unique_ptr<std::uint8_t, Free> data_;
};

class HeapRing {
public:
    HeapRing(std::uint32_t nslots, std::vector<PoolSpec> pools)
        : nslots_(nslots), specs_(std::move(pools)), header(kSuperblockBytes + std::size_t{nslots} * kHeaderSlotBytes) {
        for (const PoolSpec& spec : specs_)
            pools_.emplace_back(kSuperblockBytes + std::size_t{nslots} * spec.stride_bytes);
    }

    RingGeometry geometry() const {
        std::vector<Pool> pools;
        for (std::size_t i = 0; i < specs_.size(); ++i)
            pools.push_back({specs_[i].pool_id, specs_[i].stride_bytes, pools_[i].bytes()});
        return {header.bytes(), std::move(pools), nslots_};
    }
    std::uint8_t* slot(std::uint32_t index) const {
        return header.bytes().data() + kSuperblockBytes + std::size_t{index} * kHeaderSlotBytes;
    }
    std::span<std::uint8_t> pool(std::size_t i) const { return pools_[i].bytes(); }

private:
    std::uint32_t nslots_;
    std::vector<PoolSpec> specs_;
    std::vector<HeapRegion> pools_;

public:
    HeapRegion header;
};

// An unnamed shared file; it survives forks and can be mapped any number of times.
class SharedFile {
public:
    explicit SharedFile(std::size_t size) : fd_(memfd_create("tensorpool-test", 0)), size_(size) {
        if (fd_ < 0 || ftruncate(fd_, static_cast<off_t>(size)) != 0)
            throw std::system_error(errno, std::generic_category(), "memfd");
    }
    ~SharedFile() {
        if (fd_ >= 0) close(fd_);
    }
    SharedFile(SharedFile&& other) noexcept : fd_(std::exchange(other.fd_, -1)), size_(other.size_) {}
    SharedFile& operator=(SharedFile&&) = delete;

    std::unique_ptr<Mapping> map(bool writable) const { return std::make_unique<Mapping>(fd_, size_, writable); }

private:
    int fd_;
    std::size_t size_;
};

// A ring's mappings in one process.
struct MappedRing {
    std::unique_ptr<Mapping> header;
    std::vector<std::unique_ptr<Mapping>> pools;
    std::vector<Pool> specs;
    std::uint32_t nslots;

    RingGeometry geometry() const { return {header->bytes(), specs, nslots}; }
};

class SharedRing {
public:
    SharedRing(std::uint32_t nslots, std::vector<PoolSpec> pools)
        : nslots_(nslots),
          specs_(std::move(pools)),
          header_(kSuperblockBytes + std::size_t{nslots} * kHeaderSlotBytes) {
        for (const PoolSpec& spec : specs_)
            pools_.emplace_back(kSuperblockBytes + std::size_t{nslots} * spec.stride_bytes);
    }

    MappedRing map(bool writable) const {
        MappedRing ring{header_.map(writable), {}, {}, nslots_};
        for (std::size_t i = 0; i < specs_.size(); ++i) {
            ring.pools.push_back(pools_[i].map(writable));
            ring.specs.push_back({specs_[i].pool_id, specs_[i].stride_bytes, ring.pools.back()->bytes()});
        }
        return ring;
    }

private:
    std::uint32_t nslots_;
    std::vector<PoolSpec> specs_;
    SharedFile header_;
    std::vector<SharedFile> pools_;
};

inline TensorLayout layout_of(Dtype dtype, MajorOrder order, const std::vector<std::int32_t>& dims,
                              const std::vector<std::int32_t>& strides = {}) {
    TensorLayout layout;
    layout.dtype = static_cast<std::int16_t>(dtype);
    layout.major_order = static_cast<std::int16_t>(order);
    layout.ndims = static_cast<std::uint8_t>(dims.size());
    std::copy(dims.begin(), dims.end(), layout.dims.begin());
    std::copy(strides.begin(), strides.end(), layout.strides.begin());
    return layout;
}

// `bytes` bytes in one dimension.
inline TensorLayout byte_layout(std::size_t bytes) {
    TensorLayout layout = layout_of(Dtype::UINT8, MajorOrder::ROW, {static_cast<std::int32_t>(bytes)});
    layout.resolve();
    return layout;
}

}  // namespace tensorpool::test
