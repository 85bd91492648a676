// SPDX-License-Identifier: Apache-2.0
// cnc.dat: the words to sleep on are where Aeron has them, and in a file that is laid out otherwise there are none.
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "check.hpp"
#include "cnc_file.hpp"

using namespace tensorpool::aeron;

namespace {

struct Folder {
    Folder() : path(std::filesystem::temp_directory_path() / ("tensorpool-cnc-" + std::to_string(getpid()))) {
        std::filesystem::create_directory(path);
    }
    ~Folder() { std::filesystem::remove_all(path); }

    void write(const std::vector<std::int32_t>& head, std::size_t size) const {
        std::vector<char> bytes(size);
        if (!head.empty()) std::memcpy(bytes.data(), head.data(), head.size() * sizeof(std::int32_t));
        std::ofstream(path / "cnc.dat", std::ios::binary | std::ios::trunc)
            .write(bytes.data(), static_cast<long>(size));
    }
    bool has_words() const {
        const CncFile cnc(path.string());
        CHECK((cnc.commands() != nullptr) == (cnc.answers() != nullptr));
        CHECK((cnc.commands() != nullptr) == (cnc.bell(0) != nullptr));
        CHECK(cnc.bell(CncFile::kBells) == nullptr);
        return cnc.commands() != nullptr;
    }

    const std::filesystem::path path;
};

constexpr std::int32_t kCommands = 1024 + 768, kAnswers = 2048 + 128, kLabels = 4096, kValues = 1024;
constexpr std::size_t kSize = 128 + kCommands + kAnswers + kLabels + kValues;

}  // namespace

TEST(cnc_file, words_are_where_aeron_has_them) {
    const Folder folder;
    CHECK(!folder.has_words());
    folder.write({512, kCommands, kAnswers, kLabels, kValues}, kSize);
    CHECK(folder.has_words());
    const CncFile cnc(folder.path.string());
    const auto* const begin = reinterpret_cast<const std::uint8_t*>(cnc.bell(0));
    CHECK_EQ(*cnc.bell(0), 512u);
    CHECK_EQ(reinterpret_cast<const std::uint8_t*>(cnc.commands()) - begin, 128 + 1024 + 128);
    CHECK_EQ(reinterpret_cast<const std::uint8_t*>(cnc.answers()) - begin, 128 + kCommands + 2048);
    CHECK_EQ(cnc.udp_bytes(), 0);
    std::fstream file(folder.path / "cnc.dat", std::ios::binary | std::ios::in | std::ios::out);
    for (const std::size_t counter : {0, 1}) {
        file.seekp(static_cast<long>(128 + kCommands + kAnswers + kLabels + counter * 128));
        const std::int64_t bytes = 100 + static_cast<std::int64_t>(counter);
        file.write(reinterpret_cast<const char*>(&bytes), sizeof bytes);
    }
    file.flush();
    CHECK_EQ(cnc.udp_bytes(), 201);
}

TEST(cnc_file, a_file_of_another_layout_has_no_words) {
    const Folder folder;
    folder.write({512, kCommands, kAnswers, kLabels, kValues}, kSize - 1);
    CHECK(!folder.has_words());
    folder.write({512, kCommands + 8, kAnswers, kLabels, kValues}, 2 * kSize);
    CHECK(!folder.has_words());
    folder.write({512, kCommands, kAnswers + 8, kLabels, kValues}, 2 * kSize);
    CHECK(!folder.has_words());
    folder.write({512, -kCommands, kAnswers, kLabels, kValues}, kSize);
    CHECK(!folder.has_words());
    folder.write({}, kSize);
    CHECK(!folder.has_words());
    folder.write({}, 64);
    CHECK(!folder.has_words());
}
