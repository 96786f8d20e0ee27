// A CUDA program that does what its standard input says, one line a command, and
// answers each with one line. WAY says how it finds the driver:
// 1 linked, 2 dlopen + dlsym, 3 cuGetProcAddress, 4 the same chained as cudart does,
// with per-thread default streams.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
typedef int R;
typedef unsigned P;
#define G P, P, P, P, P, P, P
R cuInit(P); R cuLaunchKernel(void *, G, void *, void **, void **); R cuLaunchCooperativeKernel(void *, G, void *, void **);
R cuLaunchKernelEx(const void *, void *, void **, void **); R cuGraphLaunch(void *, void *); R cuLaunchHostFunc(void *, void (*)(void *), void *);
R cuStreamSynchronize(void *); R cuStreamQuery(void *); R cuCtxSynchronize(void); R cuEventCreate(void **, P); R cuEventRecord(void *, void *);
R cuEventSynchronize(void *); R cuEventQuery(void *); R cuMemcpyDtoH_v2(void *, unsigned long long, size_t); R cuStreamCreate(void **, P);
R cuStreamDestroy_v2(void *); R cuStreamBeginCapture_v2(void *, int); R cuStreamEndCapture(void *, void **); R cuModuleLoadData(void **, const void *);
R cuModuleGetFunction(void **, void *, const char *); R cuStreamWaitEvent(void *, void *, P); R cuGraphInstantiateWithFlags(void **, void *, unsigned long long);
#define NAMES(X) X(cuInit, "cuInit") X(cuLaunchKernel, "cuLaunchKernel") X(cuLaunchCooperativeKernel, "cuLaunchCooperativeKernel") \
  X(cuLaunchKernelEx, "cuLaunchKernelEx") X(cuGraphLaunch, "cuGraphLaunch") X(cuLaunchHostFunc, "cuLaunchHostFunc") \
  X(cuStreamSynchronize, "cuStreamSynchronize") X(cuStreamQuery, "cuStreamQuery") X(cuCtxSynchronize, "cuCtxSynchronize") \
  X(cuEventCreate, "cuEventCreate") X(cuEventRecord, "cuEventRecord") X(cuEventSynchronize, "cuEventSynchronize") X(cuEventQuery, "cuEventQuery") \
  X(cuMemcpyDtoH_v2, "cuMemcpyDtoH") X(cuStreamCreate, "cuStreamCreate") X(cuStreamDestroy_v2, "cuStreamDestroy") \
  X(cuStreamBeginCapture_v2, "cuStreamBeginCapture") X(cuStreamEndCapture, "cuStreamEndCapture") X(cuModuleLoadData, "cuModuleLoadData") \
  X(cuModuleGetFunction, "cuModuleGetFunction") X(cuGraphInstantiateWithFlags, "cuGraphInstantiate") X(cuStreamWaitEvent, "cuStreamWaitEvent")
#define FIELD(f, n) __typeof__(f) *f;
static struct { NAMES(FIELD) } cu;
static void *lib;
#define CHECK(f, n) if (!cu.f) { printf("missing %s\n", n); exit(3); }
static void find_driver(void) {
#if WAY == 1
#define TAKE(f, n) cu.f = f;
  NAMES(TAKE)
  lib = dlopen("libcuda.so.1", RTLD_LAZY);
#else
  lib = dlopen("libcuda.so.1", RTLD_LAZY);
  if (!lib) { printf("no driver\n"); exit(3); }
#if WAY == 2
#define TAKE(f, n) cu.f = dlsym(lib, #f);
  NAMES(TAKE)
#elif WAY == 3
  R (*gpa)(const char *, void **, int, unsigned long long) = dlsym(lib, "cuGetProcAddress");
#define TAKE(f, n) gpa(n, (void **)&cu.f, 11040, 0);
  NAMES(TAKE)
#else
  R (*v1)(const char *, void **, int, unsigned long long, int *) = dlsym(lib, "cuGetProcAddress_v2");
  R (*v2)(const char *, void **, int, unsigned long long, int *) = 0; int st = 9;
  v1("cuGetProcAddress", (void **)&v2, 12000, 0, &st);
  if (st != 0) { printf("status %d\n", st); exit(3); }
  if (v2("cuNoSuchFunction", (void **)&cu.cuInit, 12000, 0, &st) != 500 || st != 1) { printf("status not passed on\n"); exit(3); }
#define TAKE(f, n) v2(n, (void **)&cu.f, 12000, 2, &st);
  NAMES(TAKE)
#endif
#endif
  NAMES(CHECK)
}
static int control(const char *n, int a) { int (*f)(int) = dlsym(lib, n); if (!f) f = dlsym(RTLD_DEFAULT, n); return f ? f(a) : -1; }
static void *stream[130], *event[8], *fun; static int next[130];
static R launch(int s) { int a = ++next[s]; void *p[] = {&a}; return cu.cuLaunchKernel(fun, 4, 2, 1, 128, 1, 1, 256, stream[s], p, 0); }
static void host(void *p) { ++*(int *)p; }
static int per_thread;
static void *worker(void *v) {
  intptr_t s = (intptr_t)v; for (int i = 0; i < per_thread; i++) { if (launch(s)) return (void *)1; if (i % 7 == 0) cu.cuStreamSynchronize(stream[s]); } 
  cu.cuStreamSynchronize(stream[s]); return 0; }
// SIGUSR1 leaves a launch by a jump; SIGUSR2 launches into a stream within it.
static sigjmp_buf away; static int handled, handler_stream; static R handler_result;
static void jump(int n) { (void)n; siglongjmp(away, 1); }
static void launch_within(int n) { (void)n; handler_result = launch(handler_stream); handled = 1; }
static void on(int n, void (*f)(int)) { struct sigaction s = {.sa_handler = f}; sigaction(n, &s, 0); }
static pthread_t cancelled;
static void *launcher(void *v) { pthread_setcanceltype(PTHREAD_CANCEL_ASYNCHRONOUS, 0); return (void *)(intptr_t)launch((intptr_t)v); }
static int own(void *p) { Dl_info i; return dladdr(p, &i) && strstr(i.dli_fname, "libtally_shim") != 0; }
int main(void) {
  char line[256], word[32], name[128]; int a, b;
  setvbuf(stdout, 0, _IOLBF, 0);
  while (fgets(line, sizeof line, stdin)) {
    word[0] = name[0] = 0; a = b = 0; sscanf(line, "%31s %d %d", word, &a, &b); sscanf(line, "%*s %127s", name);
#define IS(w) (!strcmp(word, w))
    if (IS("find")) { find_driver(); printf("0\n"); }
    else if (IS("init")) printf("%d\n", cu.cuInit(a));
    else if (IS("module")) { void *m; R r = cu.cuModuleLoadData(&m, ".version 8.0\n"); r |= cu.cuModuleGetFunction(&fun, m, "a_kernel"); printf("%d\n", r); }
    else if (IS("foreign")) { fun = (void *)(intptr_t)a; printf("0\n"); }
    else if (IS("stream")) printf("%d\n", cu.cuStreamCreate(&stream[a], 0));
    else if (IS("destroy")) { printf("%d\n", cu.cuStreamDestroy_v2(stream[a])); stream[a] = 0; next[a] = 0; }
    else if (IS("launch")) { int r = 0, bad = 0; for (int i = 0; i < (b ? b : 1); i++) { r = launch(a); bad = bad ? bad : r; } printf("%d\n", bad); }
    else if (IS("jump")) { on(SIGUSR1, jump); if (sigsetjmp(away, 1)) { next[a]--; printf("jumped\n"); } else printf("%d\n", launch(a)); }
    else if (IS("handler")) { handler_stream = a; handled = 0; on(SIGUSR2, launch_within); printf("0\n"); }
    else if (IS("handled")) printf("%d\n", handled ? handler_result : -1);
    else if (IS("begin")) printf("%d\n", pthread_create(&cancelled, 0, launcher, (void *)(intptr_t)a));
    else if (IS("cancel")) { void *r = 0; R e = pthread_cancel(cancelled) | pthread_join(cancelled, &r); next[a] -= r == PTHREAD_CANCELED; 
      printf("%s\n", e ? "error" : r == PTHREAD_CANCELED ? "cancelled" : "returned"); }
    else if (IS("ex")) { struct { P g[3], b[3], sh; void *s; void *attrs; P n; } c = {{4, 2, 1}, {128, 1, 1}, 0, stream[a], 0, 0}; 
      struct { int id, pad; P v[16]; } at = {4, 0, {2, 1, 1}}; c.attrs = &at; c.n = 1; printf("%d\n", cu.cuLaunchKernelEx(&c, fun, 0, 0)); }
    else if (IS("coop")) printf("%d\n", cu.cuLaunchCooperativeKernel(fun, 4, 2, 1, 128, 1, 1, 0, stream[a], 0));
    else if (IS("capture")) printf("%d\n", cu.cuStreamBeginCapture_v2(stream[a], 0));
    else if (IS("endcapture")) { void *g; printf("%d\n", cu.cuStreamEndCapture(stream[a], &g)); }
    else if (IS("graph")) { void *e; R r = cu.cuGraphInstantiateWithFlags(&e, (void *)0x7000, 0); printf("%d\n", r | cu.cuGraphLaunch(e, stream[a])); }
    else if (IS("hostfunc")) { int n = 0; R r = cu.cuLaunchHostFunc(stream[a], host, &n); printf("%d\n", r ? r : n == 1 ? 0 : 99); }
    else if (IS("sync")) printf("%d\n", cu.cuStreamSynchronize(stream[a]));
    else if (IS("query")) printf("%d\n", cu.cuStreamQuery(stream[a]));
    else if (IS("ctxsync")) printf("%d\n", cu.cuCtxSynchronize());
    else if (IS("copy")) { char c; printf("%d\n", cu.cuMemcpyDtoH_v2(&c, 1, 1)); }
    else if (IS("event")) { if (!event[a]) cu.cuEventCreate(&event[a], 0); printf("%d\n", cu.cuEventRecord(event[a], stream[b])); }
    else if (IS("evsync")) printf("%d\n", cu.cuEventSynchronize(event[a]));
    else if (IS("evquery")) printf("%d\n", cu.cuEventQuery(event[a]));
    else if (IS("join")) printf("%d\n", cu.cuStreamWaitEvent(stream[a], event[b], 0));
    else if (IS("now")) { struct timespec t; clock_gettime(CLOCK_MONOTONIC, &t); printf("%lld\n", t.tv_sec * 1000000000LL + t.tv_nsec); }
    else if (IS("control")) { sscanf(line, "%*s %127s %d", name, &a); printf("%d\n", control(name, a)); }
    else if (IS("threads")) { pthread_t t[32]; void *r, *bad = 0; per_thread = b; 
      for (intptr_t i = 0; i < a; i++) pthread_create(&t[i], 0, worker, (void *)(i + 1));
      for (int i = 0; i < a; i++) { pthread_join(t[i], &r); bad = bad ? bad : r; } printf("%d\n", bad != 0); }
    else if (IS("own")) printf("%d\n", own(dlsym(lib, name)));
    else if (IS("newer")) { R (*get)(const char *, void **, int, unsigned long long) = dlsym(lib, "cuGetProcAddress"); void *f = 0;
      printf("%d\n", get("cuNewWait", &f, a, 0) || !f); }
    else if (IS("sym")) printf("%d\n", dlsym(lib, name) != 0);
    else if (IS("default")) printf("%d\n", dlsym(RTLD_DEFAULT, name) != 0);
    else if (IS("third")) { void *t = dlopen("./libthird.so", RTLD_NOW); int (*f)(void) = dlsym(t, "third_next_is_libc"); printf("%d\n", f ? f() : -1); }
    else if (IS("closeall")) { for (int i = 3; i < 2000; i++) close(i); printf("0\n"); }
    else if (IS("env")) { const char *v = getenv(name); printf("%s\n", v ? v : "-"); }
    else if (IS("fork")) { fflush(stdout); pid_t p = fork(); if (!p) { R r = cu.cuInit(0); next[0] = 0; r |= launch(0); r |= cu.cuStreamSynchronize(0); _exit(r); } 
      int st; waitpid(p, &st, 0); printf("%d\n", st); }
    else if (IS("exit")) exit(a);
    else if (IS("_exit")) _exit(a);
    else printf("what? %s", line);
  }
  return 0;
}
