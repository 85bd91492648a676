// SPDX-License-Identifier: Apache-2.0
// Which messages in fragments are put together: those of known kinds.
#include "message_filter.hpp"

#include <array>

#include "check.hpp"

using namespace tensorpool;

namespace {

std::array<std::uint8_t, 8> header(std::uint16_t template_id, std::uint16_t schema_id) {
    std::array<std::uint8_t, 8> bytes{};
    std::memcpy(bytes.data() + 2, &template_id, 2);
    std::memcpy(bytes.data() + 4, &schema_id, 2);
    return bytes;
}

struct Handled final : aeron::Sink {
    int messages = 0;
    int images = 0;
    bool on_message(std::span<const std::uint8_t>, const aeron::MessageInfo&) override { return ++messages, false; }
    void on_image(const aeron::ImageEvent&) override { ++images; }
};

}  // namespace

TEST(message_filter, a_first_fragment_decides_about_its_message) {
    MessageFilter filter({{1, 900}, {9001, 902}}, 100);
    CHECK(filter.admits(header(1, 900)));
    CHECK(filter.admits(header(9001, 902)));
    CHECK(!filter.admits(header(9001, 900)));
    CHECK(!filter.admits(header(900, 1)));
    CHECK_EQ(filter.counts().foreign, 2u);
    const std::array<std::uint8_t, 8> whole = header(1, 900);
    for (std::size_t length = 0; length < 8; ++length)
        CHECK_EQ_IN(length, filter.admits(std::span(whole).first(length)), false);
    CHECK_EQ(filter.counts().malformed, 8u);
    CHECK_EQ(filter.counts().too_long, 0u);
}

TEST(message_filter, its_sink_hands_on_what_is_whole) {
    MessageFilter filter({{1, 900}}, 100);
    Handled handled;
    BoundedSink sink(filter, handled);
    CHECK(!sink.on_message(header(7, 7), {}));  // of one fragment: the handler counts it, and ends the poll
    sink.on_image({});
    CHECK_EQ(handled.messages, 1);
    CHECK_EQ(handled.images, 1);
    CHECK(sink.wants(header(1, 900), {}));
    CHECK(!sink.wants(header(7, 7), {}));
    CHECK_EQ(sink.max_bytes(), 100u);
    sink.on_too_long({});
    CHECK_EQ(filter.counts().too_long, 1u);
}
