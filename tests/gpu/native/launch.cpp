// The cost of cuLaunchKernel as a program sees it, through three doors:
//   link    the symbol, bound by the dynamic linker
//   dlopen  dlsym on libcuda.so.1
//   getproc cuGetProcAddress, as the CUDA runtime and its static copies do
// An empty kernel, one thread. `launch DOOR LAUNCHES BURST SINGLE`: bursts of
// BURST launches with a synchronisation after each that is not timed. With
// SINGLE=0 a burst is timed as a whole (average ns a launch of each burst);
// with 1 every launch is timed alone. Prints one JSON object: ns.
// BURST stays below the driver's queue depth (1024), so no launch waits for the GPU.
#include <cuda.h>
#include <dlfcn.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <vector>

#define CK(call)                                                          \
    do {                                                                  \
        CUresult result_ = (call);                                        \
        if (result_ != CUDA_SUCCESS) {                                    \
            std::fprintf(stderr, "%s -> CUDA error %d\n", #call, result_); \
            return 1;                                                     \
        }                                                                 \
    } while (0)

// PTX of the oldest target that CUDA 13 still takes; the driver translates it.
static const char *const EMPTY =
    ".version 7.0\n.target sm_75\n.address_size 64\n.visible .entry empty() { ret; }\n";

using LaunchFn = CUresult (*)(CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                              unsigned, CUstream, void **, void **);

static LaunchFn door(const char *name) {
    if (!std::strcmp(name, "link")) return &cuLaunchKernel;
    void *library = dlopen("libcuda.so.1", RTLD_NOW);
    if (!library) return nullptr;
    if (!std::strcmp(name, "dlopen")) return reinterpret_cast<LaunchFn>(dlsym(library, "cuLaunchKernel"));
    using GetProc = CUresult (*)(const char *, void **, int, cuuint64_t, CUdriverProcAddressQueryResult *);
    auto get = reinterpret_cast<GetProc>(dlsym(library, "cuGetProcAddress_v2"));
    void *found = nullptr;
    CUdriverProcAddressQueryResult how;
    if (!get || get("cuLaunchKernel", &found, 12000, CU_GET_PROC_ADDRESS_DEFAULT, &how) != CUDA_SUCCESS)
        return nullptr;
    return reinterpret_cast<LaunchFn>(found);
}

static double now_ns() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return static_cast<double>(t.tv_sec) * 1e9 + static_cast<double>(t.tv_nsec);
}

static double rank(const std::vector<double> &sorted, double p) {
    size_t at = static_cast<size_t>(p * static_cast<double>(sorted.size()));
    return sorted[std::min(at, sorted.size() - 1)];
}

int main(int argc, char **argv) {
    if (argc != 5) {
        std::fprintf(stderr, "usage: launch link|dlopen|getproc LAUNCHES BURST SINGLE\n");
        return 2;
    }
    LaunchFn launch = door(argv[1]);
    long launches = std::atol(argv[2]), burst = std::atol(argv[3]), single = std::atol(argv[4]);
    if (!launch || burst < 1 || burst > 1000 || launches < burst) {
        std::fprintf(stderr, "no such door, or counts out of range (burst 1..1000)\n");
        return 2;
    }
    CK(cuInit(0));
    CUdevice device;
    CUcontext context;
    CUmodule module;
    CUfunction empty;
    CUstream stream;
    CK(cuDeviceGet(&device, 0));
    CK(cuDevicePrimaryCtxRetain(&context, device));
    CK(cuCtxSetCurrent(context));
    CK(cuModuleLoadData(&module, EMPTY));
    CK(cuModuleGetFunction(&empty, module, "empty"));
    CK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    for (int i = 0; i < 2000; ++i) {  // warm-up: clocks, lazy loading, the client's registration
        CK(launch(empty, 1, 1, 1, 1, 1, 1, 0, stream, nullptr, nullptr));
        if (i % 100 == 99) CK(cuStreamSynchronize(stream));
    }
    std::vector<double> ns;
    ns.reserve(static_cast<size_t>(single ? launches : launches / burst));
    double begin_all = now_ns();
    for (long done = 0; done + burst <= launches; done += burst) {
        double begin = now_ns();
        for (long i = 0; i < burst; ++i) {
            CK(launch(empty, 1, 1, 1, 1, 1, 1, 0, stream, nullptr, nullptr));
            if (single) {
                double end = now_ns();
                ns.push_back(end - begin);
                begin = end;
            }
        }
        if (!single) ns.push_back((now_ns() - begin) / static_cast<double>(burst));
        CK(cuStreamSynchronize(stream));
    }
    double total_s = (now_ns() - begin_all) / 1e9;
    std::sort(ns.begin(), ns.end());
    std::printf("{\"door\": \"%s\", \"launches\": %ld, \"burst\": %ld, \"single\": %ld, \"p10\": %.1f, \"p50\": %.1f, "
                "\"p90\": %.1f, \"p99\": %.1f, \"p999\": %.1f, \"max\": %.1f, \"seconds\": %.3f}\n",
                argv[1], launches, burst, single, rank(ns, 0.1), rank(ns, 0.5), rank(ns, 0.9), rank(ns, 0.99),
                rank(ns, 0.999), ns.back(), total_s);
    return 0;
}
