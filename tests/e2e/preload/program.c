/* What the preload matrix runs. Arguments:
 * plain            what a program without CUDA can notice of a preloaded library; exits with 3
 * asked            the same as `cuda`, and then calls ioctl three times
 * cuda             initialises CUDA by dlopen and dlsym, says so, and stays until its input ends
 * scopes           where a driver that was opened for its opener only, and then for all, is found
 * deep FILE        the same through a library opened with RTLD_DEEPBIND
 * mopen FILE       the same through a library in a linker namespace of its own */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/wait.h>
#include <unistd.h>

typedef int (*init_t)(unsigned);

static int stay(int result) {
  printf("{\"init\": %d}\n", result);
  fflush(stdout);
  while (getchar() != EOF) {
  }
  return result != 0;
}

static int plain(void) {
  struct winsize size;
  int pipes[2], bytes = -1;
  printf("cuInit by default: %s\n", dlsym(RTLD_DEFAULT, "cuInit") ? "found" : "missing");
  const char *error = dlerror();
  printf("error: %s\n", error && strstr(error, "cuInit") ? "names it" : "does not");
  printf("cuInit next: %s\n", dlsym(RTLD_NEXT, "cuInit") ? "found" : "missing");
  printf("getpid: %d\n", dlsym(RTLD_DEFAULT, "getpid") == (void *)getpid);
  if (pipe(pipes) || write(pipes[1], "abc", 3) != 3) return 1;
  int result = ioctl(pipes[0], FIONREAD, &bytes);
  printf("ioctl: %d, %d bytes\n", result, bytes);
  errno = 0;
  result = ioctl(pipes[0], TIOCGWINSZ, &size);
  printf("ioctl: %d, %s\n", result, strerror(errno));
  fflush(stdout);
  pid_t child = fork();
  if (child == 0) _exit(ioctl(pipes[0], FIONREAD, &bytes) == 0 && !dlsym(RTLD_DEFAULT, "cuInit") ? 7 : 8);
  int status;
  waitpid(child, &status, 0);
  printf("child: %d\n", WEXITSTATUS(status));
  return 3;
}

static void *of_all(int how) {
  void *handle = how == 0 ? RTLD_DEFAULT : how == 1 ? RTLD_NEXT : dlopen(NULL, RTLD_NOW);
  return dlsym(handle, "cuInit");
}

static int scopes(void) {
  static const char *const names[] = {"by default", "next", "in the program"};
  for (int flags = RTLD_LOCAL, round = 0; round < 2; flags = RTLD_GLOBAL, round++) {
    void *driver = dlopen("libcuda.so.1", RTLD_NOW | flags);
    if (!driver) return printf("no driver: %s\n", dlerror()), 4;
    printf("in the driver: %s\n", dlsym(driver, "cuInit") ? "found" : "missing");
    for (int how = 0; how < 3; how++) {
      void *found = of_all(how);
      const char *error = dlerror();
      printf("%s: %s, %s\n", names[how], found ? "found" : "missing", error ? "an error" : "no error");
    }
  }
  return 0;
}

int main(int argc, char **argv) {
  if (argc < 2) return 2;
  if (!strcmp(argv[1], "plain")) return plain();
  if (!strcmp(argv[1], "scopes")) return scopes();
  if (!strcmp(argv[1], "cuda") || !strcmp(argv[1], "asked")) {
    void *driver = dlopen("libcuda.so.1", RTLD_NOW);
    init_t init = driver ? (init_t)dlsym(driver, "cuInit") : 0;
    if (!init) return printf("no driver: %s\n", dlerror()), 4;
    int result = init(0), bytes;
    for (int i = 0; argv[1][0] == 'a' && i < 3; i++) ioctl(0, FIONREAD, &bytes);
    return stay(result);
  }
  if (argc < 3) return 2;
#ifdef LM_ID_NEWLM
  void *plugin = strcmp(argv[1], "deep") ? dlmopen(LM_ID_NEWLM, argv[2], RTLD_NOW)
                                         : dlopen(argv[2], RTLD_NOW | RTLD_DEEPBIND);
  int (*init)(void) = plugin ? (int (*)(void))dlsym(plugin, "plugin_init") : 0;
  if (!init) return printf("no plugin: %s\n", dlerror()), 4;
  return stay(init());
#else
  return 2;
#endif
}
