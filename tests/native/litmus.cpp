// SPDX-License-Identifier: Apache-2.0
// What the fences are for. This machine hides most missing fences, so the order of memory accesses is not observed here
// but recorded from the real code and then permuted by every reordering that a weaker machine may do:
//
//   record   RingWriter and RingReader run against recording stand-ins for atomic_ref, fences, memcpy and the streaming
//            stores; what remains are accesses to four places: the commit word, the header, two halves of the payload
//   explore  all interleavings of one overwrite with one read under two models:
//            weak   any two accesses may swap unless C++ acquire/release operations or fences order them (as on ARM)
//            x86    plain accesses stay in order, streaming stores pass everything but sfence, the stores of a string
//                   copy pass each other
//
// A torn outcome is a read whose commit words all said "accept" while its data is not all of the wanted frame. Prints
// one line of JSON; exit code 1 when one exists. Wire §8.3; decision B1.
#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cerrno>
#include <climits>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <limits>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include <sys/mman.h>
#include <unistd.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "rep_movsb.hpp"

// --- recording

namespace litmus {

enum class Place { WORD, HEADER, PAYLOAD_0, PAYLOAD_1, COUNT };
enum class Kind { LOAD, STORE, STRING, STREAM, FENCE, SFENCE };

struct Access {
    Kind kind;
    Place place = Place::WORD;
    std::memory_order order = std::memory_order_relaxed;
    std::uint64_t value = 0;  // of stores to the word; 1 for new data

    bool operator==(const Access&) const = default;
    bool reads() const { return kind == Kind::LOAD; }
    bool writes() const { return kind == Kind::STORE || kind == Kind::STRING || kind == Kind::STREAM; }
    bool is_fence() const { return kind == Kind::FENCE || kind == Kind::SFENCE; }
};

using Trace = std::vector<Access>;

struct Recorder {
    Trace* trace = nullptr;
    const std::uint8_t* header = nullptr;
    std::size_t header_bytes = 0;
    const std::uint8_t* payload = nullptr;
    std::size_t payload_bytes = 0;

    void add(const Access& access) const {
        // A copy in many pieces is one access to each place: pieces between two fences repeat it.
        for (auto at = trace->rbegin(); at != trace->rend() && !at->is_fence() && at->place != Place::WORD; ++at)
            if (*at == access) return;
        trace->push_back(access);
    }
    void data(std::uintptr_t address, std::size_t bytes, Kind kind) const {
        if (trace == nullptr) return;
        const auto* const at = reinterpret_cast<const std::uint8_t*>(address);
        if (at < header + header_bytes && at + bytes > header) add({kind, Place::HEADER, std::memory_order_relaxed, 1});
        if (at >= payload + payload_bytes || at + bytes <= payload) return;
        if (at < payload + payload_bytes / 2) add({kind, Place::PAYLOAD_0, std::memory_order_relaxed, 1});
        if (at + bytes > payload + payload_bytes / 2) add({kind, Place::PAYLOAD_1, std::memory_order_relaxed, 1});
    }
    void word(Kind kind, std::memory_order order, std::uint64_t value) const {
        if (trace != nullptr) trace->push_back({kind, Place::WORD, order, value});
    }
    void fence(Kind kind, std::memory_order order) const {
        if (trace != nullptr) trace->push_back({kind, Place::WORD, order, 0});
    }
};
inline Recorder recorder;

// memcpy streams by its own choice from a size that glibc lets the administrator lower to 16 KiB (the tunable
// x86_non_temporal_threshold); it fences afterwards, not before.
constexpr std::size_t kMemcpyStreamsFrom = 0x4040;

}  // namespace litmus

namespace std {

template <typename T>
class recorded_ref {
public:
    explicit recorded_ref(T& object) : object_(object) {}
    T load(memory_order order) const {
        litmus::recorder.word(litmus::Kind::LOAD, order, 0);
        return object_;
    }
    void store(T value, memory_order order) const {
        litmus::recorder.word(litmus::Kind::STORE, order, value);
        object_ = value;
    }

private:
    T& object_;
};

inline void recorded_fence(memory_order order) { litmus::recorder.fence(litmus::Kind::FENCE, order); }

inline void* recorded_memcpy(void* to, const void* from, size_t bytes) {
    const bool streams = bytes >= litmus::kMemcpyStreamsFrom;
    litmus::recorder.data(reinterpret_cast<uintptr_t>(from), bytes, litmus::Kind::LOAD);
    litmus::recorder.data(reinterpret_cast<uintptr_t>(to), bytes, streams ? litmus::Kind::STREAM : litmus::Kind::STORE);
    if (streams) litmus::recorder.fence(litmus::Kind::SFENCE, memory_order_release);
    return memcpy(to, from, bytes);
}

}  // namespace std

#define atomic_ref recorded_ref
#define atomic_thread_fence recorded_fence
#define memcpy recorded_memcpy
#if defined(__x86_64__)
#undef _mm_prefetch
#define _mm_prefetch(at, hint) static_cast<void>(at)
#define _mm256_loadu_si256(at) \
    (litmus::recorder.data(reinterpret_cast<std::uintptr_t>(at), 32, litmus::Kind::LOAD), _mm256_loadu_si256(at))
#define _mm256_storeu_si256(at, value) \
    (litmus::recorder.data(reinterpret_cast<std::uintptr_t>(at), 32, litmus::Kind::STORE), \
     _mm256_storeu_si256(at, value))
#define _mm512_loadu_si512(at) \
    (litmus::recorder.data(reinterpret_cast<std::uintptr_t>(at), 64, litmus::Kind::LOAD), _mm512_loadu_si512(at))
#define _mm512_storeu_si512(at, value) \
    (litmus::recorder.data(reinterpret_cast<std::uintptr_t>(at), 64, litmus::Kind::STORE), \
     _mm512_storeu_si512(at, value))
#define _mm_loadu_si128(at) \
    (litmus::recorder.data(reinterpret_cast<std::uintptr_t>(at), 16, litmus::Kind::LOAD), _mm_loadu_si128(at))
#define rep_movsb(to, from, bytes) \
    (litmus::recorder.data(reinterpret_cast<std::uintptr_t>(from), bytes, litmus::Kind::LOAD), \
     litmus::recorder.data(reinterpret_cast<std::uintptr_t>(to), bytes, litmus::Kind::STRING), \
     rep_movsb(to, from, bytes))
#define _mm_sfence() litmus::recorder.fence(litmus::Kind::SFENCE, std::memory_order_release)
#define _mm_stream_si128(at, value) \
    (litmus::recorder.data(reinterpret_cast<std::uintptr_t>(at), 16, litmus::Kind::STREAM), _mm_store_si128(at, value))
#define _mm256_stream_si256(at, value) \
    (litmus::recorder.data(reinterpret_cast<std::uintptr_t>(at), 32, litmus::Kind::STREAM), \
     _mm256_store_si256(at, value))
#define _mm512_stream_si512(at, value) \
    (litmus::recorder.data(reinterpret_cast<std::uintptr_t>(at), 64, litmus::Kind::STREAM), \
     _mm512_store_si512(at, value))
#endif

#include "ring.hpp"

#undef memcpy

namespace {

using namespace tensorpool;
using litmus::Access;
using litmus::Kind;
using litmus::Place;
using litmus::recorder;
using litmus::Trace;

// --- the two models: which accesses of one thread may not swap

bool is_acquire(std::memory_order order) {
    return order == std::memory_order_acquire || order == std::memory_order_acq_rel ||
           order == std::memory_order_seq_cst;
}
bool is_release(std::memory_order order) {
    return order == std::memory_order_release || order == std::memory_order_acq_rel ||
           order == std::memory_order_seq_cst;
}

bool is_ordered_weak(const Trace& trace, std::size_t a, std::size_t b) {
    const Access &first = trace[a], &second = trace[b];
    if (first.place == second.place) return true;
    if (first.reads() && is_acquire(first.order)) return true;
    if (second.writes() && is_release(second.order)) return true;
    for (std::size_t i = a + 1; i < b; ++i) {
        if (trace[i].kind != Kind::FENCE) continue;
        if (is_release(trace[i].order) && second.writes()) return true;
        if (is_acquire(trace[i].order) && first.reads()) return true;
    }
    return false;
}

bool is_ordered_x86(const Trace& trace, std::size_t a, std::size_t b) {
    const Access &first = trace[a], &second = trace[b];
    if (first.place == second.place) return true;
    if (first.kind == Kind::STRING && second.kind == Kind::STRING) return false;
    if (first.kind != Kind::STREAM && second.kind != Kind::STREAM)
        return !(first.writes() && second.reads());  // only a load may pass an earlier store
    for (std::size_t i = a + 1; i < b; ++i)
        if (trace[i].kind == Kind::SFENCE && first.writes() && second.writes()) return true;
    return first.reads();  // no store, streaming or not, passes an earlier load
}

using Model = bool (*)(const Trace&, std::size_t, std::size_t);

// A thread as a partial order: access i may happen once all of before[i] have.
struct Thread {
    Trace accesses;
    std::vector<std::uint32_t> before;

    Thread(const Trace& trace, Model is_ordered) {
        std::vector<std::size_t> at;
        for (std::size_t i = 0; i < trace.size(); ++i)
            if (!trace[i].is_fence()) at.push_back(i), accesses.push_back(trace[i]);
        for (std::size_t j = 0; j < at.size(); ++j) {
            std::uint32_t mask = 0;
            for (std::size_t i = 0; i < j; ++i)
                if (is_ordered(trace, at[i], at[j])) mask |= 1u << i;
            before.push_back(mask);
        }
    }
    std::uint32_t all() const { return (1u << accesses.size()) - 1; }
};

// --- exploring

struct Outcomes {
    std::uint64_t accepted = 0, torn = 0;
};

class Explorer {
public:
    Explorer(const Thread& writer, const Thread& reader, std::uint64_t old_word, std::uint64_t wanted_word)
        : writer_(writer), reader_(reader), wanted_word_(wanted_word), wants_new_(wanted_word != old_word) {
        memory_.fill(0);
        memory_[0] = old_word;
    }
    Outcomes run() {
        step(0, 0, true, false, false);
        return outcomes_;
    }

private:
    // `accepts`: every word read so far was the wanted one; old/new: which data was read so far.
    void step(std::uint32_t written, std::uint32_t read, bool accepts, bool saw_old, bool saw_new) {
        if (!accepts) return;
        std::vector<std::uint64_t> key{written, read, saw_old, saw_new};
        key.insert(key.end(), memory_.begin(), memory_.end());
        if (!visited_.insert(key).second) return;
        if (read == reader_.all()) {  // what the writer does from here on is not seen
            ++outcomes_.accepted;
            outcomes_.torn += wants_new_ ? saw_old : saw_new;
            return;
        }
        for (std::size_t i = 0; i < writer_.accesses.size(); ++i) {
            if ((written >> i & 1) || (writer_.before[i] & ~written)) continue;
            const Access& access = writer_.accesses[i];
            auto& cell = memory_[static_cast<std::size_t>(access.place)];
            const std::uint64_t was = std::exchange(cell, access.writes() ? access.value : cell);
            step(written | 1u << i, read, accepts, saw_old, saw_new);
            cell = was;
        }
        for (std::size_t i = 0; i < reader_.accesses.size(); ++i) {
            if ((read >> i & 1) || (reader_.before[i] & ~read)) continue;
            const Access& access = reader_.accesses[i];
            const std::uint64_t value = memory_[static_cast<std::size_t>(access.place)];
            if (access.place == Place::WORD)
                step(written, read | 1u << i, value == wanted_word_, saw_old, saw_new);
            else
                step(written, read | 1u << i, accepts, saw_old || value == 0, saw_new || value == 1);
        }
    }

    const Thread& writer_;
    const Thread& reader_;
    std::uint64_t wanted_word_;
    bool wants_new_;
    std::array<std::uint64_t, static_cast<std::size_t>(Place::COUNT)> memory_;
    std::set<std::vector<std::uint64_t>> visited_;
    Outcomes outcomes_;
};

// --- the programs under test

constexpr std::uint32_t kSlot = 3;

class Ring {
public:
    Ring(std::uint32_t stride, std::uint32_t nslots)
        : header_(map(64 + std::size_t{nslots} * 256)),
          pool_(map(64 + std::size_t{nslots} * stride)),
          geometry_(header_, {{1, stride, pool_}}, nslots),
          bytes_(stride),
          nslots_(nslots) {
        layout_.dtype = static_cast<std::int16_t>(Dtype::UINT8);
        layout_.major_order = static_cast<std::int16_t>(MajorOrder::ROW);
        layout_.ndims = 1;
        layout_.dims[0] = static_cast<std::int32_t>(stride);
        layout_.resolve();
        recorder.header = geometry_.slot(kSlot) + 8;
        recorder.header_bytes = kHeaderSlotBytes - 8;
        recorder.payload = RingGeometry::payload(geometry_.pools()[0], kSlot);
        recorder.payload_bytes = stride;
    }
    ~Ring() {
        munmap(header_.data(), header_.size());
        munmap(pool_.data(), pool_.size());
    }
    Ring(const Ring&) = delete;
    Ring& operator=(const Ring&) = delete;

    static constexpr std::uint64_t kOld = kSlot;
    std::uint64_t young() const { return kOld + nslots_; }

    Trace record(auto body) {
        Trace trace;
        RingWriter writer(geometry_);
        writer.write(kOld, layout_, bytes_, 0, 0);
        recorder.trace = &trace;
        body(writer);
        recorder.trace = nullptr;
        return trace;
    }
    Trace write() {
        return record([&](RingWriter& writer) { writer.write(young(), layout_, bytes_, 0, 0); });
    }
    // In place: begin, the owner's own stores (plain or streaming), commit.
    Trace claim(Kind kind, bool header_first) {
        return record([&](RingWriter& writer) {
            writer.begin(young(), layout_, 0, 0, header_first);
            recorder.data(reinterpret_cast<std::uintptr_t>(recorder.payload), bytes_.size(), kind);
            writer.commit(0, 0);
        });
    }
    Trace read(bool copies) {
        return record([&](RingWriter&) {
            RingReader reader(geometry_);
            SlotFrame frame;
            std::vector<std::uint8_t> to(bytes_.size());
            if (reader.read(kOld, frame) != Drop::NONE) throw std::runtime_error("the recorded read was not accepted");
            if (copies) {
                if (!reader.copy(frame, to.data())) throw std::runtime_error("the recorded copy was not accepted");
            } else {
                recorder.data(reinterpret_cast<std::uintptr_t>(recorder.payload), bytes_.size(), Kind::LOAD);
                if (!reader.intact(frame)) throw std::runtime_error("the recorded view was not accepted");
            }
        });
    }

private:
    static std::span<std::uint8_t> map(std::size_t bytes) {
        void* const at =
            mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (at == MAP_FAILED) throw std::system_error(errno, std::generic_category(), "mmap");
        return {static_cast<std::uint8_t*>(at), bytes};
    }

    std::span<std::uint8_t> header_, pool_;
    RingGeometry geometry_;
    std::vector<std::uint8_t> bytes_;
    std::uint32_t nslots_;
    TensorLayout layout_;
};

struct Totals {
    std::uint64_t programs = 0, accepted = 0, torn = 0;
    std::string first_torn;

    void explore(const Ring& ring, const char* name, Model model, const Trace& writes, const Trace& reads) {
        const Thread writer(writes, model), reader(reads, model);
        const auto words = std::count_if(reads.begin(), reads.end(),
                                         [](const Access& a) { return a.reads() && a.place == Place::WORD; });
        for (std::uint64_t wanted : {Ring::kOld, ring.young()}) {
            const Outcomes outcomes = Explorer(writer, reader, committed(Ring::kOld), committed(wanted)).run();
            ++programs;
            accepted += outcomes.accepted;
            torn += outcomes.torn;
            if (outcomes.torn > 0 && first_torn.empty())
                first_torn = std::string(name) + (wanted == Ring::kOld ? ", old frame" : ", new frame");
            // The recording is only worth something when it holds what it must.
            if (outcomes.accepted == 0 || words < 2 || writer.accesses.size() < 5 || reader.accesses.size() < 6)
                throw std::runtime_error(std::string(name) + ": the trace is incomplete");
        }
    }
};

#if defined(__x86_64__)
// Each kind of copy that this processor has, which no processor chooses by itself all of.
std::vector<CopyKind> supported_kinds(bool streaming) {
    std::vector<CopyKind> kinds;
    for (std::size_t i = 0; i < kCopyKindNames.size(); ++i)
        if (const auto kind = static_cast<CopyKind>(i); is_supported(kind) && is_streaming(kind) == streaming)
            kinds.push_back(kind);
    return kinds;
}
#endif

}  // namespace

int main() {
    Totals tally;
    {
        Ring ring(64, 4);
        const Trace write = ring.write(), claim = ring.claim(Kind::STORE, false),
                    progress = ring.claim(Kind::STORE, true);
        for (const bool copies : {false, true}) {
            const Trace read = ring.read(copies);
            tally.explore(ring, "weak, write", is_ordered_weak, write, read);
            tally.explore(ring, "weak, claim", is_ordered_weak, claim, read);
            tally.explore(ring, "weak, claim with the header first", is_ordered_weak, progress, read);
            tally.explore(ring, "x86, write", is_ordered_x86, write, read);
        }
    }
#if defined(__x86_64__)
    for (const CopyKind kind : supported_kinds(false)) {
        set_fitting(kind);
        Ring ring(64 * 1024, 4);  // memcpy may stream
        const Trace read = ring.read(true);
        tally.explore(ring, "x86, large copy", is_ordered_x86, ring.write(), read);
        tally.explore(ring, "weak, large copy", is_ordered_weak, ring.write(), read);
        tally.explore(ring, "x86, claim filled by streaming stores", is_ordered_x86, ring.claim(Kind::STREAM, false),
                      read);
        tally.explore(ring, "x86, progressive claim filled by streaming stores", is_ordered_x86,
                      ring.claim(Kind::STREAM, true), read);
    }
    for (const CopyKind kind : supported_kinds(true)) {
        set_fitting(kind);
        const auto stride = static_cast<std::uint32_t>(kStreamingFromBytes);
        Ring ring(stride, static_cast<std::uint32_t>(std::bit_ceil(last_level_cache_bytes() / 2 / stride + 2)));
        const Trace write = ring.write();
        if (std::none_of(write.begin(), write.end(), [](const Access& a) { return a.kind == Kind::STREAM; }))
            throw std::runtime_error("the large write did not stream");
        tally.explore(ring, "x86, streaming write", is_ordered_x86, write, ring.read(true));
    }
#endif
    std::printf("{\"programs\": %llu, \"accepted_outcomes\": %llu, \"torn_outcomes\": %llu, \"first_torn\": \"%s\"}\n",
                static_cast<unsigned long long>(tally.programs), static_cast<unsigned long long>(tally.accepted),
                static_cast<unsigned long long>(tally.torn), tally.first_torn.c_str());
    return tally.torn == 0 ? 0 : 1;
}
