"""One driver call, or a few, while a stream of the same context waits or runs: does the call wait for it?

Child of `step_waits`: prints one line of JSON. With ctypes only, so that nothing but the driver is in it.
"""

import argparse
import ctypes
import json
import mmap
import threading
import time

# The stream is released after so long; what took nearly as long has waited for it.
RELEASE_S = 1.5
WAITED_S = 1.2
# How long another thread has had to get into its call.
HEAD_START_S = 0.3

PTX = """
.version 7.0
.target sm_70
.address_size 64
.visible .entry known() { ret; }
.visible .entry fresh() { ret; }
.visible .entry late() { ret; }
.visible .entry spins(.param .u64 word) {
    .reg .pred %p; .reg .b32 %r; .reg .b64 %rd;
    ld.param.u64 %rd, [word];
again:
    ld.volatile.global.u32 %r, [%rd];
    setp.eq.u32 %p, %r, 0;
    @%p bra again;
    ret;
}
"""
GLOBALS_PTX = """
.version 7.0
.target sm_70
.address_size 64
.visible .global .u32 one = 1;
.visible .global .u32 other = 2;
.visible .entry reads(.param .u64 to) {
    .reg .b32 %r; .reg .b64 %rd;
    ld.param.u64 %rd, [to];
    ld.global.u32 %r, [one];
    st.global.u32 [%rd], %r;
    ret;
}
"""
MORE_PTX = PTX.replace("known", "known2").replace("fresh", "fresh2")
NON_BLOCKING = 1
WAIT_EQUAL = 1


class Driver:
    """The driver's functions; an answer other than 0 is an exception."""

    def __init__(self, path):
        self.library = ctypes.CDLL(path)

    def __getattr__(self, name):
        function = getattr(self.library, name)

        def call(*args):
            if result := function(*args):
                raise RuntimeError(f"{name}: CUDA error {result}")

        return call


def u64(value=0):
    return ctypes.c_uint64(value)


class KernelNode(ctypes.Structure):
    """`CUDA_KERNEL_NODE_PARAMS_v2`."""

    _fields_ = (
        ("function", ctypes.c_void_p),
        *((name, ctypes.c_uint) for name in ("gx", "gy", "gz", "bx", "by", "bz", "shared_bytes")),
        *((name, ctypes.c_void_p) for name in ("parameters", "extra", "kernel", "context")),
    )


class Job:
    """A context, streams, kernels, and a word of host memory that stream `a` is made to wait for."""

    def __init__(self, path):
        self.cuda = cuda = Driver(path)
        # When the main thread had made its calls, and began to wait for what they launched.
        self.issued_s = None
        cuda.cuInit(0)
        self.context, self.module = ctypes.c_void_p(), ctypes.c_void_p()
        cuda.cuCtxCreate_v2(ctypes.byref(self.context), 0, 0)
        cuda.cuModuleLoadData(ctypes.byref(self.module), ctypes.c_char_p(PTX.encode()))
        low, high = ctypes.c_int(), ctypes.c_int()
        cuda.cuCtxGetStreamPriorityRange(ctypes.byref(low), ctypes.byref(high))
        self.a, self.b = self.stream(low), self.stream(low)
        self.high = self.stream(high)
        self.known, self.fresh, self.spins = (self.function(name) for name in (b"known", b"fresh", b"spins"))
        host = ctypes.c_void_p()
        cuda.cuMemHostAlloc(ctypes.byref(host), 64, 2)
        self.word = ctypes.cast(host, ctypes.POINTER(ctypes.c_uint32))
        self.word[0] = 0
        self.at = u64()
        cuda.cuMemHostGetDevicePointer_v2(ctypes.byref(self.at), host, 0)
        self.memory, self.spare = u64(), u64()
        for memory in (self.memory, self.spare):
            cuda.cuMemAlloc_v2(ctypes.byref(memory), u64(1 << 20))
        self.make_spares()
        self.event = ctypes.c_void_p()
        cuda.cuEventCreate(ctypes.byref(self.event), 2)
        for stream in (self.a, self.b, self.high):
            self.launch(self.known, stream)
        cuda.cuCtxSynchronize()

    def make_spares(self):
        """What calls give back."""
        cuda = self.cuda
        self.spare_host, self.pool, self.graph = (ctypes.c_void_p() for _ in range(3))
        cuda.cuMemHostAlloc(ctypes.byref(self.spare_host), ctypes.c_size_t(1 << 20), 0)
        # Kept: it must not be unmapped while it is registered.
        self.buffer = mmap.mmap(-1, 1 << 20)
        self.registered = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(self.buffer)))
        cuda.cuMemHostRegister_v2(self.registered, ctypes.c_size_t(1 << 20), 0)
        cuda.cuDeviceGetDefaultMemPool(ctypes.byref(self.pool), 0)
        cuda.cuGraphCreate(ctypes.byref(self.graph), 0)
        self.make_execs()
        self.spare_module, self.spare_stream = ctypes.c_void_p(), self.stream(0)
        cuda.cuModuleLoadData(ctypes.byref(self.spare_module), ctypes.c_char_p(MORE_PTX.encode()))
        self.function(b"known2", self.spare_module)
        self.globals_module = ctypes.c_void_p()
        cuda.cuModuleLoadData(ctypes.byref(self.globals_module), ctypes.c_char_p(GLOBALS_PTX.encode()))
        self.library = ctypes.c_void_p()
        cuda.cuLibraryLoadData(ctypes.byref(self.library), ctypes.c_char_p(GLOBALS_PTX.encode()), None, None, 0, None, None, 0)
        memory = u64()
        cuda.cuMemAllocAsync(ctypes.byref(memory), ctypes.c_size_t(1 << 22), self.b)
        cuda.cuMemFreeAsync(memory, self.b)
        self.sync(self.b)

    def make_execs(self):
        """A graph of one kernel, an exec of it that was launched, and one that was not; an event, and a context."""
        cuda = self.cuda
        self.kernel_graph, self.launched, self.idle = (ctypes.c_void_p() for _ in range(3))
        cuda.cuGraphCreate(ctypes.byref(self.kernel_graph), 0)
        node = KernelNode(self.known, 1, 1, 1, 1, 1, 1, 0, None, None, None, None)
        cuda.cuGraphAddKernelNode_v2(ctypes.byref(ctypes.c_void_p()), self.kernel_graph, None, ctypes.c_size_t(0), ctypes.byref(node))
        for made in (self.launched, self.idle):
            cuda.cuGraphInstantiateWithFlags(ctypes.byref(made), self.kernel_graph, u64())
        cuda.cuGraphLaunch(self.launched, self.b)
        self.sync(self.b)
        self.spare_event, self.spare_context = ctypes.c_void_p(), ctypes.c_void_p()
        cuda.cuEventCreate(ctypes.byref(self.spare_event), 2)
        cuda.cuCtxCreate_v2(ctypes.byref(self.spare_context), 0, 0)
        cuda.cuCtxSetCurrent(self.context)

    def stream(self, priority):
        made = ctypes.c_void_p()
        self.cuda.cuStreamCreateWithPriority(ctypes.byref(made), NON_BLOCKING, priority)
        return made

    def function(self, name, module=None):
        found = ctypes.c_void_p()
        self.cuda.cuModuleGetFunction(ctypes.byref(found), module or self.module, ctypes.c_char_p(name))
        return found

    def launch(self, function, stream, word=None):
        params = (ctypes.c_void_p * 1)(ctypes.addressof(word)) if word is not None else None
        self.cuda.cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, stream, params, None)

    def sync(self, stream):
        if threading.current_thread() is threading.main_thread():
            self.issued_s = self.issued_s or time.monotonic()
        self.cuda.cuStreamSynchronize(stream)

    # What stream `a` is at.

    def a_waits(self):
        self.cuda.cuStreamWaitValue32_v2(self.a, self.at, 1, WAIT_EQUAL)

    def a_runs(self):
        # Its kernel is loaded: what it takes to launch it the first time is not what is looked at.
        self.word[0] = 1
        self.launch(self.spins, self.a, self.at)
        self.sync(self.a)
        self.word[0] = 0
        self.launch(self.spins, self.a, self.at)

    def a_runs_and_waits(self):
        self.a_runs()
        self.a_waits()
        self.launch(self.known, self.a)

    # What another thread is at, or this one does.

    def launch_known(self):
        self.launch(self.known, self.b)
        self.sync(self.b)

    def launch_known_high(self):
        self.launch(self.known, self.high)
        self.sync(self.high)

    def launch_first_time(self):
        self.launch(self.fresh, self.b)
        self.sync(self.b)

    def get_function(self):
        self.function(b"late")

    def get_function_and_launch(self):
        self.launch(self.function(b"late"), self.b)
        self.sync(self.b)

    def get_function_and_launch_in_same_stream(self):
        self.launch(self.function(b"late"), self.a)

    def load_module(self):
        module = ctypes.c_void_p()
        self.cuda.cuModuleLoadData(ctypes.byref(module), ctypes.c_char_p(MORE_PTX.encode()))

    def allocate(self):
        self.cuda.cuMemAlloc_v2(ctypes.byref(u64()), u64(1 << 22))

    def free(self):
        self.cuda.cuMemFree_v2(self.spare)

    def free_host(self):
        self.cuda.cuMemFreeHost(self.spare_host)

    def unregister(self):
        self.cuda.cuMemHostUnregister(self.registered)

    def trim_pool(self):
        self.cuda.cuMemPoolTrimTo(self.pool, ctypes.c_size_t(0))

    def set_stack_limit(self):
        self.cuda.cuCtxSetLimit(0, ctypes.c_size_t(16 << 10))

    def unload_module(self):
        self.cuda.cuModuleUnload(self.spare_module)

    def destroy_stream(self):
        self.cuda.cuStreamDestroy_v2(self.spare_stream)

    def instantiate_graph(self):
        # With a kernel that nothing has launched.
        node = KernelNode(self.fresh, 1, 1, 1, 1, 1, 1, 0, None, None, None, None)
        self.cuda.cuGraphAddKernelNode_v2(ctypes.byref(ctypes.c_void_p()), self.graph, None, ctypes.c_size_t(0), ctypes.byref(node))
        made = ctypes.c_void_p()
        self.cuda.cuGraphInstantiateWithFlags(ctypes.byref(made), self.graph, u64())
        self.cuda.cuGraphLaunch(made, self.b)
        self.sync(self.b)

    def instantiate_many_graphs(self):
        # What the driver keeps for graphs grows meanwhile.
        for _ in range(500):
            self.cuda.cuGraphInstantiateWithFlags(ctypes.byref(ctypes.c_void_p()), self.kernel_graph, u64())

    def destroy_exec(self):
        self.cuda.cuGraphExecDestroy(self.idle)

    def destroy_launched_exec(self):
        self.cuda.cuGraphExecDestroy(self.launched)

    def update_exec(self):
        self.cuda.cuGraphExecUpdate_v2(self.launched, self.kernel_graph, (ctypes.c_uint64 * 8)())

    def launch_exec(self):
        self.cuda.cuGraphLaunch(self.launched, self.b)
        self.sync(self.b)

    def destroy_graph(self):
        self.cuda.cuGraphDestroy(self.kernel_graph)

    def destroy_event(self):
        self.cuda.cuEventDestroy_v2(self.spare_event)

    def destroy_other_context(self):
        self.cuda.cuCtxDestroy_v2(self.spare_context)

    def load_function(self):
        self.cuda.cuFuncLoad(self.function(b"late"))

    def load_loaded_function(self):
        self.cuda.cuFuncLoad(self.known)

    def ask_if_loaded(self):
        self.cuda.cuFuncIsLoaded(ctypes.byref(ctypes.c_int()), self.fresh)

    def global_of(self, name):
        self.cuda.cuModuleGetGlobal_v2(ctypes.byref(u64()), ctypes.byref(u64()), self.globals_module, ctypes.c_char_p(name))

    def get_global(self):
        self.global_of(b"one")

    def get_global_again(self):
        self.global_of(b"one")

    def get_other_global(self):
        self.global_of(b"other")

    def library_global_of(self, name):
        self.cuda.cuLibraryGetGlobal(ctypes.byref(u64()), ctypes.byref(u64()), self.library, ctypes.c_char_p(name))

    def get_library_global(self):
        self.library_global_of(b"one")

    def get_other_library_global(self):
        self.library_global_of(b"other")

    def set_memory(self):
        self.cuda.cuMemsetD32Async(self.memory, 5, u64(1 << 10), self.b)
        self.sync(self.b)

    def copy_out(self):
        self.cuda.cuMemcpyDtoH_v2((ctypes.c_uint32 * 16)(), self.memory, u64(64))

    def copy_to_pageable(self):
        # Behind what `a` waits for.
        self.cuda.cuMemcpyDtoHAsync_v2((ctypes.c_uint32 * 4096)(), self.memory, u64(16384), self.a)

    def copy_from_pageable(self):
        self.cuda.cuMemcpyHtoDAsync_v2(self.memory, (ctypes.c_uint32 * 65536)(), u64(262144), self.a)

    def copy_to_pinned(self):
        self.cuda.cuMemcpyDtoHAsync_v2(self.spare_host, self.memory, u64(16384), self.a)

    def synchronize_stream(self):
        self.cuda.cuStreamSynchronize(self.a)

    def create_stream(self):
        self.stream(0)

    def create_and_record_event(self):
        event = ctypes.c_void_p()
        self.cuda.cuEventCreate(ctypes.byref(event), 2)
        self.cuda.cuEventRecord(event, self.b)
        self.cuda.cuEventSynchronize(event)

    def write_word(self):
        self.cuda.cuStreamWriteValue32_v2(self.high, self.memory, 7, 0)
        self.sync(self.high)

    def synchronize_context(self):
        self.cuda.cuCtxSynchronize()


STATES = ("a_waits", "a_runs", "a_runs_and_waits")
ACTIONS = (
    "launch_known", "launch_known_high", "launch_first_time", "get_function", "get_function_and_launch", "get_function_and_launch_in_same_stream",
    "load_module",
    "allocate", "free", "free_host", "unregister", "trim_pool", "set_stack_limit", "unload_module",
    "destroy_stream", "destroy_exec", "destroy_launched_exec", "update_exec", "launch_exec", "destroy_graph", "destroy_event",
    "destroy_other_context", "load_function", "load_loaded_function", "ask_if_loaded", "get_global", "get_global_again", "get_other_global", "get_library_global", "get_other_library_global", "instantiate_graph", "instantiate_many_graphs", "set_memory", "copy_out", "copy_to_pageable", "copy_from_pageable", "copy_to_pinned", "synchronize_stream", "create_stream", "create_and_record_event", "write_word",
    "synchronize_context",
)  # fmt: skip
# Of another thread, while this one launches: what a rescue would have to get past.
BESIDE = (
    "get_function_and_launch", "load_module", "free", "free_host", "unregister", "trim_pool",
    "set_stack_limit", "unload_module", "destroy_exec", "load_function", "get_global", "get_other_global", "get_library_global", "get_other_library_global", "instantiate_graph", "instantiate_many_graphs", "synchronize_context",
    "copy_to_pageable", "copy_from_pageable", "copy_to_pinned", "synchronize_stream",
)  # fmt: skip

# What is done before the stream is made to wait.
BEFORE = {"get_global_again": "get_global", "get_other_global": "get_global", "get_other_library_global": "get_library_global"}


def measure(job, state, action, beside):
    """Seconds until the action was done, until its calls had returned but for the last wait, and until the other thread's was done."""
    for name in filter(None, (BEFORE.get(action), BEFORE.get(beside), state)):
        getattr(job, name)()
    time.sleep(0.05)

    def let_go():
        time.sleep(RELEASE_S)
        job.word[0] = 1

    other_s = []

    def other():
        job.cuda.cuCtxSetCurrent(job.context)
        begin = time.monotonic()
        getattr(job, beside)()
        other_s.append(time.monotonic() - begin)

    threads = [threading.Thread(target=let_go)]
    if beside:
        threads.append(threading.Thread(target=other))
    for thread in threads:
        thread.start()
    if beside:
        time.sleep(HEAD_START_S)
    job.issued_s = None
    begin = time.monotonic()
    getattr(job, action)()
    took_s = time.monotonic() - begin
    issued_s = job.issued_s - begin if job.issued_s else took_s
    for thread in threads:
        thread.join()
    job.sync(job.a)
    return took_s, issued_s, other_s[0] if other_s else None


def main():
    """Print a row."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("state", choices=STATES)
    parser.add_argument("action", choices=ACTIONS)
    parser.add_argument("--beside", choices=BESIDE)
    parser.add_argument("--driver", default="libcuda.so.1")
    args = parser.parse_args()
    took_s, issued_s, other_s = measure(Job(args.driver), args.state, args.action, args.beside)
    head_start_s = HEAD_START_S if args.beside else 0
    row = {"state": args.state, "action": args.action, "beside": args.beside}
    row |= {"waits": took_s > WAITED_S - head_start_s, "ms": round(took_s * 1e3, 2), "issued_ms": round(issued_s * 1e3, 2)}
    if args.beside:
        row |= {"beside_waits": other_s > WAITED_S, "beside_ms": round(other_s * 1e3, 2)}
    print(json.dumps(row))


if __name__ == "__main__":
    main()
