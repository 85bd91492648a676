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

using RefusalListener = nb::typed<nb::callable, nb::object(std::string)>;

std::shared_ptr<aeron::MediaDriver> start_media_driver(
    const std::vector<std::pair<std::string, aeron::Setting>>& settings, const std::string& own_thread_dir,
    std::optional<RefusalListener> on_offload_refused) {
    aeron::UdpOffload::OnRefusal on_refusal;
    if (on_offload_refused) {
        // The offload keeps it until the process ends.
        on_refusal = [listener = on_offload_refused->release()](const std::string& reason) {
            const nb::gil_scoped_acquire gil;
            try {
                listener(reason);
            } catch (nb::python_error& error) {
                error.discard_as_unraisable("the UDP offload of a media driver");
            }
        };
    }
    const nb::gil_scoped_release release;
    return std::make_shared<aeron::MediaDriver>(aeron::loaded_api(), settings, own_thread_dir, std::move(on_refusal));
}

// (offset, length) of each datagram.
std::vector<std::pair<std::size_t, std::size_t>> udp_split(std::size_t length, std::size_t segment_bytes) {
    std::vector<std::pair<std::size_t, std::size_t>> datagrams;
    udp::split(length, segment_bytes,
               [&](std::size_t offset, std::size_t bytes) { datagrams.emplace_back(offset, bytes); });
    return datagrams;
}

// (first, count) of each send.
std::vector<std::pair<std::size_t, std::size_t>> udp_groups(const std::vector<std::size_t>& lengths,
                                                            std::size_t most_segment_bytes) {
    std::vector<iovec> batch;
    for (const std::size_t length : lengths) batch.push_back({nullptr, length});
    std::vector<std::pair<std::size_t, std::size_t>> groups;
    for (std::size_t first = 0; first < batch.size();) {
        const udp::Group group = udp::next_group(batch, first, most_segment_bytes);
        groups.emplace_back(group.first, group.count);
        first += group.count;
    }
    return groups;
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
    m.def(
        "udp_offload_counts",
        [] {
            const aeron::UdpOffload::Counts& counts = aeron::process_udp_offload().counts();
            return std::make_tuple(counts.sent.load(), counts.received.load(), counts.dropped.load());
        },
        "Datagrams of this process's media drivers that left in segmented sends, that came coalesced, and that came so "
        "damaged that they were dropped.");
    m.def("udp_split", &udp_split, "length"_a, "segment_bytes"_a,
          "(offset, length) of the datagrams in a buffer that the kernel coalesced.");
    m.def("udp_groups", &udp_groups, "lengths"_a, "most_segment_bytes"_a = 65'535,
          "(first, count) of the segmented sends that a batch of datagrams becomes.");
    m.def("monotonic_ns", &monotonic_ns, "CLOCK_MONOTONIC.");

    nb::class_<aeron::MediaDriver>(m, "MediaDriver", nb::is_weak_referenceable(),
                                   "Aeron's C media driver inside this process.")
        .def(nb::new_(&start_media_driver), "settings"_a, "own_thread_dir"_a = "", "on_offload_refused"_a = nb::none(),
             "`settings` are (name, value) for aeron_driver_context_set_<name>; with its directory as `own_thread_dir` "
             "its one shared thread is ours, which sleeps while nothing happens; `on_offload_refused` asks for the UDP "
             "offload, and is called with the reason where it cannot be had, once per process.")
        .def("close",
             [](aeron::MediaDriver& self) {
                 const nb::gil_scoped_release release;  // which the report of a refusal takes
                 self.close();
                 aeron::process_udp_offload().finish_reports();
             })
        .def_prop_ro("is_closed", &aeron::MediaDriver::is_closed);
}

}  // namespace tensorpool::bindings
