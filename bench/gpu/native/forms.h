// What forms.cpp and forms_facts.cpp share: checked driver calls, files, time, JSON.
#pragma once
#include <cuda.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

using Clock = std::chrono::steady_clock;

inline double now_us() {
    return std::chrono::duration<double, std::micro>(Clock::now().time_since_epoch()).count();
}

#define CK(call)                                                                                  \
    do {                                                                                          \
        CUresult result_ = (call);                                                                \
        if (result_ != CUDA_SUCCESS) {                                                            \
            const char *name_ = "?";                                                              \
            cuGetErrorName(result_, &name_);                                                      \
            std::fprintf(stderr, "%s:%d: %s -> %s\n", __FILE__, __LINE__, #call, name_);          \
            std::fflush(stderr);                                                                  \
            std::_Exit(2);                                                                        \
        }                                                                                         \
    } while (0)

inline std::vector<char> read_file(const std::string &path) {
    std::vector<char> bytes;
    FILE *file = std::fopen(path.c_str(), "rb");
    if (file == nullptr) return bytes;
    std::fseek(file, 0, SEEK_END);
    bytes.resize(static_cast<size_t>(std::ftell(file)));
    std::rewind(file);
    if (std::fread(bytes.data(), 1, bytes.size(), file) != bytes.size()) bytes.clear();
    std::fclose(file);
    // PTX ends with a zero byte.
    if (!bytes.empty()) bytes.push_back(0);
    return bytes;
}

// Nearest-rank percentile of times, null if there are none.
inline std::string percentile(std::vector<double> times, double p) {
    if (times.empty()) return "null";
    std::sort(times.begin(), times.end());
    size_t rank = static_cast<size_t>(p * static_cast<double>(times.size()));
    char text[32];
    std::snprintf(text, sizeof text, "%.2f", times[std::min(rank, times.size() - 1)]);
    return text;
}

// A JSON object, field by field.
struct Json {
    std::string text = "{";
    void raw(const std::string &key, const std::string &value) {
        text += (text.size() > 1 ? ", \"" : "\"") + key + "\": " + value;
    }
    void number(const std::string &key, double value, const char *format = "%.3f") {
        char buffer[64];
        std::snprintf(buffer, sizeof buffer, format, value);
        raw(key, buffer);
    }
    void integer(const std::string &key, long long value) { raw(key, std::to_string(value)); }
    void flag(const std::string &key, bool value) { raw(key, value ? "true" : "false"); }
    void string(const std::string &key, const std::string &value) { raw(key, "\"" + value + "\""); }
    void result(const std::string &key, CUresult value) {
        const char *name = "?";
        cuGetErrorName(value, &name);
        string(key, name);
    }
    std::string done() const { return text + "}"; }
};

// A page of host memory that the GPU sees.
struct HostWords {
    volatile unsigned *words = nullptr;
    CUdeviceptr device = 0;
    HostWords() {
        void *address = nullptr;
        CK(cuMemHostAlloc(&address, 4096, CU_MEMHOSTALLOC_DEVICEMAP | CU_MEMHOSTALLOC_PORTABLE));
        words = static_cast<volatile unsigned *>(address);
        for (int i = 0; i < 1024; ++i) words[i] = 0;
        CK(cuMemHostGetDevicePointer(&device, address, 0));
    }
};
