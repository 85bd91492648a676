// SPDX-License-Identifier: Apache-2.0
// The UDP offload over real sockets, with functions of the test where Aeron's would be: which datagrams arrive, which
// calls go to the default, and that merging and splitting are each other's inverse for any sizes.
#include "udp_offload.hpp"

#include <limits>
#include <memory>
#include <random>

#include <arpa/inet.h>
#include <linux/net_tstamp.h>
#include <poll.h>

#include "check.hpp"

using namespace tensorpool;
using namespace tensorpool::aeron;

namespace {

using Bytes = std::vector<std::uint8_t>;

struct Calls {
    std::size_t sends = 0, receives = 0, closes = 0;
} calls;

// What the wrapped system call does: so many more messages are sent, then it fails; -1: it is the real one.
int fails_after = -1;
int error_of_send = 0;

int default_send(void*, UdpTransport* transport, sockaddr_storage* address, iovec* batch, std::size_t count,
                 std::int64_t* bytes) {
    ++calls.sends;
    for (std::size_t i = 0; i < count; ++i) {
        const ssize_t sent = ::sendto(transport->fd, batch[i].iov_base, batch[i].iov_len, 0,
                                      reinterpret_cast<sockaddr*>(address), sizeof(sockaddr_in6));
        if (sent < 0) return static_cast<int>(i);
        *bytes += sent;
    }
    return static_cast<int>(count);
}

void* wrong_dispatch = nullptr;  // what the default passes instead of the transport's own word

int default_receive(UdpTransport* transport, mmsghdr* messages, std::size_t, std::int64_t* bytes, OnDatagram call,
                    void* clientd) {
    ++calls.receives;
    iovec& buffer = messages[0].msg_hdr.msg_iov[0];
    const ssize_t length = ::recv(transport->recv_fd, buffer.iov_base, buffer.iov_len, MSG_DONTWAIT);
    if (length < 0) return 0;
    call(transport->data_paths, transport, clientd,
         wrong_dispatch != nullptr ? wrong_dispatch : transport->dispatch_clientd, transport->destination_clientd,
         static_cast<std::uint8_t*>(buffer.iov_base), static_cast<std::size_t>(length), nullptr, nullptr);
    *bytes += length;
    return 1;
}

int default_close(UdpTransport* transport) {
    ++calls.closes;
    ::close(transport->fd);
    return 0;
}

// A socket as Aeron's receiver or sender has it, on IPv6's loopback.
struct End {
    explicit End(std::size_t buffer_bytes = 65'536)
        : buffers(16, Bytes(buffer_bytes)), iov(16), headers(16), names(16) {
        transport.fd = transport.recv_fd = ::socket(AF_INET6, SOCK_DGRAM | SOCK_NONBLOCK, 0);
        const int bytes = 4 << 20;
        ::setsockopt(transport.fd, SOL_SOCKET, SO_RCVBUF, &bytes, sizeof bytes);
        sockaddr_in6 own{};
        own.sin6_family = AF_INET6;
        own.sin6_addr = in6addr_loopback;
        CHECK_EQ(::bind(transport.fd, reinterpret_cast<sockaddr*>(&own), sizeof own), 0);
        socklen_t length = sizeof address;
        ::getsockname(transport.fd, reinterpret_cast<sockaddr*>(&address), &length);
        transport.data_paths = &data_paths;
        transport.dispatch_clientd = &headers;
        transport.destination_clientd = &names;
        for (std::size_t i = 0; i < 16; ++i) {
            iov[i] = {buffers[i].data(), buffers[i].size()};
            headers[i] = {};
            headers[i].msg_hdr.msg_name = &names[i];
            headers[i].msg_hdr.msg_namelen = sizeof names[i];
            headers[i].msg_hdr.msg_iov = &iov[i];
            headers[i].msg_hdr.msg_iovlen = 1;
        }
    }
    ~End() {
        if (transport.fd >= 0) ::close(transport.fd);
    }
    End(const End&) = delete;

    UdpTransport transport{};
    int data_paths = 0;
    sockaddr_storage address{};
    std::vector<Bytes> buffers;
    std::vector<iovec> iov;
    std::vector<mmsghdr> headers;
    std::vector<sockaddr_storage> names;
};

struct Received {
    std::vector<Bytes> datagrams;
    bool is_aligned = true;
    UdpTransport* transport = nullptr;
};

void on_datagram(void* data_paths, UdpTransport* transport, void* clientd, void* dispatch, void* destination,
                 std::uint8_t* buffer, std::size_t length, sockaddr_storage*, timespec*) {
    auto& received = *static_cast<Received*>(clientd);
    CHECK(data_paths == transport->data_paths);
    CHECK(dispatch == transport->dispatch_clientd || dispatch == wrong_dispatch);
    CHECK(destination == transport->destination_clientd);
    received.is_aligned = received.is_aligned && reinterpret_cast<std::uintptr_t>(buffer) % 8 == 0;
    received.datagrams.emplace_back(buffer, buffer + length);
}

struct Pair {
    Pair() {
        calls = {};
        wrong_dispatch = nullptr;
        fails_after = -1;
        offload->use(&default_close, &default_receive, &default_send);
    }

    int send(std::vector<Bytes>& batch, std::int64_t& bytes) {
        std::vector<iovec> iov;
        for (Bytes& datagram : batch) iov.push_back({datagram.data(), datagram.size()});
        return offload->send(&sender.data_paths, &sender.transport, &receiver.address, iov.data(), iov.size(), &bytes);
    }
    int poll(std::int64_t& bytes) {
        return offload->receive(&receiver.transport, receiver.headers.data(), receiver.headers.size(), &bytes,
                                &on_datagram, &received);
    }
    // Until `count` datagrams have come in all.
    void receive(std::size_t count) {
        std::int64_t bytes = 0;
        while (received.datagrams.size() < count) {
            pollfd wait{receiver.transport.recv_fd, POLLIN, 0};
            if (::poll(&wait, 1, 2000) != 1) return;
            poll(bytes);
        }
    }
    // The first datagram of a socket decides whether it is split.
    void meet() {
        std::vector<Bytes> first{{1, 2, 3}};
        std::int64_t bytes = 0;
        send(first, bytes);
        receive(1);
        received.datagrams.clear();
        calls = {};
    }

    std::unique_ptr<UdpOffload> offload = std::make_unique<UdpOffload>();
    End sender, receiver;
    Received received;
};

std::vector<Bytes> datagrams(const std::vector<std::size_t>& lengths) {
    std::vector<Bytes> made;
    std::uint8_t next = 0;
    for (const std::size_t length : lengths) {
        Bytes datagram(length);
        for (std::uint8_t& byte : datagram) byte = next++;
        made.push_back(std::move(datagram));
    }
    return made;
}

}  // namespace

extern "C" {
int __real_sendmmsg(int, mmsghdr*, unsigned, int);

int __wrap_sendmmsg(int fd, mmsghdr* messages, unsigned count, int flags) {
    if (fails_after < 0) return __real_sendmmsg(fd, messages, count, flags);
    const unsigned most = std::min(count, static_cast<unsigned>(fails_after));
    fails_after -= static_cast<int>(most);
    if (most > 0) return __real_sendmmsg(fd, messages, most, flags);
    errno = error_of_send;
    return -1;
}
}

TEST(udp_offload, groups_cover_a_batch_in_order_and_obey_the_kernels_rules) {
    std::mt19937 chance(4711);
    for (int turn = 0; turn < 20'000; ++turn) {
        std::vector<iovec> batch(1 + chance() % 80);
        const std::size_t usual = 1 + chance() % (turn % 2 ? 65'507 : 1'408);
        for (iovec& datagram : batch) datagram = {nullptr, chance() % 4 ? usual : chance() % 65'508};
        const std::size_t most = chance() % 3 ? 65'535 : chance() % 2'000;
        std::size_t first = 0;
        while (first < batch.size()) {
            const udp::Group group = udp::next_group(batch, first, most);
            CHECK_EQ(group.first, first);
            CHECK(group.count >= 1 && first + group.count <= batch.size() && group.count <= udp::kMostSegments);
            std::size_t bytes = 0;
            for (std::size_t i = 0; i < group.count; ++i) {
                const std::size_t length = batch[first + i].iov_len;
                bytes += length;
                if (group.count == 1) break;
                CHECK(length > 0 && length <= most);
                CHECK(i + 1 == group.count ? length <= group.segment_bytes : length == group.segment_bytes);
            }
            CHECK(group.count == 1 || bytes <= udp::kMostBytes);
            first += group.count;
        }
        CHECK_EQ(first, batch.size());
    }
}

TEST(udp_offload, splitting_is_the_inverse_of_merging) {
    std::mt19937 chance(1147);
    for (int turn = 0; turn < 20'000; ++turn) {
        const std::size_t segment = 1 + chance() % 9'000, whole = chance() % 64, last = 1 + chance() % segment;
        std::vector<std::size_t> lengths(whole, segment);
        lengths.push_back(last);
        std::size_t at = 0, seen = 0;
        udp::split(whole * segment + last, segment, [&](std::size_t offset, std::size_t length) {
            CHECK_EQ(offset, at);
            CHECK(seen < lengths.size() && length == lengths[seen]);
            at += length;
            ++seen;
        });
        CHECK_EQ(seen, lengths.size());
    }
    std::size_t calls_of_none = 0;
    udp::split(1000, 0,
               [&](std::size_t offset, std::size_t length) { calls_of_none += offset == 0 && length == 1000; });
    CHECK_EQ(calls_of_none, std::size_t{1});
}

TEST(udp_offload, a_size_is_read_from_well_formed_control_messages_only) {
    std::mt19937 chance(11);
    alignas(cmsghdr) std::uint8_t control[udp::kControlBytes];
    for (int turn = 0; turn < 50'000; ++turn) {
        for (std::uint8_t& byte : control) byte = static_cast<std::uint8_t>(chance() % 3 ? 0 : chance());
        msghdr message{};
        message.msg_control = control;
        message.msg_controllen = chance() % (sizeof control + 1);
        udp::segment_bytes(message);  // reads nothing outside, which AddressSanitizer watches
    }
    msghdr message{};
    message.msg_control = control;
    message.msg_controllen = CMSG_SPACE(sizeof(int));
    cmsghdr* const header = CMSG_FIRSTHDR(&message);
    *header = {CMSG_LEN(sizeof(int)), SOL_UDP, UDP_GRO};
    for (const auto& [said, understood] : {std::pair{1408, 1408}, std::pair{0, 0}, std::pair{-5, 0}}) {
        std::memcpy(CMSG_DATA(header), &said, sizeof said);
        CHECK_EQ(udp::segment_bytes(message), static_cast<std::size_t>(understood));
    }
}

TEST(udp_offload, datagrams_arrive_as_they_were_sent) {
    Pair pair;
    pair.meet();
    std::mt19937 chance(23);
    for (int turn = 0; turn < 300; ++turn) {
        std::vector<std::size_t> lengths(1 + chance() % 16);
        const std::size_t usual = 1 + chance() % 2'000;
        for (std::size_t& length : lengths) length = chance() % 6 ? usual : 1 + chance() % 4'000;
        std::vector<Bytes> batch = datagrams(lengths);
        std::int64_t bytes = 0, total = 0;
        for (const Bytes& datagram : batch) total += static_cast<std::int64_t>(datagram.size());
        CHECK_EQ(pair.send(batch, bytes), static_cast<int>(batch.size()));
        CHECK_EQ(bytes, total);
        pair.received.datagrams.clear();
        pair.receive(batch.size());
        CHECK(pair.received.datagrams == batch);
    }
    CHECK(pair.received.is_aligned);
    CHECK(pair.offload->counts().sent.load() > 1000);
    CHECK(pair.offload->counts().received.load() > 1000);
    CHECK_EQ(calls.receives, std::size_t{0});
}

TEST(udp_offload, a_send_that_would_block_in_the_middle_reports_what_left) {
    Pair pair;
    pair.meet();
    std::vector<Bytes> batch = datagrams({900, 900, 900, 100, 1200, 1200, 1200});  // two groups: 4 and 3
    std::int64_t bytes = 0;
    fails_after = 1;
    error_of_send = EAGAIN;
    CHECK_EQ(pair.send(batch, bytes), 4);
    CHECK_EQ(bytes, std::int64_t{2800});
    pair.receive(4);
    CHECK_EQ(pair.received.datagrams.size(), std::size_t{4});
    fails_after = 0;
    for (const int error : {EAGAIN, ECONNREFUSED, EINTR}) {
        error_of_send = error;
        bytes = 0;
        CHECK_EQ(pair.send(batch, bytes), 0);
        CHECK_EQ(bytes, std::int64_t{0});
    }
    CHECK_EQ(calls.sends, std::size_t{0});
}

TEST(udp_offload, a_refused_segmented_send_goes_out_by_the_default_from_then_on) {
    for (const int error : {EIO, EMSGSIZE, EINVAL, EOPNOTSUPP}) {
        Pair pair;
        pair.meet();
        std::vector<Bytes> large = datagrams({2'000, 2'000, 2'000}), small = datagrams({500, 500, 500});
        std::int64_t bytes = 0;
        fails_after = 0;
        error_of_send = error;
        CHECK_EQ(pair.send(large, bytes), 3);  // nothing is lost
        CHECK_EQ(calls.sends, std::size_t{1});
        fails_after = -1;
        CHECK_EQ(pair.send(large, bytes), 3);
        CHECK_EQ(calls.sends, std::size_t{2});
        CHECK_EQ(pair.send(small, bytes), 3);
        // A size that the path does not carry says nothing about smaller ones.
        CHECK_EQ_IN(error, calls.sends, std::size_t{error == EMSGSIZE || error == EINVAL ? 2U : 3U});
        pair.receive(9);
        CHECK_EQ(pair.received.datagrams.size(), std::size_t{9});
    }
}

// Aeron sends a batch again from its beginning until all of it has left: a refusal that hides behind a success would be
// met for ever.
TEST(udp_offload, a_refusal_in_the_middle_sends_the_rest_by_the_default) {
    Pair pair;
    pair.meet();
    std::vector<Bytes> batch = datagrams({100, 100, 2'000, 2'000, 2'000});
    std::int64_t bytes = 0;
    fails_after = 1;
    error_of_send = EMSGSIZE;
    CHECK_EQ(pair.send(batch, bytes), 5);
    CHECK_EQ(bytes, std::int64_t{6'200});
    CHECK_EQ(calls.sends, std::size_t{1});
    pair.receive(5);
    CHECK(pair.received.datagrams == batch);
}

TEST(udp_offload, what_is_unusual_takes_the_default) {
    Pair pair;
    std::vector<Bytes> one = datagrams({700}), uneven = datagrams({100, 200, 300}), even = datagrams({64, 64, 64});
    std::int64_t bytes = 0;
    pair.send(one, bytes);
    pair.send(uneven, bytes);
    std::vector<iovec> iov;
    for (Bytes& datagram : even) iov.push_back({datagram.data(), datagram.size()});
    pair.offload->send(nullptr, &pair.sender.transport, &pair.receiver.address, iov.data(), 3, &bytes);  // interceptors
    CHECK_EQ(calls.sends, std::size_t{3});
    pair.receive(7);
    CHECK_EQ(pair.received.datagrams.size(), std::size_t{7});
    Pair odd;
    odd.sender.transport.data_paths = nullptr;  // a layout that is not ours
    odd.send(even, bytes);
    CHECK_EQ(calls.sends, std::size_t{1});
    odd.receive(3);
    CHECK(odd.received.datagrams == even);
}

TEST(udp_offload, a_socket_is_split_only_after_its_first_datagram_agreed) {
    Pair pair;
    int other = 0;
    wrong_dispatch = &other;
    pair.meet();
    std::vector<Bytes> batch = datagrams({64, 64, 64});
    std::int64_t bytes = 0;
    pair.send(batch, bytes);
    pair.receive(3);
    CHECK(pair.received.datagrams == batch);
    CHECK(calls.receives >= 3);
    CHECK_EQ(pair.offload->counts().received.load(), std::uint64_t{0});
}

TEST(udp_offload, buffers_of_an_mtu_and_sockets_with_timestamps_are_not_split) {
    Pair small;
    for (iovec& buffer : small.receiver.iov) buffer.iov_len = 1408;
    small.meet();
    Pair stamped;
    const int on = 1;
    ::setsockopt(stamped.receiver.transport.fd, SOL_SOCKET, SO_TIMESTAMPNS, &on, sizeof on);
    stamped.meet();
    for (Pair* pair : {&small, &stamped}) {
        std::vector<Bytes> batch = datagrams({640, 640, 640});
        std::int64_t bytes = 0;
        pair->received.datagrams.clear();
        pair->send(batch, bytes);
        pair->receive(3);
        CHECK(pair->received.datagrams == batch);
        CHECK_EQ(pair->offload->counts().received.load(), std::uint64_t{0});
    }
}

TEST(udp_offload, a_cut_buffer_yields_its_whole_datagrams_only) {
    Pair pair;
    pair.meet();
    for (iovec& buffer : pair.receiver.iov) buffer.iov_len = 1'500;
    std::vector<Bytes> batch = datagrams({640, 640, 640});
    std::int64_t bytes = 0;
    pair.send(batch, bytes);
    pair.receive(2);
    batch.pop_back();
    CHECK(pair.received.datagrams == batch);
    CHECK_EQ(pair.offload->counts().dropped.load(), std::uint64_t{1});
}

TEST(udp_offload, a_buffer_without_the_size_of_its_datagrams_is_dropped) {
    Pair pair;
    pair.meet();
    // More control data than there is room for before the size, from a socket that had none when it was judged.
    const int on = 1, software = SOF_TIMESTAMPING_RX_SOFTWARE | SOF_TIMESTAMPING_SOFTWARE;
    const int fd = pair.receiver.transport.fd;
    CHECK_EQ(::setsockopt(fd, SOL_SOCKET, SO_TIMESTAMPNS, &on, sizeof on), 0);
    CHECK_EQ(::setsockopt(fd, SOL_SOCKET, SO_TIMESTAMPING, &software, sizeof software), 0);
    CHECK_EQ(::setsockopt(fd, SOL_SOCKET, SO_RCVMARK, &on, sizeof on), 0);
    std::vector<Bytes> batch = datagrams({640, 640, 640});
    std::int64_t bytes = 0;
    pair.received.datagrams.clear();
    pair.send(batch, bytes);
    pollfd wait{fd, POLLIN, 0};
    CHECK_EQ(::poll(&wait, 1, 2000), 1);
    pair.poll(bytes);
    CHECK(pair.received.datagrams.empty());
    CHECK_EQ(pair.offload->counts().dropped.load(), std::uint64_t{1});
}

TEST(udp_offload, a_setup_that_no_publication_sends_is_not_handed_on) {
    const auto setup = [](std::uint16_t type, std::int32_t initial, std::int32_t active) {
        Bytes frame(40);
        std::memcpy(&frame[6], &type, sizeof type);
        std::memcpy(&frame[20], &initial, sizeof initial);
        std::memcpy(&frame[24], &active, sizeof active);
        return frame;
    };
    constexpr std::int32_t kLeast = std::numeric_limits<std::int32_t>::min(), kMost = ~kLeast;
    const std::vector<Bytes> honest{setup(5, 7, 7), setup(5, kMost, kLeast), setup(5, -1, kMost - 1), setup(1, 7, 6),
                                    Bytes(27, 5)};
    const std::vector<Bytes> lies{setup(5, 7, 6), setup(5, kLeast, 7), setup(5, -1, kMost)};
    for (const bool is_split : {false, true}) {
        Pair pair;
        if (is_split) pair.meet();
        pair.received.datagrams.clear();
        for (const std::vector<Bytes>* each : {&lies, &honest})
            for (const Bytes& frame : *each)
                ::sendto(pair.sender.transport.fd, frame.data(), frame.size(), 0,
                         reinterpret_cast<const sockaddr*>(&pair.receiver.address), sizeof(sockaddr_in6));
        pair.receive(honest.size());
        CHECK(pair.received.datagrams == honest);
        CHECK_EQ(pair.offload->counts().refused.load(), std::uint64_t{lies.size()});
    }
}

TEST(udp_offload, nothing_is_known_of_a_closed_socket) {
    Pair pair;
    pair.meet();
    std::vector<Bytes> batch = datagrams({64, 64});
    std::int64_t bytes = 0;
    pair.offload->close(&pair.receiver.transport);
    CHECK_EQ(calls.closes, std::size_t{1});
    End other;  // gets the number of the closed one
    CHECK_EQ(other.transport.fd, pair.receiver.transport.fd);
    pair.offload->receive(&other.transport, other.headers.data(), 16, &bytes, &on_datagram, &pair.received);
    CHECK_EQ(calls.receives, std::size_t{1});
    pair.receiver.transport.fd = -1;
}

TEST(udp_offload, a_refusal_is_reported_once_and_not_on_the_callers_thread) {
    std::atomic<int> reports{0};
    std::string reason;
    {
        Pair pair;
        Api api{};
        api.version_major = [] { return 1; };
        api.version_minor = [] { return 2; };
        api.version_full = [] { return "aeron version=1.2.3"; };
        const std::thread::id own = std::this_thread::get_id();
        for (int turn = 0; turn < 3; ++turn)
            pair.offload->install(api, nullptr, [&, own](const std::string& text) {
                CHECK(std::this_thread::get_id() != own);
                reason = text;
                ++reports;
            });
        pair.offload->finish_reports();
    }
    CHECK_EQ(reports.load(), 1);
    CHECK(reason.find("aeron version=1.2.3") != std::string::npos);
}
