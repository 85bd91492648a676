// SPDX-License-Identifier: Apache-2.0
// Mapping: a mapped file with Python's buffer protocol.
#include "bindings/py_mapping.hpp"

namespace tensorpool::bindings {

namespace {

int mapping_getbuffer(PyObject* self, Py_buffer* view, int flags) {
    const PyMapping* const mapping = nb::inst_ptr<PyMapping>(self);
    const std::span<std::uint8_t> bytes = mapping->bytes();
    return PyBuffer_FillInfo(view, self, bytes.data(), static_cast<Py_ssize_t>(bytes.size()), !mapping->is_writable(),
                             flags);
}

PyType_Slot mapping_slots[] = {{Py_bf_getbuffer, reinterpret_cast<void*>(mapping_getbuffer)}, {0, nullptr}};

}  // namespace

void bind_mapping(nb::module_& m) {
    nb::class_<PyMapping>(m, "Mapping", nb::type_slots(mapping_slots),
                          "A mapped file; exports the buffer protocol and is unmapped with its last view. Made by "
                          "tensorpool.shm only.")
        .def(nb::init<int, std::size_t, bool>(), "fd"_a, "length"_a, nb::kw_only(), "writable"_a)
        .def("__len__", [](const PyMapping& self) { return self.bytes().size(); })
        .def_prop_ro("is_writable", &PyMapping::is_writable)
        .def("prefault", &PyMapping::prefault, "begin"_a = 0, "end"_a = SIZE_MAX,
             nb::call_guard<nb::gil_scoped_release>(), "Bring the pages of [begin, end) in, without the GIL.")
        .def("collapse", &PyMapping::collapse, "begin"_a = 0, "end"_a = SIZE_MAX,
             nb::call_guard<nb::gil_scoped_release>(),
             "Give [begin, end) of a new tmpfs file huge pages, as far as the kernel has any; the bytes in them.")
        .def("lock", &PyMapping::lock, nb::kw_only(), "on_fault"_a = false, nb::call_guard<nb::gil_scoped_release>(),
             "mlock the pages; with `on_fault` each from when it is first touched.")
        .def("load_u64", &PyMapping::load_u64, "offset"_a, "Load an aligned u64 with acquire ordering.")
        .def("store_u64", &PyMapping::store_u64, "offset"_a, "value"_a, "Store an aligned u64 with release ordering.");
}

}  // namespace tensorpool::bindings
