/* Loads and unloads modules by different ways in turn, so that handles are used again, and checks what their
 * kernels write. Arguments:
 * plain            all calls are this program's own
 * open FILE        ... and a library without a driver function is opened with RTLD_DEEPBIND
 * deep FILE        every other module is loaded, and the others unloaded, by a library opened with RTLD_DEEPBIND
 * late FILE        the same, bound at the first call
 * hook             the same by functions that dlsym finds
 * patched          all calls are this program's own, and a library behind changes the code
 * waits FILE       a thread does it while a library is opened, whose constructor waits for it
 * files FOLDER     a thread with descriptors of its own loads modules from files
 * Says how many launches were wrong, and stays until its input ends. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <semaphore.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef unsigned long long address_t;
int cuInit(unsigned);
int cuCtxCreate_v2(void **, unsigned, int);
int cuCtxSynchronize(void);
int cuMemAlloc_v2(address_t *, size_t);
int cuMemsetD32_v2(address_t, unsigned, size_t);
int cuMemcpyDtoH_v2(void *, address_t, size_t);
int cuCtxSetCurrent(void *);
int cuLaunchHostFunc(void *, void (*)(void *), void *);
int cuModuleLoad(void **, const char *);
int cuModuleLoadData(void **, const void *);
int cuModuleGetFunction(void **, void *, const char *);
int cuModuleUnload(void *);
int cuLaunchKernel(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **);

enum { BLOCKS = 64, ROUNDS = 6, LAUNCHES = 40 };

static void check(int result, const char *what) {
  if (result) {
    fprintf(stderr, "%s: %d\n", what, result);
    exit(3);
  }
}
#define CHECK(call) check(call, #call)

static const char *ptx(int value) {
  static char text[2048];
  snprintf(text, sizeof text,
           ".version 7.0\n.target sm_75\n.address_size 64\n"
           ".visible .entry k(.param .u64 p)\n{ .reg .b64 %%rd<4>; .reg .b32 %%r<3>; ld.param.u64 %%rd1, [p];\n"
           "cvta.to.global.u64 %%rd2, %%rd1; mov.u32 %%r1, %%ctaid.x; mul.wide.u32 %%rd3, %%r1, 4;\n"
           "add.s64 %%rd2, %%rd2, %%rd3; mov.u32 %%r2, %d; st.global.u32 [%%rd2], %%r2; ret; }\n",
           value);
  return text;
}

static int wrong(void *function, address_t cells, unsigned value) {
  unsigned seen[BLOCKS];
  int bad = 0;
  for (int launch = 0; launch < LAUNCHES; launch++) {
    void *arguments[] = {&cells};
    CHECK(cuMemsetD32_v2(cells, 0, BLOCKS));
    CHECK(cuLaunchKernel(function, BLOCKS, 1, 1, 32, 1, 1, 0, 0, arguments, 0));
    CHECK(cuCtxSynchronize());
    CHECK(cuMemcpyDtoH_v2(seen, cells, sizeof seen));
    for (int i = 0; i < BLOCKS; i++) {
      if (seen[i] != value) {
        bad++;
        break;
      }
    }
    usleep(1500);
  }
  return bad;
}

static void *context;
static address_t cells;
static sem_t wanted, done;
static int bad;

static void nothing_at_all(void *nothing) {
  (void)nothing;
}

static void *on_demand(void *nothing) {
  /* Threads of the driver's that are started late need the loader, too. */
  CHECK(cuCtxSetCurrent(context));
  CHECK(cuLaunchHostFunc(NULL, nothing_at_all, NULL));
  CHECK(cuCtxSynchronize());
  sem_post(&done);
  sem_wait(&wanted);
  for (int round = 0; round < ROUNDS; round++) {
    void *module, *function;
    CHECK(cuModuleLoadData(&module, ptx(1000 + round)));
    CHECK(cuModuleGetFunction(&function, module, "k"));
    bad += wrong(function, cells, 1000 + round);
    CHECK(cuModuleUnload(module));
  }
  sem_post(&done);
  return nothing;
}

static void wait_for_thread(void) {
  sem_post(&wanted);
  sem_wait(&done);
}

static char mine[300], others[300];

static void *from_files(void *nothing) {
  if (unshare(CLONE_FILES)) return nothing;
  sem_post(&wanted);
  sem_wait(&done);
  CHECK(cuCtxSetCurrent(context));
  for (int round = 0; round < ROUNDS; round++) {
    void *module, *function;
    CHECK(cuModuleLoad(&module, mine));
    CHECK(cuModuleGetFunction(&function, module, "k"));
    bad += wrong(function, cells, 1000);
    CHECK(cuModuleUnload(module));
  }
  return nothing;
}

static void put(const char *path, const char *text) {
  FILE *file = fopen(path, "w");
  if (!file || fputs(text, file) < 0 || fclose(file)) exit(5);
}

/* Not the ways of main. */
static int by_a_thread(char **argv) {
  pthread_t thread;
  sem_init(&wanted, 0, 0);
  sem_init(&done, 0, 0);
  if (!strcmp(argv[1], "waits")) {
    char address[32];
    snprintf(address, sizeof address, "%p", (void *)wait_for_thread);
    setenv("WAIT_FOR_THREAD", address, 1);
    pthread_create(&thread, NULL, on_demand, NULL);
    sem_wait(&done);
    if (!dlopen(argv[2], RTLD_NOW)) return fprintf(stderr, "%s\n", dlerror()), 4;
  } else {
    snprintf(mine, sizeof mine, "%s/mine.ptx", argv[2]);
    snprintf(others, sizeof others, "%s/others.ptx", argv[2]);
    put(mine, ptx(1000));
    put(others, ptx(2000));
    pthread_create(&thread, NULL, from_files, NULL);
    sem_wait(&wanted);
    /* Under the numbers that the thread's own will have. */
    for (int i = 0; i < 20; i++) {
      if (open(others, O_RDONLY) < 0) return 5;
    }
    sem_post(&done);
  }
  pthread_join(thread, NULL);
  return 0;
}

int main(int argc, char **argv) {
  if (argc < 2) return 2;
  int (*load)(void **, const void *) = cuModuleLoadData;
  int (*get)(void **, void *, const char *) = cuModuleGetFunction;
  int (*unload)(void *) = cuModuleUnload;
  void *module, *function, *library = NULL;
  int is_own_thread = !strcmp(argv[1], "waits") || !strcmp(argv[1], "files");
  int added = strcmp(argv[1], "patched") ? 0 : 1000;
  CHECK(cuInit(0));
  CHECK(cuCtxCreate_v2(&context, 0, 0));
  CHECK(cuMemAlloc_v2(&cells, BLOCKS * sizeof(unsigned)));
  if (is_own_thread) {
    int failed = argc < 3 ? 2 : by_a_thread(argv);
    if (failed) return failed;
  } else if (argc > 2) {
    library = dlopen(argv[2], RTLD_DEEPBIND | (strcmp(argv[1], "late") ? RTLD_NOW : RTLD_LAZY));
    if (!library) return fprintf(stderr, "%s\n", dlerror()), 4;
  }
  if (!strcmp(argv[1], "deep") || !strcmp(argv[1], "late")) {
    *(void **)&load = dlsym(library, "plugin_load");
    *(void **)&get = dlsym(library, "plugin_get");
    *(void **)&unload = dlsym(library, "plugin_unload");
  } else if (!strcmp(argv[1], "hook")) {
    library = dlopen("libcuda.so.1", RTLD_NOW);
    *(void **)&load = dlsym(library, "cuModuleLoadData");
    *(void **)&get = dlsym(library, "cuModuleGetFunction");
    *(void **)&unload = dlsym(library, "cuModuleUnload");
  }
  for (int round = 0; round < ROUNDS; round++) {
    int is_own = round % 2 == 0;
    CHECK((is_own ? cuModuleLoadData : load)(&module, ptx(1000 + round)));
    CHECK((is_own ? cuModuleGetFunction : get)(&function, module, "k"));
    bad += wrong(function, cells, 1000 + round + added);
    CHECK((is_own ? unload : cuModuleUnload)(module));
  }
  printf("{\"wrong\": %d}\n", bad);
  fflush(stdout);
  while (getchar() != EOF) {
  }
  return 0;
}
