// SPDX-License-Identifier: Apache-2.0
// Arrays of callers against layouts of frames: which are copied natively, which repeat the one before, and which view
// of a slot shows the next frame.
#include <string>
#include <vector>

#include "array_buffer.hpp"
#include "check.hpp"
#include "rings.hpp"
#include "slot_views.hpp"

using namespace tensorpool;
using namespace tensorpool::test;

namespace {

constexpr auto ROW = MajorOrder::ROW;
constexpr auto COLUMN = MajorOrder::COLUMN;

using Extents = std::vector<std::ptrdiff_t>;

// An array with memory for its shape and strides.
struct Array {
    const char* format;
    std::ptrdiff_t itemsize;
    Extents shape;
    Extents strides;

    ArrayBuffer buffer() const {
        std::ptrdiff_t bytes = itemsize;
        for (const std::ptrdiff_t extent : shape) bytes *= extent;
        return {format, itemsize, bytes, shape, strides};
    }
};

TensorLayout resolved(Dtype dtype, MajorOrder order, const std::vector<std::int32_t>& dims,
                      const std::vector<std::int32_t>& strides = {}) {
    TensorLayout layout = layout_of(dtype, order, dims, strides);
    CHECK_EQ(layout.resolve(), Drop::NONE);
    return layout;
}

std::shared_ptr<const TensorLayout> shared(const TensorLayout& layout) {
    return std::make_shared<TensorLayout>(layout);
}

}  // namespace

TEST(array_buffer, formats_of_every_dtype) {
    const struct {
        Dtype dtype;
        std::string accepted;
        std::ptrdiff_t bytes;
    } rows[] = {
        {Dtype::UINT8, "BHILQ", 1},  {Dtype::BYTES, "BHILQ", 1},  {Dtype::UINT16, "BHILQ", 2},
        {Dtype::UINT32, "BHILQ", 4}, {Dtype::UINT64, "BHILQ", 8}, {Dtype::INT8, "bhilq", 1},
        {Dtype::INT16, "bhilq", 2},  {Dtype::INT32, "bhilq", 4},  {Dtype::INT64, "bhilq", 8},
        {Dtype::FLOAT32, "f", 4},    {Dtype::FLOAT64, "d", 8},    {Dtype::BOOLEAN, "?", 1},
        {Dtype::UNKNOWN, "", 1},     {Dtype::BIT, "", 1},
    };
    for (const auto& row : rows)
        for (int letter = 1; letter < 128; ++letter) {
            const char format[] = {static_cast<char>(letter), '\0'};
            const auto dtype = static_cast<std::int16_t>(row.dtype);
            const bool is_accepted = row.accepted.find(format[0]) != std::string::npos;
            CHECK_EQ_IN(format, is_format_of(format, row.bytes, dtype), is_accepted);
            CHECK_EQ_IN(format, is_format_of(format, row.bytes + 1, dtype), false);
        }
    const auto bytes = static_cast<std::int16_t>(Dtype::UINT8);
    CHECK(!is_format_of(nullptr, 1, bytes));
    CHECK(!is_format_of("", 1, bytes));
    CHECK(!is_format_of("<B", 1, bytes));  // with a byte order: Python looks at it
    CHECK(!is_format_of("BB", 1, bytes));
}

TEST(array_buffer, contiguous_in_the_order_of_c_and_of_fortran) {
    const struct {
        const char* what;
        Array array;
        bool is_c;
        bool is_fortran;
    } rows[] = {
        {"row", {"f", 4, {2, 3}, {12, 4}}, true, false},
        {"column", {"f", 4, {2, 3}, {4, 8}}, false, true},
        {"one dimension", {"f", 4, {5}, {4}}, true, true},
        {"a scalar", {"f", 4, {}, {}}, true, true},
        {"every second", {"f", 4, {5}, {8}}, false, false},
        {"backwards", {"f", 4, {5}, {-4}}, false, false},
        {"an extent of 1 has any stride", {"f", 4, {1, 3}, {999, 4}}, true, true},
        {"without elements", {"f", 4, {0, 3}, {1, 1}}, true, true},
        {"rows with padding", {"f", 4, {2, 3}, {16, 4}}, false, false},
    };
    for (const auto& row : rows) {
        CHECK_EQ_IN(row.what, row.array.buffer().is_contiguous(false), row.is_c);
        CHECK_EQ_IN(row.what, row.array.buffer().is_contiguous(true), row.is_fortran);
    }
}

TEST(array_buffer, only_an_array_of_the_same_kind_is_like_a_frame) {
    const TensorLayout layout = resolved(Dtype::FLOAT32, ROW, {2, 3});
    const struct {
        const char* what;
        Array array;
        bool is_like;
    } rows[] = {
        {"the same", {"f", 4, {2, 3}, {12, 4}}, true},
        {"of another dtype", {"i", 4, {2, 3}, {12, 4}}, false},
        {"without a format", {nullptr, 4, {2, 3}, {12, 4}}, false},
        {"of another shape", {"f", 4, {3, 2}, {8, 4}}, false},
        {"of another rank", {"f", 4, {6}, {4}}, false},
        {"in another order", {"f", 4, {2, 3}, {4, 8}}, false},
        {"larger", {"f", 4, {2, 4}, {16, 4}}, false},
    };
    for (const auto& row : rows) CHECK_EQ_IN(row.what, is_like(row.array.buffer(), layout, 24), row.is_like);

    const TensorLayout padded = resolved(Dtype::FLOAT32, ROW, {2, 3}, {16, 4});
    const Array dense{"f", 4, {2, 3}, {16, 4}};
    CHECK(!is_like(dense.buffer(), padded, static_cast<std::uint32_t>(padded.extent_bytes)));  // the frame has holes
    CHECK(!is_like(Array{"f", 4, {2, 3}, {12, 4}}.buffer(), layout, 32));  // its payload is longer than its tensor

    const TensorLayout bits = resolved(Dtype::BIT, ROW, {3, 7});
    CHECK(is_like(Array{"B", 1, {3}, {1}}.buffer(), bits, 3));
    CHECK(!is_like(Array{"B", 1, {3}, {2}}.buffer(), bits, 3));
    CHECK(!is_like(Array{"b", 1, {3}, {1}}.buffer(), bits, 3));
    CHECK(!is_like(Array{"B", 1, {4}, {1}}.buffer(), bits, 4));
}

TEST(array_buffer, the_last_layout_is_found_for_an_array_that_looks_the_same) {
    RepeatedLayout last;
    const Array row{"f", 4, {2, 3}, {12, 4}};
    const Array column{"f", 4, {2, 3}, {4, 8}};
    CHECK(last.find(row.buffer()) == nullptr);
    const auto layout = shared(resolved(Dtype::FLOAT32, ROW, {2, 3}));
    last.remember(row.buffer(), layout);
    CHECK(last.find(row.buffer()) == layout);
    CHECK(last.find(column.buffer()) == nullptr);
    CHECK(last.find(Array{"i", 4, {2, 3}, {12, 4}}.buffer()) == nullptr);
    CHECK(last.find(Array{"f", 4, {2, 4}, {16, 4}}.buffer()) == nullptr);
    CHECK(last.find(Array{"f", 4, {2}, {4}}.buffer()) == nullptr);
    CHECK(last.find(Array{"f", 4, {2, 3}, {16, 4}}.buffer()) == nullptr);  // strided: Python copies it
    const auto transposed = shared(resolved(Dtype::FLOAT32, COLUMN, {2, 3}));
    last.remember(column.buffer(), transposed);
    CHECK(last.find(column.buffer()) == transposed);
    CHECK(last.find(row.buffer()) == nullptr);
    const auto bytes = shared(resolved(Dtype::UINT8, ROW, {4}));
    last.remember(Array{nullptr, 1, {4}, {1}}.buffer(), bytes);  // the buffer protocol: no format means "B"
    CHECK(last.find(Array{"B", 1, {4}, {1}}.buffer()) == bytes);
    last.forget();
    CHECK(last.find(Array{"B", 1, {4}, {1}}.buffer()) == nullptr);
}

TEST(array_buffer, a_view_shows_later_frames_of_its_slot_in_the_same_layout_and_pool) {
    SlotViews<std::string> views(4);
    SlotFrame frame;
    frame.slot = 2;
    frame.values_len_bytes = 16;
    frame.layout = shared(byte_layout(16));
    CHECK(views.find(frame) == nullptr);
    views.keep(frame, "view", true);
    CHECK(views.find(frame) != nullptr && *views.find(frame) == "view");
    SlotFrame other = frame;
    other.slot = 3;
    CHECK(views.find(other) == nullptr);
    other = frame;
    other.pool = 1;
    CHECK(views.find(other) == nullptr);
    other = frame;
    other.layout = shared(byte_layout(16));
    CHECK(views.find(other) == nullptr);
    other = frame;
    other.values_len_bytes = 0;
    CHECK(views.find(other) == nullptr);
    other = frame;
    other.meta_version = 1;
    CHECK(views.find(other) != nullptr);
    views.keep(frame, "view of version 0", false);  // its metadata decided it
    CHECK(views.find(frame) != nullptr);
    CHECK(views.find(other) == nullptr);
}
