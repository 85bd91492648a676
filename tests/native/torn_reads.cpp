// SPDX-License-Identifier: Apache-2.0
// One writer overwrites a small ring as fast as it can while three readers read it, in processes of their own. No read
// that the protocol accepts may hold a mixture of two frames. Wire §15.13.
//
//   torn_reads [--seconds S] [--reads N] [--seed X] [--sizes 64,4096,…] [--threads] [--copy KIND]
//
// Every 8-byte word of a payload follows from the frame's seq and the word's index, and so do the header's fields, so
// that any mixture is recognised, and cheaply. Reader 0 copies, reader 1 looks at the mapped bytes in place, reader 2
// does both in turn. Prints one line of JSON; exit code 1 when a torn frame was accepted, when a frame was dropped for
// a reason that this writer gives no cause for, or when accepted and dropped reads do not add up to the attempts.
#include <array>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "rings.hpp"

using namespace tensorpool;
using namespace tensorpool::test;

namespace {

constexpr std::uint32_t kSlots = 8;
constexpr int kReaders = 3;
constexpr std::array<std::uint32_t, 5> kSizes = {64, 4096, 64 * 1024, 1024 * 1024, 4 * 1024 * 1024};
constexpr std::uint64_t kTurnNs = 2'000'000;  // how long the writer stays with one size

const char* const kDropNames[kDropCount] = {"NONE",
                                            "NOT_COMMITTED",
                                            "OVERWRITTEN",
                                            "STALE",
                                            "BAD_EMBEDDED_HEADER",
                                            "BAD_PAYLOAD_OFFSET",
                                            "BAD_PAYLOAD_SLOT",
                                            "BAD_POOL",
                                            "BAD_LENGTH",
                                            "BAD_DTYPE",
                                            "BAD_MAJOR_ORDER",
                                            "BAD_NDIMS",
                                            "BAD_DIMS",
                                            "BAD_STRIDES",
                                            "BAD_PROGRESS",
                                            "NO_POOL"};

// --- what frame `seq` looks like

std::uint64_t mix(std::uint64_t x) {
    x += 0x9E37'79B9'7F4A'7C15;
    x = (x ^ (x >> 30)) * 0xBF58'476D'1CE4'E5B9;
    x = (x ^ (x >> 27)) * 0x94D0'49BB'1331'11EB;
    return x ^ (x >> 31);
}

constexpr std::uint64_t kStep = 0xD1B5'4A32'D192'ED03;
std::uint64_t word_at(std::uint64_t seq, std::size_t i) { return mix(seq) + i * kStep; }
std::uint64_t timestamp_of(std::uint64_t seq) { return mix(~seq); }
std::uint32_t meta_of(std::uint64_t seq, std::size_t words) {
    return static_cast<std::uint32_t>(mix(mix(seq) ^ words));
}

TensorLayout layout_of(std::uint64_t seq, std::size_t words) {
    const auto n = static_cast<std::int32_t>(words);
    TensorLayout layout;
    switch (mix(seq) % 3) {
        case 0: layout = test::layout_of(Dtype::UINT64, MajorOrder::ROW, {n}); break;
        case 1: layout = test::layout_of(Dtype::UINT8, MajorOrder::COLUMN, {8, n}); break;
        default: layout = test::layout_of(Dtype::FLOAT32, MajorOrder::ROW, {n, 1, 2}, {8, 0, 4}); break;
    }
    layout.resolve();
    return layout;
}

std::size_t size_index(std::size_t bytes) {
    std::size_t i = 0;
    while (kSizes[i] < bytes) ++i;
    return i;
}

// Payload words in shared memory; ThreadSanitizer must see both sides as atomics (copy.hpp).
std::uint64_t load_word(const std::uint8_t* at) {
    return __atomic_load_n(reinterpret_cast<const std::uint64_t*>(at), __ATOMIC_RELAXED);
}
void fill(std::uint8_t* at, std::uint64_t seq, std::size_t words) {
    const std::uint64_t first = word_at(seq, 0);
    for (std::size_t i = 0; i < words; ++i)
#if defined(__SANITIZE_THREAD__)
        __atomic_store_n(reinterpret_cast<std::uint64_t*>(at) + i, first + i * kStep, __ATOMIC_RELAXED);
#else
        store<std::uint64_t>(at + 8 * i, first + i * kStep);
#endif
}

class Random {
public:
    explicit Random(std::uint64_t seed) : state_(mix(seed) | 1) {}
    std::uint64_t next() {
        state_ ^= state_ << 13;
        state_ ^= state_ >> 7;
        state_ ^= state_ << 17;
        return state_;
    }
    std::uint64_t below(std::uint64_t limit) { return next() % limit; }

private:
    std::uint64_t state_;
};

// --- what the processes share besides the ring: each counter has one writer

class Counter {
public:
    void add(std::uint64_t n = 1) { value_.store(get() + n, std::memory_order_relaxed); }
    std::uint64_t get() const { return value_.load(std::memory_order_relaxed); }

private:
    std::atomic<std::uint64_t> value_{0};
};

struct ReaderCounts {
    Counter attempts;
    std::array<Counter, kSizes.size()> accepted;
    std::array<Counter, kSizes.size()> raced;  // overwritten after read() and before the last look: discarded
    Counter raced_header;                      // overwritten inside read()
    Counter mixed;                             // of the raced: those that did hold two frames
    Counter torn_header, torn_payload;         // accepted although they held two frames
    Counter unexplained, miscounted;
    std::array<Counter, kDropCount> drops;
};

struct Shared {
    std::atomic<bool> stop{false};
    std::array<Counter, kSizes.size()> written;
    Counter streamed, in_place, abandoned;
    std::array<ReaderCounts, kReaders> readers;
};

struct Options {
    double seconds = 5;
    std::uint64_t reads = 0;
    std::uint64_t seed = 1;
    bool threads = false;
    std::vector<std::size_t> sizes = {0, 1, 2, 3, 4};
};

// --- the writer

void write_frames(const MappedRing& ring, Shared& shared, const Options& options) {
    RingWriter writer(ring.geometry());
    Random random(options.seed);
    alignas(64) static thread_local std::uint8_t source[kSizes.back()];
    std::size_t turn = 0;
    std::uint64_t turn_ends = 0;
    for (std::uint64_t seq = 0; !shared.stop.load(std::memory_order_relaxed); ++seq) {
        if (seq % 16 == 0 || kSizes[options.sizes[turn]] > 4096) {
            const std::uint64_t now = monotonic_ns();
            if (now > turn_ends) {
                turn = (turn + 1) % options.sizes.size();
                turn_ends = now + kTurnNs;
            }
        }
        const std::size_t size = options.sizes[turn];
        const std::size_t largest = kSizes[size] / 8;
        const std::size_t least = size == 0 ? 1 : kSizes[size - 1] / 8 + 1;
        const std::size_t words = random.below(2) == 0 ? largest : least + random.below(largest - least + 1);
        const TensorLayout layout = layout_of(seq, words);
        const auto open = [&](std::size_t fill_words, bool header_first) {
            const Pool& pool =
                writer.geometry()
                    .pools()[writer.begin(seq, layout, timestamp_of(seq), meta_of(seq, words), header_first)];
            fill(RingGeometry::payload(pool, writer.geometry().index_of(seq)), seq, fill_words);
        };
        const std::uint64_t kind = random.below(8);
        if (kind == 0) {  // abandoned in the middle, then written after all
            open(words / 2, random.below(2) == 0);
            writer.abandon();
            shared.abandoned.add();
        }
        if (kind < 4) {
            open(words, kind == 1);
            writer.commit(timestamp_of(seq), meta_of(seq, words));
            shared.in_place.add();
        } else {
            fill(source, seq, words);
            writer.write(seq, layout, {source, words * 8}, timestamp_of(seq), meta_of(seq, words));
            if (prefers_streaming(words * 8, std::size_t{kSlots} * kSizes[size])) shared.streamed.add();
        }
        shared.written[size].add();
    }
}

// --- the readers

bool header_matches(const RingGeometry& geometry, const SlotFrame& frame) {
    const std::size_t words = frame.values_len_bytes / 8;
    if (frame.values_len_bytes % 8 != 0 || words == 0 || frame.values_len_bytes > kSizes.back()) return false;
    const TensorLayout expected = layout_of(frame.seq, words);
    const TensorLayout& layout = *frame.layout;
    return frame.timestamp_ns == timestamp_of(frame.seq) && frame.meta_version == meta_of(frame.seq, words) &&
           frame.pool == geometry.pool_for(frame.values_len_bytes) && layout.dtype == expected.dtype &&
           layout.major_order == expected.major_order && layout.ndims == expected.ndims &&
           layout.dims == expected.dims && layout.strides == expected.strides &&
           layout.extent_bytes == frame.values_len_bytes;
}

// Backwards every other time: a writer that runs forwards is then met in the middle.
bool payload_matches(const std::uint8_t* at, std::uint64_t seq, std::size_t words, bool backwards) {
    const std::uint64_t first = word_at(seq, 0);
    if (backwards) {
        for (std::size_t i = words; i-- > 0;)
            if (load_word(at + 8 * i) != first + i * kStep) return false;
    } else {
        for (std::size_t i = 0; i < words; ++i)
            if (load_word(at + 8 * i) != first + i * kStep) return false;
    }
    return true;
}

// Mostly the newest frame and the one that is overwritten next; sometimes what is not there yet or not any more.
std::uint64_t choose(std::uint64_t newest, Random& random) {
    const std::uint64_t oldest = newest >= kSlots - 1 ? newest - (kSlots - 1) : 0;
    switch (random.below(8)) {
        case 0: return newest + 1;
        case 1: return oldest > 0 ? oldest - 1 : 0;
        case 2: return oldest + random.below(newest - oldest + 1);
        case 3:
        case 4: return newest;
        default: return oldest;
    }
}

void read_frames(const MappedRing& ring, Shared& shared, const Options& options, int id) {
    RingReader reader(ring.geometry());
    const RingGeometry& geometry = reader.geometry();
    ReaderCounts& counts = shared.readers[static_cast<std::size_t>(id)];
    Random random(options.seed * 1000 + static_cast<std::uint64_t>(id) + 1);
    std::vector<std::uint8_t> copied(kSizes.back());
    DropCounters seen;
    while (!shared.stop.load(std::memory_order_relaxed)) {
        const std::optional<std::uint64_t> newest = reader.newest();
        if (!newest) continue;
        const std::uint64_t seq = choose(*newest, random);
        const bool was_there = CommitWord(geometry.slot(geometry.index_of(seq))).peek() == committed(seq);
        SlotFrame frame;
        counts.attempts.add();
        const Drop drop = reader.read(seq, frame);
        seen.of(drop).add();
        if (drop != Drop::NONE) {
            counts.drops[static_cast<std::size_t>(drop)].add();
            // Seqs are written without gaps: only the one after the newest may still be missing.
            const bool explained = drop == Drop::STALE ? seq > *newest : is_late(drop);
            if (!explained) counts.unexplained.add();
            if (was_there && drop == Drop::OVERWRITTEN) counts.raced_header.add();
            continue;
        }
        if (!header_matches(geometry, frame)) {  // read() vouches for the header, whatever becomes of the payload
            counts.torn_header.add();
            continue;
        }
        const std::size_t words = frame.values_len_bytes / 8;
        const std::size_t size = size_index(frame.values_len_bytes);
        const bool copies = id == 0 || (id == 2 && random.below(2) == 0);
        const bool backwards = random.below(2) == 0;
        bool is_whole, is_intact;
        if (copies) {
            is_intact = reader.copy(frame, copied.data());
            is_whole = payload_matches(copied.data(), seq, words, false);
        } else {
            const std::uint8_t* const at = geometry.pools()[frame.pool].region.data() + frame.payload_offset;
            is_whole = payload_matches(at, seq, words, backwards);
            is_intact = reader.intact(frame);
        }
        if (!is_intact) {
            counts.raced[size].add();
            if (!is_whole) counts.mixed.add();
        } else if (!is_whole) {
            counts.torn_payload.add();
        } else {
            counts.accepted[size].add();
        }
    }
    const auto is_same = [](const RelaxedCounter& mine, const RelaxedCounter& its) { return mine.get() == its.get(); };
    if (!std::equal(seen.begin(), seen.end(), reader.drops().begin(), is_same)) counts.miscounted.add();
}

// --- running them

struct Children {
    std::vector<pid_t> pids;
    std::vector<std::thread> threads;

    template <typename Body>
    void start(bool as_thread, Body body) {
        if (as_thread) {
            threads.emplace_back(body);
            return;
        }
        const pid_t pid = fork();
        if (pid == 0) {
            prctl(PR_SET_PDEATHSIG, SIGKILL);
            body();
            std::_Exit(0);
        }
        pids.push_back(pid);
    }

    // The number of processes that did not end well; `block` waits for all of them.
    int reap(bool block) {
        int failed = 0;
        for (pid_t& pid : pids) {
            int status = 0;
            if (pid > 0 && waitpid(pid, &status, block ? 0 : WNOHANG) == pid) {
                failed += status != 0;
                pid = 0;
            }
        }
        if (block)
            for (std::thread& thread : threads) thread.join();
        return failed;
    }
};

struct Sum {
    std::uint64_t attempts = 0, accepted = 0, raced = 0, raced_header = 0, mixed = 0, torn_header = 0, torn_payload = 0,
                  unexplained = 0, miscounted = 0, dropped = 0;
    std::array<std::uint64_t, kSizes.size()> accepted_by_size{}, raced_by_size{};
    std::array<std::uint64_t, kDropCount> drops{};

    explicit Sum(const Shared& shared) {
        for (const ReaderCounts& reader : shared.readers) {
            attempts += reader.attempts.get();
            raced_header += reader.raced_header.get();
            mixed += reader.mixed.get();
            torn_header += reader.torn_header.get();
            torn_payload += reader.torn_payload.get();
            unexplained += reader.unexplained.get();
            miscounted += reader.miscounted.get();
            for (std::size_t i = 0; i < kSizes.size(); ++i) {
                accepted_by_size[i] += reader.accepted[i].get();
                raced_by_size[i] += reader.raced[i].get();
            }
            for (std::size_t i = 0; i < kDropCount; ++i) drops[i] += reader.drops[i].get();
        }
        for (std::uint64_t n : accepted_by_size) accepted += n;
        for (std::uint64_t n : raced_by_size) raced += n;
        for (std::uint64_t n : drops) dropped += n;
    }
    std::uint64_t torn() const { return torn_header + torn_payload; }
    bool adds_up() const { return miscounted == 0 && attempts == accepted + raced + torn() + dropped; }
};

std::string by_size(const auto& values) {
    std::string text = "{";
    for (std::size_t i = 0; i < kSizes.size(); ++i)
        text += (i ? ", \"" : "\"") + std::to_string(kSizes[i]) + "\": " + std::to_string(values[i]);
    return text + "}";
}

bool parse(int argc, char** argv, Options& options) {
    for (int i = 1; i < argc; ++i) {
        const std::string name = argv[i];
        if (name == "--threads") {
            options.threads = true;
            continue;
        }
        if (i + 1 == argc) return false;
        char* const value = argv[++i];
        if (name == "--seconds")
            options.seconds = std::strtod(value, nullptr);
        else if (name == "--reads")
            options.reads = std::strtoull(value, nullptr, 10);
        else if (name == "--seed")
            options.seed = std::strtoull(value, nullptr, 10);
        else if (name == "--copy") {
            const auto* const kind = std::find(kCopyKindNames.begin(), kCopyKindNames.end(), value);
            if (kind == kCopyKindNames.end()) return false;
            if (set_fitting(static_cast<CopyKind>(kind - kCopyKindNames.begin())) == 0) std::exit(3);  // not here
        } else if (name == "--sizes") {
            options.sizes.clear();
            for (char* part = std::strtok(value, ","); part; part = std::strtok(nullptr, ","))
                for (std::size_t s = 0; s < kSizes.size(); ++s)
                    if (std::to_string(kSizes[s]) == part) options.sizes.push_back(s);
            if (options.sizes.empty()) return false;
        } else
            return false;
    }
    return true;
}

}  // namespace

int main(int argc, char** argv) {
    Options options;
    if (!parse(argc, argv, options)) {
        std::fprintf(
            stderr,
            "usage: torn_reads [--seconds S] [--reads N] [--seed X] [--sizes 64,…] [--threads] [--copy KIND]\n");
        return 2;
    }
    std::vector<PoolSpec> pools;
    for (std::size_t i = 0; i < kSizes.size(); ++i) pools.push_back({static_cast<std::uint16_t>(i + 1), kSizes[i]});
    const SharedRing ring(kSlots, pools);
    const SharedFile control(sizeof(Shared));
    const std::unique_ptr<Mapping> page = control.map(true);
    Shared& shared = *new (page->bytes().data()) Shared;

    const std::uint64_t start = monotonic_ns();
    Children children;
    children.start(options.threads, [&] {
        const MappedRing mine = ring.map(true);
        write_frames(mine, shared, options);
    });
    for (int id = 0; id < kReaders; ++id)
        children.start(options.threads, [&, id] {
            const MappedRing mine = ring.map(false);
            read_frames(mine, shared, options, id);
        });

    int crashed = 0;
    double elapsed = 0;
    while (true) {
        usleep(2000);
        elapsed = static_cast<double>(monotonic_ns() - start) / 1e9;
        crashed += children.reap(false);
        const Sum sum(shared);
        const bool is_enough = options.reads > 0 && sum.accepted >= options.reads;
        if (elapsed >= options.seconds || is_enough || crashed > 0 || sum.torn() > 0 || sum.unexplained > 0) break;
    }
    shared.stop = true;
    crashed += children.reap(true);

    const Sum sum(shared);
    std::string drops;
    for (std::size_t i = 1; i < kDropCount; ++i)
        if (sum.drops[i] > 0)
            drops +=
                (drops.empty() ? "\"" : ", \"") + std::string(kDropNames[i]) + "\": " + std::to_string(sum.drops[i]);
    std::array<std::uint64_t, kSizes.size()> written{};
    for (std::size_t i = 0; i < kSizes.size(); ++i) written[i] = shared.written[i].get();
    const auto count = [](std::uint64_t n) { return static_cast<unsigned long long>(n); };
    std::printf(
        "{\"seed\": %llu, \"seconds\": %.3f, \"attempts\": %llu, \"accepted\": %llu, \"torn_header\": %llu, "
        "\"torn_payload\": %llu, \"raced\": %llu, \"raced_header\": %llu, \"mixed_discarded\": %llu, "
        "\"unexplained\": %llu, \"adds_up\": %s, \"crashed\": %d, \"drops\": {%s}, \"accepted_by_size\": %s, "
        "\"raced_by_size\": %s, \"written_by_size\": %s, \"streamed\": %llu, \"in_place\": %llu, "
        "\"abandoned\": %llu}\n",
        count(options.seed), elapsed, count(sum.attempts), count(sum.accepted), count(sum.torn_header),
        count(sum.torn_payload), count(sum.raced), count(sum.raced_header), count(sum.mixed), count(sum.unexplained),
        sum.adds_up() ? "true" : "false", crashed, drops.c_str(), by_size(sum.accepted_by_size).c_str(),
        by_size(sum.raced_by_size).c_str(), by_size(written).c_str(), count(shared.streamed.get()),
        count(shared.in_place.get()), count(shared.abandoned.get()));
    return sum.torn() == 0 && sum.unexplained == 0 && sum.adds_up() && crashed == 0 ? 0 : 1;
}
