/* A library whose dlsym leads past whoever stands behind it, to the C library's. */
#define _GNU_SOURCE
#include <dlfcn.h>

void *dlsym(void *handle, const char *name) {
  static void *(*real)(void *, const char *);
  if (!real) {
    void *libc = dlopen("libc.so.6", RTLD_LAZY | RTLD_NOLOAD);
    *(void **)&real = dlvsym(libc, "dlsym", "GLIBC_2.34");
    if (!real) *(void **)&real = dlvsym(libc, "dlsym", "GLIBC_2.2.5");
  }
  return real(handle, name);
}
