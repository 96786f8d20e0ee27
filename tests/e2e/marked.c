/* Plays NVTX's part: does what its headers do at a program's first call, with tables of its own, and marks what it
 * launches. Linked with -lcuda. Arguments: the PTX file, and what to do:
 *
 *   marks    40 requests of a launch each (push and pop; start and end on another thread; in a domain; by a registered
 *            string), 120 tokens, 4 prefills, and ranges that mark nothing
 *   tokens   10 requests of 6 tokens, each a launch and a wait
 *   lies     requests that say that they waited for a year
 *   nothing  the same ranges without their names
 *   many     1000 requests that are begun at once and never ended
 *
 * Prints a JSON object: whether the library took the tables, and the longest of its requests, ms, by clocks outside of
 * the ranges and by clocks inside. Stays until its standard input ends. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "driver.h"

/* The tables: number 1 is the first interface, 5 is domains. A place that nobody filled stays null. */
enum { IDS = 16 };
static void *functions[2][IDS];
static void **places[2][IDS];

static int module_table(int module, void ****table, unsigned *count) {
  int at = module == 1 ? 0 : module == 5 ? 1 : -1;
  if (at < 0) return 0;
  for (int id = 1; id < IDS; ++id) places[at][id] = &functions[at][id];
  *table = places[at];
  *count = IDS;
  return 1;
}

static const struct {
  size_t bytes;
  int (*module)(int, void ****, unsigned *);
} callbacks = {sizeof callbacks, module_table};

static const void *export_table(unsigned id) { return id == 1 ? &callbacks : NULL; }

static int inject(void) {
  const char *path = getenv("NVTX_INJECTION64_PATH");
  void *library = path ? dlopen(path, RTLD_LAZY) : NULL;
  if (!library) return 0;
  int (*initialise)(const void *(*)(unsigned)) =
      (int (*)(const void *(*)(unsigned)))dlsym(library, "InitializeInjectionNvtx2");
  if (!initialise || !initialise(export_table)) {
    dlclose(library);
    memset(functions, 0, sizeof functions);
    return 0;
  }
  return 1;
}

struct attributes {
  uint16_t version, bytes;
  uint32_t category;
  int32_t colour_kind;
  uint32_t colour;
  int32_t payload_kind, reserved;
  uint64_t payload;
  int32_t message_kind;
  const void *message;
};

static struct attributes with(int kind, const void *message) {
  struct attributes all = {.version = 3, .bytes = sizeof all, .message_kind = kind, .message = message};
  return all;
}

/* As the headers call: through the pointer, if there is one. */
static void push(const char *name) {
  int (*f)(const char *) = (int (*)(const char *))functions[0][9];
  if (f) f(name);
}
static void push_wide(const wchar_t *name) {
  int (*f)(const wchar_t *) = (int (*)(const wchar_t *))functions[0][10];
  if (f) f(name);
}
static void push_ex(int kind, const void *name) {
  struct attributes all = with(kind, name);
  int (*f)(const struct attributes *) = (int (*)(const struct attributes *))functions[0][8];
  if (f) f(&all);
}
static void pop(void) {
  int (*f)(void) = (int (*)(void))functions[0][11];
  if (f) f();
}
static uint64_t start(const char *name) {
  uint64_t (*f)(const char *) = (uint64_t(*)(const char *))functions[0][5];
  return f ? f(name) : 0;
}
static void end(uint64_t id) {
  void (*f)(uint64_t) = (void (*)(uint64_t))functions[0][7];
  if (f) f(id);
}
static void *domain(const char *name) {
  void *(*f)(const char *) = (void *(*)(const char *))functions[1][12];
  return f ? f(name) : NULL;
}
static void *string(void *in, const char *name) {
  void *(*f)(void *, const char *) = (void *(*)(void *, const char *))functions[1][10];
  return f ? f(in, name) : NULL;
}
static void domain_push(void *in, int kind, const void *name) {
  struct attributes all = with(kind, name);
  int (*f)(void *, const struct attributes *) = (int (*)(void *, const struct attributes *))functions[1][4];
  if (f) f(in, &all);
}
static void domain_pop(void *in) {
  int (*f)(void *) = (int (*)(void *))functions[1][5];
  if (f) f(in);
}
static uint64_t domain_start(void *in, int kind, const void *name) {
  struct attributes all = with(kind, name);
  uint64_t (*f)(void *, const struct attributes *) =
      (uint64_t(*)(void *, const struct attributes *))functions[1][2];
  return f ? f(in, &all) : 0;
}
static void domain_end(void *in, uint64_t id) {
  void (*f)(void *, uint64_t) = (void (*)(void *, uint64_t))functions[1][3];
  if (f) f(in, id);
}
static void *end_elsewhere(void *id) {
  end(*(uint64_t *)id);
  return NULL;
}

static CUfunction count;
static CUdeviceptr counters;

/* Two requests, unless they are marked. */
static void serve(void) {
  int spins = 20000;
  void *parameters[] = {&counters, &spins};
  for (int i = 0; i < 2; ++i) {
    CHECK(cuLaunchKernel(count, 4, 1, 1, 64, 1, 1, 0, NULL, parameters, NULL));
    CHECK(cuCtxSynchronize());
  }
}

static double now_ms(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1e3 + t.tv_nsec * 1e-6;
}

int main(int argc, char **argv) {
  if (argc != 3) return 2;
  CUdevice device;
  CUcontext context;
  CUmodule module;
  int injected = inject();
  const char *year = "tally:request age_us=31536000000000";
  int lies = !strcmp(argv[2], "lies"), nothing = !strcmp(argv[2], "nothing");
  const char *request = lies ? year : nothing ? "request" : "tally:request";
  const char *queued = lies ? year : nothing ? "request" : "tally:request age_us=2000";
  double queued_ms = lies || nothing ? 0 : 2;
  void *mine = domain("mine"), *other = domain("other");
  void *named = string(mine, request);

  CHECK(cuInit(0));
  CHECK(cuDeviceGet(&device, 0));
  CHECK(cuCtxCreate(&context, 0, device));
  CHECK(cuModuleLoad(&module, argv[1]));
  CHECK(cuModuleGetFunction(&count, module, "count"));
  CHECK(cuMemAlloc(&counters, 4 * 4 * 64));
  serve(); /* Warm-up, outside of any request. */

  double most_ms = 0, inside_ms = 0;
  if (!strcmp(argv[2], "many")) {
    for (int i = 0; i < 1000; ++i) start(request);
    serve();
  } else if (!strcmp(argv[2], "tokens")) {
    for (int i = 0; i < 10; ++i) {
      push(request);
      for (int token = 0; token < 6; ++token) {
        push("tally:token");
        serve();
        pop();
      }
      pop();
    }
  } else {
    for (int i = 0; i < 40; ++i) {
      uint64_t id = 0;
      double began = now_ms();
      int way = i % 5;
      push_wide(L"tally:request");
      if (way == 0) push(request);
      if (way == 1) id = start(queued);
      if (way == 2) domain_push(mine, 1, request);
      if (way == 3) domain_push(mine, 3, named);
      if (way == 4) id = domain_start(mine, 1, request);
      double inside = now_ms();
      push_ex(1, "a layer");
      domain_push(other, 1, "another domain's");
      serve();
      for (int token = 0; !nothing && token < 3; ++token) {
        push_ex(1, "tally:token");
        pop();
      }
      if (!nothing && i % 10 == 0) end(start("tally:prefill"));
      pop();
      inside = now_ms() - inside + (way == 1 ? queued_ms : 0);
      if (inside > inside_ms) inside_ms = inside;
      if (way == 0) pop();
      if (way == 1) {
        pthread_t thread;
        pthread_create(&thread, NULL, end_elsewhere, &id);
        pthread_join(thread, NULL);
      }
      if (way == 2 || way == 3) domain_pop(mine);
      if (way == 4) domain_end(mine, id);
      domain_pop(other);
      pop();
      double took = now_ms() - began + (way == 1 ? queued_ms : 0);
      if (took > most_ms) most_ms = took;
    }
  }
  printf("{\"injected\": %d, \"most_ms\": %f, \"inside_ms\": %f}\n", injected, most_ms, inside_ms);
  fflush(stdout);
  while (getchar() != EOF) {
  }
  return 0;
}
