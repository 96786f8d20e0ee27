// A driver whose calls cost nothing: what is left is the shim's.
#include <stddef.h>
typedef int R; typedef unsigned P;
R cuInit(P f) { (void)f; return 0; }
R cuCtxGetCurrent(void **c) { *c = (void *)0x1000; return 0; }
R cuCtxGetDevice(int *d) { *d = 0; return 0; }
R cuStreamGetCtx(void *s, void **c) { (void)s; *c = (void *)0x1000; return 0; }
R cuStreamSynchronize(void *s) { (void)s; return 0; }
R cuLaunchKernel(void *f, P a, P b, P c, P d, P e, P g, P h, void *s, void **p, void **x) {
  (void)f; (void)a; (void)b; (void)c; (void)d; (void)e; (void)g; (void)h; (void)s; (void)p; (void)x; return 0; }
R cuMemHostRegister_v2(void *p, size_t n, P f) { (void)p; (void)n; (void)f; return 0; }
R cuMemHostGetDevicePointer_v2(unsigned long long *d, void *p, P f) { (void)f; *d = (unsigned long long)p; return 0; }
R cuStreamWriteValue32_v2(void *s, unsigned long long a, P v, P f) { (void)s; (void)f; *(volatile P *)a = v; return 0; }
R cuGraphInstantiateWithFlags(void **e, void *g, unsigned long long f) { (void)g; (void)f; *e = (void *)0x9000; return 0; }
R cuGraphExecDestroy(void *e) { (void)e; return 0; }
R cuGraphLaunch(void *e, void *s) { (void)e; (void)s; return 0; }
