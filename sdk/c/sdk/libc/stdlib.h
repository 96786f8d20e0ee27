/* What the bindings need of a C library, so that a policy needs none. */
#ifndef TALLY_STDLIB_H
#define TALLY_STDLIB_H
#include <stddef.h>
void *malloc(size_t bytes);
void *calloc(size_t count, size_t bytes);
void *realloc(void *old, size_t bytes);
void free(void *block);
_Noreturn void abort(void);
#endif
