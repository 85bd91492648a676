// SPDX-License-Identifier: Apache-2.0
// Moving payload bytes. Which instructions move them fastest depends on the processor, the size, and where the bytes are:
// every use has a kind of copy that can be exchanged (copy_kinds), by default one that suits what the processor is.
//
// Streaming (non-temporal) stores skip the read for ownership and win for frames of about a MiB and more, as long as what
// they fill as a whole does not stay in the last-level cache, which other processes use as well; below that ordinary
// ones win, and the reader finds the frame in a cache.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string_view>

#include <unistd.h>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

#include "rep_movsb.hpp"

namespace tensorpool {

inline constexpr std::size_t kStreamingFromBytes = std::size_t{1} << 20;

// The cache that one core shares with its neighbours. The kernel knows it; glibc reports a whole socket's sum on some
// processors, which is eight times as much.
inline std::size_t last_level_cache_bytes() noexcept {
    static const std::size_t bytes = []() -> std::size_t {
        if (std::FILE* const file = std::fopen("/sys/devices/system/cpu/cpu0/cache/index3/size", "re")) {
            unsigned long kib = 0;
            const bool is_read = std::fscanf(file, "%luK", &kib) == 1 && kib > 0;
            std::fclose(file);
            if (is_read) return std::size_t{kib} << 10;
        }
#if defined(_SC_LEVEL3_CACHE_SIZE)
        const long reported = sysconf(_SC_LEVEL3_CACHE_SIZE);
        if (reported > 0) return static_cast<std::size_t>(reported);
#endif
        return std::size_t{32} << 20;
    }();
    return bytes;
}

// Whether memory of `total_bytes` that is used in turn leaves the cache before it is used again.
inline bool exceeds_cache(std::size_t total_bytes) noexcept { return total_bytes > last_level_cache_bytes() / 4; }

// Whether a frame of `bytes` that goes into memory of `total_bytes`, used in turn, is worth streaming stores.
inline bool prefers_streaming(std::size_t bytes, std::size_t total_bytes) noexcept {
    return bytes >= kStreamingFromBytes && exceeds_cache(total_bytes);
}

// AHEAD prefetches what is read, OWN the lines that are written and that a reader on another core has in its cache; LINES
// writes whole lines without reading them first.
enum class CopyKind : std::uint8_t {
    LIBC,
    AVX2,
    AVX2_AHEAD,
    AVX2_OWN,
    AVX512,
    AVX512_AHEAD,
    AVX512_OWN,
    LINES,
    STREAM_SSE2,
    STREAM_AVX2,
    STREAM_AVX2_AHEAD,
    STREAM_AVX512,
};
inline constexpr std::array<std::string_view, 12> kCopyKindNames{
    "libc",  "avx2",        "avx2-ahead",  "avx2-own",          "avx512",       "avx512-ahead", "avx512-own",
    "lines", "stream-sse2", "stream-avx2", "stream-avx2-ahead", "stream-avx512"};

// What a copy is for. Reads go from a ring to the reader's own memory, writes from the writer's into a ring: COLD is a
// frame of a ring that exceeds the cache, STREAM everything that prefers_streaming.
enum class CopyUse : std::uint8_t { READ_SMALL, READ_MEDIUM, READ_COLD, READ_LARGE, WRITE, WRITE_COLD, STREAM };
inline constexpr std::array<std::string_view, 7> kCopyUseNames{"read-small", "read-medium", "read-cold", "read-large",
                                                               "write",      "write-cold",  "stream"};
inline constexpr std::size_t kMediumFromBytes = std::size_t{32} << 10;

inline constexpr bool is_streaming(CopyKind kind) noexcept { return kind >= CopyKind::STREAM_SSE2; }

// What takes lines from readers is for writes, streaming stores are for CopyUse::STREAM, which has the fences; memcpy is
// for any use.
inline constexpr bool is_fit(CopyUse use, CopyKind kind) noexcept {
    if (kind == CopyKind::AVX2_OWN || kind == CopyKind::AVX512_OWN || kind == CopyKind::LINES)
        return use == CopyUse::WRITE;
    return kind == CopyKind::LIBC || is_streaming(kind) == (use == CopyUse::STREAM);
}

#if defined(__x86_64__)
inline bool has_avx2() noexcept { return __builtin_cpu_supports("avx2"); }
// The first processors with AVX-512 run slower while they use it; those that also have VBMI2 do not.
inline bool has_avx512() noexcept { return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vbmi2"); }
// Whether `rep movsb` moves whole lines (ERMS).
inline bool has_fast_strings() noexcept {
    static const bool is_there = [] {
        unsigned a = 0, b = 0, c = 0, d = 0;
        return __get_cpuid_count(7, 0, &a, &b, &c, &d) != 0 && (b >> 9 & 1) != 0;
    }();
    return is_there;
}
#endif

// Whether this processor has the instructions.
inline bool is_supported(CopyKind kind) noexcept {
    if (kind == CopyKind::LIBC) return true;
#if defined(__x86_64__)
    switch (kind) {
        case CopyKind::STREAM_SSE2: return true;
        case CopyKind::LINES: return has_avx2() && has_fast_strings();
        case CopyKind::AVX512:
        case CopyKind::AVX512_AHEAD:
        case CopyKind::AVX512_OWN:
        case CopyKind::STREAM_AVX512: return has_avx512();
        default: return has_avx2();
    }
#else
    return false;
#endif
}

// The kind for each use when nothing else is set, by what the processor has; measured on Zen 5, before on Zen 3 and 4.
inline CopyKind default_kind(CopyUse use) noexcept {
#if defined(__x86_64__)
    if (use == CopyUse::STREAM) {
        if (has_avx512()) return CopyKind::STREAM_AVX512;
        return has_avx2() ? CopyKind::STREAM_AVX2_AHEAD : CopyKind::STREAM_SSE2;
    }
    if (has_avx2()) switch (use) {
            case CopyUse::READ_SMALL: return CopyKind::AVX2_AHEAD;
            case CopyUse::READ_MEDIUM:
            case CopyUse::READ_LARGE: return has_avx512() ? CopyKind::AVX512_AHEAD : CopyKind::LIBC;
            case CopyUse::WRITE: return has_avx512() && has_fast_strings() ? CopyKind::LINES : CopyKind::AVX2_OWN;
            default: return CopyKind::LIBC;
        }
#endif
    static_cast<void>(use);
    return CopyKind::LIBC;
}

// The kind of copy for each use, of this process. Relaxed: any kind that a copy finds here moves the same bytes.
class CopyKinds {
public:
    CopyKinds() noexcept { reset(); }
    CopyKind operator[](CopyUse use) const noexcept {
        return kinds_[static_cast<std::size_t>(use)].load(std::memory_order_relaxed);
    }
    // `kind` is supported and fit.
    void set(CopyUse use, CopyKind kind) noexcept {
        kinds_[static_cast<std::size_t>(use)].store(kind, std::memory_order_relaxed);
    }
    void reset() noexcept {
        for (std::size_t i = 0; i < kinds_.size(); ++i) {
            const auto use = static_cast<CopyUse>(i);
            set(use, default_kind(use));
        }
    }

private:
    std::array<std::atomic<CopyKind>, kCopyUseNames.size()> kinds_;
};
inline CopyKinds copy_kinds;

// This kind for every use that it fits; returns to how many.
inline std::size_t set_fitting(CopyKind kind) noexcept {
    std::size_t count = 0;
    for (std::size_t i = 0; i < kCopyUseNames.size(); ++i)
        if (const auto use = static_cast<CopyUse>(i); is_supported(kind) && is_fit(use, kind)) {
            copy_kinds.set(use, kind);
            ++count;
        }
    return count;
}

#if defined(__SANITIZE_THREAD__)

// A seqlock races on purpose: readers discard what they read while it changed. ThreadSanitizer must see those accesses
// as atomics, or it would report the protocol itself instead of mistakes in it.
inline void copy_by(CopyKind, std::uint8_t* to, const std::uint8_t* from, std::size_t bytes) noexcept {
    for (std::size_t i = 0; i < bytes; ++i)
        __atomic_store_n(to + i, __atomic_load_n(from + i, __ATOMIC_RELAXED), __ATOMIC_RELAXED);
}
inline void streaming_fence() noexcept {}

#elif defined(__x86_64__)

// Below this a call of memcpy is as fast as any.
inline constexpr std::size_t kBlocksFromBytes = std::size_t{2} << 10;
inline constexpr std::size_t kBlockBytes = 256;
inline constexpr std::size_t kAheadBytes = 2048;

enum class Prefetch { NONE, READ, READ_ONCE, WRITE };

template <Prefetch kPrefetch>
__attribute__((always_inline)) inline void prefetch(const std::uint8_t* to, const std::uint8_t* from, std::size_t at,
                                                    std::size_t bytes) noexcept {
    if (kPrefetch == Prefetch::NONE || at + kAheadBytes + kBlockBytes > bytes) return;  // the next slot is not ours
    for (std::size_t line = at + kAheadBytes; line < at + kAheadBytes + kBlockBytes; line += 64) {
        if (kPrefetch == Prefetch::WRITE) __builtin_prefetch(to + line, 1);
        if (kPrefetch == Prefetch::READ) _mm_prefetch(reinterpret_cast<const char*>(from + line), _MM_HINT_T0);
        if (kPrefetch == Prefetch::READ_ONCE) _mm_prefetch(reinterpret_cast<const char*>(from + line), _MM_HINT_NTA);
    }
}

// `to` begins a cache line, `bytes` are whole blocks.
template <Prefetch kPrefetch, bool kStream>
__attribute__((target("avx2,prfchw"))) inline void blocks_avx2(std::uint8_t* to, const std::uint8_t* from,
                                                               std::size_t bytes) noexcept {
    for (std::size_t block = 0; block < bytes; block += kBlockBytes) {
        prefetch<kPrefetch>(to, from, block, bytes);
        for (std::size_t i = block; i < block + kBlockBytes; i += 128) {
            const __m256i a = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i));
            const __m256i b = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i + 32));
            const __m256i c = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i + 64));
            const __m256i d = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i + 96));
            auto* const at = reinterpret_cast<__m256i*>(to + i);
            if constexpr (kStream) {
                _mm256_stream_si256(at, a);
                _mm256_stream_si256(at + 1, b);
                _mm256_stream_si256(at + 2, c);
                _mm256_stream_si256(at + 3, d);
            } else {
                _mm256_storeu_si256(at, a);
                _mm256_storeu_si256(at + 1, b);
                _mm256_storeu_si256(at + 2, c);
                _mm256_storeu_si256(at + 3, d);
            }
        }
    }
}

template <Prefetch kPrefetch, bool kStream>
__attribute__((target("avx512f,prfchw"))) inline void blocks_avx512(std::uint8_t* to, const std::uint8_t* from,
                                                                    std::size_t bytes) noexcept {
    for (std::size_t i = 0; i < bytes; i += kBlockBytes) {
        prefetch<kPrefetch>(to, from, i, bytes);
        const __m512i a = _mm512_loadu_si512(from + i);
        const __m512i b = _mm512_loadu_si512(from + i + 64);
        const __m512i c = _mm512_loadu_si512(from + i + 128);
        const __m512i d = _mm512_loadu_si512(from + i + 192);
        auto* const at = reinterpret_cast<__m512i*>(to + i);
        if constexpr (kStream) {
            _mm512_stream_si512(at, a);
            _mm512_stream_si512(at + 1, b);
            _mm512_stream_si512(at + 2, c);
            _mm512_stream_si512(at + 3, d);
        } else {
            _mm512_storeu_si512(at, a);
            _mm512_storeu_si512(at + 1, b);
            _mm512_storeu_si512(at + 2, c);
            _mm512_storeu_si512(at + 3, d);
        }
    }
}

// Like blocks_avx2. `rep movsb` writes whole lines without taking them from another core first, where the source begins a
// line, too; any other source, such as an array from malloc, goes through a piece in the nearest cache.
inline void copy_lines(std::uint8_t* to, const std::uint8_t* from, std::size_t bytes) noexcept {
    constexpr std::size_t kPieceBytes = std::size_t{16} << 10;
    alignas(64) std::uint8_t piece[kPieceBytes];
    const bool is_aligned = (reinterpret_cast<std::uintptr_t>(from) & 63) == 0;
    for (std::size_t done = 0; done < bytes;) {
        const std::size_t count = is_aligned ? bytes : std::min(kPieceBytes, bytes - done);
        const std::uint8_t* source = from + done;
        std::uint8_t* const target = to + done;
        done += count;
        if (!is_aligned) {
            blocks_avx2<Prefetch::NONE, false>(piece, source, count);
            source = piece;
        }
        rep_movsb(target, source, count);
    }
}

inline void stream_blocks_sse2(std::uint8_t* to, const std::uint8_t* from, std::size_t bytes) noexcept {
    for (std::size_t i = 0; i < bytes; i += 16)
        _mm_stream_si128(reinterpret_cast<__m128i*>(to + i),
                         _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i)));
}

// Zen 3 and 4 run `rep movsb`, which glibc uses up to about a MiB, at a tenth of their speed (Zen 5 at 0.7) where the
// target begins up to 63 bytes after the source, counted within a page: as a slot does after an array from malloc.
inline bool is_slow_for_libc(const std::uint8_t* to, const std::uint8_t* from) noexcept {
    const std::size_t distance = (reinterpret_cast<std::uintptr_t>(to) - reinterpret_cast<std::uintptr_t>(from)) & 4095;
    return distance > 0 && distance < 64;
}

inline void copy_blocks(CopyKind kind, std::uint8_t* to, const std::uint8_t* from, std::size_t bytes) noexcept {
    if (kind == CopyKind::LIBC) {
        if (!is_slow_for_libc(to, from) || !has_avx2()) return std::memcpy(to, from, bytes), void();
        kind = CopyKind::AVX2;
    }
    const std::size_t head = (64 - (reinterpret_cast<std::uintptr_t>(to) & 63)) & 63;
    std::memcpy(to, from, head);
    const std::size_t blocks = (bytes - head) / kBlockBytes * kBlockBytes;
    std::uint8_t* const at = to + head;
    const std::uint8_t* const of = from + head;
    switch (kind) {
        case CopyKind::LIBC: break;
        case CopyKind::AVX2: blocks_avx2<Prefetch::NONE, false>(at, of, blocks); break;
        case CopyKind::AVX2_AHEAD: blocks_avx2<Prefetch::READ, false>(at, of, blocks); break;
        case CopyKind::AVX2_OWN: blocks_avx2<Prefetch::WRITE, false>(at, of, blocks); break;
        case CopyKind::AVX512: blocks_avx512<Prefetch::NONE, false>(at, of, blocks); break;
        case CopyKind::AVX512_AHEAD: blocks_avx512<Prefetch::READ, false>(at, of, blocks); break;
        case CopyKind::AVX512_OWN: blocks_avx512<Prefetch::WRITE, false>(at, of, blocks); break;
        case CopyKind::LINES: copy_lines(at, of, blocks); break;
        case CopyKind::STREAM_SSE2: stream_blocks_sse2(at, of, blocks); break;
        case CopyKind::STREAM_AVX2: blocks_avx2<Prefetch::NONE, true>(at, of, blocks); break;
        case CopyKind::STREAM_AVX2_AHEAD: blocks_avx2<Prefetch::READ_ONCE, true>(at, of, blocks); break;
        case CopyKind::STREAM_AVX512: blocks_avx512<Prefetch::NONE, true>(at, of, blocks); break;
    }
    std::memcpy(at + blocks, of + blocks, bytes - head - blocks);
}

inline void copy_by(CopyKind kind, std::uint8_t* to, const std::uint8_t* from, std::size_t bytes) noexcept {
    if (bytes < kBlocksFromBytes) return std::memcpy(to, from, bytes), void();
    copy_blocks(kind, to, from, bytes);
}

// Streaming stores are weakly ordered even among themselves: fence on both sides, so that the in-progress word is
// visible before the first of them and all of them before the committed word.
inline void streaming_fence() noexcept { _mm_sfence(); }

#else

inline void copy_by(CopyKind, std::uint8_t* to, const std::uint8_t* from, std::size_t bytes) noexcept {
    std::memcpy(to, from, bytes);
}
inline void streaming_fence() noexcept {}

#endif

// A piece that stays in a cache: a header, a chunk of a frame.
inline void copy_racing(std::uint8_t* to, const std::uint8_t* from, std::size_t bytes) noexcept {
    copy_by(copy_kinds[CopyUse::WRITE], to, from, bytes);
}
inline void copy_streaming(std::uint8_t* to, const std::uint8_t* from, std::size_t bytes) noexcept {
    copy_by(copy_kinds[CopyUse::STREAM], to, from, bytes);
}

// glibc's memcpy streams by itself from a size that depends on the machine and can be tuned down to 16 KiB. It fences
// after its streaming stores, not before them.
inline constexpr std::size_t kMemcpyMayStreamFromBytes = std::size_t{16} << 10;

inline void copy_payload(std::uint8_t* to, const std::uint8_t* from, std::size_t bytes, CopyUse use) noexcept {
    if (bytes == 0) return;
    const bool streaming = use == CopyUse::STREAM;
    if (streaming || bytes >= kMemcpyMayStreamFromBytes) streaming_fence();
    if (!streaming) return copy_by(copy_kinds[use], to, from, bytes);
    copy_streaming(to, from, bytes);
    streaming_fence();
}

// Into a slot of a pool of `total_bytes`, which is used in turn.
inline void write_payload(std::uint8_t* to, const std::uint8_t* from, std::size_t bytes,
                          std::size_t total_bytes) noexcept {
    const bool is_cold = bytes >= kMediumFromBytes && exceeds_cache(total_bytes);
    copy_payload(to, from, bytes,
                 prefers_streaming(bytes, total_bytes) ? CopyUse::STREAM
                 : is_cold                             ? CopyUse::WRITE_COLD
                                                       : CopyUse::WRITE);
}

// Out of a slot of such a pool, into memory of the reader's.
inline void read_payload(std::uint8_t* to, const std::uint8_t* from, std::size_t bytes,
                         std::size_t total_bytes) noexcept {
    copy_payload(to, from, bytes,
                 prefers_streaming(bytes, bytes) ? CopyUse::STREAM
                 : bytes >= kStreamingFromBytes  ? CopyUse::READ_LARGE
                 : bytes < kMediumFromBytes      ? CopyUse::READ_SMALL
                 : exceeds_cache(total_bytes)    ? CopyUse::READ_COLD
                                                 : CopyUse::READ_MEDIUM);
}

}  // namespace tensorpool
