"""Recompiles kernels under a few names and checks every launch's values. Child of `step_jit`; prints one line of JSON.

All kernels of a job have one shape and differ in a constant, so that their images have the same names and, most of
the time, the same length. Several are loaded at once and launched in random order; the oldest is unloaded when
a new one comes, and images are handed over in a buffer that the next one overwrites.
"""

import argparse
import collections
import ctypes
import gc
import json
import random
import time

MULTIPLIER = 1664525
NAMES = ("step", "update", "apply_to_all")
BLOCK = 256
SOURCE = """
extern "C" __global__ void {name}(unsigned *out, unsigned n, unsigned rounds) {{
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x, x = i;
    for (unsigned r = 0; r < rounds; r++) x = x * 1664525u + {constant}u;
    if (i < n) out[i] = x;
}}
"""


def expected(numpy, n, rounds, constant):
    """What a kernel leaves: x -> a x + c, `rounds` times, in closed form."""
    power, total = 1, 0
    for _ in range(rounds):
        power, total = power * MULTIPLIER % 2**32, (total * MULTIPLIER + 1) % 2**32
    return numpy.arange(n, dtype=numpy.uint32) * numpy.uint32(power) + numpy.uint32(total * constant % 2**32)


class Nvrtc:
    """NVRTC and the driver API by ctypes; images in one buffer that is used again."""

    def __init__(self, n, rounds):
        import numpy
        from cuda.bindings import nvrtc

        self.numpy, self.nvrtc = numpy, nvrtc
        self.cuda = ctypes.CDLL("libcuda.so.1")
        self.n, self.rounds = n, rounds
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self.check(self.cuda.cuInit(0))
        self.check(self.cuda.cuDeviceGet(ctypes.byref(device), 0))
        self.check(self.cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device))
        self.check(self.cuda.cuCtxSetCurrent(context))
        major, minor = ctypes.c_int(), ctypes.c_int()
        self.check(self.cuda.cuDeviceGetAttribute(ctypes.byref(major), 75, device))
        self.check(self.cuda.cuDeviceGetAttribute(ctypes.byref(minor), 76, device))
        self.target = f"{major.value}{minor.value}"
        self.out = ctypes.c_uint64()
        self.check(self.cuda.cuMemAlloc_v2(ctypes.byref(self.out), ctypes.c_size_t(4 * n)))
        self.host = numpy.empty(n, numpy.uint32)
        self.buffer = ctypes.create_string_buffer(1 << 20)
        self.made = 0

    def check(self, code):
        if code:
            raise RuntimeError(f"CUDA error {code}")

    def call(self, result):
        if int(result[0]):
            raise RuntimeError(str(result[0]))
        return result[1] if len(result) > 1 else None

    def make(self, name, constant):
        rtc = self.nvrtc
        program = self.call(rtc.nvrtcCreateProgram(SOURCE.format(name=name, constant=constant).encode(), b"k.cu", 0, [], []))
        # PTX and machine code in turns.
        self.made += 1
        kind, option = ("PTX", "compute") if self.made % 2 else ("CUBIN", "sm")
        options = [f"--gpu-architecture={option}_{self.target}".encode()]
        self.call(rtc.nvrtcCompileProgram(program, len(options), options))
        image = b" " * self.call(getattr(rtc, f"nvrtcGet{kind}Size")(program))
        self.call(getattr(rtc, f"nvrtcGet{kind}")(program, image))
        self.call(rtc.nvrtcDestroyProgram(program))
        ctypes.memmove(self.buffer, image, len(image))
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        self.check(self.cuda.cuModuleLoadData(ctypes.byref(module), self.buffer))
        self.check(self.cuda.cuModuleGetFunction(ctypes.byref(function), module, name.encode()))
        ctypes.memset(self.buffer, 0, len(image))
        return module, function

    def launch(self, kernel):
        arguments = (ctypes.c_void_p * 3)()
        values = [self.out, ctypes.c_uint(self.n), ctypes.c_uint(self.rounds)]
        for i, value in enumerate(values):
            arguments[i] = ctypes.cast(ctypes.byref(value), ctypes.c_void_p)
        self.check(self.cuda.cuMemsetD32_v2(self.out, 0, ctypes.c_size_t(self.n)))
        grid = -(-self.n // BLOCK)
        self.check(self.cuda.cuLaunchKernel(kernel[1], grid, 1, 1, BLOCK, 1, 1, 0, None, arguments, None))
        destination = ctypes.c_void_p(self.host.ctypes.data)
        self.check(self.cuda.cuMemcpyDtoH_v2(destination, self.out, ctypes.c_size_t(4 * self.n)))
        return self.host

    def unload(self, kernel):
        self.check(self.cuda.cuModuleUnload(kernel[0]))


class Cupy:
    """`cupy.RawModule`; a module goes when its last reference goes."""

    def __init__(self, n, rounds):
        import cupy
        import numpy

        self.numpy, self.cupy, self.n, self.rounds = numpy, cupy, n, rounds
        self.out = cupy.empty(n, cupy.uint32)

    def make(self, name, constant):
        return self.cupy.RawModule(code=SOURCE.format(name=name, constant=constant)).get_function(name)

    def launch(self, kernel):
        self.out.fill(0)
        kernel((-(-self.n // BLOCK),), (BLOCK,), (self.out, self.numpy.uint32(self.n), self.numpy.uint32(self.rounds)))
        return self.out.get()

    def unload(self, kernel):
        del kernel
        gc.collect(0)


class Triton:
    """One `triton.jit` function, compiled again for each constant, under one name."""

    def __init__(self, n, rounds):
        import numpy
        import torch
        import triton_kernel

        self.numpy, self.torch, self.kernel, self.n, self.rounds = numpy, torch, triton_kernel.step, n, rounds
        self.out = torch.empty(n, dtype=torch.int32, device="cuda")

    def make(self, _name, constant):
        return constant if constant < 2**31 else constant - 2**32

    def launch(self, kernel):
        self.out.zero_()
        self.kernel[(-(-self.n // BLOCK),)](self.out, self.n, self.rounds, kernel, BLOCK)
        return self.out.cpu().numpy().view(self.numpy.uint32)

    def unload(self, _kernel):
        """Triton keeps what it loaded."""


BACKENDS = {"nvrtc": Nvrtc, "cupy": Cupy, "triton": Triton}


def main():
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--backend", choices=BACKENDS, required=True)
    parser.add_argument("--kernels", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--elements", type=int, default=1 << 19)
    parser.add_argument("--rounds", type=int, default=16000)
    parser.add_argument("--alive", type=int, default=8, help="kernels loaded at once")
    parser.add_argument("--seconds", type=float, default=1e9, help="no more kernels are made after so long")
    args = parser.parse_args()
    chance = random.Random(args.seed)
    backend = BACKENDS[args.backend](args.elements, args.rounds)
    begin = time.monotonic()
    alive, made, launches, wrong, examples = collections.deque(), 0, 0, 0, []
    while made < args.kernels and time.monotonic() - begin < args.seconds:
        # Of the same number of digits, so that sources and images are of one length.
        name, constant = NAMES[made % len(NAMES)], chance.randrange(10**9, 2**32) | 1
        kernel = backend.make(name, constant)
        alive.append((name, constant, kernel, expected(backend.numpy, args.elements, args.rounds, constant)))
        made += 1
        for name, constant, kernel, right in chance.sample(list(alive), min(3, len(alive))):
            found = backend.launch(kernel)
            launches += 1
            if not backend.numpy.array_equal(found, right):
                wrong += 1
                first = int(backend.numpy.flatnonzero(found != right)[0])
                examples.append({"kernel": made, "name": name, "constant": constant, "element": first})
        if len(alive) > args.alive:
            backend.unload(alive.popleft()[2])
    print(json.dumps({
        "kernels": made, "launches": launches, "wrong": wrong, "examples": examples[:5],
        "seconds": round(time.monotonic() - begin, 1),
    }), flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
