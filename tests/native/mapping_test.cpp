// SPDX-License-Identifier: Apache-2.0
// Mappings beside those of other threads: only what is ours is unmapped, also where a map fails, and large files begin
// where huge pages may.
#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include <fcntl.h>

#include "check.hpp"
#include "rings.hpp"

using namespace tensorpool;
using namespace tensorpool::test;

namespace {

constexpr std::size_t kBytes = std::size_t{4} << 20;

// Which addresses the code under test owns, as it calls mmap and munmap: the linker sends these calls here (--wrap).
struct Ledger {
    bool is_open = false;
    int takes = 0;    // how often another thread is faster to map where a file was wanted
    int foreign = 0;  // calls of munmap for addresses that are not ours
    std::vector<std::uintptr_t> pages;
    std::vector<void*> taken;

    static constexpr std::uintptr_t kPage = 4096;

    void add(std::uintptr_t at, std::size_t bytes) {
        for (std::uintptr_t page = at; page < at + bytes; page += kPage) pages.push_back(page);
    }
    // Whether all of it was ours.
    bool remove(std::uintptr_t at, std::size_t bytes) {
        const std::size_t before = pages.size();
        std::erase_if(pages, [&](std::uintptr_t page) { return page >= at && page < at + bytes; });
        return before - pages.size() == (bytes + kPage - 1) / kPage;
    }
};
Ledger ledger;

struct Opened {
    Opened() {
        ledger = Ledger();
        ledger.is_open = true;
    }
    ~Opened() {
        ledger.is_open = false;
        for (void* at : ledger.taken) munmap(at, kBytes);
    }
};

}  // namespace

extern "C" {
void* __real_mmap(void*, std::size_t, int, int, int, off_t);
int __real_munmap(void*, std::size_t);

void* __wrap_mmap(void* hint, std::size_t bytes, int protection, int flags, int fd, off_t offset) {
    if (!ledger.is_open) return __real_mmap(hint, bytes, protection, flags, fd, offset);
    if (hint != nullptr && (flags & MAP_FIXED) == 0 && ledger.takes > 0) {
        --ledger.takes;
        const int anonymous = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
        ledger.taken.push_back(__real_mmap(hint, kBytes, PROT_NONE, anonymous | MAP_FIXED_NOREPLACE, -1, 0));
        CHECK(ledger.taken.back() == hint);
        // The kernel then chooses by itself; here it is an address that suits no huge page.
        const std::size_t room = bytes + (std::size_t{64} << 20);
        void* const free = __real_mmap(nullptr, room, PROT_NONE, anonymous, -1, 0);
        __real_munmap(free, room);
        const std::uintptr_t huge = std::uintptr_t{32} << 20;
        hint =
            reinterpret_cast<void*>((reinterpret_cast<std::uintptr_t>(free) + huge - 1) / huge * huge + Ledger::kPage);
    }
    void* const at = __real_mmap(hint, bytes, protection, flags, fd, offset);
    if (at != MAP_FAILED)
        ledger.add(reinterpret_cast<std::uintptr_t>(at), bytes);
    else if (flags & MAP_FIXED)  // mmap(2): it may have unmapped what was there
        ledger.remove(reinterpret_cast<std::uintptr_t>(hint), bytes);
    return at;
}

int __wrap_munmap(void* at, std::size_t bytes) {
    if (ledger.is_open && !ledger.remove(reinterpret_cast<std::uintptr_t>(at), bytes)) ++ledger.foreign;
    return __real_munmap(at, bytes);
}
}

TEST(mapping, a_map_that_fails_unmaps_only_what_is_ours_and_leaves_nothing) {
    const int fd = memfd_create("tensorpool-test", MFD_ALLOW_SEALING);
    CHECK_EQ(ftruncate(fd, kBytes), 0);
    CHECK_EQ(fcntl(fd, F_ADD_SEALS, F_SEAL_WRITE), 0);  // the file refuses to be mapped writable
    {
        const Opened opened;
        CHECK_THROWS(std::system_error, Mapping(fd, kBytes, true));
        CHECK_EQ(ledger.foreign, 0);
        CHECK(ledger.pages.empty());
    }
    close(fd);
}

TEST(mapping, large_files_begin_where_a_huge_page_may_though_another_thread_was_faster) {
    const std::size_t page = transparent_huge_page_bytes();
    if (page == 0 || page > kBytes) return;
    const SharedFile file(kBytes);
    const Opened opened;
    ledger.takes = 3;
    {
        const std::unique_ptr<Mapping> mapping = file.map(true);
        CHECK_EQ(reinterpret_cast<std::uintptr_t>(mapping->bytes().data()) % page, std::uintptr_t{0});
        CHECK_EQ(ledger.takes, 0);
        CHECK_EQ(ledger.pages.size(), kBytes / Ledger::kPage);
    }
    CHECK_EQ(ledger.foreign, 0);
    CHECK(ledger.pages.empty());
}

TEST(mapping, a_file_is_mapped_even_where_others_are_always_faster) {
    const SharedFile file(kBytes);
    const Opened opened;
    ledger.takes = 1000;
    const std::unique_ptr<Mapping> mapping = file.map(true);
    mapping->bytes().back() = 1;
    CHECK_EQ(ledger.pages.size(), kBytes / Ledger::kPage);
    CHECK_EQ(ledger.foreign, 0);
}

TEST(mapping, words_are_aligned_inside_and_not_stored_in_read_only_memory) {
    const SharedFile file(64);
    const auto writable = file.map(true), readable = file.map(false);
    writable->store_u64(0, 5);
    writable->store_u64(56, 7);
    CHECK_EQ(readable->load_u64(0), std::uint64_t{5});
    CHECK_EQ(readable->load_u64(56), std::uint64_t{7});
    for (const std::size_t offset :
         {std::size_t{1}, std::size_t{57}, std::size_t{60}, std::size_t{64}, SIZE_MAX - 7, SIZE_MAX})
        CHECK_THROWS(std::invalid_argument, readable->load_u64(offset));
    CHECK_THROWS(std::invalid_argument, writable->store_u64(64, 1));
    CHECK_THROWS(std::invalid_argument, readable->store_u64(0, 1));
    CHECK_EQ(readable->load_u64(0), std::uint64_t{5});
}
