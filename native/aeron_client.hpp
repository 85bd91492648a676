// SPDX-License-Identifier: Apache-2.0
// Aeron's C client behind objects that cannot be misused into a crash. Aeron frees a publication, subscription or
// counter when it is closed and all of them when the client is; here every call passes a CloseGate first, so that use
// after close is an exception, a close inside a handler or from another thread takes effect when the last call has
// left, and nothing of the parent process is touched after a fork. Aeron's conductor takes its turns on a thread of ours
// that sleeps until the media driver answers or a keepalive is due, and in calls that wait for an answer. Its callbacks
// only append to queues: no user code runs there. Aeron's errors are collected, never printed, and never end the process.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <ctime>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <system_error>
#include <unordered_map>
#include <utility>
#include <vector>

#include "aeron_api.hpp"
#include "close_gate.hpp"
#include "cnc_file.hpp"
#include "quiet_thread.hpp"
#include "wake.hpp"

namespace tensorpool::aeron {

class AeronError : public std::runtime_error {
public:
    AeronError(const std::string& what, int code) : std::runtime_error(what), code(code) {}
    int code;
};

// Aeron has ended a request with an error: nothing of it comes later.
class RefusedError : public AeronError {
public:
    explicit RefusedError(const AeronError& error) : AeronError(error) {}
};

class ClosedError : public std::runtime_error {
    using std::runtime_error::runtime_error;
};

// Aeron's message has a line per call frame; ours is one line.
inline AeronError last_error(const Api& api, const std::string& doing) {
    const int code = api.errcode();
    std::string message = api.errmsg();
    std::replace(message.begin(), message.end(), '\n', ' ');
    message.erase(message.find_last_not_of(' ') + 1);
    return {doing + ": " + message, code};
}

struct ErrorRecord {
    int code;
    std::string message;
};

struct ClientOptions {
    std::string dir;
    std::string client_name;
    std::uint64_t driver_timeout_ms = 10'000;
    std::uint64_t keepalive_interval_ns = 500'000'000;
    std::uint64_t resource_linger_ns = 3'000'000'000;
    std::uint64_t idle_sleep_ns = 16'000'000;
    bool pre_touch = false;
};

// Asked while a call waits for the driver; true gives up.
using Interrupted = std::function<bool()>;

// How many handlers this thread is inside of. Such a thread never waits for a close: it would wait for itself, or for
// a thread that waits for it.
inline int& handler_depth() noexcept {
    thread_local int depth = 0;
    return depth;
}

class Resource;

// An image came or went. `monotonic_ns` is the moment Aeron's conductor learned of it: the join time of wire §10.1.1.
struct ImageEvent {
    bool available;
    std::int32_t session_id;
    std::int64_t correlation_id;
    std::int64_t position;
    std::uint64_t monotonic_ns;
    std::string source;
    std::size_t mtu_bytes;  // of its publisher
};

class ClientCore;

// Filled by Aeron's conductor, emptied by the polling thread.
struct ImageEvents {
    static constexpr std::size_t kMaxEvents = 4096;
    ClientCore* client;
    const Api& api;
    std::mutex mutex;
    std::deque<ImageEvent> queue;
    std::atomic<bool> pending{false};

    ImageEvents(ClientCore* client, const Api& api) : client(client), api(api) {}

    static void on_available(void* self, Sub*, Image* image) { static_cast<ImageEvents*>(self)->add(image, true); }
    static void on_unavailable(void* self, Sub*, Image* image) { static_cast<ImageEvents*>(self)->add(image, false); }

    void add(Image* image, bool available) {
        ImageConstants constants{};
        if (api.image_constants(image, &constants) < 0) return;
        const std::lock_guard lock(mutex);
        if (queue.size() == kMaxEvents) queue.pop_front();  // the subscription is not polled
        queue.push_back({available, constants.session_id, constants.correlation_id,
                         available ? constants.join_position : api.image_position(image), monotonic_ns(),
                         constants.source_identity ? constants.source_identity : "", constants.mtu_length});
        pending.store(true, std::memory_order_release);
    }

    bool take(ImageEvent& event) {
        if (!pending.load(std::memory_order_acquire)) return false;
        const std::lock_guard lock(mutex);
        if (queue.empty()) return false;
        event = std::move(queue.front());
        queue.pop_front();
        if (queue.empty()) pending.store(false, std::memory_order_release);
        return true;
    }
};

// The connection to a media driver. Each of its resources stays inside its gate for as long as it lives, so closing the
// last of them tears the client down.
class ClientCore : public std::enable_shared_from_this<ClientCore> {
public:
    ClientCore(const Api& api, const ClientOptions& options)
        : api_(api), dir_(options.dir), cnc_(options.dir), turn_every_ns_(options.idle_sleep_ns) {
        if (api_.context_init(&context_) < 0) throw last_error(api_, "aeron_context_init");
        api_.context_set_dir(context_, options.dir.c_str());
        api_.context_set_client_name(context_, options.client_name.c_str());
        api_.context_set_driver_timeout_ms(context_, options.driver_timeout_ms);
        api_.context_set_keepalive_interval_ns(context_, options.keepalive_interval_ns);
        api_.context_set_resource_linger_duration_ns(context_, options.resource_linger_ns);
        api_.context_set_use_conductor_agent_invoker(context_, true);
        api_.context_set_pre_touch_mapped_memory(context_, options.pre_touch);
        api_.context_set_error_handler(context_, &ClientCore::on_error, this);
        if (api_.init(&client_, context_) < 0) {
            const AeronError error = last_error(api_, "cannot connect to a media driver at " + options.dir);
            api_.context_close(context_);
            throw error;
        }
        if (api_.start(client_) < 0) {
            const AeronError error = last_error(api_, "cannot start the Aeron client for " + options.dir);
            api_.close(client_);
            api_.context_close(context_);
            throw error;
        }
        try {
            thread_ = QuietThread("aeron-client", [this] { take_turns(); });
        } catch (const std::system_error& error) {
            api_.close(client_);
            api_.context_close(context_);
            throw AeronError(std::string("no thread for the Aeron client: ") + error.what(), error.code().value());
        }
    }
    ~ClientCore() {
        if (gate_.shut()) tear_down();
    }
    ClientCore(const ClientCore&) = delete;
    ClientCore& operator=(const ClientCore&) = delete;

    // Closes every resource, then the client. Waits for calls that other threads are inside of.
    void close();

    const Api& api() const noexcept { return api_; }
    const std::string& dir() const noexcept { return dir_; }
    CloseGate& gate() noexcept { return gate_; }
    Client* raw() const noexcept { return client_; }
    void leave() {
        if (gate_.leave()) tear_down();
    }

    // The media driver sent events (images that came or went, answers to requests) faster than Aeron's thread of this
    // process read them, as when the process stood still for seconds. Aeron reports that and goes on without those
    // events: an image may be missing for good. Only a new client knows the media driver's state again.
    bool has_missed_events() const noexcept { return has_missed_events_.load(std::memory_order_relaxed); }

    void expect_polls() noexcept { expects_polls_.store(true, std::memory_order_relaxed); }

    // Called before every poll; false: this process stood still for so long that the media driver may have ended the
    // client and lent its counters to others. A poll would write positions into those, and their readers would miss
    // everything up to there. Aeron's own thread notices a moment later, which may be after a poll of another thread.
    // Only of a client whose owner polls it all the time can a long pause tell that (`expect_polls`).
    bool may_poll() noexcept {
        if (!expects_polls_.load(std::memory_order_relaxed)) return !has_missed_events();
        const std::uint64_t now_ns = monotonic_ns();
        const std::uint64_t before_ns = last_poll_ns_.load(std::memory_order_relaxed);
        last_poll_ns_.store(now_ns, std::memory_order_relaxed);
        if (before_ns != 0 && now_ns > before_ns + kStoodStillNs)
            has_missed_events_.store(true, std::memory_order_relaxed);
        return !has_missed_events();
    }

    // True once closed by us, by a fork, or by Aeron itself (the media driver died or timed this client out).
    bool is_closed() {
        if (!gate_.enter()) return true;
        const bool closed = api_.is_closed(client_);
        leave();
        return closed;
    }

    std::vector<ErrorRecord> take_errors() {
        const std::lock_guard lock(mutex_);
        return std::exchange(errors_, {});
    }

    void adopt(const std::shared_ptr<Resource>& resource) {
        const std::lock_guard lock(mutex_);
        std::erase_if(resources_, [](const auto& weak) { return weak.expired(); });
        resources_.push_back(resource);
    }

    std::shared_ptr<ImageEvents> retain_images() {
        auto events = std::make_shared<ImageEvents>(this, api_);
        const std::lock_guard lock(mutex_);
        images_.emplace(events.get(), events);
        return events;
    }
    void release_images(ImageEvents* events) {
        const std::lock_guard lock(mutex_);
        images_.erase(events);
    }
    std::size_t kept_images() {
        const std::lock_guard lock(mutex_);
        return images_.size();
    }

    // Calls a function of Aeron's that adds or closes something: those are the conductor's, and it takes no turn meanwhile.
    template <typename Call>
    auto command(Call&& call) {
        const std::lock_guard turn(turn_);
        const auto result = call();
        if (cnc_.commands() != nullptr) wake_all(cnc_.commands());
        return result;
    }

    // For agents that poll: wakes those that sleep on a bell of this media driver. See cnc_file.hpp.
    void ring(std::size_t bell) {
        if (!gate_.enter()) return;
        if (const std::uint32_t* const word = cnc_.bell(bell)) wake_all(word);
        leave();
    }
    // Sleeps until the bell is rung, or the time is over. A ring that comes just before is missed.
    void wait_for_ring(std::size_t bell, std::uint64_t nanoseconds) {
        if (!gate_.enter()) return nap(nanoseconds);
        if (const std::uint32_t* const word = cnc_.bell(bell))
            sleep_on(word, __atomic_load_n(word, __ATOMIC_RELAXED), nanoseconds);
        else
            nap(nanoseconds);
        leave();
    }

    // Waits for an asynchronous add; `poll` is one of Aeron's *_poll functions.
    template <typename Handle, typename Poll>
    Handle* await(Async* async, Poll poll, const std::string& what, const Interrupted& interrupted) {
        Handle* handle = nullptr;
        while (true) {
            const std::uint32_t seen = seen_answers();
            work();
            const int done = poll(&handle, async);
            if (done < 0) throw RefusedError(last_error(api_, "cannot add " + what));
            if (done > 0) {
                last_poll_ns_.store(monotonic_ns(), std::memory_order_relaxed);
                return handle;
            }
            if (api_.is_closed(client_)) throw AeronError("cannot add " + what + ": the media driver is gone", 0);
            if (has_missed_events())
                throw AeronError("cannot add " + what + ": this process missed events of the media driver", 0);
            if (interrupted()) throw AeronError("adding " + what + " was interrupted", 0);
            sleep_on(answers(), seen, kAnswerNs);
        }
    }

private:
    static constexpr std::uint64_t kStoodStillNs = 4'000'000'000;  // less than the media driver waits for a client
    static constexpr std::uint64_t kLongestTurnNs = 200'000'000;   // less than the keepalives' interval
    static constexpr std::uint64_t kAnswerNs = 200'000;            // how often a call looks for an answer
    static constexpr int kMaxTurns = 1000;                         // then waiting threads get their answers
    static constexpr std::size_t kMaxErrors = 64;                  // a dead driver can repeat itself without end

    // What the conductor's thread sleeps on; without cnc.dat a word of our own.
    const std::uint32_t* answers() const noexcept { return cnc_.answers() == nullptr ? &no_answers_ : cnc_.answers(); }
    std::uint32_t seen_answers() const noexcept { return __atomic_load_n(answers(), __ATOMIC_ACQUIRE); }

    // Aeron's conductor takes one answer or event per turn.
    void work() noexcept {
        for (int turn = 0; turn < kMaxTurns; ++turn) {
            const std::lock_guard lock(turn_);
            if (api_.main_do_work(client_) <= 0) return;
        }
    }

    // The conductor's thread: takes answers and events of the media driver, and sends keepalives. After a media driver that
    // wakes no client it looks every `turn_every_ns_`.
    void take_turns() noexcept {
        bool is_woken = false;
        while (!is_ending_.load(std::memory_order_relaxed)) {
            const std::uint32_t seen = seen_answers();
            work();
            is_woken = sleep_on(answers(), seen, is_woken ? kLongestTurnNs : turn_every_ns_) || is_woken;
        }
        has_ended_.store(true, std::memory_order_relaxed);
    }

    void end_turns() noexcept {
        is_ending_.store(true, std::memory_order_relaxed);
        while (!has_ended_.load(std::memory_order_relaxed)) {  // a wake-up that comes just before the sleep is missed
            wake_all(answers());
            nap(kAnswerNs);
        }
        thread_.join();
    }

    static void on_error(void* self, int code, const char* message) {
        auto* const core = static_cast<ClientCore*>(self);
        if (message && std::strstr(message, "unable to keep up with broadcast"))
            core->has_missed_events_.store(true, std::memory_order_relaxed);
        const std::lock_guard lock(core->mutex_);
        if (core->errors_.size() < kMaxErrors) core->errors_.push_back({code, message ? message : ""});
    }

    void tear_down() {
        end_turns();
        api_.close(client_);
        api_.context_close(context_);
        cnc_.unmap();
        {
            const std::lock_guard lock(mutex_);
            images_.clear();
        }
        gate_.finish();
    }

    const Api& api_;
    const std::string dir_;
    CncFile cnc_;
    const std::uint64_t turn_every_ns_;
    std::mutex turn_;  // held while Aeron's conductor works; taken before mutex_
    const std::uint32_t no_answers_ = 0;
    std::atomic<bool> is_ending_{false}, has_ended_{false};
    QuietThread thread_;
    Context* context_ = nullptr;
    Client* client_ = nullptr;
    CloseGate gate_;
    std::mutex mutex_;
    std::vector<ErrorRecord> errors_;
    std::atomic<bool> has_missed_events_{false};
    std::atomic<bool> expects_polls_{false};
    std::atomic<std::uint64_t> last_poll_ns_{0};  // of any subscription, or when something was added; 0: never
    std::vector<std::weak_ptr<Resource>> resources_;
    std::unordered_map<ImageEvents*, std::shared_ptr<ImageEvents>> images_;
};

// What a client owns: a publication, a subscription, a counter.
class Resource : public std::enable_shared_from_this<Resource> {
public:
    Resource(std::shared_ptr<ClientCore> client, std::string name)
        : client_(std::move(client)), name_(std::move(name)) {
        if (!client_->gate().enter()) throw ClosedError("the Aeron client is closed");
    }
    virtual ~Resource() = default;
    Resource(const Resource&) = delete;
    Resource& operator=(const Resource&) = delete;

    // Takes effect now, or when the last call has left, which is waited for outside of handlers.
    void close() {
        if (gate_.shut())
            finish();
        else if (handler_depth() == 0)
            gate_.wait_finished();
    }
    bool is_closed() const noexcept { return gate_.is_shut(); }
    const std::string& name() const noexcept { return name_; }

protected:
    class Inside {
    public:
        explicit Inside(Resource& resource) : resource_(resource) {
            if (resource_.gate_.enter()) return;
            throw ClosedError(resource_.name_ + (resource_.gate_.is_foreign()
                                                     ? " belongs to the process that was forked; connect again here"
                                                     : " is closed"));
        }
        ~Inside() {
            if (resource_.gate_.leave()) resource_.finish();
        }
        Inside(const Inside&) = delete;
        Inside& operator=(const Inside&) = delete;

    private:
        Resource& resource_;
    };

    // For destructors of subclasses: no call can be inside any more.
    void close_now() noexcept {
        if (gate_.shut()) finish();
    }

    virtual void tear_down() noexcept = 0;

    const Api& api() const noexcept { return client_->api(); }
    CloseGate gate_;
    std::shared_ptr<ClientCore> client_;

private:
    void finish() noexcept {
        tear_down();
        gate_.finish();
        client_->leave();
    }
    const std::string name_;
};

inline void ClientCore::close() {
    const bool alone = gate_.shut();
    std::vector<std::weak_ptr<Resource>> resources;
    {
        const std::lock_guard lock(mutex_);
        resources.swap(resources_);
    }
    for (const auto& weak : resources)
        if (const auto resource = weak.lock()) resource->close();
    if (alone)
        tear_down();
    else if (handler_depth() == 0)
        gate_.wait_finished();
}

}  // namespace tensorpool::aeron
