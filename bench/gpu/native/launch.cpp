// The cost of cuLaunchKernel as a program sees it, through three entry points:
//   link    the symbol, bound by the dynamic linker
//   dlopen  dlsym on libcuda.so.1
//   getproc cuGetProcAddress, as the CUDA runtime and its static copies do
// An empty kernel, one thread. `launch ENTRY_POINT LAUNCHES BURST HOW`: bursts of
// BURST launches with a synchronisation after each that is not timed. HOW:
//   whole   a burst is timed as a whole (average ns a launch of each burst)
//   single  every launch is timed alone
//   paired  bursts by way of the entry point and bursts straight into the driver, in
//           turns: what the entry point adds, of one process, so that where its code and
//           data happen to lie is the same for both
// Prints one JSON object: ns.
// BURST stays below the driver's queue depth (1024), so no launch waits for the GPU.
#include <cuda.h>
#include <dlfcn.h>
#include <elf.h>
#include <link.h>

#include <algorithm>
#include <cstdint>
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

static LaunchFn entry_point(const char *name) {
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

// The driver's own cuLaunchKernel, whoever has put himself in front of dlsym: from the
// dynamic symbols of the loaded libcuda.so.1.
static int in_driver(dl_phdr_info *info, size_t, void *found) {
    if (!info->dlpi_name || !std::strstr(info->dlpi_name, "libcuda.so")) return 0;
    const ElfW(Sym) *symbols = nullptr;
    const char *names = nullptr;
    const uint32_t *hash = nullptr;
    for (int i = 0; i < info->dlpi_phnum; ++i) {
        if (info->dlpi_phdr[i].p_type != PT_DYNAMIC) continue;
        auto entry = reinterpret_cast<const ElfW(Dyn) *>(info->dlpi_addr + info->dlpi_phdr[i].p_vaddr);
        for (; entry->d_tag != DT_NULL; ++entry) {
            if (entry->d_tag == DT_SYMTAB) symbols = reinterpret_cast<const ElfW(Sym) *>(entry->d_un.d_ptr);
            if (entry->d_tag == DT_STRTAB) names = reinterpret_cast<const char *>(entry->d_un.d_ptr);
            if (entry->d_tag == DT_GNU_HASH) hash = reinterpret_cast<const uint32_t *>(entry->d_un.d_ptr);
        }
    }
    if (!symbols || !names || !hash) return 0;
    uint32_t buckets = hash[0], first = hash[1], words = hash[2];
    const uint32_t *bucket = hash + 4 + words * (sizeof(ElfW(Addr)) / 4), *chain = bucket + buckets;
    for (uint32_t b = 0; b < buckets; ++b) {
        for (uint32_t i = bucket[b]; i >= first; ++i) {
            const ElfW(Sym) &symbol = symbols[i];
            if (symbol.st_shndx != SHN_UNDEF && !std::strcmp(names + symbol.st_name, "cuLaunchKernel")) {
                *static_cast<ElfW(Addr) *>(found) = info->dlpi_addr + symbol.st_value;
                return 1;
            }
            if (chain[i - first] & 1) break;
        }
    }
    return 0;
}

static LaunchFn driver() {
    ElfW(Addr) found = 0;
    dl_iterate_phdr(in_driver, &found);
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
        std::fprintf(stderr, "usage: launch link|dlopen|getproc LAUNCHES BURST whole|single|paired\n");
        return 2;
    }
    LaunchFn launch = entry_point(argv[1]);
    long launches = std::atol(argv[2]), burst = std::atol(argv[3]);
    bool single = !std::strcmp(argv[4], "single"), paired = !std::strcmp(argv[4], "paired");
    if (!launch || burst < 1 || burst > 1000 || launches < burst || !(single || paired || !std::strcmp(argv[4], "whole"))) {
        std::fprintf(stderr, "no such entry point or way, or counts out of range (burst 1..1000)\n");
        return 2;
    }
    LaunchFn straight = paired ? driver() : launch;
    if (!straight) {
        std::fprintf(stderr, "the driver's own cuLaunchKernel is not found\n");
        return 1;
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
    std::vector<double> ns, added;
    ns.reserve(static_cast<size_t>(single ? launches : launches / burst));
    added.reserve(static_cast<size_t>(launches / burst));
    double begin_all = now_ns();
    // Of a burst of its own: average ns a launch.
    auto timed = [&](LaunchFn by, double *each) {
        double begin = now_ns();
        for (long i = 0; i < burst; ++i) CK(by(empty, 1, 1, 1, 1, 1, 1, 0, stream, nullptr, nullptr));
        *each = (now_ns() - begin) / static_cast<double>(burst);
        CK(cuStreamSynchronize(stream));
        return 0;
    };
    for (long done = 0; paired && done + burst <= launches; done += burst) {
        double by_entry_point, by_driver;
        // Each is first as often as second.
        bool entry_point_first = done / burst % 2;
        if (timed(entry_point_first ? launch : straight, entry_point_first ? &by_entry_point : &by_driver)) return 1;
        if (timed(entry_point_first ? straight : launch, entry_point_first ? &by_driver : &by_entry_point)) return 1;
        ns.push_back(by_driver);
        added.push_back(by_entry_point - by_driver);
    }
    for (long done = 0; !paired && done + burst <= launches; done += burst) {
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
    std::printf("{\"entry_point\": \"%s\", \"launches\": %ld, \"burst\": %ld, \"how\": \"%s\", \"p10\": %.1f, \"p50\": %.1f, "
                "\"p90\": %.1f, \"p99\": %.1f, \"p999\": %.1f, \"max\": %.1f, \"seconds\": %.3f",
                argv[1], launches, burst, argv[4], rank(ns, 0.1), rank(ns, 0.5), rank(ns, 0.9), rank(ns, 0.99),
                rank(ns, 0.999), ns.back(), total_s);
    if (paired) {
        std::sort(added.begin(), added.end());
        std::printf(", \"added_p10\": %.1f, \"added_p50\": %.1f, \"added_p90\": %.1f", rank(added, 0.1), rank(added, 0.5),
                    rank(added, 0.9));
    }
    std::printf("}\n");
    return 0;
}
