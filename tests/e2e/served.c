/* A server that counts and times its own requests. Linked with -lcuda. Arguments: the PTX file; `eager` or `graph`; how
 * many buffers (with two the next request is launched before the last is waited for); how many requests; how long a
 * kernel spins; and how it waits: `event`, `stream`, `context`, `poll`, `copy` (to the host) or `side` (for an event in
 * a stream that waits for the one that computes), or `pause`: as `stream`, with pauses between launches and between
 * requests.
 *
 * Serves once it is told to by a line of its standard input. Prints its count; the median and the longest time, ms,
 * from before the first launch of a request to the return of the wait; and the median of these from the return of the
 * wait before, if that is later, as a decode loop times its tokens. Stays until its standard input ends. */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "driver.h"

enum { KERNELS = 3, BUFFERS_MAX = 2, PAUSE_NS = 1000000, ERROR_NOT_READY = 600 };
static CUfunction count;
static CUdeviceptr counters;
static CUstream stream, side;
static CUgraphExec exec;
static int spins, is_graph;
static const char *way;

static double now_ms(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1e3 + t.tv_nsec * 1e-6;
}

static void take_break(void) {
  struct timespec pause = {0, PAUSE_NS};
  nanosleep(&pause, NULL);
}

static void kernels(void) {
  void *parameters[] = {&counters, &spins};
  for (int i = 0; i < KERNELS; ++i) {
    CHECK(cuLaunchKernel(count, 4, 1, 1, 64, 1, 1, 0, stream, parameters, NULL));
    if (!strcmp(way, "pause")) take_break();
  }
}

static void launch(CUevent event, CUevent computed) {
  if (is_graph) {
    CHECK(cuGraphLaunch(exec, stream));
    if (!strcmp(way, "pause")) take_break();
  } else {
    kernels();
  }
  if (!strcmp(way, "side")) {
    CHECK(cuEventRecord(computed, stream));
    CHECK(cuStreamWaitEvent(side, computed, 0));
    CHECK(cuEventRecord(event, side));
  } else {
    CHECK(cuEventRecord(event, stream));
  }
}

static void wait_for(CUevent event) {
  int value;
  if (!strcmp(way, "stream") || !strcmp(way, "pause")) {
    CHECK(cuStreamSynchronize(stream));
  } else if (!strcmp(way, "context")) {
    CHECK(cuCtxSynchronize());
  } else if (!strcmp(way, "copy")) {
    CHECK(cuMemcpyDtoH(&value, counters, sizeof value));
  } else if (!strcmp(way, "poll")) {
    CUresult result;
    while ((result = cuEventQuery(event)) == ERROR_NOT_READY) {
    }
    CHECK(result);
  } else {
    CHECK(cuEventSynchronize(event));
  }
}

static int order(const void *a, const void *b) {
  double x = *(const double *)a, y = *(const double *)b;
  return (x > y) - (x < y);
}

int main(int argc, char **argv) {
  if (argc != 7) return 2;
  int buffers = atoi(argv[3]), requests = atoi(argv[4]);
  is_graph = !strcmp(argv[2], "graph");
  spins = atoi(argv[5]);
  way = argv[6];
  double *took = calloc(requests, sizeof *took), *token = calloc(requests, sizeof *token);
  double began[BUFFERS_MAX], ended = 0;
  CUdevice device;
  CUcontext context;
  CUmodule module;
  CUevent events[BUFFERS_MAX], computed;
  CHECK(cuInit(0));
  CHECK(cuDeviceGet(&device, 0));
  CHECK(cuCtxCreate(&context, 0, device));
  CHECK(cuModuleLoad(&module, argv[1]));
  CHECK(cuModuleGetFunction(&count, module, "count"));
  CHECK(cuMemAlloc(&counters, 4 * 4 * 64));
  CHECK(cuStreamCreate(&stream, 0));
  CHECK(cuStreamCreate(&side, 0));
  CHECK(cuEventCreate(&computed, 0));
  for (int i = 0; i < BUFFERS_MAX; ++i) CHECK(cuEventCreate(&events[i], 0));
  CUgraph graph;
  CHECK(cuStreamBeginCapture(stream, 0));
  kernels();
  CHECK(cuStreamEndCapture(stream, &graph));
  CHECK(cuGraphInstantiateWithFlags(&exec, graph, 0));
  printf("{\"ready\": true}\n");
  fflush(stdout);
  if (getchar() == EOF) return 1;
  for (int n = 0; n < requests + buffers - 1; ++n) {
    if (n < requests) {
      began[n % buffers] = now_ms();
      launch(events[n % buffers], computed);
    }
    int last = n - (buffers - 1);
    if (last < 0) continue;
    wait_for(events[last % buffers]);
    double now = now_ms(), since = began[last % buffers];
    took[last] = now - since;
    token[last] = now - (since > ended ? since : ended);
    ended = now;
    for (int i = 0; i < KERNELS && !strcmp(way, "pause"); ++i) take_break();
  }
  qsort(took, requests, sizeof *took, order);
  qsort(token, requests, sizeof *token, order);
  printf("{\"requests\": %d, \"p50_ms\": %f, \"most_ms\": %f, \"token_p50_ms\": %f}\n", requests,
         took[(requests - 1) / 2], took[requests - 1], token[(requests - 1) / 2]);
  fflush(stdout);
  while (getchar() != EOF) {
  }
  return 0;
}
