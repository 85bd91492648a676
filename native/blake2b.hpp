// SPDX-License-Identifier: Apache-2.0
// BLAKE2b with a key (RFC 7693): a message authentication code.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <stdexcept>

namespace tensorpool {

class Blake2b {
public:
    static constexpr std::size_t kMaxKeyBytes = 64;
    static constexpr std::size_t kMaxDigestBytes = 64;

    Blake2b(std::span<const std::uint8_t> key, std::size_t digest_bytes) {
        if (key.size() > kMaxKeyBytes) throw std::invalid_argument("a key has at most 64 bytes");
        if (digest_bytes == 0 || digest_bytes > kMaxDigestBytes)
            throw std::invalid_argument("a digest has 1 to 64 bytes");
        state_ = kInitial;
        state_[0] ^= 0x0101'0000 ^ (key.size() << 8) ^ digest_bytes;
        if (key.empty()) return;
        std::copy(key.begin(), key.end(), block_.begin());
        filled_ = kBlockBytes;
    }

    void update(std::span<const std::uint8_t> data) noexcept {
        while (!data.empty()) {
            if (filled_ == kBlockBytes) {  // not before there is more: the last block is marked
                compress(false);
                filled_ = 0;
            }
            const std::size_t taken = std::min(data.size(), kBlockBytes - filled_);
            std::memcpy(block_.data() + filled_, data.data(), taken);
            filled_ += taken;
            data = data.subspan(taken);
        }
    }

    // Of everything so far; the object is used up.
    void finish(std::span<std::uint8_t> digest) noexcept {
        std::fill(block_.begin() + static_cast<std::ptrdiff_t>(filled_), block_.end(), std::uint8_t{0});
        compress(true);
        std::memcpy(digest.data(), state_.data(), digest.size());
    }

private:
    static_assert(std::endian::native == std::endian::little, "words are little-endian");
    static constexpr std::size_t kBlockBytes = 128;
    static constexpr std::array<std::uint64_t, 8> kInitial{0x6a09e667f3bcc908, 0xbb67ae8584caa73b, 0x3c6ef372fe94f82b,
                                                           0xa54ff53a5f1d36f1, 0x510e527fade682d1, 0x9b05688c2b3e6c1f,
                                                           0x1f83d9abfb41bd6b, 0x5be0cd19137e2179};
    static constexpr std::uint8_t kSigma[10][16] = {
        {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, {14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3},
        {11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4}, {7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8},
        {9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13}, {2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9},
        {12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11}, {13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10},
        {6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5}, {10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0}};

    void compress(bool is_last) noexcept {
        counted_ += filled_;
        std::array<std::uint64_t, 16> words;
        std::memcpy(words.data(), block_.data(), kBlockBytes);
        std::array<std::uint64_t, 16> v;
        std::copy(state_.begin(), state_.end(), v.begin());
        std::copy(kInitial.begin(), kInitial.end(), v.begin() + 8);
        v[12] ^= counted_;
        if (is_last) v[14] = ~v[14];
        const auto mix = [&](int a, int b, int c, int d, std::uint64_t x, std::uint64_t y) {
            v[a] += v[b] + x;
            v[d] = std::rotr(v[d] ^ v[a], 32);
            v[c] += v[d];
            v[b] = std::rotr(v[b] ^ v[c], 24);
            v[a] += v[b] + y;
            v[d] = std::rotr(v[d] ^ v[a], 16);
            v[c] += v[d];
            v[b] = std::rotr(v[b] ^ v[c], 63);
        };
        for (int round = 0; round < 12; ++round) {
            const std::uint8_t* const s = kSigma[round % 10];
            mix(0, 4, 8, 12, words[s[0]], words[s[1]]);
            mix(1, 5, 9, 13, words[s[2]], words[s[3]]);
            mix(2, 6, 10, 14, words[s[4]], words[s[5]]);
            mix(3, 7, 11, 15, words[s[6]], words[s[7]]);
            mix(0, 5, 10, 15, words[s[8]], words[s[9]]);
            mix(1, 6, 11, 12, words[s[10]], words[s[11]]);
            mix(2, 7, 8, 13, words[s[12]], words[s[13]]);
            mix(3, 4, 9, 14, words[s[14]], words[s[15]]);
        }
        for (std::size_t i = 0; i < 8; ++i) state_[i] ^= v[i] ^ v[i + 8];
    }

    std::array<std::uint64_t, 8> state_;
    std::array<std::uint8_t, kBlockBytes> block_{};
    std::size_t filled_ = 0;
    std::uint64_t counted_ = 0;
};

}  // namespace tensorpool
