/* A plain C program linked with -lcuda: no loader tricks. Launches the counting
 * kernel as often as its first argument says, checks every counter, says so, and
 * stays until its standard input ends. The PTX file is its second argument. */
#include <stdio.h>
#include <stdlib.h>

#include "driver.h"

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
