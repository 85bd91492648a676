// SPDX-License-Identifier: Apache-2.0
// Arrays of callers, as Python's buffer protocol describes them, compared with the layouts of frames. Only an array
// that matches exactly is copied natively; every other one is left to Python.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "tensor.hpp"

namespace tensorpool {

struct ArrayBuffer {
    const char* format = nullptr;  // of an element, as Python's struct module spells it; null: unsigned bytes
    std::ptrdiff_t itemsize = 0;
    std::ptrdiff_t bytes = 0;
    std::span<const std::ptrdiff_t> shape;
    std::span<const std::ptrdiff_t> strides;  // in bytes

    // An array of frames, one for each index of its first axis: how one of them looks.
    ArrayBuffer row() const noexcept {
        return {format, itemsize, shape[0] == 0 ? 0 : bytes / shape[0], shape.subspan(1), strides.subspan(1)};
    }

    const char* format_or_bytes() const noexcept { return format != nullptr ? format : "B"; }

    // Without holes, in the order of C or, with `is_column_major`, of Fortran. An axis of extent 1 has any stride.
    bool is_contiguous(bool is_column_major) const noexcept {
        if (bytes == 0) return true;
        std::ptrdiff_t expected = itemsize;
        for (std::size_t step = 0; step < shape.size(); ++step) {
            const std::size_t axis = is_column_major ? step : shape.size() - 1 - step;
            if (shape[axis] > 1 && strides[axis] != expected) return false;
            expected *= shape[axis];
        }
        return true;
    }
};

// Whether a buffer's elements are those of a wire dtype, as numpy and the struct module spell them.
inline bool is_format_of(const char* format, std::ptrdiff_t itemsize, std::int16_t dtype) noexcept {
    if (format == nullptr || format[0] == '\0' || format[1] != '\0') return false;
    const char* accepted = "";
    switch (static_cast<Dtype>(dtype)) {
        case Dtype::BOOLEAN: accepted = "?"; break;
        case Dtype::FLOAT32: accepted = "f"; break;
        case Dtype::FLOAT64: accepted = "d"; break;
        case Dtype::INT8:
        case Dtype::INT16:
        case Dtype::INT32:
        case Dtype::INT64: accepted = "bhilq"; break;
        case Dtype::UINT8:
        case Dtype::BYTES:
        case Dtype::UINT16:
        case Dtype::UINT32:
        case Dtype::UINT64: accepted = "BHILQ"; break;
        default: return false;
    }
    return std::strchr(accepted, format[0]) != nullptr && itemsize == static_cast<std::ptrdiff_t>(element_bytes(dtype));
}

// Whether an array has exactly the dtype, shape and strides of a frame of `payload_bytes`, both without holes.
inline bool is_like(const ArrayBuffer& array, const TensorLayout& layout, std::uint32_t payload_bytes) noexcept {
    if (array.bytes != static_cast<std::ptrdiff_t>(payload_bytes) || layout.extent_bytes != payload_bytes) return false;
    if (layout.is_bits())  // shown as its packed bytes
        return array.shape.size() == 1 && array.strides[0] == 1 &&
               is_format_of(array.format, array.itemsize, static_cast<std::int16_t>(Dtype::UINT8));
    return array.shape.size() == layout.ndims && is_format_of(array.format, array.itemsize, layout.dtype) &&
           std::equal(array.shape.begin(), array.shape.end(), layout.dims.begin()) &&
           std::equal(array.strides.begin(), array.strides.end(), layout.byte_strides.begin());
}

// The layout of the array that was published last, for the next one that looks the same: streams keep their shape.
class RepeatedLayout {
public:
    // Without memory to remember it, nothing is remembered: the frame is published by then, and an exception would make
    // the caller publish it again.
    void remember(const ArrayBuffer& array, std::shared_ptr<const TensorLayout> layout) noexcept {
        layout_.reset();
        try {
            format_ = array.format_or_bytes();
            shape_.assign(array.shape.begin(), array.shape.end());
        } catch (const std::bad_alloc&) {
            return;
        }
        layout_ = std::move(layout);
    }

    void forget() noexcept { layout_.reset(); }

    // Null: the array is another kind than the last one.
    std::shared_ptr<const TensorLayout> find(const ArrayBuffer& array) const noexcept {
        const bool is_same = layout_ &&
                             std::equal(array.shape.begin(), array.shape.end(), shape_.begin(), shape_.end()) &&
                             format_ == array.format_or_bytes() && array.is_contiguous(!layout_->is_row_major());
        return is_same ? layout_ : nullptr;
    }

private:
    std::shared_ptr<const TensorLayout> layout_;
    std::string format_;
    std::vector<std::ptrdiff_t> shape_;
};

}  // namespace tensorpool
