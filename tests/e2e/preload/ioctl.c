/* Another library that watches ioctl: prints how many calls it saw when the program ends. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdarg.h>
#include <stdio.h>

static int calls;

int ioctl(int fd, unsigned long request, ...) {
  static int (*real)(int, unsigned long, ...);
  va_list list;
  va_start(list, request);
  void *argument = va_arg(list, void *);
  va_end(list);
  if (!real) real = (int (*)(int, unsigned long, ...))dlsym(RTLD_NEXT, "ioctl");
  calls++;
  return real(fd, request, argument);
}

__attribute__((destructor)) static void tell(void) { fprintf(stderr, "ioctl seen: %d\n", calls); }
