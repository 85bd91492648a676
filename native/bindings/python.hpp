// SPDX-License-Identifier: Apache-2.0
// nanobind, and what every file of the bindings shares: buffers, methods bound by hand, and the functions that register
// the classes, each in the file of its name.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <memory>
#include <new>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "array_buffer.hpp"

namespace nb = nanobind;

namespace tensorpool::bindings {

using namespace nb::literals;

void bind_errors();
void bind_drop_reason(nb::module_& m);
void bind_mapping(nb::module_& m);
void bind_ring(nb::module_& m);
void bind_media_driver(nb::module_& m);
void bind_publication(nb::module_& m);
void bind_subscription(nb::module_& m);
void bind_aeron_client(nb::module_& m);
void bind_frame(nb::module_& m);
void bind_descriptor_feed(nb::module_& m);
void bind_consumer(nb::module_& m);
void bind_producer(nb::module_& m);
void bind_frame_sender(nb::module_& m);
void bind_assembler(nb::module_& m);
void bind_copies(nb::module_& m);

// A view of an object's memory, given back at the end of its scope.
class Buffer {
public:
    Buffer(nb::handle object, int flags) {
        if (PyObject_GetBuffer(object.ptr(), &view_, flags) != 0) throw nb::python_error();
    }
    // Empty where the object has no such buffer.
    Buffer(nb::handle object, int flags, std::nothrow_t) {
        if (PyObject_GetBuffer(object.ptr(), &view_, flags) != 0) PyErr_Clear();
    }
    ~Buffer() { PyBuffer_Release(&view_); }
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;

    bool is_there() const noexcept { return view_.obj != nullptr; }
    std::span<const std::uint8_t> bytes() const noexcept {
        return {static_cast<const std::uint8_t*>(view_.buf), static_cast<std::size_t>(view_.len)};
    }
    std::span<std::uint8_t> writable_bytes() const noexcept {
        return {static_cast<std::uint8_t*>(view_.buf), static_cast<std::size_t>(view_.len)};
    }
    // For a buffer that was asked for with its strides.
    ArrayBuffer array() const noexcept {
        const auto ndim = static_cast<std::size_t>(view_.ndim);
        return {view_.format, view_.itemsize, view_.len, {view_.shape, ndim}, {view_.strides, ndim}};
    }

private:
    Py_buffer view_{};
};

// Below this many bytes a copy holds the GIL: giving it up can cost a whole switch interval to get back.
inline constexpr std::size_t kReleaseGilFromBytes = std::size_t{8} << 20;

inline std::size_t positive(std::int64_t limit) {
    if (limit < 1) throw nb::value_error("limit must be positive");
    return static_cast<std::size_t>(limit);
}

// --- Methods that loops call are bound by hand: nanobind's arguments by name take as long as the rest of the call.

template <typename Function>
PyCFunction as_method(Function* function) {
    return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

inline Py_ssize_t count_of(PyObject* names) { return names == nullptr ? 0 : PyTuple_Size(names); }

// Hands a call on to a method of the Python subclass.
inline PyObject* hand_on(PyObject* self, const char* method, PyObject* const* arguments, Py_ssize_t count,
                         PyObject* names) {
    std::vector<PyObject*> all{self};
    all.insert(all.end(), arguments, arguments + count + count_of(names));
    const nb::object name = nb::steal(PyUnicode_InternFromString(method));
    return PyObject_VectorcallMethod(name.ptr(), all.data(), static_cast<std::size_t>(count) + 1, names);
}

}  // namespace tensorpool::bindings
