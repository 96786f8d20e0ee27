"""Has CUPTI run this process's kernels one at a time, as profilers do that measure each kernel by itself.

`CUPTI_ACTIVITY_KIND_KERNEL` serialises kernels; PyTorch's profiler uses `CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL`, which
does not.
"""

import ctypes

KIND_KERNEL = 3
BUFFER_BYTES = 1 << 22
ALIGNMENT = 8

REQUESTED = ctypes.CFUNCTYPE(None, ctypes.POINTER(ctypes.c_void_p), ctypes.POINTER(ctypes.c_size_t), ctypes.POINTER(ctypes.c_size_t))
COMPLETED = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_uint32, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t)


class SerialKernels:
    """Enabled from now on; `record_bytes` counts what CUPTI wrote about kernels."""

    def __init__(self, library):
        self.cupti, self.buffers, self.record_bytes = library, {}, 0
        # CUPTI keeps these for as long as the process lives.
        self.callbacks = REQUESTED(self._requested), COMPLETED(self._completed)
        self._check(library.cuptiActivityRegisterCallbacks(*self.callbacks))
        self._check(library.cuptiActivityEnable(KIND_KERNEL))

    def _check(self, code):
        if code:
            raise RuntimeError(f"CUPTI error {code}")

    def _requested(self, buffer, size, records_max):
        memory = ctypes.create_string_buffer(BUFFER_BYTES + ALIGNMENT)
        address = -(-ctypes.addressof(memory) // ALIGNMENT) * ALIGNMENT
        self.buffers[address] = memory
        buffer[0], size[0], records_max[0] = address, BUFFER_BYTES, 0

    def _completed(self, _context, _stream, buffer, _size, valid_bytes):
        self.record_bytes += valid_bytes
        self.buffers.pop(buffer, None)

    def flush(self):
        """Have CUPTI hand over what it has."""
        self._check(self.cupti.cuptiActivityFlushAll(1))
        return self.record_bytes


def enable():
    """CUPTI as the process's libraries have it: `torch` must have been imported."""
    with open("/proc/self/maps", encoding="ascii", errors="replace") as maps:
        paths = {line.split()[-1] for line in maps if "libcupti.so" in line}
    return SerialKernels(ctypes.CDLL(min(paths)))
