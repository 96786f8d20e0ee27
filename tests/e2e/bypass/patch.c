/* A library that changes the code that passes through it: kernels write 1000 more. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

int cuModuleLoadData(void **module, const void *image) {
  static int (*real)(void **, const void *);
  if (!real) *(void **)&real = dlsym(RTLD_NEXT, "cuModuleLoadData");
  char *text = strdup(image);
  char *value = strstr(text, "%r2, 1");
  if (value) value[5] = '2';
  int result = real(module, text);
  free(text);
  return result;
}
