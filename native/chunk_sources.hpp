// SPDX-License-Identifier: Apache-2.0
// Who may send chunks of a mapping: hosts by their address, and of those one session at a time.
#pragma once

#include <algorithm>
#include <array>
#include <charconv>
#include <cstdint>
#include <cstring>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include <arpa/inet.h>

namespace tensorpool {

// "10.0.0.7:40123" and "[fe80::1%eth0]:40123" without port, brackets and scope.
inline std::string address_of(std::string_view source) {
    source = source.substr(0, source.rfind(':'));
    if (!source.empty() && source.front() == '[') source = source.substr(1, source.find(']') - 1);
    return std::string(source.substr(0, source.find('%')));
}

// Networks such as "10.0.0.0/8", "fd00::/8" or single addresses. None allow every address.
class AllowedSources {
public:
    explicit AllowedSources(const std::vector<std::string>& networks) {
        for (const std::string& text : networks) networks_.push_back(parse_network(text));
    }

    bool allows(const std::string& address) const noexcept {
        if (networks_.empty()) return true;
        const std::optional<Bytes> bytes = parse(address);
        return bytes && std::any_of(networks_.begin(), networks_.end(),
                                    [&](const Network& each) { return each.contains(*bytes); });
    }

private:
    using Bytes = std::array<std::uint8_t, 16>;  // IPv4 as ::ffff:a.b.c.d
    static constexpr unsigned kMappedBits = 96;

    struct Network {
        Bytes base;
        unsigned bits;
        bool contains(const Bytes& address) const noexcept {
            const std::size_t whole = bits / 8;
            if (std::memcmp(base.data(), address.data(), whole) != 0) return false;
            const unsigned rest = bits % 8;
            return rest == 0 || ((base[whole] ^ address[whole]) >> (8 - rest)) == 0;
        }
    };

    static std::optional<Bytes> parse(const std::string& text) noexcept {
        Bytes bytes{};
        if (inet_pton(AF_INET6, text.c_str(), bytes.data()) == 1) return bytes;
        bytes[10] = bytes[11] = 0xff;
        if (inet_pton(AF_INET, text.c_str(), bytes.data() + 12) == 1) return bytes;
        return std::nullopt;
    }

    static Network parse_network(const std::string& text) {
        const std::size_t slash = std::min(text.find('/'), text.size());
        const std::optional<Bytes> base = parse(text.substr(0, slash));
        const bool is_v4 = text.find(':') == std::string::npos;
        const unsigned most = is_v4 ? 32 : 128;
        unsigned bits = most;
        bool is_number = true;
        if (slash < text.size()) {
            const auto [end, error] = std::from_chars(text.data() + slash + 1, text.data() + text.size(), bits);
            is_number = error == std::errc{} && end == text.data() + text.size();
        }
        if (!base || !is_number || bits > most)
            throw std::invalid_argument(text + ": expected an address or a network");
        return {*base, bits + (is_v4 ? kMappedBits : 0)};
    }

    std::vector<Network> networks_;
};

// One session per mapping: chunks of any other are not used.
//
//   no origin ──announce──► origin known ──chunk of its session, or else of its address──► pinned
//                                ▲                                                           │
//                                └────────────────────── the image goes ────────────────────┘
//
// The origin is the session whose announce was accepted. A sender of ours uses one session id for all its streams; any
// other sender is known by its address, and its first session there is taken; an empty address is every address.
class SessionPin {
public:
    // Another origin ends the pin; none keeps it, until its image goes.
    void set_origin(std::optional<std::int32_t> session_id, std::string address) {
        if (session_id && session_id != origin_) pinned_.reset();
        origin_ = session_id;
        address_ = std::move(address);
    }

    bool admits(std::int32_t session_id, std::string_view address) noexcept {
        if (pinned_ == session_id) return true;
        if (!origin_) return false;
        const bool is_from_there = address_.empty() || address == address_;
        if (session_id != *origin_ && (pinned_ || !is_from_there)) return false;
        pinned_ = session_id;
        return true;
    }

    void on_image_gone(std::int32_t session_id) noexcept {
        if (pinned_ == session_id) pinned_.reset();
    }

    std::optional<std::int32_t> origin() const noexcept { return origin_; }
    std::optional<std::int32_t> pinned() const noexcept { return pinned_; }

private:
    std::optional<std::int32_t> origin_;
    std::string address_;
    std::optional<std::int32_t> pinned_;
};

}  // namespace tensorpool
