// A driver that runs nothing but keeps account: which launch ran where, in what order.
// While held (fake_hold), work queues up in its stream; a call that waits runs it.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef int R;
typedef struct { int arg; } Op;
typedef struct { Op *ops; int n, cap; int last; int capturing; int alive; long pushed, done; } Stream;
typedef struct { Stream *s; long upto; } Event;
static pthread_mutex_t mu = PTHREAD_MUTEX_INITIALIZER;
static Stream legacy, streams[128];
static __thread Stream mine;
static atomic_int held, fail_next, fail_events, launched, ran, disorder, inits, events, captured;
static __thread void *current = (void *)0x1000;

static Stream *of(void *h) { return (uintptr_t)h <= 1 ? &legacy : (uintptr_t)h == 2 ? &mine : (Stream *)h; }
static void run(Op *o, Stream *s) {
  if (o->arg) { if (o->arg <= s->last) disorder++; s->last = o->arg; }
  ran++;
}
static void drain_locked(Stream *s) { for (int i = 0; i < s->n; i++) run(&s->ops[i], s); s->done += s->n; s->n = 0; }
static void push(Stream *s, Op o) {
  pthread_mutex_lock(&mu);
  if (s->n == s->cap) { s->cap = s->cap ? 2 * s->cap : 64; s->ops = realloc(s->ops, s->cap * sizeof(Op)); }
  s->ops[s->n++] = o; s->pushed++;
  if (!held) drain_locked(s);
  pthread_mutex_unlock(&mu);
}
static void finish(Stream *s) { pthread_mutex_lock(&mu); drain_locked(s); pthread_mutex_unlock(&mu); }
static void finish_all(void) { finish(&legacy); finish(&mine); for (int i = 0; i < 128; i++) finish(&streams[i]); }
static int pending(Stream *s) { pthread_mutex_lock(&mu); int n = s->n; pthread_mutex_unlock(&mu); return n; }
static int take_one(atomic_int *n) { int v = *n; while (v > 0) if (atomic_compare_exchange_weak(n, &v, v - 1)) return 1; return 0; }

// Control, for the tests.
void fake_hold(int on) { held = on; if (!on) finish_all(); }
void fake_fail(int n) { fail_next = n; }
void fake_fail_events(int n) { fail_events = n; }
int fake_launched(void) { return launched; }
int fake_ran(void) { return ran; }
int fake_disorder(void) { return disorder; }
int fake_inits(void) { return inits; }
int fake_events(void) { return events; }
int fake_captured(void) { return captured; }

// What the environment said of MPS at cuInit, where a driver reads it.
static int mps_pipe, mps_priority = -1, mps_percent = -1;
int fake_mps_pipe(int a) { (void)a; return mps_pipe; }
int fake_mps_priority(int a) { (void)a; return mps_priority; }
int fake_mps_percent(int a) { (void)a; return mps_percent; }
R cuInit(unsigned f) {
  const char *pipe = getenv("CUDA_MPS_PIPE_DIRECTORY"), *priority = getenv("CUDA_MPS_CLIENT_PRIORITY");
  mps_pipe = pipe && !strcmp(pipe, "/run/tally/mps"); mps_priority = priority ? atoi(priority) : -1;
  const char *percent = getenv("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE");
  mps_percent = percent ? atoi(percent) : -1;
  inits++; return f ? 1 : 0;
}
R cuDriverGetVersion(int *v) { *v = 13000; return 0; }
R cuCtxGetCurrent(void **c) { *c = current; return 0; }
R cuCtxSetCurrent(void *c) { current = c; return 0; }
R cuCtxGetDevice(int *d) { *d = 0; return 0; }
R cuDeviceGetAttribute(int *v, int a, int d) { (void)d; *v = a == 16 ? 132 : a == 133 ? 1 : 7; return 0; }
R cuDeviceGetUuid_v2(char *u, int d) { (void)d; for (int i = 0; i < 16; i++) u[i] = i + 1; return 0; }
R cuStreamCreate(void **s, unsigned f) {
  (void)f; pthread_mutex_lock(&mu); int i = 0; while (streams[i].alive) i++;
  memset(&streams[i], 0, sizeof streams[i]); streams[i].alive = 1; pthread_mutex_unlock(&mu); *s = &streams[i]; return 0; }
R cuStreamDestroy_v2(void *s) { if ((uintptr_t)s <= 2) return 400; finish(of(s)); of(s)->alive = 0; return 0; }
R cuStreamGetFlags(void *s, unsigned *f) { (void)s; *f = 0; return 0; }
R cuStreamGetCtx(void *s, void **c) { (void)s; *c = current; return 0; }
R cuStreamIsCapturing(void *s, int *st) { *st = of(s)->capturing; return 0; }
R cuStreamBeginCapture_v2(void *s, int m) { (void)m; of(s)->capturing = 1; return 0; }
R cuStreamEndCapture(void *s, void **g) { if (!of(s)->capturing) return 401; of(s)->capturing = 0; *g = (void *)0x7000; return 0; }
R cuThreadExchangeStreamCaptureMode(int *m) { static __thread int now; int o = now; now = *m; *m = o; return 0; }
R cuGraphGetNodes(void *g, void **n, size_t *c) { // 3 nodes, the third a child graph of 2
  size_t have = g == (void *)0x7000 ? 3 : 2; if (n) for (size_t i = 0; i < have; i++) n[i] = (char *)g + 1 + i; *c = have; return 0; }
R cuGraphNodeGetType(void *n, int *t) { *t = n == (void *)0x7003 ? 4 : 0; return 0; }
R cuGraphChildGraphNodeGetGraph(void *n, void **g) { (void)n; *g = (void *)0x8000; return 0; }
R cuGraphKernelNodeGetParams_v2(void *n, void *p) { (void)n; memset(p, 0, 72); return 0; }
R cuGraphInstantiateWithFlags(void **e, void *g, unsigned long long f) { (void)g; (void)f; *e = (void *)0x9000; return 0; }
R cuGraphExecDestroy(void *e) { (void)e; return 0; }
static atomic_int clones;
int fake_clones(void) { return clones; }
R cuGraphClone(void **c, void *g) { (void)g; clones++; *c = (void *)0xa000; return 0; }
R cuGraphDestroy(void *g) { clones -= g == (void *)0xa000; return 0; }
R cuGraphNodeFindInClone(void **t, void *n, void *g) { *t = (char *)g + ((uintptr_t)n & 0xfff); return 0; }
R cuGraphGetEdges(void *g, void **f, void **t, size_t *c) { (void)g; (void)f; (void)t; *c = 0; return 0; }

static R launch(void *s, int arg) {
  Stream *st = of(s);
  if (st->capturing) { captured++; return 0; }
  if (take_one(&fail_next)) return 700;
  launched++; push(st, (Op){.arg = arg}); return 0; }
static int arg_of(void **p) { return p && p[0] ? *(int *)p[0] : 0; }
#define G unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned sh
#define U (void)f, (void)gx, (void)gy, (void)gz, (void)bx, (void)by, (void)bz, (void)sh
R cuLaunchKernel(void *f, G, void *s, void **p, void **x) { U; (void)x; return launch(s, arg_of(p)); }
R cuLaunchKernel_ptsz(void *f, G, void *s, void **p, void **x) { U; (void)x; return launch(s ? s : (void *)2, arg_of(p)); }
R cuLaunchCooperativeKernel(void *f, G, void *s, void **p) { U; return launch(s, arg_of(p)); }
R cuLaunchKernelEx(const void *c, void *f, void **p, void **x) { (void)f; (void)x; return launch(*(void **)((char *)c + 32), arg_of(p)); }
R cuGraphLaunch(void *e, void *s) { return e == (void *)0x9000 ? launch(s, 0) : 400; }
R cuLaunchHostFunc(void *s, void (*f)(void *), void *d) { (void)s; f(d); return 0; }

R cuStreamSynchronize(void *s) { finish(of(s)); return 0; }
R cuStreamSynchronize_ptsz(void *s) { finish(of(s ? s : (void *)2)); return 0; }
R cuStreamQuery(void *s) { return pending(of(s)) ? 600 : 0; }
R cuCtxSynchronize(void) { finish_all(); return 0; }
R cuEventCreate(void **e, unsigned f) { (void)f; *e = calloc(1, sizeof(Event)); return 0; }
R cuEventDestroy_v2(void *e) { free(e); return 0; }
R cuEventRecord(void *e, void *s) {
  Stream *st = of(s); if (st->capturing) return 1;
  if (take_one(&fail_events)) return 801;
  events++; pthread_mutex_lock(&mu); *(Event *)e = (Event){st, st->pushed}; pthread_mutex_unlock(&mu); return 0; }
R cuStreamWaitEvent(void *s, void *e, unsigned f) { (void)s; (void)e; (void)f; return 0; }
R cuEventSynchronize(void *e) { if (((Event *)e)->s) finish(((Event *)e)->s); return 0; }
R cuEventQuery(void *e) {
  Event *v = e; pthread_mutex_lock(&mu); int busy = v->s && v->s->done < v->upto; pthread_mutex_unlock(&mu); return busy ? 600 : 0; }
R cuMemcpyDtoH_v2(void *d, unsigned long long s, size_t n) { (void)d; (void)s; (void)n; finish_all(); return 0; }

R cuModuleLoadData(void **m, const void *i) { (void)i; *m = (void *)0x2000; return 0; }
R cuModuleGetFunction(void **f, void *m, const char *n) { *f = (char *)m + 16 + strlen(n); return 0; }
R cuFuncGetName(const char **n, void *f) { *n = f == (void *)0x3333 ? "named_by_the_driver" : 0; return *n ? 0 : 400; }

R cuNewWait(void *s) { (void)s; return 0; } // of a CUDA to come
R cuGetProcAddress_v2(const char *n, void **p, int v, unsigned long long f, int *st);
R cuGetProcAddress(const char *n, void **p, int v, unsigned long long f) { return cuGetProcAddress_v2(n, p, v, f, 0); }
R cuGetProcAddress_v2(const char *n, void **p, int v, unsigned long long f, int *st) {
  char b[128]; const char *suffix[] = {f & 2 ? "_v2_ptsz" : "_v2", f & 2 ? "_ptsz" : "", "_v2", "", "WithFlags"};
  void *self = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD); void *(*find)(void *, const char *) = dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.34");
  *p = 0;
  if (!strcmp(n, "cuGetProcAddress")) *p = v >= 12000 ? (void *)cuGetProcAddress_v2 : (void *)cuGetProcAddress;
  for (int i = 0; i < 5 && !*p; i++) { snprintf(b, sizeof b, "%s%s", n, suffix[i]); *p = find(self, b); }
  if (st) *st = *p ? 0 : 1; // CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND
  return *p ? 0 : 500; }
