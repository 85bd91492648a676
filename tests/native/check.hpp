// SPDX-License-Identifier: Apache-2.0
// The whole test framework: TEST registers a function, CHECK records a failure and goes on, main runs the suites that
// are named on the command line, or all of them.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <sstream>
#include <string>
#include <type_traits>
#include <vector>

namespace check {

struct Case {
    const char* suite;
    const char* name;
    void (*run)();
};

inline std::vector<Case>& cases() {
    static std::vector<Case> all;
    return all;
}
inline int& failures() {
    static int count = 0;
    return count;
}

struct Register {
    Register(const char* suite, const char* name, void (*run)()) { cases().push_back({suite, name, run}); }
};

template <typename T>
std::string show(const T& value) {
    std::ostringstream text;
    if constexpr (std::is_enum_v<T>)
        text << static_cast<long long>(value);
    else if constexpr (std::is_integral_v<T> && sizeof(T) == 1)
        text << static_cast<int>(value);
    else
        text << value;
    return text.str();
}

inline void fail(const char* file, int line, const std::string& what) {
    ++failures();
    if (failures() <= 50) std::printf("%s:%d: %s\n", file, line, what.c_str());
}

struct Place {
    const char* file;
    int line;
    const char* text;
};

// Not inlined: a call is all that a check costs the compiler.
template <typename T, typename Context>
[[gnu::noinline]] void equal(const Place& place, const T& actual, const T& expected, const Context& context) {
    if (actual == expected) return;
    fail(place.file, place.line,
         std::string(place.text) + " is " + show(actual) + ", expected " + show(expected) + " " + show(context));
}
[[gnu::noinline]] inline void holds(const char* file, int line, const char* text, bool condition) {
    if (!condition) fail(file, line, text);
}

// In a forked child: what failed there becomes the exit code that the parent checks.
[[noreturn]] inline void exit_child() {
    std::fflush(stdout);
    std::_Exit(failures() == 0 ? 0 : 1);
}

inline int run(int argc, char** argv) {
    int ran = 0;
    for (const Case& test : cases()) {
        bool wanted = argc < 2;
        for (int i = 1; i < argc; ++i) wanted = wanted || std::strcmp(argv[i], test.suite) == 0;
        if (!wanted) continue;
        ++ran;
        const int before = failures();
        try {
            test.run();
        } catch (const std::exception& error) {
            fail(test.suite, 0, std::string("uncaught: ") + error.what());
        }
        if (failures() != before) std::printf("FAILED %s.%s\n", test.suite, test.name);
    }
    std::printf("%d tests, %d failed checks\n", ran, failures());
    return ran > 0 && failures() == 0 ? 0 : 1;
}

}  // namespace check

#define TEST(suite, name) \
    static void suite##_##name(); \
    static const check::Register register_##suite##_##name(#suite, #name, suite##_##name); \
    static void suite##_##name()

#define CHECK(condition) check::holds(__FILE__, __LINE__, "CHECK " #condition, static_cast<bool>(condition))

// `context` says which row of a table failed.
#define CHECK_EQ_IN(context, actual, expected) \
    check::equal<std::decay_t<decltype(actual)>>({__FILE__, __LINE__, #actual}, (actual), (expected), context)
#define CHECK_EQ(actual, expected) CHECK_EQ_IN("", actual, expected)

#define CHECK_THROWS(type, ...) \
    do { \
        bool thrown_ = false; \
        try { \
            __VA_ARGS__; \
        } catch (const type&) { \
            thrown_ = true; \
        } \
        if (!thrown_) check::fail(__FILE__, __LINE__, #__VA_ARGS__ " did not throw " #type); \
    } while (false)
