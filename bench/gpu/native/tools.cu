// Programs for developer tools, and two processes that share device memory. `tools MODE COUNT`:
//   run     COUNT kernels, three kinds in turn
//   bounds  the same, then one thread writes behind the end of its buffer
//   race    the same, then a block whose warps do not wait for each other
//   ipc     a producer and a consumer, COUNT rounds: device memory and events of one process opened in the other
//   load    bursts of kernels, half of the time, until standard input ends
// Prints one JSON object: `digest` of every value that the right kernels left. Then its process stays a moment, so that
// the core can be asked about it.
#include <cuda_runtime.h>
#include <poll.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#define CK(call)                                                                        \
    do {                                                                                \
        cudaError_t result_ = (call);                                                   \
        if (result_ != cudaSuccess) {                                                   \
            std::fprintf(stderr, "%s: %s\n", #call, cudaGetErrorString(result_));       \
            return 1;                                                                   \
        }                                                                               \
    } while (0)

static const unsigned THREADS = 256, COUNT = 1u << 18, BLOCKS = COUNT / THREADS;
static const useconds_t STAYS_US = 700'000;
// Kernels get other forms while nothing runs in their context; two processes that always wait for each other leave no
// such moment.
static const useconds_t IDLES_US = 1'000'000;

__host__ __device__ inline unsigned mixed(unsigned value, unsigned key, unsigned rounds) {
    for (unsigned i = 0; i < rounds; ++i) {
        value = (value ^ (value >> 15)) * 0x2c1b3c6du + key;
    }
    return value;
}

__global__ void fill_values(unsigned *out, unsigned n, unsigned key) {
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = mixed(i, key, 64);
}

__global__ void mix_values(unsigned *out, unsigned n, unsigned key) {
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = mixed(out[i], key, 64);
}

__global__ void rotate_values(unsigned *out, unsigned n, unsigned key) {
    __shared__ unsigned tile[THREADS];
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    tile[threadIdx.x] = i < n ? out[i] : 0;
    __syncthreads();
    if (i < n) out[i] = tile[(threadIdx.x + key) % THREADS] + key;
}

// What memcheck is to find: one write of four bytes.
__global__ void behind_the_end(unsigned *out, unsigned n) {
    if (blockIdx.x == 0 && threadIdx.x == 0) out[n + 64] = 1;
}

// What racecheck is to find: a warp reads what another wrote, without a barrier.
__global__ void without_a_barrier(unsigned *out) {
    __shared__ unsigned tile[THREADS];
    tile[threadIdx.x] = threadIdx.x;
    out[threadIdx.x] = tile[(threadIdx.x + THREADS / 2) % THREADS];
}

// acc = acc * 31 + buffer.
__global__ void consume(unsigned *acc, const unsigned *buffer, unsigned n) {
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) acc[i] = acc[i] * 31 + buffer[i];
}

__global__ void busy(unsigned ns) {
    unsigned long long begin, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin));
    do {
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    } while (now - begin < ns);
}

static uint64_t digest_of(const std::vector<unsigned> &values) {
    uint64_t digest = 0xcbf29ce484222325ull;
    for (unsigned value : values) digest = (digest ^ value) * 0x100000001b3ull;
    return digest;
}

static int told(uint64_t digest, unsigned launches, unsigned wrong, int error) {
    std::printf("\n{\"digest\": \"%016llx\", \"launches\": %u, \"wrong\": %u, \"error\": %d}\n",
                static_cast<unsigned long long>(digest), launches, wrong, error);
    std::fflush(stdout);
    usleep(STAYS_US);
    return wrong || error ? 3 : 0;
}

static int run(const char *mode, unsigned count) {
    unsigned *out;
    std::vector<unsigned> values(COUNT), right(COUNT), tile(THREADS);
    CK(cudaMalloc(&out, COUNT * sizeof(unsigned)));
    for (unsigned launch = 0; launch < count; ++launch) {
        unsigned key = launch * 2 + 1;
        switch (launch % 3) {
            case 0: fill_values<<<BLOCKS, THREADS>>>(out, COUNT, key); break;
            case 1: mix_values<<<BLOCKS, THREADS>>>(out, COUNT, key); break;
            default: rotate_values<<<BLOCKS, THREADS>>>(out, COUNT, key);
        }
        CK(cudaGetLastError());
    }
    CK(cudaMemcpy(values.data(), out, COUNT * sizeof(unsigned), cudaMemcpyDeviceToHost));
    // A `fill_values` begins anew: only the last ones matter.
    for (unsigned launch = count ? (count - 1) / 3 * 3 : 0; launch < count; ++launch) {
        unsigned key = launch * 2 + 1;
        for (unsigned i = 0; i < COUNT && launch % 3 < 2; ++i) right[i] = mixed(launch % 3 ? right[i] : i, key, 64);
        for (unsigned block = 0; block < BLOCKS && launch % 3 == 2; ++block) {
            unsigned *here = right.data() + block * THREADS;
            std::memcpy(tile.data(), here, THREADS * sizeof(unsigned));
            for (unsigned i = 0; i < THREADS; ++i) here[i] = tile[(i + key) % THREADS] + key;
        }
    }
    unsigned wrong = 0;
    for (unsigned i = 0; i < COUNT; ++i) wrong += values[i] != right[i];
    cudaError_t error = cudaSuccess;
    if (!std::strcmp(mode, "bounds")) behind_the_end<<<1, 32>>>(out, COUNT);
    if (!std::strcmp(mode, "race")) without_a_barrier<<<1, THREADS>>>(out);
    if (std::strcmp(mode, "run")) error = cudaDeviceSynchronize();
    return told(digest_of(values), count, wrong, error);
}

// What a round writes: no two rounds near each other write the same.
static const unsigned KEYS = 16;
static unsigned key_of(unsigned round) { return round % KEYS * 2 + 1; }

// Whole objects through a pipe.
static bool put(int to, const void *from, size_t bytes) {
    return write(to, from, bytes) == static_cast<ssize_t>(bytes);
}

static bool get(int from, void *to, size_t bytes) {
    for (size_t at = 0; at < bytes;) {
        ssize_t got = read(from, static_cast<char *>(to) + at, bytes - at);
        if (got <= 0) return false;
        at += static_cast<size_t>(got);
    }
    return true;
}

#define PIPE(call)                                      \
    do {                                                \
        if (!(call)) {                                  \
            std::fprintf(stderr, "%s: it ended\n", #call); \
            return 1;                                   \
        }                                               \
    } while (0)

// Fills a buffer again and again. Waits for the GPU only once, and for the other's word that it has enqueued its part.
static int produce(unsigned rounds, int to, int from) {
    unsigned *buffer;
    cudaEvent_t filled, consumed;
    cudaIpcMemHandle_t memory;
    cudaIpcEventHandle_t of_filled, of_consumed;
    CK(cudaMalloc(&buffer, COUNT * sizeof(unsigned)));
    CK(cudaEventCreateWithFlags(&filled, cudaEventDisableTiming | cudaEventInterprocess));
    CK(cudaIpcGetMemHandle(&memory, buffer));
    CK(cudaIpcGetEventHandle(&of_filled, filled));
    PIPE(put(to, &memory, sizeof memory) && put(to, &of_filled, sizeof of_filled));
    PIPE(get(from, &of_consumed, sizeof of_consumed));
    CK(cudaIpcOpenEventHandle(&consumed, of_consumed));
    for (unsigned round = 0; round < rounds; ++round) {
        char word = 1;
        if (round) {
            PIPE(get(from, &word, 1));
            CK(cudaStreamWaitEvent(nullptr, consumed, 0));
        }
        if (round == rounds / 4) {
            CK(cudaDeviceSynchronize());
            usleep(IDLES_US);
        }
        fill_values<<<BLOCKS, THREADS>>>(buffer, COUNT, key_of(round));
        CK(cudaGetLastError());
        CK(cudaEventRecord(filled, nullptr));
        PIPE(put(to, &word, 1));
    }
    char word;
    // The memory is the other's, too, until it has said that it closed it.
    PIPE(get(from, &word, 1) && get(from, &word, 1));
    CK(cudaDeviceSynchronize());
    CK(cudaFree(buffer));
    usleep(STAYS_US);
    return 0;
}

static int consume_all(unsigned rounds, int to, int from) {
    unsigned *buffer, *acc;
    void *opened;
    cudaEvent_t filled, consumed;
    cudaIpcMemHandle_t memory;
    cudaIpcEventHandle_t of_filled, of_consumed;
    CK(cudaMalloc(&acc, COUNT * sizeof(unsigned)));
    CK(cudaMemset(acc, 0, COUNT * sizeof(unsigned)));
    CK(cudaEventCreateWithFlags(&consumed, cudaEventDisableTiming | cudaEventInterprocess));
    CK(cudaIpcGetEventHandle(&of_consumed, consumed));
    PIPE(get(from, &memory, sizeof memory) && get(from, &of_filled, sizeof of_filled));
    PIPE(put(to, &of_consumed, sizeof of_consumed));
    CK(cudaIpcOpenMemHandle(&opened, memory, cudaIpcMemLazyEnablePeerAccess));
    CK(cudaIpcOpenEventHandle(&filled, of_filled));
    buffer = static_cast<unsigned *>(opened);
    for (unsigned round = 0; round < rounds; ++round) {
        char word;
        PIPE(get(from, &word, 1));
        CK(cudaStreamWaitEvent(nullptr, filled, 0));
        consume<<<BLOCKS, THREADS>>>(acc, buffer, COUNT);
        CK(cudaGetLastError());
        CK(cudaEventRecord(consumed, nullptr));
        PIPE(put(to, &word, 1));
    }
    std::vector<unsigned> values(COUNT), right(COUNT);
    CK(cudaMemcpy(values.data(), acc, COUNT * sizeof(unsigned), cudaMemcpyDeviceToHost));
    CK(cudaIpcCloseMemHandle(opened));
    char word = 1;
    PIPE(put(to, &word, 1));
    std::vector<std::vector<unsigned>> made(KEYS, std::vector<unsigned>(COUNT));
    for (unsigned key = 0; key < KEYS; ++key) {
        for (unsigned i = 0; i < COUNT; ++i) made[key][i] = mixed(i, key_of(key), 64);
    }
    for (unsigned round = 0; round < rounds; ++round) {
        for (unsigned i = 0; i < COUNT; ++i) right[i] = right[i] * 31 + made[round % KEYS][i];
    }
    unsigned wrong = 0;
    for (unsigned i = 0; i < COUNT; ++i) wrong += values[i] != right[i];
    return told(digest_of(values), rounds, wrong, 0);
}

// Each half has a process of its own before either uses CUDA; the consumer's is this one's child.
static int ipc(const char *program, const char *count) {
    int down[2], up[2];
    PIPE(!pipe(down) && !pipe(up));
    pid_t child = fork();
    if (child == 0) {
        char ends[2][16];
        std::snprintf(ends[0], sizeof ends[0], "%d", up[1]);
        std::snprintf(ends[1], sizeof ends[1], "%d", down[0]);
        close(up[0]);
        close(down[1]);
        execl(program, program, "consumer", count, ends[0], ends[1], static_cast<char *>(nullptr));
        _exit(127);
    }
    PIPE(child > 0);
    close(up[1]);
    close(down[0]);
    int produced = produce(static_cast<unsigned>(std::atoi(count)), down[1], up[0]), status = 0;
    close(down[1]);
    close(up[0]);
    PIPE(waitpid(child, &status, 0) == child);
    if (produced) return produced;
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

static int load() {
    CK(cudaFree(nullptr));
    std::printf("{\"ready\": true}\n");
    std::fflush(stdout);
    for (pollfd in = {0, POLLIN, 0}; poll(&in, 1, 0) == 0;) {
        for (int i = 0; i < 10; ++i) busy<<<132, 128>>>(300'000);
        CK(cudaDeviceSynchronize());
        usleep(3'000);
    }
    return 0;
}

int main(int argc, char **argv) {
    if (argc < 3) return 2;
    const char *mode = argv[1];
    unsigned count = static_cast<unsigned>(std::atoi(argv[2]));
    if (!std::strcmp(mode, "load")) return load();
    if (!std::strcmp(mode, "ipc")) return ipc(argv[0], argv[2]);
    if (!std::strcmp(mode, "consumer") && argc == 5) return consume_all(count, std::atoi(argv[3]), std::atoi(argv[4]));
    return run(mode, count);
}
