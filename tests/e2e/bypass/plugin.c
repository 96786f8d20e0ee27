/* A library that is linked with the driver, or with -DPLAIN one that is not. */
#ifdef PLAIN
int plugin_plain(void) { return 1; }
#else
int cuModuleLoadData(void **, const void *);
int cuModuleGetFunction(void **, void *, const char *);
int cuModuleUnload(void *);
int plugin_load(void **module, const void *image) { return cuModuleLoadData(module, image); }
int plugin_get(void **function, void *module, const char *name) { return cuModuleGetFunction(function, module, name); }
int plugin_unload(void *module) { return cuModuleUnload(module); }
#endif
