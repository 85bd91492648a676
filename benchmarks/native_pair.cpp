// SPDX-License-Identifier: Apache-2.0
// The headers of native/ used from C++, for comparison with figures that others publish about theirs.
//
//   native_pair line                    ns of a cache line from one core to the other, one way
//   native_pair latency BYTES SECONDS   two processes play ping-pong with frames, filled and read in place: ns, one way
//   native_pair throughput BYTES SLOTS SECONDS [copy]    one process writes as fast as it goes, the other reads all
//
// Both sides spin, as in those figures. Prints one line of JSON. Built by benchmarks/native_pair.py.
#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "ring.hpp"

using namespace tensorpool;

namespace {

std::int64_t now_ns() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1'000'000'000LL + now.tv_nsec;
}

void pin(int nth) {
    cpu_set_t allowed, one;
    CPU_ZERO(&one);
    if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) return;
    for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu)
        if (CPU_ISSET(cpu, &allowed) && nth-- == 0) CPU_SET(cpu, &one);
    if (CPU_COUNT(&one) > 0) pthread_setaffinity_np(pthread_self(), sizeof one, &one);
}

template <typename T>
T* shared(std::size_t count = 1) {
    void* const at =
        mmap(nullptr, count * sizeof(T), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    if (at == MAP_FAILED) std::exit((std::perror("mmap"), 2));
    return static_cast<T*>(at);
}

double at_share(std::vector<double> values, double share) {
    std::sort(values.begin(), values.end());
    return values[static_cast<std::size_t>(share * static_cast<double>(values.size() - 1))];
}

// The child's work runs on another core and ends with the parent.
pid_t start(const auto& work) {
    const pid_t parent = getpid(), child = fork();
    if (child < 0) std::exit((std::perror("fork"), 2));
    if (child == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (getppid() != parent) _exit(1);
        pin(1);
        work();
        _exit(0);
    }
    pin(0);
    return child;
}

// For a child that works until it is ended: one that ends by itself has found a mistake.
void expect_no_end() {
    signal(SIGCHLD, [](int) { _exit(1); });
}
void end(pid_t child) {
    signal(SIGCHLD, SIG_DFL);
    kill(child, SIGKILL);
    waitpid(child, nullptr, 0);
}

int line() {
    struct alignas(128) Ball {
        std::atomic<std::uint32_t> at{0};
    };
    constexpr std::uint32_t kTurns = 2000, kBatches = 21;
    auto* const ball = new (shared<Ball>()) Ball;
    const pid_t child = start([&] {
        for (std::uint32_t turn = 1; turn < 2 * kTurns * kBatches; turn += 2) {
            while (ball->at.load(std::memory_order_acquire) != turn) {
            }
            ball->at.store(turn + 1, std::memory_order_release);
        }
    });
    std::vector<double> batches;
    std::uint32_t turn = 0;
    for (std::uint32_t batch = 0; batch < kBatches; ++batch) {
        const std::int64_t began = now_ns();
        for (std::uint32_t i = 0; i < kTurns; ++i, turn += 2) {
            ball->at.store(turn + 1, std::memory_order_release);
            while (ball->at.load(std::memory_order_acquire) != turn + 2) {
            }
        }
        batches.push_back(static_cast<double>(now_ns() - began) / (2.0 * kTurns));
    }
    waitpid(child, nullptr, 0);
    std::printf("{\"ns\": %.1f}\n", at_share(batches, 0.25));  // others may have had a core for some of the batches
    return 0;
}

// A ring in memory that both processes have.
RingGeometry make_ring(std::uint32_t bytes, std::uint32_t nslots) {
    const std::uint32_t stride = std::max<std::uint32_t>(64, std::bit_ceil(bytes));
    const std::size_t header = kSuperblockBytes + std::size_t{nslots} * kHeaderSlotBytes;
    const std::size_t pool = kSuperblockBytes + std::size_t{nslots} * stride;
    return {{shared<std::uint8_t>(header), header}, {{1, stride, {shared<std::uint8_t>(pool), pool}}}, nslots};
}

TensorLayout layout_of(std::uint32_t bytes) {
    const std::array dims{static_cast<std::int32_t>(bytes)};
    return checked_layout(1, 1, dims, {}, 0, 0);
}

// Fills the first and the last word of a slot in place and commits it.
void send(RingWriter& ring, const TensorLayout& layout, std::uint64_t seq) {
    const std::size_t pool = ring.begin(seq, layout, 0, 0, false);
    std::uint8_t* const at = RingGeometry::payload(ring.geometry().pools()[pool], ring.geometry().index_of(seq));
    store<std::uint64_t>(at, seq);
    store<std::uint64_t>(at + layout.extent_bytes - 8, seq);
    ring.commit(0, 0);
}

void receive(RingReader& ring, const RingGeometry& geometry, std::uint64_t seq, std::uint32_t bytes) {
    SlotFrame frame;
    while (ring.read(seq, frame) != Drop::NONE) {
    }
    const std::uint8_t* const at = geometry.pools()[frame.pool].region.data() + frame.payload_offset;
    if (load<std::uint64_t>(at) != seq || load<std::uint64_t>(at + bytes - 8) != seq || !ring.intact(frame))
        std::exit((std::fprintf(stderr, "frame %llu is not whole\n", static_cast<unsigned long long>(seq)), 1));
}

int latency(std::uint32_t bytes, double seconds) {
    const RingGeometry there = make_ring(bytes, 8), back = make_ring(bytes, 8);
    const TensorLayout layout = layout_of(bytes);
    expect_no_end();
    const pid_t child = start([&] {
        RingReader reader(there);
        RingWriter writer(back);
        for (std::uint64_t seq = 0;; ++seq) {
            receive(reader, there, seq, bytes);
            send(writer, layout, seq);
        }
    });
    RingWriter writer(there);
    RingReader reader(back);
    std::vector<double> trips;
    const std::int64_t until = now_ns() + static_cast<std::int64_t>(seconds * 1e9);
    for (std::uint64_t seq = 0; now_ns() < until; ++seq) {
        const std::int64_t sent = now_ns();
        send(writer, layout, seq);
        receive(reader, back, seq, bytes);
        trips.push_back(static_cast<double>(now_ns() - sent) / 2);
    }
    end(child);
    std::printf("{\"p50_ns\": %.0f, \"p99_ns\": %.0f, \"trips\": %zu}\n", at_share(trips, 0.5), at_share(trips, 0.99),
                trips.size());
    return 0;
}

int throughput(std::uint32_t bytes, std::uint32_t nslots, double seconds, bool copies) {
    const RingGeometry geometry = make_ring(bytes, nslots);
    const TensorLayout layout = layout_of(bytes);
    auto* const newest = new (shared<std::atomic<std::uint64_t>>()) std::atomic<std::uint64_t>(0);
    expect_no_end();
    const pid_t child = start([&] {
        RingWriter writer(geometry);
        const std::vector<std::uint8_t> source(bytes, 7);
        for (std::uint64_t seq = 0;; ++seq) {
            writer.write(seq, layout, source, 0, 0);
            newest->store(seq + 1, std::memory_order_release);  // stands for the descriptor
        }
    });
    RingReader reader(geometry);
    std::vector<std::uint8_t> own(bytes);
    std::uint64_t frames = 0, lost = 0, next = 0, sum = 0;
    const std::int64_t began = now_ns(), deadline = began + static_cast<std::int64_t>(seconds * 1e9);
    while (now_ns() < deadline) {
        const std::uint64_t until = newest->load(std::memory_order_acquire);
        if (until - next > nslots / 2) lost += until - nslots / 2 - next, next = until - nslots / 2;
        for (; next < until; ++next) {
            SlotFrame frame;
            bool is_whole = reader.read(next, frame) == Drop::NONE;
            if (is_whole && copies) is_whole = reader.copy(frame, own.data());
            if (is_whole && !copies) {
                const std::uint8_t* const at = geometry.pools()[frame.pool].region.data() + frame.payload_offset;
                for (std::uint32_t i = 0; i < bytes; i += 4096) sum += at[i];
                is_whole = reader.intact(frame);
            }
            is_whole ? ++frames : ++lost;
        }
    }
    const double took = static_cast<double>(now_ns() - began) / 1e9;
    end(child);
    std::printf("{\"per_second\": %.0f, \"lost\": %llu, \"sum\": %llu}\n", static_cast<double>(frames) / took,
                static_cast<unsigned long long>(lost), static_cast<unsigned long long>(sum));
    return 0;
}

}  // namespace

int main(int argc, char** argv) {
    const std::string mode = argc > 1 ? argv[1] : "";
    const auto number = [&](int at) { return argc > at ? std::strtod(argv[at], nullptr) : 0.0; };
    const auto bytes = static_cast<std::uint32_t>(number(2));
    if (mode == "line") return line();
    if (mode == "latency" && bytes >= 16 && number(3) > 0) return latency(bytes, number(3));
    const auto nslots = static_cast<std::uint32_t>(number(3));
    if (mode == "throughput" && bytes >= 16 && nslots > 1 && std::has_single_bit(nslots) && number(4) > 0)
        return throughput(bytes, nslots, number(4), argc > 5);
    std::fprintf(stderr, "usage: native_pair line | latency BYTES SECONDS | throughput BYTES SLOTS SECONDS [copy]\n");
    return 2;
}
