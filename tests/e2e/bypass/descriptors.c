/* Counts on its descriptors while it uses CUDA: says how often that was in vain, and stays until its input ends.
 * lowest   one thread loads and launches, another opens files as number 0
 * ends     one thread loads and launches, another closes pipes of which it waits for the end
 * closed   closes all that it did not open itself, opens others, goes on, and forks */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

typedef unsigned long long address_t;
int cuInit(unsigned);
int cuCtxCreate_v2(void **, unsigned, int);
int cuCtxSynchronize(void);
int cuMemAlloc_v2(address_t *, size_t);
int cuModuleLoadData(void **, const void *);
int cuModuleGetFunction(void **, void *, const char *);
int cuModuleUnload(void *);
int cuLaunchKernel(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **);

enum { ROUNDS = 6, LAUNCHES = 60, FILES = 700, TEXT_BYTES = 60000 };

static void check(int result, const char *what) {
  if (result) {
    fprintf(stderr, "%s: %d\n", what, result);
    exit(3);
  }
}
#define CHECK(call) check(call, #call)

static address_t cells;
static atomic_int is_over;
static int wrong;

/* Long enough for its transformed form to be kept in a file. */
static const char *ptx(int value) {
  static char text[TEXT_BYTES + 1];
  int length = snprintf(text, sizeof text,
                        ".version 7.0\n.target sm_75\n.address_size 64\n"
                        ".visible .entry k(.param .u64 p)\n{ .reg .b64 %%rd<4>; .reg .b32 %%r<3>; ld.param.u64 %%rd1, [p];\n"
                        "mov.u32 %%r1, %%ctaid.x; mul.wide.u32 %%rd3, %%r1, 4; add.s64 %%rd1, %%rd1, %%rd3;\n"
                        "mov.u32 %%r2, %d; st.global.u32 [%%rd1], %%r2; ret; }\n//",
                        value);
  memset(text + length, 'x', TEXT_BYTES - length);
  return text;
}

static void use_cuda(int round) {
  void *module, *function;
  CHECK(cuModuleLoadData(&module, ptx(1000 + round)));
  CHECK(cuModuleGetFunction(&function, module, "k"));
  for (int launch = 0; launch < LAUNCHES; launch++) {
    void *arguments[] = {&cells};
    CHECK(cuLaunchKernel(function, 64, 1, 1, 32, 1, 1, 0, 0, arguments, 0));
    CHECK(cuCtxSynchronize());
    usleep(1000);
  }
  CHECK(cuModuleUnload(module));
}

static void *open_as_0(void *nothing) {
  while (!is_over) {
    close(0);
    int file = open("/dev/null", O_RDONLY | O_CLOEXEC);
    if (file != 0) {
      wrong++;
      if (file > 0) dup2(file, 0), close(file);
    }
    usleep(20);
  }
  return nothing;
}

/* Whoever else has the descriptor, for however short, keeps the pipe open. */
static void *end_pipes(void *nothing) {
  int ends[2];
  char byte;
  while (!is_over) {
    if (pipe2(ends, O_NONBLOCK | O_CLOEXEC)) return nothing;
    close(ends[1]);
    if (read(ends[0], &byte, 1) != 0) wrong++;
    close(ends[0]);
  }
  return nothing;
}

static int files[FILES];

/* How many are not what they were. */
static int changed(const char *path) {
  struct stat mine, stat;
  int count = lstat(path, &mine) || mine.st_size != 0;
  for (int i = 0; i < FILES; i++) {
    if (files[i] >= 0 && (fstat(files[i], &stat) || stat.st_ino != mine.st_ino)) count++;
  }
  return count;
}

static void close_all(const char *path, int input, void *context) {
  (void)context;
  for (int number = 3; number < 2048; number++) {
    if (number != input) close(number);
  }
  for (int i = 0; i < FILES; i++) files[i] = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  for (int round = 0; round < 3; round++) use_cuda(round);
  wrong += changed(path);
  pid_t child = fork();
  if (child == 0) _exit(changed(path) > 100 ? 100 : changed(path));
  int status = 0;
  waitpid(child, &status, 0);
  wrong += WIFEXITED(status) ? WEXITSTATUS(status) : 1;
}

int main(int argc, char **argv) {
  if (argc < 3) return 2;
  void *context;
  int input = dup(0);
  CHECK(cuInit(0));
  CHECK(cuCtxCreate_v2(&context, 0, 0));
  CHECK(cuMemAlloc_v2(&cells, 64 * sizeof(unsigned)));
  if (strcmp(argv[1], "closed")) {
    pthread_t thread;
    pthread_create(&thread, NULL, strcmp(argv[1], "ends") ? open_as_0 : end_pipes, NULL);
    for (int round = 0; round < ROUNDS; round++) use_cuda(round);
    is_over = 1;
    pthread_join(thread, NULL);
  } else {
    use_cuda(-1);
    close_all(argv[2], input, context);
  }
  printf("{\"wrong\": %d}\n", wrong);
  fflush(stdout);
  char byte;
  while (read(input, &byte, 1) > 0) {
  }
  return 0;
}
