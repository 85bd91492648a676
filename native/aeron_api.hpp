// SPDX-License-Identifier: Apache-2.0
// The part of Aeron's public C API (aeronc.h, aeronmd.h) that we call, resolved at run time from the shared objects
// the caller names: no Aeron headers or libraries are needed to build. Declarations follow the published API of 1.4x
// and later; load() refuses a library that lacks a symbol.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include <dlfcn.h>

namespace tensorpool::aeron {

struct Context;
struct Client;
struct Pub;
struct XPub;
struct Sub;
struct Image;
struct CounterHandle;
struct CountersReader;
struct Header;
struct Async;
struct Assembler;
struct DriverContext;
struct Driver;

struct IoVec {
    const std::uint8_t* base;
    std::size_t length;
};

struct BufferClaim {
    std::uint8_t* frame_header;
    std::uint8_t* data;
    std::size_t length;
};

struct PublicationConstants {
    const char* channel;
    std::int64_t original_registration_id;
    std::int64_t registration_id;
    std::int64_t max_possible_position;
    std::size_t position_bits_to_shift;
    std::size_t term_buffer_length;
    std::size_t max_message_length;
    std::size_t max_payload_length;
    std::int32_t stream_id;
    std::int32_t session_id;
    std::int32_t initial_term_id;
    std::int32_t publication_limit_counter_id;
    std::int32_t channel_status_indicator_id;
};

struct ImageConstants {
    Sub* subscription;
    const char* source_identity;
    std::int64_t correlation_id;
    std::int64_t join_position;
    std::size_t position_bits_to_shift;
    std::size_t term_buffer_length;
    std::size_t mtu_length;
    std::int32_t session_id;
    std::int32_t initial_term_id;
    std::int32_t subscriber_position_id;
};

#pragma pack(push, 4)
struct HeaderValues {
    std::int32_t frame_length;
    std::int8_t version;
    std::uint8_t flags;
    std::int16_t type;
    std::int32_t term_offset;
    std::int32_t session_id;
    std::int32_t stream_id;
    std::int32_t term_id;
    std::int64_t reserved_value;
    std::int32_t initial_term_id;
    std::size_t position_bits_to_shift;
};
#pragma pack(pop)
static_assert(sizeof(HeaderValues) == 44);

enum Action : int { kAbort = 1, kBreak = 2, kCommit = 3, kContinue = 4 };

inline constexpr std::int64_t kNotConnected = -1;
inline constexpr std::int64_t kBackPressured = -2;
inline constexpr std::int64_t kAdminAction = -3;
inline constexpr std::int64_t kPublicationClosed = -4;
inline constexpr std::int64_t kMaxPositionExceeded = -5;
inline constexpr std::uint8_t kUnfragmented = 0xC0;
inline constexpr std::uint8_t kBegin = 0x80;
inline constexpr std::uint8_t kEnd = 0x40;

using ErrorHandler = void (*)(void*, int, const char*);
using ImageHandler = void (*)(void*, Sub*, Image*);
using Notification = void (*)(void*);
using FragmentHandler = Action (*)(void*, const std::uint8_t*, std::size_t, Header*);
using BlockHandler = void (*)(void*, const std::uint8_t*, std::size_t, std::int32_t session_id, std::int32_t term_id);
using CounterVisitor = void (*)(std::int64_t, std::int32_t, std::int32_t, const std::uint8_t*, std::size_t, const char*,
                                std::size_t, void*);
using LogFunction = void (*)(const char*);

// X(result, name without "aeron_", parameters)
#define TENSORPOOL_AERON_FUNCTIONS(X) \
    X(int, errcode, ()) \
    X(const char*, errmsg, ()) \
    X(const char*, version_full, ()) \
    X(int, version_major, ()) \
    X(int, version_minor, ()) \
    X(int, default_path, (char*, std::size_t)) \
    X(bool, is_driver_active, (const char*, std::int64_t, LogFunction)) \
    X(int, context_init, (Context**)) \
    X(int, context_close, (Context*)) \
    X(int, context_set_dir, (Context*, const char*)) \
    X(int, context_set_client_name, (Context*, const char*)) \
    X(int, context_set_driver_timeout_ms, (Context*, std::uint64_t)) \
    X(int, context_set_keepalive_interval_ns, (Context*, std::uint64_t)) \
    X(int, context_set_resource_linger_duration_ns, (Context*, std::uint64_t)) \
    X(int, context_set_pre_touch_mapped_memory, (Context*, bool)) \
    X(int, context_set_error_handler, (Context*, ErrorHandler, void*)) \
    X(int, context_set_use_conductor_agent_invoker, (Context*, bool)) \
    X(int, main_do_work, (Client*)) \
    X(int, init, (Client**, Context*)) \
    X(int, start, (Client*)) \
    X(int, close, (Client*)) \
    X(bool, is_closed, (Client*)) \
    X(std::int64_t, client_id, (Client*)) \
    X(int, async_add_publication, (Async**, Client*, const char*, std::int32_t)) \
    X(int, async_add_publication_poll, (Pub**, Async*)) \
    X(int, async_add_exclusive_publication, (Async**, Client*, const char*, std::int32_t)) \
    X(int, async_add_exclusive_publication_poll, (XPub**, Async*)) \
    X(int, async_add_subscription, \
      (Async**, Client*, const char*, std::int32_t, ImageHandler, void*, ImageHandler, void*)) \
    X(int, async_add_subscription_poll, (Sub**, Async*)) \
    X(int, async_add_counter, \
      (Async**, Client*, std::int32_t, const std::uint8_t*, std::size_t, const char*, std::size_t)) \
    X(int, async_add_counter_poll, (CounterHandle**, Async*)) \
    X(std::int64_t, publication_offer, (Pub*, const std::uint8_t*, std::size_t, void*, void*)) \
    X(std::int64_t, publication_offerv, (Pub*, const IoVec*, std::size_t, void*, void*)) \
    X(std::int64_t, publication_try_claim, (Pub*, std::size_t, BufferClaim*)) \
    X(bool, publication_is_connected, (Pub*)) \
    X(bool, publication_is_closed, (Pub*)) \
    X(std::int64_t, publication_position, (Pub*)) \
    X(std::int64_t, publication_position_limit, (Pub*)) \
    X(int, publication_constants, (Pub*, PublicationConstants*)) \
    X(int, publication_close, (Pub*, Notification, void*)) \
    X(std::int64_t, exclusive_publication_offer, (XPub*, const std::uint8_t*, std::size_t, void*, void*)) \
    X(std::int64_t, exclusive_publication_offerv, (XPub*, const IoVec*, std::size_t, void*, void*)) \
    X(std::int64_t, exclusive_publication_try_claim, (XPub*, std::size_t, BufferClaim*)) \
    X(bool, exclusive_publication_is_connected, (XPub*)) \
    X(bool, exclusive_publication_is_closed, (XPub*)) \
    X(std::int64_t, exclusive_publication_position, (XPub*)) \
    X(std::int64_t, exclusive_publication_position_limit, (XPub*)) \
    X(int, exclusive_publication_constants, (XPub*, PublicationConstants*)) \
    X(int, exclusive_publication_close, (XPub*, Notification, void*)) \
    X(int, buffer_claim_commit, (BufferClaim*)) \
    X(int, buffer_claim_abort, (BufferClaim*)) \
    X(int, subscription_controlled_poll, (Sub*, FragmentHandler, void*, std::size_t)) \
    X(long, subscription_block_poll, (Sub*, BlockHandler, void*, std::size_t)) \
    X(bool, subscription_is_connected, (Sub*)) \
    X(bool, subscription_is_closed, (Sub*)) \
    X(int, subscription_image_count, (Sub*)) \
    X(int, subscription_close, (Sub*, Notification, void*)) \
    X(std::int64_t, subscription_channel_status, (Sub*)) \
    X(int, image_constants, (Image*, ImageConstants*)) \
    X(std::int64_t, image_position, (Image*)) \
    X(int, image_controlled_fragment_assembler_create, (Assembler**, FragmentHandler, void*)) \
    X(int, image_controlled_fragment_assembler_delete, (Assembler*)) \
    X(Action, image_controlled_fragment_assembler_handler, (void*, const std::uint8_t*, std::size_t, Header*)) \
    X(int, header_values, (Header*, HeaderValues*)) \
    X(std::int64_t, header_position, (Header*)) \
    X(CountersReader*, counters_reader, (Client*)) \
    X(void, counters_reader_foreach_counter, (CountersReader*, CounterVisitor, void*)) \
    X(std::int64_t*, counter_addr, (CounterHandle*)) \
    X(int, counter_close, (CounterHandle*, Notification, void*)) \
    X(int, driver_context_init, (DriverContext**)) \
    X(int, driver_context_close, (DriverContext*)) \
    X(int, driver_init, (Driver**, DriverContext*)) \
    X(int, driver_start, (Driver*, bool)) \
    X(int, driver_main_do_work, (Driver*)) \
    X(int, driver_close, (Driver*))

struct Api {
#define TENSORPOOL_DECLARE(result, name, parameters) result(*name) parameters;
    TENSORPOOL_AERON_FUNCTIONS(TENSORPOOL_DECLARE)
#undef TENSORPOOL_DECLARE

    std::vector<void*> libraries;

    void* find(const std::string& symbol) const noexcept {
        for (void* library : libraries)
            if (void* at = dlsym(library, symbol.c_str())) return at;
        return nullptr;
    }
};

class LoadError : public std::runtime_error {
    using std::runtime_error::runtime_error;
};

// Opens the libraries in order; a symbol is taken from the first that has it.
inline Api load(const std::vector<std::string>& paths) {
    Api api{};
    std::string names;
    for (const std::string& path : paths) {
        void* const library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
        if (library == nullptr) throw LoadError("cannot load Aeron from " + path + ": " + dlerror());
        api.libraries.push_back(library);
        names += (names.empty() ? "" : ", ") + path;
    }
    std::string missing;
#define TENSORPOOL_RESOLVE(result, name, parameters) \
    api.name = reinterpret_cast<result(*) parameters>(api.find("aeron_" #name)); \
    if (api.name == nullptr) missing += (missing.empty() ? "aeron_" : ", aeron_") + std::string(#name);
    TENSORPOOL_AERON_FUNCTIONS(TENSORPOOL_RESOLVE)
#undef TENSORPOOL_RESOLVE
    if (!missing.empty()) throw LoadError(names + ": not a usable Aeron, these symbols are missing: " + missing);
    return api;
}

// Aeron as this process uses it: the first call of load_once() decides from where.
inline Api process_api{};

inline void load_once(const std::vector<std::string>& paths) {
    if (process_api.libraries.empty()) process_api = load(paths);
}

inline const Api& loaded_api() {
    if (process_api.libraries.empty()) throw LoadError("Aeron is not loaded; call load_aeron first");
    return process_api;
}

}  // namespace tensorpool::aeron
