/* A driver that does nothing and needs no C library, for an old one. */
int cuInit(unsigned flags) { return (int)flags; }
