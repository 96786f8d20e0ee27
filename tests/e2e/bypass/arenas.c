/* Has so many threads, each of which has an arena of the allocator, that alone it would open no file with one more; forbids
 * to open files, and starts that one, whose arena grows and shrinks. Before all that it frees a piece of so many KiB, which
 * has the allocator shrink arenas less often. Says how many values are wrong, and stays until its input ends. The
 * thread-local data is on the stack of each thread. */
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <pthread.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

typedef unsigned long long address_t;
int cuInit(unsigned);
int cuCtxCreate_v2(void **, unsigned, int);
int cuCtxSynchronize(void);
int cuMemAlloc_v2(address_t *, size_t);
int cuMemcpyDtoH_v2(void *, address_t, size_t);
int cuModuleLoadData(void **, const void *);
int cuModuleGetFunction(void **, void *, const char *);
int cuLaunchKernel(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **);

enum { LAUNCHES = 60, BLOCKS = 64 };
#define CHECK(call) do { int result = call; if (result) { fprintf(stderr, #call ": %d\n", result); exit(3); } } while (0)

static __thread char local[500 << 10];

static int freed_kib;

static void *stay(void *nothing) {
  memset(local, 1, sizeof local);
  void *volatile memory = malloc(1000);
  free(memory);
  pause();
  return nothing;
}

static void *shrink(void *nothing) {
  enum { PIECES = 400, PIECE_KIB = 60 };
  static void *pieces[PIECES];
  int count = (2 * freed_kib + 1024) / PIECE_KIB;
  for (int i = 0; i < count && i < PIECES; i++) pieces[i] = malloc(PIECE_KIB << 10);
  for (int i = count < PIECES ? count : PIECES; i-- > 0;) free(pieces[i]);
  return nothing;
}

static const char *const PTX =
    ".version 7.0\n.target sm_75\n.address_size 64\n"
    ".visible .entry k(.param .u64 p)\n{ .reg .b64 %rd<4>; .reg .b32 %r<3>; ld.param.u64 %rd1, [p];\n"
    "mov.u32 %r1, %ctaid.x; mul.wide.u32 %rd3, %r1, 4; add.s64 %rd1, %rd1, %rd3; st.global.u32 [%rd1], %r1; ret; }\n";

int main(int argc, char **argv) {
  if (argc < 4) return 2;
  freed_kib = atoi(argv[3]);
  void *volatile piece = malloc((size_t)freed_kib << 10);
  free(piece);
  void *context, *module, *function;
  address_t cells;
  unsigned values[BLOCKS];
  pthread_t thread;
  CHECK(cuInit(0));
  CHECK(cuCtxCreate_v2(&context, 0, 0));
  CHECK(cuMemAlloc_v2(&cells, sizeof values));
  CHECK(cuModuleLoadData(&module, PTX));
  CHECK(cuModuleGetFunction(&function, module, "k"));
  for (int i = 0; i < atoi(argv[2]); i++) CHECK(pthread_create(&thread, NULL, stay, NULL));
  usleep(200000);
  struct sock_filter filter[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_openat, 1, 0),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_open, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  struct sock_fprog program = {sizeof filter / sizeof *filter, filter};
  CHECK(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0));
  CHECK((int)syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_TSYNC, &program));
  CHECK(pthread_create(&thread, NULL, shrink, NULL));
  CHECK(pthread_join(thread, NULL));
  for (int launch = 0; launch < LAUNCHES; launch++) {
    void *arguments[] = {&cells};
    CHECK(cuLaunchKernel(function, BLOCKS, 1, 1, 32, 1, 1, 0, 0, arguments, 0));
    CHECK(cuCtxSynchronize());
  }
  CHECK(cuMemcpyDtoH_v2(values, cells, sizeof values));
  int wrong = 0;
  for (unsigned i = 0; i < BLOCKS; i++) wrong += values[i] != i;
  printf("{\"wrong\": %d}\n", wrong);
  fflush(stdout);
  char byte;
  while (read(0, &byte, 1) > 0) {
  }
  return 0;
}
