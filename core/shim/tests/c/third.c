// A third library that looks further than itself, as interposers do.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <string.h>
// In front of libc's for this library: RTLD_NEXT from here must skip it.
char *strdup(const char *s) { (void)s; return 0; }
int third_next_is_libc(void) {
  void *next = dlsym(RTLD_NEXT, "strdup"); Dl_info i;
  if (!next) return 1;
  if (!dladdr(next, &i) || !strstr(i.dli_fname, "libc.so")) return 2;
  // The next cuInit behind this library is nobody's: it was opened last.
  return dlsym(RTLD_NEXT, "cuInit") ? 3 : 0;
}
