// SPDX-License-Identifier: Apache-2.0
// What dims, strides and dtypes mean and which are refused. Wire §8.2, §15.8; decisions B9-B14, B23, B24.
#include <algorithm>
#include <limits>
#include <string>

#include "check.hpp"
#include "rings.hpp"

using namespace tensorpool;
using namespace tensorpool::test;

namespace {

constexpr std::int32_t kMax = std::numeric_limits<std::int32_t>::max();
constexpr auto ROW = MajorOrder::ROW;
constexpr auto COL = MajorOrder::COLUMN;

struct Row {
    const char* what;
    Dtype dtype;
    MajorOrder order;
    std::vector<std::int32_t> dims;
    std::vector<std::int32_t> strides;
    Drop expected;
    std::uint64_t extent = 0;
    std::vector<std::int64_t> byte_strides = {};
};

void check_rows(const std::vector<Row>& rows) {
    for (const Row& row : rows) {
        TensorLayout layout = layout_of(row.dtype, row.order, row.dims, row.strides);
        CHECK_EQ_IN(row.what, layout.resolve(), row.expected);
        if (row.expected != Drop::NONE) continue;
        CHECK_EQ_IN(row.what, layout.extent_bytes, row.extent);
        for (std::size_t i = 0; i < row.byte_strides.size(); ++i)
            CHECK_EQ_IN(row.what, layout.byte_strides[i], row.byte_strides[i]);
    }
}

}  // namespace

TEST(tensor, element_sizes) {
    const struct {
        int dtype;
        std::uint32_t bytes;
    } rows[] = {{0, 0}, {1, 1},  {2, 1},  {3, 2},  {4, 2},  {5, 4},  {6, 4},  {7, 8},  {8, 8},
                {9, 4}, {10, 8}, {11, 1}, {12, 0}, {13, 1}, {14, 1}, {15, 0}, {99, 0}, {-1, 0}};
    for (const auto& row : rows) CHECK_EQ_IN(row.dtype, element_bytes(static_cast<std::int16_t>(row.dtype)), row.bytes);
    for (int dtype = -32768; dtype <= 32767; ++dtype)
        if (dtype < 1 || dtype > 14) CHECK_EQ_IN(dtype, element_bytes(static_cast<std::int16_t>(dtype)), 0);
}

TEST(tensor, inferred_and_declared_strides) {
    check_rows({
        {"contiguous row", Dtype::FLOAT32, ROW, {2, 3}, {}, Drop::NONE, 24, {12, 4}},
        {"contiguous column", Dtype::FLOAT32, COL, {2, 3}, {}, Drop::NONE, 24, {4, 8}},
        {"declared equals inferred", Dtype::FLOAT32, ROW, {2, 3}, {12, 4}, Drop::NONE, 24, {12, 4}},
        {"B10 outer inferred", Dtype::FLOAT32, ROW, {2, 3}, {0, 8}, Drop::NONE, 44, {24, 8}},
        {"B10 inner inferred", Dtype::FLOAT32, ROW, {2, 3}, {100, 0}, Drop::NONE, 112, {100, 4}},
        {"B10 middle inferred", Dtype::UINT8, ROW, {2, 3, 4}, {64, 0, 2}, Drop::NONE, 64 + 16 + 6 + 1, {64, 8, 2}},
        {"B10 column outer inferred", Dtype::UINT16, COL, {3, 2}, {4, 0}, Drop::NONE, 4 * 2 + 12 + 2, {4, 12}},
        {"padded rows", Dtype::UINT8, ROW, {3, 100}, {128, 1}, Drop::NONE, 2 * 128 + 100, {128, 1}},
        {"eight dimensions",
         Dtype::UINT8,
         ROW,
         {2, 2, 2, 2, 2, 2, 2, 2},
         {},
         Drop::NONE,
         256,
         {128, 64, 32, 16, 8, 4, 2, 1}},
        {"eight dimensions column", Dtype::INT64, COL, {2, 1, 2, 1, 2, 1, 2, 1}, {}, Drop::NONE, 128},
        {"boolean is a byte", Dtype::BOOLEAN, ROW, {7}, {}, Drop::NONE, 7, {1}},
        {"bytes are bytes", Dtype::BYTES, ROW, {7}, {}, Drop::NONE, 7, {1}},
    });
}

TEST(tensor, overlapping_or_contradicting_strides_are_refused) {
    check_rows({
        {"inner below the element", Dtype::FLOAT32, ROW, {2, 3}, {12, 3}, Drop::BAD_STRIDES},
        {"outer below the inner extent", Dtype::FLOAT32, ROW, {2, 3}, {11, 4}, Drop::BAD_STRIDES},
        {"broadcast is not expressible", Dtype::FLOAT32, ROW, {2, 3}, {4, 4}, Drop::BAD_STRIDES},
        {"column strides under the row flag", Dtype::FLOAT32, ROW, {2, 3}, {4, 8}, Drop::BAD_STRIDES},
        {"row strides under the column flag", Dtype::FLOAT32, COL, {2, 3}, {12, 4}, Drop::BAD_STRIDES},
        {"negative", Dtype::FLOAT32, ROW, {2, 3}, {-12, 4}, Drop::BAD_STRIDES},
        {"most negative",
         Dtype::FLOAT32,
         ROW,
         {2, 3},
         {12, std::numeric_limits<std::int32_t>::min()},
         Drop::BAD_STRIDES},
        {"negative on a unit dimension", Dtype::FLOAT32, ROW, {1, 3}, {-1, 4}, Drop::BAD_STRIDES},
        {"negative on an empty tensor", Dtype::FLOAT32, ROW, {0, 3}, {-1, 4}, Drop::BAD_STRIDES},
        {"inferred outer over a declared inner that overlaps", Dtype::FLOAT32, ROW, {2, 3}, {0, 2}, Drop::BAD_STRIDES},
    });
}

TEST(tensor, dimensions_of_extent_one_do_not_constrain) {
    check_rows({
        {"B9 5x1", Dtype::FLOAT32, ROW, {5, 1}, {4, 4}, Drop::NONE, 20, {4, 4}},
        {"B9 1x5", Dtype::FLOAT32, ROW, {1, 5}, {4, 4}, Drop::NONE, 20, {4, 4}},
        {"unit with a tiny stride", Dtype::FLOAT64, ROW, {1, 5}, {1, 8}, Drop::NONE, 40, {1, 8}},
        {"unit with a huge stride", Dtype::FLOAT64, ROW, {5, 1}, {8, kMax}, Drop::NONE, 40, {8, kMax}},
        {"unit in the middle", Dtype::UINT8, ROW, {2, 1, 3}, {3, 1, 1}, Drop::NONE, 6, {3, 1, 1}},
        {"units only", Dtype::UINT32, ROW, {1, 1, 1}, {1, 1, 1}, Drop::NONE, 4, {1, 1, 1}},
        {"column, unit last", Dtype::UINT32, COL, {4, 1}, {4, 1}, Drop::NONE, 16, {4, 1}},
    });
}

TEST(tensor, zero_and_negative_dims) {
    check_rows({
        {"zero", Dtype::FLOAT32, ROW, {0}, {}, Drop::NONE, 0},
        {"zero outside", Dtype::FLOAT32, ROW, {0, kMax, kMax}, {}, Drop::NONE, 0},
        {"zero inside", Dtype::FLOAT32, ROW, {kMax, kMax, 0}, {}, Drop::NONE, 0},
        {"zero in the middle", Dtype::FLOAT64, COL, {kMax, 0, kMax}, {kMax, kMax, kMax}, Drop::NONE, 0},
        {"zero bits", Dtype::BIT, ROW, {kMax, 0, kMax}, {}, Drop::NONE, 0},
        {"negative", Dtype::FLOAT32, ROW, {-1}, {}, Drop::BAD_DIMS},
        {"negative beside zero", Dtype::FLOAT32, ROW, {0, -1}, {}, Drop::BAD_DIMS},
        {"most negative", Dtype::FLOAT32, ROW, {3, std::numeric_limits<std::int32_t>::min()}, {}, Drop::BAD_DIMS},
    });
}

TEST(tensor, sizes_beyond_32_bits_are_refused_and_never_wrap) {
    const std::vector<std::int32_t> all_max(8, kMax);
    check_rows({
        {"the largest", Dtype::UINT8, ROW, {2, kMax}, {}, Drop::NONE, 2ull * kMax},
        {"2^32 - 1", Dtype::UINT8, ROW, {65537, 65535}, {}, Drop::NONE, 0xFFFF'FFFF},
        {"2^32", Dtype::UINT8, ROW, {65536, 65536}, {}, Drop::BAD_DIMS},
        {"2^32 by columns", Dtype::UINT8, COL, {65536, 65536}, {}, Drop::BAD_DIMS},
        {"2^64", Dtype::UINT64, ROW, {1 << 30, 1 << 30, 2}, {}, Drop::BAD_DIMS},
        {"max, eight times", Dtype::FLOAT64, ROW, all_max, {}, Drop::BAD_DIMS},
        {"max, eight times, by columns", Dtype::FLOAT64, COL, all_max, {}, Drop::BAD_DIMS},
        {"max dims and strides", Dtype::FLOAT64, ROW, all_max, all_max, Drop::BAD_DIMS},
        {"unit dims with max strides", Dtype::UINT8, ROW, {1, 1, 1, 1, 1, 1, 1, 1}, all_max, Drop::NONE, 1},
        {"inferred past the limit over unit dims", Dtype::FLOAT64, ROW, {1, 1, 1, 1 << 29}, {}, Drop::BAD_DIMS},
        {"inferred beyond the limit, then 2", Dtype::UINT8, ROW, {2, 1, 1}, {0, 0, kMax}, Drop::NONE, 1ull + kMax},
        {"inferred at the limit, then 3", Dtype::UINT8, ROW, {3, 2, kMax}, {}, Drop::BAD_DIMS},
        {"max stride twice", Dtype::UINT8, ROW, {2}, {kMax}, Drop::NONE, 1ull + kMax},
        {"max stride thrice", Dtype::UINT8, ROW, {3}, {kMax}, Drop::NONE, 1ull + 2ull * kMax},
        {"max stride four times", Dtype::UINT8, ROW, {4}, {kMax}, Drop::BAD_DIMS},
        {"max dim by max stride", Dtype::UINT8, ROW, {kMax}, {kMax}, Drop::BAD_DIMS},
    });
}

TEST(tensor, bits_are_packed) {
    constexpr std::int32_t p17 = 1 << 17, p30 = 1 << 30, p16 = 1 << 16;
    check_rows({
        {"1", Dtype::BIT, ROW, {1}, {}, Drop::NONE, 1},
        {"8", Dtype::BIT, ROW, {8}, {}, Drop::NONE, 1},
        {"9", Dtype::BIT, ROW, {9}, {}, Drop::NONE, 2},
        {"3x3 shares bytes between rows", Dtype::BIT, ROW, {3, 3}, {}, Drop::NONE, 2},
        {"by columns", Dtype::BIT, COL, {3, 7}, {}, Drop::NONE, 3},
        {"a stride", Dtype::BIT, ROW, {8, 8}, {1, 0}, Drop::BAD_STRIDES},
        {"a stride on a unit dimension", Dtype::BIT, ROW, {1}, {1}, Drop::BAD_STRIDES},
        {"the largest", Dtype::BIT, ROW, {p17, p17}, {}, Drop::NONE, (std::uint64_t{1} << 34) / 8},
        {"2^32 bytes", Dtype::BIT, ROW, {p17, p17, 2}, {}, Drop::BAD_DIMS},
        {"2^64 bits, outermost last", Dtype::BIT, ROW, {p30, p17, p17}, {}, Drop::BAD_DIMS},
        {"2^64 bits by columns", Dtype::BIT, COL, {p17, p17, p30}, {}, Drop::BAD_DIMS},
        {"2^64 + 2^34 bits", Dtype::BIT, ROW, {p30 + 1, p17, p17}, {}, Drop::BAD_DIMS},
        {"2^65 bits", Dtype::BIT, ROW, {p30, p16, p16, 8}, {}, Drop::BAD_DIMS},
        {"max, eight times", Dtype::BIT, ROW, std::vector<std::int32_t>(8, kMax), {}, Drop::BAD_DIMS},
    });
}

TEST(tensor, ndims_dtype_and_order_are_checked) {
    for (int ndims : {0, 9, 10, 128, 255}) {
        TensorLayout layout = byte_layout(4);
        layout.ndims = static_cast<std::uint8_t>(ndims);
        CHECK_EQ_IN(ndims, layout.resolve(), Drop::BAD_NDIMS);
    }
    for (int dtype = -32768; dtype <= 32767; ++dtype) {
        TensorLayout layout = byte_layout(4);
        layout.dtype = static_cast<std::int16_t>(dtype);
        const bool known = dtype >= 1 && dtype <= 14 && dtype != 12;
        CHECK_EQ_IN(dtype, layout.resolve(), known ? Drop::NONE : Drop::BAD_DTYPE);
        layout = byte_layout(4);
        layout.major_order = static_cast<std::int16_t>(dtype);
        CHECK_EQ_IN(dtype, layout.resolve(), dtype == 1 || dtype == 2 ? Drop::NONE : Drop::BAD_MAJOR_ORDER);
    }
}

TEST(tensor, progress_strides_are_the_real_ones) {
    const struct {
        const char* what;
        Dtype dtype;
        MajorOrder order;
        std::vector<std::int32_t> dims, strides;
        int unit;
        std::uint32_t stride;
        Drop expected;
    } rows[] = {
        {"rows, inferred", Dtype::FLOAT32, ROW, {2, 3}, {}, 1, 12, Drop::NONE},
        {"rows, declared", Dtype::FLOAT32, ROW, {2, 3}, {64, 4}, 1, 64, Drop::NONE},
        {"rows of a column-major tensor", Dtype::FLOAT32, COL, {2, 3}, {}, 1, 4, Drop::NONE},
        {"columns", Dtype::FLOAT32, COL, {2, 3}, {}, 2, 8, Drop::NONE},
        {"columns of a row-major tensor", Dtype::FLOAT32, ROW, {2, 3}, {}, 2, 4, Drop::NONE},
        {"rows of one dimension", Dtype::FLOAT32, ROW, {3}, {}, 1, 4, Drop::NONE},
        {"rows of three dimensions", Dtype::UINT8, ROW, {2, 3, 4}, {}, 1, 12, Drop::NONE},
        {"columns of three dimensions", Dtype::UINT8, ROW, {2, 3, 4}, {}, 2, 4, Drop::NONE},
        {"zero", Dtype::FLOAT32, ROW, {2, 3}, {}, 1, 0, Drop::BAD_PROGRESS},
        {"off by one", Dtype::FLOAT32, ROW, {2, 3}, {}, 1, 13, Drop::BAD_PROGRESS},
        {"inferred although declared", Dtype::FLOAT32, ROW, {2, 3}, {64, 4}, 1, 12, Drop::BAD_PROGRESS},
        {"the element as row", Dtype::FLOAT32, ROW, {2, 3}, {}, 1, 4, Drop::BAD_PROGRESS},
        {"columns of one dimension", Dtype::FLOAT32, ROW, {3}, {}, 2, 4, Drop::BAD_PROGRESS},
        {"unknown unit", Dtype::FLOAT32, ROW, {2, 3}, {}, 3, 12, Drop::BAD_PROGRESS},
        {"unknown unit 255", Dtype::FLOAT32, ROW, {2, 3}, {}, 255, 12, Drop::BAD_PROGRESS},
        {"bits have none", Dtype::BIT, ROW, {8, 8}, {}, 1, 1, Drop::BAD_PROGRESS},
        {"beyond 32 bits", Dtype::UINT8, ROW, {1, 3}, {0, kMax}, 1, 0xFFFF'FFFF, Drop::BAD_PROGRESS},
        {"B24: none ignores the stride", Dtype::FLOAT32, ROW, {2, 3}, {}, 0, 999, Drop::NONE},
    };
    for (const auto& row : rows) {
        TensorLayout layout = layout_of(row.dtype, row.order, row.dims, row.strides);
        layout.progress_unit = static_cast<std::uint8_t>(row.unit);
        layout.progress_stride_bytes = row.stride;
        CHECK_EQ_IN(row.what, layout.resolve(), row.expected);
    }
}

namespace {

// Every element of a small tensor, one by one.
struct Enumerated {
    bool overlaps = false;
    std::uint64_t end = 0;  // one past the last byte of any element
};

Enumerated enumerate(const std::vector<std::int32_t>& dims, const std::vector<std::int64_t>& strides,
                     std::uint32_t element) {
    std::vector<std::int64_t> starts{0};
    for (std::size_t axis = 0; axis < dims.size(); ++axis) {
        std::vector<std::int64_t> next;
        for (std::int64_t start : starts)
            for (std::int32_t i = 0; i < dims[axis]; ++i) next.push_back(start + i * strides[axis]);
        starts = std::move(next);
    }
    Enumerated result;
    std::sort(starts.begin(), starts.end());
    for (std::size_t i = 0; i < starts.size(); ++i) {
        if (i > 0 && starts[i] - starts[i - 1] < static_cast<std::int64_t>(element)) result.overlaps = true;
        result.end = std::max(result.end, static_cast<std::uint64_t>(starts[i]) + element);
    }
    return result;
}

// B9 and B10 said again, index by index, without the running minimum of the code under test.
struct Declared {
    std::vector<std::int64_t> effective;
    bool follows_b9 = true;
};

Declared declare(const std::vector<std::int32_t>& dims, const std::vector<std::int32_t>& strides, MajorOrder order,
                 std::uint32_t element) {
    const std::size_t n = dims.size();
    Declared result{std::vector<std::int64_t>(n), true};
    std::vector<std::size_t> axes;  // from the fastest outward
    for (std::size_t i = 0; i < n; ++i) axes.push_back(order == ROW ? n - 1 - i : i);
    for (std::size_t i = 0; i < n; ++i)
        result.effective[axes[i]] = strides[axes[i]] != 0 ? strides[axes[i]]
                                    : i == 0              ? static_cast<std::int64_t>(element)
                                                          : result.effective[axes[i - 1]] * dims[axes[i - 1]];
    std::vector<std::size_t> wide;
    for (std::size_t axis : axes)
        if (dims[axis] > 1) wide.push_back(axis);
    for (std::size_t i = 0; i < wide.size(); ++i) {
        const std::int64_t least =
            i == 0 ? static_cast<std::int64_t>(element) : result.effective[wide[i - 1]] * dims[wide[i - 1]];
        result.follows_b9 = result.follows_b9 && result.effective[wide[i]] >= least;
    }
    return result;
}

}  // namespace

TEST(tensor, small_shapes_agree_with_enumeration) {
    const std::vector<std::int32_t> strides{0, 1, 2, 3, 4, 5, 6, 8, 12, 17};
    int accepted = 0, refused = 0;
    for (Dtype dtype : {Dtype::UINT8, Dtype::INT16, Dtype::FLOAT32}) {
        const std::uint32_t element = element_bytes(static_cast<std::int16_t>(dtype));
        for (MajorOrder order : {ROW, COL})
            for (int ndims = 1; ndims <= 3; ++ndims) {
                std::vector<std::int32_t> dims(static_cast<std::size_t>(ndims)), pick(dims), declared(dims);
                // odometers over dims in 0..3 and the strides above
                const auto step = [](std::vector<std::int32_t>& digits, std::int32_t base) {
                    for (std::int32_t& digit : digits) {
                        if (++digit < base) return true;
                        digit = 0;
                    }
                    return false;
                };
                do {
                    do {
                        for (std::size_t i = 0; i < pick.size(); ++i)
                            declared[i] = strides[static_cast<std::size_t>(pick[i])];
                        TensorLayout layout = layout_of(dtype, order, dims, declared);
                        const Drop drop = layout.resolve();
                        const bool empty = std::count(dims.begin(), dims.end(), 0) > 0;
                        const Declared oracle = declare(dims, declared, order, element);
                        CHECK_EQ(drop, empty || oracle.follows_b9 ? Drop::NONE : Drop::BAD_STRIDES);
                        if (drop != Drop::NONE) {
                            ++refused;
                            continue;
                        }
                        ++accepted;
                        if (empty) {
                            CHECK_EQ(layout.extent_bytes, 0u);
                            continue;
                        }
                        const Enumerated elements = enumerate(dims, oracle.effective, element);
                        CHECK(!elements.overlaps);
                        CHECK_EQ(layout.extent_bytes, elements.end);
                        for (std::size_t i = 0; i < dims.size(); ++i)
                            CHECK_EQ(layout.byte_strides[i], oracle.effective[i]);
                    } while (step(pick, static_cast<std::int32_t>(strides.size())));
                } while (step(dims, 4));
            }
    }
    CHECK(accepted > 10'000);
    CHECK(refused > 10'000);
}

TEST(tensor, header_round_trip) {
    for (MajorOrder order : {ROW, COL}) {
        TensorLayout layout =
            layout_of(Dtype::INT16, order, {2, 1, 3},
                      order == ROW ? std::vector<std::int32_t>{64, 0, 4} : std::vector<std::int32_t>{2, 0, 64});
        layout.progress_unit = 1;
        layout.progress_stride_bytes = order == ROW ? 64 : 2;
        CHECK_EQ(layout.resolve(), Drop::NONE);
        std::uint8_t image[kHeaderSlotBytes];
        std::memset(image, 0xAA, sizeof image);
        write_tensor_header(image, layout);
        TensorLayout parsed;
        CHECK_EQ(parse_tensor_header(image, parsed), Drop::NONE);
        CHECK(parsed.dims == layout.dims);
        CHECK(parsed.strides == layout.strides);
        CHECK(parsed.byte_strides == layout.byte_strides);
        CHECK_EQ(parsed.extent_bytes, layout.extent_bytes);
        CHECK_EQ(parsed.progress_stride_bytes, layout.progress_stride_bytes);
        for (std::size_t i = slot::kPad; i < slot::kHeaderLength; ++i) CHECK_EQ(image[i], 0);
        for (std::size_t i = slot::kTail; i < kHeaderSlotBytes; ++i) CHECK_EQ(image[i], 0);
        for (std::size_t i = 0; i < slot::kPad; ++i) CHECK_EQ(image[i], 0xAA);  // not this function's part
    }
}

// The producer's API refuses what a consumer would drop, and says why.
TEST(tensor, a_layout_that_no_frame_can_have_is_refused_with_its_reason) {
    struct Refusal {
        std::string text;
        int dtype = 1;
        int order = 1;
        std::vector<std::int32_t> dims = {2, 3};
        std::vector<std::int32_t> strides = {};
        int unit = 0;
        std::uint32_t unit_stride_bytes = 0;
    };
    const std::vector<Refusal> rows = {
        {"at most 8 dimensions", 1, 1, std::vector<std::int32_t>(9, 1)},
        {"1 to 8 dimensions", 1, 1, {}},
        {"as many as dims", 1, 1, {2, 3}, {1}},
        {"numbers of the specification", -1},
        {"numbers of the specification", 65'537},
        {"numbers of the specification", 1, 65'537},
        {"numbers of the specification", 1, 1, {2, 3}, {}, 256},
        {"dtype is not one", 12},
        {"major_order is 1", 1, 3},
        {"must not be negative", 1, 1, {-1}},
        {"below 4 GiB", 1, 1, {kMax, 3}},
        {"strides must be positive", 1, 1, {2, 3}, {-1, 1}},
        {"strides must be positive", 1, 1, {2, 3}, {2, 1}},
        {"progress_stride_bytes", 1, 1, {2, 3}, {}, 1, 4},
    };
    for (const Refusal& row : rows) {
        std::string text;
        try {
            checked_layout(row.dtype, row.order, row.dims, row.strides, row.unit, row.unit_stride_bytes);
        } catch (const std::invalid_argument& error) {
            text = error.what();
        }
        CHECK_EQ_IN(row.text + ": " + text, text.find(row.text) != std::string::npos, true);
    }
    const std::vector<std::int32_t> dims = {2, 3}, strides = {16, 4};
    const TensorLayout layout = checked_layout(9, 1, dims, strides, 1, 16);
    CHECK_EQ(layout.extent_bytes, std::uint64_t{28});
    CHECK_EQ(layout.byte_strides[0], std::int64_t{16});
}
