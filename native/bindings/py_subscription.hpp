// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "aeron_subscription.hpp"
#include "bindings/python.hpp"

namespace tensorpool::bindings {

struct PySubscription {
    std::shared_ptr<aeron::Subscription> subscription;
    nb::object on_image;
};

// Subscriptions that a call without the GIL looks at, kept alive until it ends.
class WatchedSubscriptions {
public:
    explicit WatchedSubscriptions(const std::vector<PySubscription*>& subscriptions) {
        for (const PySubscription* each : subscriptions) {
            kept_.push_back(each->subscription);
            raw_.push_back(each->subscription.get());
        }
    }
    std::span<aeron::Subscription* const> all() const noexcept { return raw_; }

private:
    std::vector<std::shared_ptr<aeron::Subscription>> kept_;
    std::vector<aeron::Subscription*> raw_;
};

}  // namespace tensorpool::bindings
