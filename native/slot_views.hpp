// SPDX-License-Identifier: Apache-2.0
// Views of payloads, one for each slot of a ring. What metadata say may decide the view of a frame: then it is kept for
// frames of the same meta_version only. Making a numpy view takes ten times as long as reading a slot, and
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
        const bool is_same = kept.layout == frame.layout && kept.pool == frame.pool && frame.values_len_bytes != 0 &&
                             (kept.is_of_any_version || kept.meta_version == frame.meta_version);
        return is_same ? &kept.view : nullptr;
    }
    void keep(const SlotFrame& frame, View view, bool is_of_any_version) {
        views_[frame.slot] = {frame.layout, frame.pool, frame.meta_version, is_of_any_version, std::move(view)};
    }

private:
    struct Kept {
        std::shared_ptr<const TensorLayout> layout;
        std::uint32_t pool = 0;
        std::uint32_t meta_version = 0;
        bool is_of_any_version = true;
        View view;
    };
    std::vector<Kept> views_;
};

}  // namespace tensorpool
