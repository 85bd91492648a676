// SPDX-License-Identifier: Apache-2.0
// Loading Aeron, and MediaDriver: Aeron's media driver inside this process.
#include "media_driver.hpp"

#include "aeron_client.hpp"
#include "bindings/python.hpp"
#include "wake.hpp"

namespace tensorpool::bindings {

namespace {

std::string default_dir() {
    char path[4096] = {};
    const aeron::Api& api = aeron::loaded_api();
    if (api.default_path(path, sizeof path) < 0) throw aeron::last_error(api, "default path");
    return path;
}

}  // namespace

void bind_media_driver(nb::module_& m) {
    m.def("load_aeron", &aeron::load_once, "paths"_a,
          "Resolve Aeron's C API from these shared objects; once per process.");
    m.def("aeron_version", [] { return std::string(aeron::loaded_api().version_full()); });
    m.def("aeron_default_dir", &default_dir, "The directory that Aeron uses when none is named.");
    m.def(
        "is_driver_active",
        [](const std::string& dir, std::int64_t timeout_ms) {
            const nb::gil_scoped_release release;
            return aeron::loaded_api().is_driver_active(dir.c_str(), timeout_ms, [](const char*) {});
        },
        "dir"_a, "timeout_ms"_a, "Whether a media driver has given a sign of life at `dir` within the timeout.");
    m.def("monotonic_ns", &monotonic_ns, "CLOCK_MONOTONIC.");

    nb::class_<aeron::MediaDriver>(m, "MediaDriver", nb::is_weak_referenceable(),
                                   "Aeron's C media driver inside this process.")
        .def(nb::new_([](const std::vector<std::pair<std::string, aeron::Setting>>& settings) {
                 const nb::gil_scoped_release release;
                 return std::make_shared<aeron::MediaDriver>(aeron::loaded_api(), settings);
             }),
             "settings"_a, "`settings` are (name, value) for aeron_driver_context_set_<name>.")
        .def("close", &aeron::MediaDriver::close, nb::call_guard<nb::gil_scoped_release>())
        .def_prop_ro("is_closed", &aeron::MediaDriver::is_closed);
}

}  // namespace tensorpool::bindings
