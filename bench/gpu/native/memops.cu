// What it costs to learn that a kernel has finished: per kernel, GPU time (end to
// end, in one stream) and host time, for each way to track completion. Then how
// soon the CPU sees a 10 us kernel done. Prints one JSON object.
#include <cuda.h>
#include <cuda_runtime.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <string>
#include <vector>

using Clock = std::chrono::steady_clock;
static double us(Clock::time_point a, Clock::time_point b) {
    return std::chrono::duration<double, std::micro>(b - a).count();
}

#define CK(call)                                                          \
    do {                                                                  \
        int result_ = static_cast<int>(call);                             \
        if (result_ != 0) {                                               \
            std::fprintf(stderr, "%s -> CUDA error %d\n", #call, result_); \
            return 1;                                                     \
        }                                                                 \
    } while (0)

// Busy for about `ns` at the 1.98 GHz of a Hopper GPU; the lengths are labels, not measurements.
__global__ void spin(long long ns) {
    long long begin = clock64();
    while (clock64() - begin < ns * 2) {
    }
}

enum Way { PLAIN, EVENT, WRITE, WRITE_EVERY_8, WRITE_REGISTERED, HOST_FUNC, WAYS };
static const char *const NAMES[WAYS] = {"nothing", "event record", "cuStreamWriteValue32",
                                        "cuStreamWriteValue32 after every 8th",
                                        "cuStreamWriteValue32 to a registered memfd page", "cuLaunchHostFunc"};

static const int KERNELS = 1000, REPEATS = 5, BLOCKS = 132, THREADS = 128;

int main() {
    CK(cudaFree(nullptr));
    unsigned *host;
    CUdeviceptr host_on_device;
    cudaStream_t stream;
    CK(cudaHostAlloc(reinterpret_cast<void **>(&host), 4096, cudaHostAllocMapped));
    CK(cuMemHostGetDevicePointer(&host_on_device, host, 0));
    CK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    // As the shim has it: a shared memory page, registered.
    int fd = static_cast<int>(syscall(SYS_memfd_create, "memops", 0));
    CK(ftruncate(fd, 4096));
    void *page = mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    CUdeviceptr shared_on_device;
    CK(cuMemHostRegister(page, 4096, CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP));
    CK(cuMemHostGetDevicePointer(&shared_on_device, page, 0));
    // Without its memory barrier the write would be cheaper, if the driver took the flag.
    int no_barrier = static_cast<int>(
        cuStreamWriteValue32(stream, host_on_device, 1, CU_STREAM_WRITE_VALUE_NO_MEMORY_BARRIER));
    std::vector<cudaEvent_t> events(KERNELS);
    for (auto &event : events) CK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    auto track = [&](int way, int i) -> int {
        switch (way) {
            case EVENT: return cudaEventRecord(events[i], stream);
            case WRITE: return cuStreamWriteValue32(stream, host_on_device, i + 1, 0);
            case WRITE_EVERY_8: return i % 8 ? 0 : cuStreamWriteValue32(stream, host_on_device, i + 1, 0);
            case WRITE_REGISTERED: return cuStreamWriteValue32(stream, shared_on_device, i + 1, 0);
            case HOST_FUNC: return cudaLaunchHostFunc(stream, [](void *) {}, nullptr);
            default: return 0;
        }
    };
    std::string json = "{\"no_memory_barrier_flag_error\": " + std::to_string(no_barrier) + ", \"per_kernel\": [";
    for (int length_ns : {2000, 10000}) {
        for (int way = PLAIN; way < WAYS; ++way) {
            double best = 1e18, best_host = 1e18;
            for (int repeat = 0; repeat < REPEATS; ++repeat) {
                CK(cudaStreamSynchronize(stream));
                auto a = Clock::now();
                for (int i = 0; i < KERNELS; ++i) {
                    spin<<<BLOCKS, THREADS, 0, stream>>>(length_ns);
                    CK(track(way, i));
                }
                auto b = Clock::now();
                CK(cudaStreamSynchronize(stream));
                best = std::min(best, us(a, Clock::now()) / KERNELS);
                best_host = std::min(best_host, us(a, b) / KERNELS);
            }
            char line[256];
            std::snprintf(line, sizeof line,
                          "%s{\"kernel_ns\": %d, \"tracking\": \"%s\", \"us_per_kernel\": %.3f, \"host_us_per_kernel\": %.3f}",
                          json.back() == '[' ? "" : ", ", length_ns, NAMES[way], best, best_host);
            json += line;
        }
    }
    json += "], \"seen_done\": [";
    volatile unsigned *word = host;
    for (int way : {WRITE, EVENT, PLAIN}) {
        std::vector<double> seen;
        for (int i = 0; i < 400; ++i) {
            *word = 0;
            auto a = Clock::now();
            spin<<<BLOCKS, THREADS, 0, stream>>>(10000);
            CK(track(way, 0));
            if (way == WRITE) {
                while (*word != 1) {
                }
            } else if (way == EVENT) {
                while (cudaEventQuery(events[0]) == cudaErrorNotReady) {
                }
            } else {
                CK(cudaStreamSynchronize(stream));
            }
            seen.push_back(us(a, Clock::now()));
        }
        std::sort(seen.begin(), seen.end());
        char line[256];
        std::snprintf(line, sizeof line, "%s{\"by\": \"%s\", \"p50_us\": %.2f, \"p99_us\": %.2f}",
                      json.back() == '[' ? "" : ", ", way == PLAIN ? "cudaStreamSynchronize" : NAMES[way],
                      seen[seen.size() / 2], seen[seen.size() * 99 / 100]);
        json += line;
    }
    std::printf("%s]}\n", json.c_str());
    return 0;
}
