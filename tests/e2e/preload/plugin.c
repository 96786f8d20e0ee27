/* A library that is linked with the driver. */
int cuInit(unsigned flags);
int plugin_init(void) { return cuInit(0); }
