/* Finds driver functions as cuda-python does: dlopen, one dlsym, then cuGetProcAddress for all others; calls one that
 * the shim does not wrap and one that it does.
 *
 *   lookup          prints "1 device" */
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>

typedef int (*GetProcAddress)(const char *, void **, int, uint64_t, int *);

int main(void) {
  void *driver = dlopen("libcuda.so.1", RTLD_NOW);
  if (!driver) return fprintf(stderr, "%s\n", dlerror()), 1;
  GetProcAddress find = (GetProcAddress)dlsym(driver, "cuGetProcAddress_v2");
  if (!find) return fprintf(stderr, "%s\n", dlerror()), 1;
  static const char *const names[] = {"cuInit", "cuDeviceGetCount", "cuDeviceGetName", "cuLaunchKernel",
                                      "cuMemAlloc", "cuCtxGetCurrent"};
  void *found[sizeof names / sizeof *names];
  for (unsigned i = 0; i < sizeof names / sizeof *names; i++) {
    int status = -1, result = find(names[i], &found[i], 12080, 0, &status);
    if (result || status || !found[i])
      return fprintf(stderr, "%s: result %d, status %d\n", names[i], result, status), 1;
  }
  int count = 0;
  if (((int (*)(unsigned))found[0])(0) || ((int (*)(int *))found[1])(&count)) return 1;
  printf("%d device\n", count);
  return 0;
}
