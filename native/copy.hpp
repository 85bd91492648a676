// SPDX-License-Identifier: Apache-2.0
// Moving payload bytes. Streaming (non-temporal) stores skip the read for ownership and win for frames of about a
// MiB and more, as long as what they fill as a whole does not stay in the last-level cache, which other processes use
// as well; below that ordinary ones win.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>

#include <unistd.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

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

// Whether a frame of `bytes` that goes into memory of `total_bytes`, used in turn, is worth streaming stores.
inline bool prefers_streaming(std::size_t bytes, std::size_t total_bytes) noexcept {
    return bytes >= kStreamingFromBytes && total_bytes > last_level_cache_bytes() / 4;
}

#if defined(__SANITIZE_THREAD__)

// A seqlock races on purpose: readers discard what they read while it changed. ThreadSanitizer must see those accesses
// as atomics, or it would report the protocol itself instead of mistakes in it.
inline void copy_racing(std::uint8_t* to, const std::uint8_t* from, std::size_t bytes) noexcept {
    for (std::size_t i = 0; i < bytes; ++i)
        __atomic_store_n(to + i, __atomic_load_n(from + i, __ATOMIC_RELAXED), __ATOMIC_RELAXED);
}
inline void copy_streaming(std::uint8_t* to, const std::uint8_t* from, std::size_t bytes) noexcept {
    copy_racing(to, from, bytes);
}
inline void streaming_fence() noexcept {}

#elif defined(__x86_64__)

// From here to about a MiB glibc copies with `rep movsb`. Zen 3 and 4 run it at a tenth of their speed where the target
// begins a few bytes after the source, counted within a page, as a slot often does after an array from malloc.
inline constexpr std::size_t kBlocksFromBytes = std::size_t{2} << 10;

inline bool has_avx2() noexcept { return __builtin_cpu_supports("avx2"); }

// Prefetches the lines that a reader of the slot's last frame has in its cache: saves 20 % for a frame of 640 KiB.
__attribute__((target("avx2,prfchw"))) inline void copy_blocks_avx2(std::uint8_t* to, const std::uint8_t* from,
                                                                    std::size_t bytes) noexcept {
    constexpr std::size_t kAhead = 2048;
    for (std::size_t i = 0; i < bytes; i += 128) {
        if (i + kAhead < bytes) {
            __builtin_prefetch(to + i + kAhead, 1);
            __builtin_prefetch(to + i + kAhead + 64, 1);
        }
        const __m256i a = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i));
        const __m256i b = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i + 32));
        const __m256i c = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i + 64));
        const __m256i d = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i + 96));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + i), a);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + i + 32), b);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + i + 64), c);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + i + 96), d);
    }
}

inline void copy_racing(std::uint8_t* to, const std::uint8_t* from, std::size_t bytes) noexcept {
    std::size_t done = 0;
    if (bytes >= kBlocksFromBytes && has_avx2()) {
        const std::size_t head = (32 - (reinterpret_cast<std::uintptr_t>(to) & 31)) & 31;
        std::memcpy(to, from, head);
        done = head + (bytes - head) / 128 * 128;
        copy_blocks_avx2(to + head, from + head, done - head);
    }
    std::memcpy(to + done, from + done, bytes - done);
}

// Streaming stores are weakly ordered even among themselves: fence on both sides, so that the in-progress word is
// visible before the first of them and all of them before the committed word.
inline void streaming_fence() noexcept { _mm_sfence(); }

__attribute__((target("avx2"))) inline void stream_blocks_avx2(std::uint8_t* to, const std::uint8_t* from,
                                                               std::size_t bytes) noexcept {
    for (std::size_t i = 0; i < bytes; i += 128) {
        _mm_prefetch(reinterpret_cast<const char*>(from + i + 1024), _MM_HINT_NTA);
        _mm_prefetch(reinterpret_cast<const char*>(from + i + 1088), _MM_HINT_NTA);
        const __m256i a = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i));
        const __m256i b = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i + 32));
        const __m256i c = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i + 64));
        const __m256i d = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i + 96));
        _mm256_stream_si256(reinterpret_cast<__m256i*>(to + i), a);
        _mm256_stream_si256(reinterpret_cast<__m256i*>(to + i + 32), b);
        _mm256_stream_si256(reinterpret_cast<__m256i*>(to + i + 64), c);
        _mm256_stream_si256(reinterpret_cast<__m256i*>(to + i + 96), d);
    }
}

inline void stream_blocks_sse2(std::uint8_t* to, const std::uint8_t* from, std::size_t bytes) noexcept {
    for (std::size_t i = 0; i < bytes; i += 16)
        _mm_stream_si128(reinterpret_cast<__m128i*>(to + i),
                         _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i)));
}

inline void copy_streaming(std::uint8_t* to, const std::uint8_t* from, std::size_t bytes) noexcept {
    const std::size_t head = (64 - (reinterpret_cast<std::uintptr_t>(to) & 63)) & 63;
    if (bytes < head + 128) return std::memcpy(to, from, bytes), void();
    std::memcpy(to, from, head);
    const std::size_t blocks = (bytes - head) / 128 * 128;
    if (has_avx2())
        stream_blocks_avx2(to + head, from + head, blocks);
    else
        stream_blocks_sse2(to + head, from + head, blocks);
    std::memcpy(to + head + blocks, from + head + blocks, bytes - head - blocks);
}

#else

inline void copy_racing(std::uint8_t* to, const std::uint8_t* from, std::size_t bytes) noexcept {
    std::memcpy(to, from, bytes);
}
inline void streaming_fence() noexcept {}
inline void copy_streaming(std::uint8_t* to, const std::uint8_t* from, std::size_t bytes) noexcept {
    std::memcpy(to, from, bytes);
}

#endif

// glibc's memcpy streams by itself from a size that depends on the machine and can be tuned down to 16 KiB. It fences
// after its streaming stores, not before them.
inline constexpr std::size_t kMemcpyMayStreamFromBytes = std::size_t{16} << 10;

inline void copy_payload(std::uint8_t* to, const std::uint8_t* from, std::size_t bytes, bool streaming) noexcept {
    if (bytes == 0) return;
    if (streaming || bytes >= kMemcpyMayStreamFromBytes) streaming_fence();
    if (!streaming) return copy_racing(to, from, bytes);
    copy_streaming(to, from, bytes);
    streaming_fence();
}

}  // namespace tensorpool
