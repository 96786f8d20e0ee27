/* Its constructor, during which its opener keeps the loader, waits for a thread of the program. */
#include <stdio.h>
#include <stdlib.h>

__attribute__((constructor)) static void start(void) {
  void *wait = NULL;
  const char *address = getenv("WAIT_FOR_THREAD");
  if (address && sscanf(address, "%p", &wait) == 1) ((void (*)(void))wait)();
}
