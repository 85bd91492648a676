// SPDX-License-Identifier: Apache-2.0
// What a payload means: dtype, shape, order, strides. One validation for both sides: the producer's API refuses
// what the consumer would drop. All arithmetic is checked; nothing here touches payload memory.
// Wire §8.2, §10.2.2, §15.8; decisions A2, A15, A22, B9-B14, B23, B24.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>
#include <span>
#include <stdexcept>

#include "drops.hpp"
#include "layout.hpp"

namespace tensorpool {

enum class Dtype : std::int16_t {
    UNKNOWN = 0,
    UINT8 = 1,
    INT8 = 2,
    UINT16 = 3,
    INT16 = 4,
    UINT32 = 5,
    INT32 = 6,
    UINT64 = 7,
    INT64 = 8,
    FLOAT32 = 9,
    FLOAT64 = 10,
    BOOLEAN = 11,
    BYTES = 13,
    BIT = 14,
};

enum class MajorOrder : std::int16_t { UNKNOWN = 0, ROW = 1, COLUMN = 2 };
enum class ProgressUnit : std::uint8_t { NONE = 0, ROWS = 1, COLUMNS = 2 };

// Bytes per element; 0 for what cannot be interpreted. BIT is packed: 1 here stands for "a byte of bits" (B11).
inline constexpr std::uint32_t element_bytes(std::int16_t dtype) noexcept {
    switch (static_cast<Dtype>(dtype)) {
        case Dtype::UINT8:
        case Dtype::INT8:
        case Dtype::BOOLEAN:
        case Dtype::BYTES:
        case Dtype::BIT: return 1;
        case Dtype::UINT16:
        case Dtype::INT16: return 2;
        case Dtype::UINT32:
        case Dtype::INT32:
        case Dtype::FLOAT32: return 4;
        case Dtype::UINT64:
        case Dtype::INT64:
        case Dtype::FLOAT64: return 8;
        default: return 0;
    }
}

// The TensorHeader as it stands in a slot, and what follows from it.
struct TensorLayout {
    std::int16_t dtype = 0;
    std::int16_t major_order = 0;
    std::uint8_t ndims = 0;
    std::uint8_t progress_unit = 0;
    std::uint32_t progress_stride_bytes = 0;
    std::array<std::int32_t, kMaxDims> dims{};
    std::array<std::int32_t, kMaxDims> strides{};  // as declared: 0 = inferred

    // derived by resolve()
    std::array<std::int64_t, kMaxDims> byte_strides{};
    std::uint64_t extent_bytes = 0;  // from the first byte of the first element to the last of the last

    bool is_row_major() const noexcept { return major_order == static_cast<std::int16_t>(MajorOrder::ROW); }
    bool is_bits() const noexcept { return dtype == static_cast<std::int16_t>(Dtype::BIT); }

    bool has_zero_dim() const noexcept {
        for (int i = 0; i < ndims; ++i)
            if (dims[static_cast<std::size_t>(i)] == 0) return true;
        return false;
    }

    // Validates everything and derives byte_strides and extent_bytes.
    Drop resolve() noexcept {
        if (ndims < 1 || ndims > kMaxDims) return Drop::BAD_NDIMS;
        const std::uint32_t element = element_bytes(dtype);
        if (element == 0) return Drop::BAD_DTYPE;
        if (major_order != static_cast<std::int16_t>(MajorOrder::ROW) &&
            major_order != static_cast<std::int16_t>(MajorOrder::COLUMN))
            return Drop::BAD_MAJOR_ORDER;
        for (int i = 0; i < ndims; ++i) {
            if (dims[static_cast<std::size_t>(i)] < 0) return Drop::BAD_DIMS;
            if (strides[static_cast<std::size_t>(i)] < 0) return Drop::BAD_STRIDES;
        }
        const Drop shape = is_bits() ? resolve_bits() : resolve_strides(element);
        return shape != Drop::NONE ? shape : check_progress();
    }

private:
    static constexpr std::uint64_t kLimit = std::numeric_limits<std::uint32_t>::max();  // values_len_bytes is a u32

    std::size_t axis_from_fastest(int step) const noexcept {
        return static_cast<std::size_t>(is_row_major() ? ndims - 1 - step : step);
    }

    Drop resolve_bits() noexcept {
        const bool empty = has_zero_dim();
        std::uint64_t bits = 1;
        for (int step = 0; step < ndims; ++step) {
            const std::size_t axis = axis_from_fastest(step);
            if (strides[axis] != 0) return Drop::BAD_STRIDES;  // B11: only inferred
            byte_strides[axis] = 0;
            if (empty) continue;
            const auto extent = static_cast<std::uint64_t>(dims[axis]);
            if (extent > kLimit * 8 / bits) return Drop::BAD_DIMS;  // before the product, which could exceed 64 bits
            bits *= extent;
        }
        extent_bytes = empty ? 0 : (bits + 7) / 8;
        return Drop::NONE;
    }

    // From the fastest axis outward: `inferred` is what a stride of 0 stands for (B10), `least` what a stride must
    // reach so that elements neither overlap nor contradict the order; axes of extent 1 do not constrain (B9).
    Drop resolve_strides(std::uint32_t element) noexcept {
        const bool empty = has_zero_dim();
        std::uint64_t inferred = element;
        std::uint64_t least = element;
        std::uint64_t last = 0;
        for (int step = 0; step < ndims; ++step) {
            const std::size_t axis = axis_from_fastest(step);
            const auto extent = static_cast<std::uint64_t>(dims[axis]);
            const std::uint64_t stride = strides[axis] != 0 ? static_cast<std::uint64_t>(strides[axis]) : inferred;
            byte_strides[axis] = static_cast<std::int64_t>(stride);
            if (empty) {  // no element, nothing to overlap; keep numbers small
                inferred = element;
                continue;
            }
            if (extent > 1) {
                if (stride < least) return Drop::BAD_STRIDES;
                last += (extent - 1) * stride;  // extent < 2^31, stride <= 2^32, last < 2^32: no overflow
                least = extent * stride;
            }
            if (last + element > kLimit) return Drop::BAD_DIMS;
            inferred = std::min(extent * stride, kLimit + 1);  // past the limit any further extent > 1 is refused
        }
        extent_bytes = empty ? 0 : last + element;
        return Drop::NONE;
    }

    // §8.2, B23: the declared row or column distance must be the real one.
    Drop check_progress() const noexcept {
        const auto unit = static_cast<ProgressUnit>(progress_unit);
        if (unit == ProgressUnit::NONE) return Drop::NONE;  // B24: the stride is ignored
        if (unit != ProgressUnit::ROWS && unit != ProgressUnit::COLUMNS) return Drop::BAD_PROGRESS;
        if (is_bits()) return Drop::BAD_PROGRESS;
        const int axis = unit == ProgressUnit::ROWS ? 0 : 1;
        if (axis >= ndims || progress_stride_bytes == 0) return Drop::BAD_PROGRESS;
        const std::int64_t real = byte_strides[static_cast<std::size_t>(axis)];
        return real == static_cast<std::int64_t>(progress_stride_bytes) ? Drop::NONE : Drop::BAD_PROGRESS;
    }
};

// A layout from a caller's numbers; throws std::invalid_argument, with the reason, for one that no frame can have.
inline TensorLayout checked_layout(int dtype, int major_order, std::span<const std::int32_t> dims,
                                   std::span<const std::int32_t> strides, int progress_unit,
                                   std::uint32_t progress_stride_bytes) {
    if (dims.size() > kMaxDims) throw std::invalid_argument("a tensor has at most 8 dimensions");
    if (!strides.empty() && strides.size() != dims.size())
        throw std::invalid_argument("strides must be as many as dims, or none");
    const auto fits = [](int value, int high) { return value >= 0 && value <= high; };
    if (!fits(dtype, 0x7fff) || !fits(major_order, 0x7fff) || !fits(progress_unit, 0xff))
        throw std::invalid_argument("dtype, major_order and progress_unit are the numbers of the specification");
    TensorLayout layout;
    layout.dtype = static_cast<std::int16_t>(dtype);
    layout.major_order = static_cast<std::int16_t>(major_order);
    layout.ndims = static_cast<std::uint8_t>(dims.size());
    layout.progress_unit = static_cast<std::uint8_t>(progress_unit);
    layout.progress_stride_bytes = progress_stride_bytes;
    std::copy(dims.begin(), dims.end(), layout.dims.begin());
    std::copy(strides.begin(), strides.end(), layout.strides.begin());
    switch (layout.resolve()) {
        case Drop::NONE: return layout;
        case Drop::BAD_NDIMS: throw std::invalid_argument("a tensor has 1 to 8 dimensions; reshape a scalar to (1,)");
        case Drop::BAD_DTYPE: throw std::invalid_argument("dtype is not one that a frame can carry");
        case Drop::BAD_MAJOR_ORDER: throw std::invalid_argument("major_order is 1 (row) or 2 (column)");
        case Drop::BAD_DIMS: throw std::invalid_argument("dims must not be negative and a frame stays below 4 GiB");
        case Drop::BAD_STRIDES:
            throw std::invalid_argument("strides must be positive, without overlap, and follow major_order");
        default: throw std::invalid_argument("progress_stride_bytes must be the real distance of rows or columns");
    }
}

// Reads bytes 60..146 of a slot image. The caller still has to check lengths against the pool.
inline Drop parse_tensor_header(const std::uint8_t* image, TensorLayout& out) noexcept {
    if (load<std::uint32_t>(image + slot::kHeaderLength) != kEmbeddedLength ||
        load<std::uint64_t>(image + slot::kEmbedded) != kEmbeddedHeader)
        return Drop::BAD_EMBEDDED_HEADER;
    out.dtype = load<std::int16_t>(image + slot::kDtype);
    out.major_order = load<std::int16_t>(image + slot::kMajorOrder);
    out.ndims = load<std::uint8_t>(image + slot::kNdims);
    out.progress_unit = load<std::uint8_t>(image + slot::kProgressUnit);
    out.progress_stride_bytes = load<std::uint32_t>(image + slot::kProgressStride);
    std::memcpy(out.dims.data(), image + slot::kDims, sizeof out.dims);
    std::memcpy(out.strides.data(), image + slot::kStrides, sizeof out.strides);
    return out.resolve();
}

// Writes bytes 60..255 of a slot image; dims and strides past ndims and all padding are zero (§8.2).
inline void write_tensor_header(std::uint8_t* image, const TensorLayout& layout) noexcept {
    std::memset(image + slot::kPad, 0, slot::kHeaderLength - slot::kPad);
    store<std::uint32_t>(image + slot::kHeaderLength, kEmbeddedLength);
    store<std::uint64_t>(image + slot::kEmbedded, kEmbeddedHeader);
    store<std::int16_t>(image + slot::kDtype, layout.dtype);
    store<std::int16_t>(image + slot::kMajorOrder, layout.major_order);
    store<std::uint8_t>(image + slot::kNdims, layout.ndims);
    store<std::uint8_t>(image + slot::kPadAlign, 0);
    store<std::uint8_t>(image + slot::kProgressUnit, layout.progress_unit);
    store<std::uint32_t>(image + slot::kProgressStride, layout.progress_stride_bytes);
    std::memset(image + slot::kDims, 0, kHeaderSlotBytes - slot::kDims);
    for (std::size_t i = 0; i < layout.ndims; ++i) {
        store<std::int32_t>(image + slot::kDims + 4 * i, layout.dims[i]);
        store<std::int32_t>(image + slot::kStrides + 4 * i, layout.strides[i]);
    }
}

}  // namespace tensorpool
