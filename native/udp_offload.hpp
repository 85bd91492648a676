// SPDX-License-Identifier: Apache-2.0
// Aeron's UDP transport with segmentation offload: the media driver's batches of equal datagrams leave as one send that
// the kernel (or the network card) cuts, and what the kernel coalesced is handed to Aeron datagram by datagram. The
// datagrams on the wire stay the same, so the peer may be any Aeron.
//
// It stands behind Aeron's own seam: the media driver takes a table of functions for its transport, and ours is a copy
// of the default one with three functions replaced, each of which calls the default where anything is unusual. These
// tables belong to a version of Aeron and are in no public header. So ours is used only with versions that were tried,
// where every word of the default table is the function that the library exports under the expected name, and where each
// socket's first datagram, received by the default function, came with the words that we would have passed.
#pragma once

#include <array>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <functional>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <thread>

#include <netinet/in.h>
#include <unistd.h>

#include "aeron_api.hpp"
#include "udp_segments.hpp"

namespace tensorpool::aeron {

// What we read of a transport: Aeron's struct goes on after it.
struct UdpTransport {
    int fd;
    int recv_fd;
    void* data_paths;
    void* connected_address;
    void* dispatch_clientd;
    void* bindings_clientd;
    void* destination_clientd;
};

using OnDatagram = void (*)(void* data_paths, UdpTransport*, void* clientd, void* dispatch_clientd,
                            void* destination_clientd, std::uint8_t*, std::size_t, sockaddr_storage*, timespec*);
using CloseTransport = int (*)(UdpTransport*);
using ReceiveMany = int (*)(UdpTransport*, mmsghdr*, std::size_t, std::int64_t* bytes, OnDatagram, void* clientd);
using SendMany = int (*)(void* data_paths, UdpTransport*, sockaddr_storage*, iovec*, std::size_t, std::int64_t* bytes);

// A table of transport functions, then three words that name it.
struct UdpBindings {
    static constexpr std::size_t kClose = 2, kReceive = 3, kSend = 4;
    static constexpr const char* kFunctions[] = {
        "channel_transport_init",
        "channel_transport_reconnect",
        "channel_transport_close",
        "channel_transport_recvmmsg",
        "channel_transport_send",
        "channel_transport_get_so_rcvbuf",
        "channel_transport_bind_addr_and_port",
        "transport_poller_init",
        "transport_poller_close",
        "transport_poller_add",
        "transport_poller_remove",
        "transport_poller_poll",
    };
    std::array<void*, std::size(kFunctions) + 3> words;
};

class UdpOffload {
public:
    static constexpr int kMajor = 1, kMinor = 53;  // of the Aeron that it was tried with

    using OnRefusal = std::function<void(const std::string&)>;

    struct Counts {
        std::atomic<std::uint64_t> sent{0};      // datagrams that left in segmented sends
        std::atomic<std::uint64_t> received{0};  // datagrams that the kernel had coalesced
        std::atomic<std::uint64_t> dropped{0};   // of those, such as came damaged
        std::atomic<std::uint64_t> refused{0};   // SETUP frames that no publication sends
    };

    // Chooses our functions for a media driver that is not started yet. Where that is impossible the default stays, and
    // `on_refusal` gets the reason, on a thread of its own and once per process; the same where a socket refuses later.
    void install(const Api& api, DriverContext* context, OnRefusal on_refusal) {
        {
            const std::lock_guard lock(mutex_);
            on_refusal_ = std::move(on_refusal);
        }
        if (const std::optional<std::string> reason = prepare(api)) return refuse(*reason);
        using Getter = void* (*)(DriverContext*);
        using Setter = int (*)(DriverContext*, void*);
        const auto current =
            reinterpret_cast<Getter>(api.find("aeron_driver_context_get_udp_channel_transport_bindings"));
        const auto choose =
            reinterpret_cast<Setter>(api.find("aeron_driver_context_set_udp_channel_transport_bindings"));
        if (current == nullptr || choose == nullptr) return refuse("this Aeron does not let its transport be chosen");
        if (current(context) != default_bindings_)
            return refuse("the environment of this process chooses another UDP transport for Aeron");
        if (choose(context, &bindings_) < 0) refuse("Aeron refuses another UDP transport");
    }

    // For tests: the functions that ours fall back to, without an Aeron.
    void use(CloseTransport close, ReceiveMany receive, SendMany send) {
        default_close_ = close;
        default_receive_ = receive;
        default_send_ = send;
    }

    // Waits until a reported refusal has reached its listener.
    void finish_reports() {
        const std::lock_guard lock(mutex_);
        if (reporter_.joinable()) reporter_.join();
    }

    const Counts& counts() const noexcept { return counts_; }

    int send(void* data_paths, UdpTransport* transport, sockaddr_storage* address, iovec* batch, std::size_t count,
             std::int64_t* bytes_sent) noexcept {
        const auto by_default = [&] { return default_send_(data_paths, transport, address, batch, count, bytes_sent); };
        // Aeron's interceptors call without data paths: what they want to see is not ours to merge.
        if (count < 2 || count > udp::kMostSegments || data_paths == nullptr) return by_default();
        std::atomic<std::uint32_t>* const entry = at(sending_, transport->fd);
        if (entry == nullptr) return by_default();
        std::uint32_t state = entry->load(std::memory_order_relaxed);
        if (state == 0) entry->store(state = judge_sender(*transport, data_paths), std::memory_order_relaxed);
        const std::size_t most_segment_bytes = state & kSegmentMask;
        if (most_segment_bytes == 0) return by_default();

        Batch messages;
        const socklen_t address_bytes = address == nullptr ? 0 : length_of(*address);
        const bool is_connected = (state & kConnected) != 0;
        if (!is_connected && address_bytes == 0) return by_default();
        for (std::size_t first = 0; first < count;) {
            const udp::Group group = udp::next_group({batch, count}, first, most_segment_bytes);
            messages.add(group, batch, is_connected ? nullptr : address, address_bytes);
            first += group.count;
        }
        if (messages.count == count) return by_default();

        std::size_t done = 0, datagrams = 0;
        while (done < messages.count) {
            const int sent =
                ::sendmmsg(transport->fd, &messages.headers[done], static_cast<unsigned>(messages.count - done), 0);
            if (sent <= 0) {
                if (sent == 0 || errno == EAGAIN || errno == EWOULDBLOCK || errno == ECONNREFUSED || errno == EINTR)
                    break;
                if (errno == EMSGSIZE || errno == EINVAL || errno == EIO || errno == EOPNOTSUPP)
                    limit_segments(*entry, state, messages.groups[done].segment_bytes, errno);
                // The default sends the rest, or says what is wrong.
                const int rest =
                    default_send_(data_paths, transport, address, batch + datagrams, count - datagrams, bytes_sent);
                return rest < 0 ? rest : static_cast<int>(datagrams) + rest;
            }
            for (const std::size_t end = done + static_cast<std::size_t>(sent); done < end; ++done) {
                const std::size_t in_group = messages.groups[done].count;
                datagrams += in_group;
                *bytes_sent += messages.headers[done].msg_len;
                if (in_group > 1) counts_.sent.fetch_add(in_group, std::memory_order_relaxed);
            }
        }
        return static_cast<int>(datagrams);
    }

    int receive(UdpTransport* transport, mmsghdr* messages, std::size_t count, std::int64_t* bytes_received,
                OnDatagram on_datagram, void* clientd) noexcept {
        guarded_ = {on_datagram, &counts_.refused};
        on_datagram = &on_guarded_datagram;
        const auto by_default = [&](OnDatagram call) {
            return default_receive_(transport, messages, count, bytes_received, call, clientd);
        };
        std::atomic<std::uint8_t>* const entry = at(receiving_, transport->recv_fd);
        if (entry == nullptr || count == 0) return by_default(on_datagram);
        const auto state = static_cast<Receiving>(entry->load(std::memory_order_relaxed));
        if (state == Receiving::kPlain) return by_default(on_datagram);
        if (state == Receiving::kUnknown) {
            if (!takes_any_datagram({messages, count})) {
                entry->store(static_cast<std::uint8_t>(Receiving::kPlain), std::memory_order_relaxed);
                return by_default(on_datagram);
            }
            witness_ = Witness{transport, on_datagram, false, true};
            const int result = by_default(&on_first_datagram);
            if (witness_.has_seen)
                entry->store(static_cast<std::uint8_t>(judge_receiver(*transport)), std::memory_order_relaxed);
            return result;
        }

        count = std::min(count, kMostMessages);
        alignas(cmsghdr) std::uint8_t control[kMostMessages][udp::kControlBytes];
        for (std::size_t i = 0; i < count; ++i) {
            msghdr& header = messages[i].msg_hdr;
            header.msg_control = control[i];
            header.msg_controllen = udp::kControlBytes;
            header.msg_namelen = sizeof(sockaddr_storage);
        }
        const int came = ::recvmmsg(transport->recv_fd, messages, static_cast<unsigned>(count), MSG_DONTWAIT, nullptr);
        const int error = errno;
        int datagrams = 0;
        for (int i = 0; i < came; ++i)
            datagrams += deliver(transport, messages[i], bytes_received, on_datagram, clientd);
        for (std::size_t i = 0; i < count; ++i) {  // our memory ends with this call
            messages[i].msg_hdr.msg_control = nullptr;
            messages[i].msg_hdr.msg_controllen = 0;
        }
        if (came >= 0) return datagrams;
        if (error == EAGAIN || error == EWOULDBLOCK || error == ECONNREFUSED || error == EINTR) return 0;
        return by_default(on_datagram);  // says what is wrong
    }

    int close(UdpTransport* transport) noexcept {
        for (const int fd : {transport->fd, transport->recv_fd}) {
            if (auto* const entry = at(sending_, fd)) entry->store(0, std::memory_order_relaxed);
            if (auto* const entry = at(receiving_, fd)) entry->store(0, std::memory_order_relaxed);
        }
        return default_close_(transport);
    }

private:
    static constexpr std::size_t kMostMessages = 64;
    static constexpr std::size_t kMostSockets = 1 << 16;  // file descriptors above take the default
    static constexpr std::uint32_t kKnown = 1U << 31, kConnected = 1U << 30, kSegmentMask = 0xFFFF;
    enum class Receiving : std::uint8_t { kUnknown = 0, kPlain, kSplit };

    struct Batch {
        std::array<mmsghdr, udp::kMostSegments> headers;
        std::array<udp::Group, udp::kMostSegments> groups;
        alignas(cmsghdr) std::uint8_t control[udp::kMostSegments][CMSG_SPACE(sizeof(std::uint16_t))];
        std::size_t count = 0;

        void add(const udp::Group& group, iovec* batch, sockaddr_storage* address, socklen_t address_bytes) noexcept {
            groups[count] = group;
            headers[count] = {};
            msghdr& header = headers[count].msg_hdr;
            header.msg_name = address;
            header.msg_namelen = address == nullptr ? 0 : address_bytes;
            header.msg_iov = batch + group.first;
            header.msg_iovlen = group.count;
            if (group.count > 1) udp::ask_for_segments(header, std::span(control[count]), group.segment_bytes);
            ++count;
        }
    };

    // What the default function passes with a socket's first datagram, next to what we would have passed.
    struct Witness {
        UdpTransport* transport;
        OnDatagram on_datagram;
        bool has_seen;
        bool agrees;
    };
    static inline thread_local Witness witness_;

    static void on_first_datagram(void* data_paths, UdpTransport* transport, void* clientd, void* dispatch_clientd,
                                  void* destination_clientd, std::uint8_t* buffer, std::size_t length,
                                  sockaddr_storage* address, timespec* media_timestamp) {
        const UdpTransport* const ours = witness_.transport;
        witness_.has_seen = true;
        witness_.agrees = witness_.agrees && transport == ours && data_paths == ours->data_paths &&
                          dispatch_clientd == ours->dispatch_clientd &&
                          destination_clientd == ours->destination_clientd;
        witness_.on_datagram(data_paths, transport, clientd, dispatch_clientd, destination_clientd, buffer, length,
                             address, media_timestamp);
    }

    // Aeron makes an image of every SETUP. Where the active term is before the initial one, the image has a position below
    // 0, and each process that polls it reads outside of the log: a datagram of 40 bytes from anywhere would end them all.
    struct Guarded {
        OnDatagram next;
        std::atomic<std::uint64_t>* refused;
    };
    static inline thread_local Guarded guarded_;

    static void on_guarded_datagram(void* data_paths, UdpTransport* transport, void* clientd, void* dispatch_clientd,
                                    void* destination_clientd, std::uint8_t* buffer, std::size_t length,
                                    sockaddr_storage* address, timespec* media_timestamp) {
        if (udp::is_impossible_setup({buffer, length})) {
            guarded_.refused->fetch_add(1, std::memory_order_relaxed);
            return;
        }
        guarded_.next(data_paths, transport, clientd, dispatch_clientd, destination_clientd, buffer, length, address,
                      media_timestamp);
    }

    static int option(int fd, int level, int name) noexcept {
        int value = 0;
        socklen_t bytes = sizeof value;
        return ::getsockopt(fd, level, name, &value, &bytes) == 0 ? value : -1;
    }
    static bool is_datagram_socket(int fd) noexcept { return option(fd, SOL_SOCKET, SO_TYPE) == SOCK_DGRAM; }

    static socklen_t length_of(const sockaddr_storage& address) noexcept {
        return address.ss_family == AF_INET    ? sizeof(sockaddr_in)
               : address.ss_family == AF_INET6 ? sizeof(sockaddr_in6)
                                               : 0;
    }

    // The poller of Aeron's sender has buffers of an MTU, which what the kernel coalesced would not fit.
    static bool takes_any_datagram(std::span<const mmsghdr> messages) noexcept {
        for (const mmsghdr& message : messages)
            if (message.msg_hdr.msg_iovlen != 1 || message.msg_hdr.msg_iov[0].iov_len < 65'535) return false;
        return true;
    }

    template <typename Table>
    static auto at(Table& table, int fd) noexcept -> decltype(&table[0]) {
        return fd >= 0 && static_cast<std::size_t>(fd) < table.size() ? &table[static_cast<std::size_t>(fd)] : nullptr;
    }

    std::uint32_t judge_sender(const UdpTransport& transport, const void* data_paths) {
        if (transport.data_paths != data_paths || !is_datagram_socket(transport.fd) ||
            !is_datagram_socket(transport.recv_fd)) {
            refuse("a transport of this Aeron is not laid out as expected");
            return kKnown;
        }
        if (option(transport.fd, SOL_UDP, UDP_SEGMENT) < 0) {
            refuse(std::string("a socket refuses UDP_SEGMENT: ") + std::strerror(errno));
            return kKnown;
        }
        sockaddr_storage peer;
        socklen_t bytes = sizeof peer;
        const bool is_connected = ::getpeername(transport.fd, reinterpret_cast<sockaddr*>(&peer), &bytes) == 0;
        return kKnown | (is_connected ? kConnected : 0) | kSegmentMask;
    }

    Receiving judge_receiver(const UdpTransport& transport) {
        if (!witness_.agrees) {
            refuse("a transport of this Aeron is not laid out as expected");
            return Receiving::kPlain;
        }
        // One time for all datagrams of a buffer is not what the user asked for.
        if (option(transport.recv_fd, SOL_SOCKET, SO_TIMESTAMPNS) != 0) return Receiving::kPlain;
        const int on = 1;
        if (::setsockopt(transport.recv_fd, SOL_UDP, UDP_GRO, &on, sizeof on) < 0) {
            refuse(std::string("a socket refuses UDP_GRO: ") + std::strerror(errno));
            return Receiving::kPlain;
        }
        return Receiving::kSplit;
    }

    // A datagram of more than the path's MTU travels in fragments, which no segmented send can do: such sizes, and all
    // sizes where the reason is another, take the default from now on.
    void limit_segments(std::atomic<std::uint32_t>& entry, std::uint32_t state, std::size_t bytes, int error) {
        const bool is_size = error == EMSGSIZE || error == EINVAL;
        const auto most = static_cast<std::uint32_t>(is_size ? bytes - 1 : 0);
        entry.store((state & ~kSegmentMask) | most, std::memory_order_relaxed);
        refuse("a segmented send of datagrams of " + std::to_string(bytes) + " bytes was refused: " +
               std::strerror(error) + (is_size ? "; does the path carry such datagrams whole?" : ""));
    }

    int deliver(UdpTransport* transport, mmsghdr& message, std::int64_t* bytes_received, OnDatagram on_datagram,
                void* clientd) noexcept {
        const msghdr& header = message.msg_hdr;
        const std::size_t segment_bytes = udp::segment_bytes(header);
        std::size_t length = message.msg_len;
        *bytes_received += message.msg_len;
        if (segment_bytes == 0 && (header.msg_flags & MSG_CTRUNC) != 0) {  // its datagrams cannot be found
            counts_.dropped.fetch_add(1, std::memory_order_relaxed);
            return 0;
        }
        if (segment_bytes != 0 && (header.msg_flags & MSG_TRUNC) != 0) {  // the last one is not whole
            length -= length % segment_bytes;
            counts_.dropped.fetch_add(1, std::memory_order_relaxed);
        }
        auto* const buffer = static_cast<std::uint8_t*>(header.msg_iov[0].iov_base);
        int datagrams = 0;
        udp::split(length, segment_bytes, [&](std::size_t offset, std::size_t bytes) {
            std::uint8_t* datagram = buffer + offset;
            // Aeron reads words of 8 bytes. The front of the buffer is free: its datagrams have been handled.
            if (offset % 8 != 0) datagram = static_cast<std::uint8_t*>(std::memmove(buffer, datagram, bytes));
            on_datagram(transport->data_paths, transport, clientd, transport->dispatch_clientd,
                        transport->destination_clientd, datagram, bytes,
                        static_cast<sockaddr_storage*>(header.msg_name), nullptr);
            ++datagrams;
        });
        if (datagrams > 1) counts_.received.fetch_add(static_cast<std::uint64_t>(datagrams), std::memory_order_relaxed);
        return datagrams;
    }

    // Why this Aeron or this kernel cannot be used so; otherwise the tables are ready afterwards.
    std::optional<std::string> prepare(const Api& api) {
        const std::lock_guard lock(mutex_);
        if (api.version_major() != kMajor || api.version_minor() != kMinor)
            return "it was tried with Aeron " + std::to_string(kMajor) + "." + std::to_string(kMinor) +
                   ", not with this one: " + api.version_full();
        const void* const symbol = api.find("aeron_udp_channel_transport_bindings_default");
        if (symbol == nullptr) return "this Aeron does not export its default UDP transport";
        UdpBindings found;
        std::memcpy(&found, symbol, sizeof found);
        for (std::size_t i = 0; i < std::size(UdpBindings::kFunctions); ++i) {
            void* const function = api.find(std::string("aeron_udp_") + UdpBindings::kFunctions[i]);
            if (function == nullptr || found.words[i] != function)
                return std::string("the default UDP transport of this Aeron is not laid out as expected, at ") +
                       UdpBindings::kFunctions[i];
        }
        if (const int error = probe_kernel())
            return std::string("this kernel has no UDP offload: ") + std::strerror(error);
        if (default_bindings_ != nullptr) return std::nullopt;
        default_bindings_ = symbol;
        use(reinterpret_cast<CloseTransport>(found.words[UdpBindings::kClose]),
            reinterpret_cast<ReceiveMany>(found.words[UdpBindings::kReceive]),
            reinterpret_cast<SendMany>(found.words[UdpBindings::kSend]));
        bindings_ = found;
        bindings_.words[UdpBindings::kClose] = reinterpret_cast<void*>(&close_function);
        bindings_.words[UdpBindings::kReceive] = reinterpret_cast<void*>(&receive_function);
        bindings_.words[UdpBindings::kSend] = reinterpret_cast<void*>(&send_function);
        return std::nullopt;
    }

    static int probe_kernel() noexcept {
        const int fd = ::socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
        if (fd < 0) return errno;
        const int on = 1;
        int error = 0;
        if (option(fd, SOL_UDP, UDP_SEGMENT) < 0 || ::setsockopt(fd, SOL_UDP, UDP_GRO, &on, sizeof on) < 0)
            error = errno;
        ::close(fd);
        return error;
    }

    void refuse(const std::string& reason) noexcept {
        if (has_refused_.exchange(true)) return;
        try {
            const std::lock_guard lock(mutex_);
            // Not on the media driver's thread: a listener may wait for locks, and for the reader of the log.
            if (on_refusal_) reporter_ = std::thread([listener = on_refusal_, reason] { listener(reason); });
        } catch (...) {
            return;  // no thread to be had: the fallback works without a line in the log
        }
    }

    static int close_function(UdpTransport* transport);
    static int receive_function(UdpTransport* transport, mmsghdr* messages, std::size_t count, std::int64_t* bytes,
                                OnDatagram on_datagram, void* clientd);
    static int send_function(void* data_paths, UdpTransport* transport, sockaddr_storage* address, iovec* batch,
                             std::size_t count, std::int64_t* bytes);

    // By file descriptor. The media driver's threads write them, each for its own sockets; close() forgets.
    std::array<std::atomic<std::uint32_t>, kMostSockets> sending_{};
    std::array<std::atomic<std::uint8_t>, kMostSockets> receiving_{};
    Counts counts_;
    CloseTransport default_close_ = nullptr;
    ReceiveMany default_receive_ = nullptr;
    SendMany default_send_ = nullptr;
    const void* default_bindings_ = nullptr;
    UdpBindings bindings_{};
    std::mutex mutex_;
    OnRefusal on_refusal_;
    std::thread reporter_;
    std::atomic<bool> has_refused_{false};
};

// Of this process: Aeron's functions have no argument for an object of ours. Never destroyed: a media driver that was not
// closed may still call.
inline UdpOffload& process_udp_offload() {
    static UdpOffload* const offload = new UdpOffload();
    return *offload;
}

inline int UdpOffload::close_function(UdpTransport* transport) { return process_udp_offload().close(transport); }

inline int UdpOffload::receive_function(UdpTransport* transport, mmsghdr* messages, std::size_t count,
                                        std::int64_t* bytes, OnDatagram on_datagram, void* clientd) {
    return process_udp_offload().receive(transport, messages, count, bytes, on_datagram, clientd);
}

inline int UdpOffload::send_function(void* data_paths, UdpTransport* transport, sockaddr_storage* address, iovec* batch,
                                     std::size_t count, std::int64_t* bytes) {
    return process_udp_offload().send(data_paths, transport, address, batch, count, bytes);
}

}  // namespace tensorpool::aeron
