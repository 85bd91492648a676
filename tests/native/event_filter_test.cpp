// SPDX-License-Identifier: Apache-2.0
// Which EventMessages reach a service's handler: its own, whole; all others are counted.
#include <string>
#include <vector>

#include "check.hpp"
#include "event_filter.hpp"

using namespace tensorpool;

namespace {

constexpr std::uint16_t kSchema = 920;

template <typename T>
void put(std::vector<std::uint8_t>& message, std::size_t at, T value) {
    std::memcpy(message.data() + at, &value, sizeof value);
}

std::vector<std::uint8_t> event(const std::string& tag, std::uint16_t schema_id = kSchema,
                                std::uint16_t template_id = 1, std::uint16_t block_bytes = 40) {
    std::vector<std::uint8_t> message(8 + std::size_t{block_bytes} + 4 + tag.size());
    put(message, 0, block_bytes);
    put(message, 2, template_id);
    put(message, 4, schema_id);
    put(message, 8 + std::size_t{block_bytes}, static_cast<std::uint32_t>(tag.size()));
    std::memcpy(message.data() + 12 + block_bytes, tag.data(), tag.size());
    return message;
}

struct Handled final : aeron::Sink {
    int messages = 0;
    int images = 0;
    bool on_message(std::span<const std::uint8_t>, const aeron::MessageInfo&) override { return ++messages, false; }
    void on_image(const aeron::ImageEvent&) override { ++images; }
};

}  // namespace

TEST(event_filter, admits_its_tags_and_counts_the_rest) {
    EventFilter filter(kSchema, {"Camera.Main", "Camera"});
    CHECK(filter.admits(event("Camera")));
    CHECK(filter.admits(event("Camera.Main")));
    CHECK(filter.admits(event("Camera", kSchema, 1, 48)));  // a later version has a longer block
    for (const char* tag : {"", "Came", "camera", "Camera.Mai", "Camera.Main.1"}) CHECK(!filter.admits(event(tag)));
    CHECK_EQ(filter.counts().other_tag, 5u);
    CHECK(!filter.admits(event("Camera", kSchema + 1)));
    CHECK(!filter.admits(event("Camera", kSchema, 2)));
    CHECK_EQ(filter.counts().other_schema, 2u);
    CHECK_EQ(filter.counts().mine, 3u);
    CHECK_EQ(filter.counts().malformed, 0u);
}

// AddressSanitizer sees every byte that is read behind a message.
TEST(event_filter, a_message_that_is_cut_short_is_malformed) {
    EventFilter filter(kSchema, {"Camera"});
    const std::vector<std::uint8_t> whole = event("Camera");
    for (std::size_t length = 0; length < whole.size(); ++length) {
        const std::vector<std::uint8_t> cut(whole.begin(), whole.begin() + static_cast<std::ptrdiff_t>(length));
        CHECK_EQ_IN(length, filter.admits(cut), false);
    }
    CHECK(!filter.admits(event("Camera", kSchema, 1, 39)));
    std::vector<std::uint8_t> endless = event("Camera");
    put(endless, 48, std::uint32_t{0xffff'ffff});
    CHECK(!filter.admits(endless));
    CHECK_EQ(filter.counts().malformed, whole.size() + 2);
    CHECK_EQ(filter.counts().mine, 0u);
}

TEST(event_filter, what_it_refuses_does_not_reach_the_handler) {
    EventFilter filter(kSchema, {"Camera"});
    Handled handled;
    FilteredSink sink(filter, handled);
    CHECK(!sink.on_message(event("Camera"), {}));  // its handler ends a poll
    CHECK(sink.on_message(event("other"), {}));
    sink.on_image({});
    CHECK_EQ(handled.messages, 1);
    CHECK_EQ(handled.images, 1);
    CHECK_EQ(filter.counts().mine, 1u);
    CHECK_EQ(filter.counts().other_tag, 1u);
}

TEST(event_filter, a_first_fragment_decides_about_its_message) {
    EventFilter filter(kSchema, {"Camera"});
    Handled handled;
    FilteredSink sink(filter, handled);
    CHECK(sink.wants(event("Camera"), {}));
    CHECK(!sink.wants(event("other"), {}));
    CHECK(!sink.wants(event("Camera", kSchema + 1), {}));
    CHECK_EQ(filter.counts().mine, 0u);  // counted when it is whole
    CHECK_EQ(filter.counts().other_tag, 1u);
    CHECK_EQ(filter.counts().other_schema, 1u);
}
