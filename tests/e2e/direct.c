/* A plain C program linked with -lcuda: no loader tricks. Launches the counting
 * kernel as often as its first argument says, checks every counter, says so, and
 * stays until its standard input ends. The PTX file is its second argument. */
#include <stdio.h>
#include <stdlib.h>

typedef int CUresult;
typedef int CUdevice;
typedef unsigned long long CUdeviceptr;
typedef struct CUctx_st *CUcontext;
typedef struct CUmod_st *CUmodule;
typedef struct CUfunc_st *CUfunction;
typedef struct CUstream_st *CUstream;

/* What cuda.h declares under these names. */
#define cuCtxCreate cuCtxCreate_v2
#define cuMemAlloc cuMemAlloc_v2
#define cuMemsetD32 cuMemsetD32_v2
#define cuMemcpyDtoH cuMemcpyDtoH_v2
CUresult cuInit(unsigned flags);
CUresult cuDeviceGet(CUdevice *device, int ordinal);
CUresult cuCtxCreate(CUcontext *context, unsigned flags, CUdevice device);
CUresult cuModuleLoad(CUmodule *module, const char *file);
CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name);
CUresult cuMemAlloc(CUdeviceptr *pointer, size_t bytes);
CUresult cuMemsetD32(CUdeviceptr pointer, unsigned value, size_t count);
CUresult cuMemcpyDtoH(void *to, CUdeviceptr from, size_t bytes);
CUresult cuLaunchKernel(CUfunction function, unsigned gx, unsigned gy, unsigned gz, unsigned bx,
                        unsigned by, unsigned bz, unsigned shared_bytes, CUstream stream,
                        void **parameters, void **extra);
CUresult cuCtxSynchronize(void);

#define CHECK(call)                                                     \
  do {                                                                  \
    CUresult result = (call);                                           \
    if (result) {                                                       \
      fprintf(stderr, "%s: error %d\n", #call, result);                 \
      return 1;                                                         \
    }                                                                   \
  } while (0)

enum { BLOCKS = 4, THREADS = 64, COUNTERS = BLOCKS * THREADS };

int main(int argc, char **argv) {
  if (argc != 3) return 2;
  unsigned launches = (unsigned)atoi(argv[1]);
  CUdevice device;
  CUcontext context;
  CUmodule module;
  CUfunction count;
  CUdeviceptr counters;
  static unsigned seen[COUNTERS];
  int spins = 10;
  void *parameters[] = {&counters, &spins};

  CHECK(cuInit(0));
  CHECK(cuDeviceGet(&device, 0));
  CHECK(cuCtxCreate(&context, 0, device));
  CHECK(cuModuleLoad(&module, argv[2]));
  CHECK(cuModuleGetFunction(&count, module, "count"));
  CHECK(cuMemAlloc(&counters, sizeof seen));
  CHECK(cuMemsetD32(counters, 0, COUNTERS));
  for (unsigned i = 0; i < launches; ++i)
    CHECK(cuLaunchKernel(count, BLOCKS, 1, 1, THREADS, 1, 1, 0, NULL, parameters, NULL));
  CHECK(cuCtxSynchronize());
  CHECK(cuMemcpyDtoH(seen, counters, sizeof seen));
  for (int i = 0; i < COUNTERS; ++i)
    if (seen[i] != launches) {
      fprintf(stderr, "counter %d is %u after %u launches\n", i, seen[i], launches);
      return 1;
    }
  printf("{\"launched\": %u}\n", launches);
  fflush(stdout);
  while (getchar() != EOF) {
  }
  return 0;
}
