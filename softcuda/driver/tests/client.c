/* A plain C program on the driver API, linked against libcuda as any other.
 * It declares what it uses itself, so that no NVIDIA header is needed.
 *
 *   client PTX work BLOCKS LAUNCHES   runs a kernel LAUNCHES times on its own
 *                                     data and checks every element
 *   client PTX hold BLOCKS 0          takes BLOCKS SMs and never gives them up
 *   client PTX time BLOCKS LAUNCHES   prints microseconds per launch call, per
 *                                     launch and per block
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef int CUresult;
typedef int CUdevice;
typedef uint64_t CUdeviceptr;
typedef struct CUctx_st *CUcontext;
typedef struct CUmod_st *CUmodule;
typedef struct CUfunc_st *CUfunction;
typedef struct CUstream_st *CUstream;
typedef struct CUevent_st *CUevent;

CUresult cuInit(unsigned);
CUresult cuDeviceGet(CUdevice *, int);
CUresult cuDeviceGetAttribute(int *, int, CUdevice);
CUresult cuCtxCreate_v2(CUcontext *, unsigned, CUdevice);
CUresult cuCtxDestroy_v2(CUcontext);
CUresult cuCtxSynchronize(void);
CUresult cuModuleLoad(CUmodule *, const char *);
CUresult cuModuleGetFunction(CUfunction *, CUmodule, const char *);
CUresult cuMemAlloc_v2(CUdeviceptr *, size_t);
CUresult cuMemFree_v2(CUdeviceptr);
CUresult cuMemsetD32_v2(CUdeviceptr, unsigned, size_t);
CUresult cuMemcpyDtoH_v2(void *, CUdeviceptr, size_t);
CUresult cuStreamCreate(CUstream *, unsigned);
CUresult cuStreamSynchronize(CUstream);
CUresult cuEventCreate(CUevent *, unsigned);
CUresult cuEventRecord(CUevent, CUstream);
CUresult cuEventSynchronize(CUevent);
CUresult cuEventElapsedTime(float *, CUevent, CUevent);
CUresult cuGetErrorName(CUresult, const char **);
CUresult cuLaunchKernel(CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                        unsigned, CUstream, void **, void **);

#define CHECK(call)                                                                \
    do {                                                                           \
        CUresult rc_ = (call);                                                     \
        if (rc_ != 0) {                                                            \
            const char *name_ = "?";                                               \
            cuGetErrorName(rc_, &name_);                                           \
            fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #call, name_);  \
            exit(1);                                                               \
        }                                                                          \
    } while (0)

#define THREADS 32u

static double now_us(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1e6 + t.tv_nsec / 1e3;
}

static void work(CUmodule module, CUstream stream, unsigned blocks, unsigned launches) {
    CUfunction increment;
    CUdeviceptr data;
    unsigned n = blocks * THREADS, rounds = 2, i;
    unsigned *host = malloc(n * sizeof *host);
    CHECK(cuModuleGetFunction(&increment, module, "increment"));
    CHECK(cuMemAlloc_v2(&data, n * sizeof *host));
    CHECK(cuMemsetD32_v2(data, 0, n));
    void *params[] = {&data, &n, &rounds};
    for (i = 0; i < launches; i++)
        CHECK(cuLaunchKernel(increment, blocks, 1, 1, THREADS, 1, 1, 0, stream, params, NULL));
    CHECK(cuStreamSynchronize(stream));
    CHECK(cuMemcpyDtoH_v2(host, data, n * sizeof *host));
    for (i = 0; i < n; i++)
        if (host[i] != rounds * launches) {
            fprintf(stderr, "element %u is %u instead of %u\n", i, host[i], rounds * launches);
            exit(1);
        }
    CHECK(cuMemFree_v2(data));
    free(host);
}

/* Returns when all blocks run, as the word that they write last shows that
 * none of them has ended. */
static void hold(CUmodule module, CUstream stream, unsigned blocks) {
    CUfunction spin;
    CUdeviceptr done;
    unsigned rounds = ~0u;
    void *params[] = {&done, &rounds};
    CHECK(cuModuleGetFunction(&spin, module, "spin"));
    CHECK(cuMemAlloc_v2(&done, 4));
    CHECK(cuLaunchKernel(spin, blocks, 1, 1, 32, 1, 1, 0, stream, params, NULL));
    struct timespec pause = {0, 20 * 1000 * 1000};
    nanosleep(&pause, NULL);
}

static void time_it(CUmodule module, CUstream stream, unsigned blocks, unsigned launches) {
    CUfunction empty;
    CUevent start, end;
    float ms;
    unsigned i;
    CHECK(cuModuleGetFunction(&empty, module, "empty"));
    CHECK(cuEventCreate(&start, 0));
    CHECK(cuEventCreate(&end, 0));
    for (i = 0; i < 100; i++)
        CHECK(cuLaunchKernel(empty, blocks, 1, 1, 1, 1, 1, 0, stream, NULL, NULL));
    CHECK(cuStreamSynchronize(stream));
    double before = now_us();
    CHECK(cuEventRecord(start, stream));
    for (i = 0; i < launches; i++)
        CHECK(cuLaunchKernel(empty, blocks, 1, 1, 1, 1, 1, 0, stream, NULL, NULL));
    CHECK(cuEventRecord(end, stream));
    double called = now_us() - before;
    CHECK(cuEventSynchronize(end));
    CHECK(cuEventElapsedTime(&ms, start, end));
    double synced = now_us();
    for (i = 0; i < launches; i++) {
        CHECK(cuLaunchKernel(empty, blocks, 1, 1, 1, 1, 1, 0, stream, NULL, NULL));
        CHECK(cuStreamSynchronize(stream));
    }
    synced = now_us() - synced;
    printf("call %.2f us, launch %.2f us, block %.3f us, launch and wait %.2f us\n",
           called / launches, ms * 1e3 / launches, ms * 1e3 / launches / blocks,
           synced / launches);
}

int main(int argc, char **argv) {
    CUdevice device;
    CUcontext context;
    CUmodule module;
    CUstream stream;
    int sms;
    if (argc != 5) return 2;
    CHECK(cuInit(0));
    CHECK(cuDeviceGet(&device, 0));
    CHECK(cuDeviceGetAttribute(&sms, 16, device));
    CHECK(cuCtxCreate_v2(&context, 0, device));
    CHECK(cuModuleLoad(&module, argv[1]));
    CHECK(cuStreamCreate(&stream, 0));
    if (strcmp(argv[2], "hold") == 0) hold(module, stream, atoi(argv[3]));
    puts("ready");
    fflush(stdout);
    if (strcmp(argv[2], "work") == 0)
        work(module, stream, atoi(argv[3]), atoi(argv[4]));
    else if (strcmp(argv[2], "time") == 0)
        time_it(module, stream, atoi(argv[3]), atoi(argv[4]));
    CHECK(cuCtxSynchronize());
    CHECK(cuCtxDestroy_v2(context));
    printf("done on %d SMs\n", sms);
    return 0;
}
