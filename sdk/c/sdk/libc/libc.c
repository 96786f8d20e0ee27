/* The few functions of a C library that bindings and policies need.
 *
 * Memory comes in blocks of 16 bytes times a power of two, each with a header of 16
 * bytes that names its class; freed blocks are kept for the next of their class. There
 * is one thread. What cannot be had traps: the core counts a fault and starts anew. */
#include "stdlib.h"
#include "string.h"
#include <stdint.h>

#define CLASSES 24 /* the largest has 128 MiB, more than any policy may have */
#define SMALLEST 16
#define PAGE 65536

struct header {
  uint32_t class;
  uint32_t unused[3];
};

struct free_block {
  struct free_block *next;
};

extern unsigned char __heap_base; /* from the linker: where static data ends */
static struct free_block *freed[CLASSES];
static uintptr_t unused_from;

/* `bytes` that nobody had before, aligned to 16. */
static void *fresh(size_t bytes) {
  if (unused_from == 0) {
    unused_from = ((uintptr_t)&__heap_base + 15) & ~(uintptr_t)15;
  }
  uintptr_t from = unused_from;
  size_t have = __builtin_wasm_memory_size(0) * (size_t)PAGE;
  if (bytes > SIZE_MAX - from) abort();
  if (from + bytes > have) {
    size_t pages = (from + bytes - have + PAGE - 1) / PAGE;
    if (__builtin_wasm_memory_grow(0, pages) == SIZE_MAX) abort();
  }
  unused_from = from + bytes;
  return (void *)from;
}

void *malloc(size_t bytes) {
  uint32_t class = 0;
  size_t size = SMALLEST;
  while (size < bytes) {
    size *= 2;
    if (++class == CLASSES) abort();
  }
  struct free_block *block = freed[class];
  if (block != NULL) {
    freed[class] = block->next;
    return block;
  }
  struct header *header = fresh(sizeof *header + size);
  header->class = class;
  return header + 1;
}

void free(void *block) {
  if (block == NULL) return;
  uint32_t class = ((struct header *)block - 1)->class;
  if (class >= CLASSES) abort(); /* not a block of ours, or written beyond another */
  struct free_block *first = block;
  first->next = freed[class];
  freed[class] = first;
}

void *calloc(size_t count, size_t bytes) {
  size_t all;
  if (__builtin_mul_overflow(count, bytes, &all)) abort();
  void *block = malloc(all);
  memset(block, 0, all);
  return block;
}

void *realloc(void *old, size_t bytes) {
  if (old == NULL) return malloc(bytes);
  uint32_t class = ((struct header *)old - 1)->class;
  if (class >= CLASSES) abort();
  size_t had = (size_t)SMALLEST << class;
  if (bytes <= had) return old;
  void *block = malloc(bytes);
  memcpy(block, old, had);
  free(old);
  return block;
}

_Noreturn void abort(void) { __builtin_trap(); }

/* Compilers turn such loops into calls of these very functions: not here. */
#define AS_WRITTEN __attribute__((no_builtin))

AS_WRITTEN void *memcpy(void *restrict to, const void *restrict from, size_t bytes) {
  unsigned char *t = to;
  const unsigned char *f = from;
  for (size_t i = 0; i < bytes; i++) t[i] = f[i];
  return to;
}

AS_WRITTEN void *memmove(void *to, const void *from, size_t bytes) {
  unsigned char *t = to;
  const unsigned char *f = from;
  if (t <= f) {
    for (size_t i = 0; i < bytes; i++) t[i] = f[i];
  } else {
    for (size_t i = bytes; i > 0; i--) t[i - 1] = f[i - 1];
  }
  return to;
}

AS_WRITTEN void *memset(void *to, int byte, size_t bytes) {
  unsigned char *t = to;
  for (size_t i = 0; i < bytes; i++) t[i] = (unsigned char)byte;
  return to;
}

AS_WRITTEN int memcmp(const void *one, const void *other, size_t bytes) {
  const unsigned char *a = one, *b = other;
  for (size_t i = 0; i < bytes; i++) {
    if (a[i] != b[i]) return a[i] < b[i] ? -1 : 1;
  }
  return 0;
}

AS_WRITTEN size_t strlen(const char *text) {
  size_t length = 0;
  while (text[length] != 0) length++;
  return length;
}
