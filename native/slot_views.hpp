// SPDX-License-Identifier: Apache-2.0
// Views of payloads, one for each slot of a ring. Making a numpy view takes ten times as long as reading a slot, and
// the frames of a slot keep their layout and pool: then the view of the frame before shows the next one, too.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "ring.hpp"

namespace tensorpool {

template <typename View>
class SlotViews {
public:
    explicit SlotViews(std::uint32_t nslots) : views_(nslots) {}

    // Null: none was kept for a frame of this layout, in this pool. An empty payload has no view.
    const View* find(const SlotFrame& frame) const noexcept {
        const Kept& kept = views_[frame.slot];
        const bool is_same = kept.layout == frame.layout && kept.pool == frame.pool && frame.values_len_bytes != 0;
        return is_same ? &kept.view : nullptr;
    }
    void keep(const SlotFrame& frame, View view) { views_[frame.slot] = {frame.layout, frame.pool, std::move(view)}; }

private:
    struct Kept {
        std::shared_ptr<const TensorLayout> layout;
        std::uint32_t pool = 0;
        View view;
    };
    std::vector<Kept> views_;
};

}  // namespace tensorpool
