// SPDX-License-Identifier: Apache-2.0
// The kinds of copies of this process: which there are, which is used for what, and which suit the processor.
#include "bindings/python.hpp"
#include "copy_calibration.hpp"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace tensorpool::bindings {

namespace {

template <typename Value, std::size_t kCount>
Value by_name(const std::array<std::string_view, kCount>& names, const std::string& name, const char* what) {
    for (std::size_t i = 0; i < kCount; ++i)
        if (names[i] == name) return static_cast<Value>(i);
    throw nb::value_error((std::string("no ") + what + " is called " + name).c_str());
}

std::string_view name_of(CopyKind kind) { return kCopyKindNames[static_cast<std::size_t>(kind)]; }

template <typename KindOf>
nb::dict by_use(const KindOf& kind_of) {
    nb::dict kinds;
    for (std::size_t i = 0; i < kCopyUseNames.size(); ++i) {
        const std::string_view use = kCopyUseNames[i], kind = name_of(kind_of(static_cast<CopyUse>(i)));
        kinds[nb::str(use.data(), use.size())] = nb::str(kind.data(), kind.size());
    }
    return kinds;
}

// Vendor, family, model, stepping and cache: another text is another processor.
std::string processor() {
    std::string text = "other";
#if defined(__x86_64__)
    unsigned a = 0, b = 0, c = 0, d = 0;
    if (__get_cpuid(0, &a, &b, &c, &d) != 0) {
        char vendor[12];
        std::memcpy(vendor, &b, 4);
        std::memcpy(vendor + 4, &d, 4);
        std::memcpy(vendor + 8, &c, 4);
        text.assign(vendor, sizeof vendor);
        if (__get_cpuid(1, &a, &b, &c, &d) != 0) text += " " + std::to_string(a);
    }
    text += has_avx512() ? " avx512" : has_avx2() ? " avx2" : "";
#endif
    return text + " " + std::to_string(last_level_cache_bytes());
}

}  // namespace

void bind_copies(nb::module_& m) {
    m.def("processor", &processor, "What copies depend on; the same text on every processor of one kind.");
    m.def("last_level_cache_bytes", &last_level_cache_bytes);
    m.def(
        "copy_kinds", [] { return by_use([](CopyUse use) { return copy_kinds[use]; }); },
        nb::sig("def copy_kinds() -> dict[str, str]"), "The kind of copy of each use, in this process.");
    m.def(
        "copy_candidates",
        [](const std::string& use) {
            nb::list names;
            for (const CopyKind kind : CopyCalibration::candidates(by_name<CopyUse>(kCopyUseNames, use, "use")))
                names.append(nb::str(name_of(kind).data(), name_of(kind).size()));
            return names;
        },
        "use"_a, nb::sig("def copy_candidates(use: str) -> list[str]"), "The kinds that this processor has for a use.");
    m.def(
        "set_copy_kind",
        [](const std::string& use_name, const std::string& kind_name) {
            const auto use = by_name<CopyUse>(kCopyUseNames, use_name, "use");
            const auto kind = by_name<CopyKind>(kCopyKindNames, kind_name, "kind of copy");
            if (!is_supported(kind) || !is_fit(use, kind))
                throw nb::value_error((kind_name + " cannot be used for " + use_name + " here").c_str());
            copy_kinds.set(use, kind);
        },
        "use"_a, "kind"_a, "From the next copy on. Raises ValueError for what the processor or the use cannot take.");
    m.def("reset_copy_kinds", [] { copy_kinds.reset(); }, "Back to what the processor is known for.");
    m.def(
        "calibrate_copies",
        [](std::int64_t budget_ns) {
            CopyCalibration::Kinds kinds;
            {
                const nb::gil_scoped_release release;
                try {
                    kinds = CopyCalibration::run(std::chrono::nanoseconds(budget_ns));
                } catch (const std::system_error&) {  // no further thread
                    kinds = CopyCalibration::defaults();
                }
            }
            return by_use([&kinds](CopyUse use) { return kinds[static_cast<std::size_t>(use)]; });
        },
        "budget_ns"_a, nb::sig("def calibrate_copies(budget_ns: int) -> dict[str, str]"),
        "Measures which kinds are fastest, and changes nothing.");
}

}  // namespace tensorpool::bindings
