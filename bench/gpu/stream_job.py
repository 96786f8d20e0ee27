"""What an operation put behind a kernel does to its own stream and to others, with so many hardware queues.

Child of `step_streams`, which sets `CUDA_DEVICE_MAX_CONNECTIONS`: prints one line of JSON. With ctypes only.
"""

import argparse
import ctypes
import json
import threading
import time

from wait_job import Job

# A stream that waits is released after so long; what took nearly as long was held up.
RELEASE_S = 0.6
HELD_S = 0.4
# Kernels behind one another, of which the time of one is taken.
KERNELS = 1000
ROUNDS = 15
# More launches than a hardware queue takes.
LAUNCHES = 1100
ASKED = 10_000
DISABLE_TIMING = 2


class Behind:
    """Operations that are put into a stream behind a kernel, by name."""

    def __init__(self, job):
        self.job = job
        self.untimed, self.timed = self.event(DISABLE_TIMING), self.event(0)

    def event(self, flags):
        """A new event."""
        made = ctypes.c_void_p()
        self.job.cuda.cuEventCreate(ctypes.byref(made), flags)
        return made

    def nothing(self, stream):
        """Only the kernels."""

    def untimed_event(self, stream):
        """What the shim does."""
        self.job.cuda.cuEventRecord(self.untimed, stream)

    def timed_event(self, stream):
        """An event with a time stamp."""
        self.job.cuda.cuEventRecord(self.timed, stream)

    def write(self, stream):
        """A word in device memory."""
        self.job.cuda.cuStreamWriteValue32_v2(stream, self.job.memory, 7, 0)


OPERATIONS = ("nothing", "untimed_event", "timed_event", "write")


def released(job, call):
    """Seconds that `call` takes while a word keeps streams waiting, which another thread sets after a while."""
    job.word[0] = 0

    def let_go():
        time.sleep(RELEASE_S)
        job.word[0] = 1

    thread = threading.Thread(target=let_go)
    thread.start()
    begin = time.monotonic()
    call()
    took_s = time.monotonic() - begin
    thread.join()
    job.cuda.cuCtxSynchronize()
    return took_s


def kernel_us(job, behind):
    """For each operation, time of one of many kernels in a row, by the host's clock, and of its calls, us: the least of
    several rounds in turns, for what else the host does only adds."""
    found = {name: [] for name in OPERATIONS}
    for _ in range(ROUNDS):
        for name in OPERATIONS:
            operation = getattr(behind, name)
            job.cuda.cuCtxSynchronize()
            begin = time.monotonic()
            for _ in range(KERNELS):
                job.launch(job.known, job.a)
                operation(job.a)
            issued_s = time.monotonic() - begin
            job.sync(job.a)
            found[name].append((time.monotonic() - begin, issued_s))
    least = {name: [min(times) * 1e6 / KERNELS for times in zip(*rounds, strict=True)] for name, rounds in found.items()}
    return {name: {"us": us, "issued_us": issued_us} for name, (us, issued_us) in least.items()}


def holds_up(job, operation, streams):
    """Whether a stream with a kernel that runs, and the operation behind it, holds up any of so many others."""
    others = [job.stream(0) for _ in range(streams)]
    for other in others:
        job.launch(job.known, other)
    job.cuda.cuCtxSynchronize()

    def call():
        job.launch(job.spins, job.a, job.at)
        operation(job.a)
        for other in others:
            job.launch(job.known, other)
            job.sync(other)

    held = released(job, call) > HELD_S
    for other in others:
        job.cuda.cuStreamDestroy_v2(other)
    return held


def depth(job, operation):
    """Launches that a stream takes behind a wait before a launch is held up."""
    taken = []

    def call():
        job.a_waits()
        for n in range(LAUNCHES):
            begin = time.monotonic()
            job.launch(job.known, job.a)
            operation(job.a)
            if not taken and time.monotonic() - begin > HELD_S / 4:
                taken.append(n)

    released(job, call)
    return taken[0] if taken else None


def ask_us(job, event):
    """What it takes to ask for an event and for a stream, us, while a kernel runs."""
    asked = {}

    def call():
        job.launch(job.spins, job.a, job.at)
        job.cuda.cuEventRecord(event, job.a)
        library = job.cuda.library
        for name, handle in (("cuEventQuery", event), ("cuStreamQuery", job.a)):
            function = getattr(library, name)
            begin = time.monotonic()
            for _ in range(ASKED):
                function(handle)
            asked[name] = (time.monotonic() - begin) * 1e6 / ASKED

    released(job, call)
    return asked


def captures(job, behind):
    """Whether calls of another thread spoil a capture in the mode that lets no thread make unsafe calls (0): made in that
    mode, and in the relaxed one (2)."""
    cuda, library = job.cuda, job.cuda.library
    made, memory = ctypes.c_void_p(), ctypes.c_uint64()
    cuda.cuEventRecord(behind.untimed, job.b)
    calls = {
        "event_query": lambda: library.cuEventQuery(behind.untimed),
        "stream_query": lambda: library.cuStreamQuery(job.b),
        "event_record": lambda: library.cuEventRecord(behind.untimed, job.b),
        "event_create": lambda: library.cuEventCreate(ctypes.byref(made), DISABLE_TIMING),
        "stream_create": lambda: library.cuStreamCreate(ctypes.byref(made), 1),
        "launch": lambda: library.cuLaunchKernel(job.known, 1, 1, 1, 1, 1, 1, 0, job.b, None, None),
        "synchronize": lambda: library.cuStreamSynchronize(job.b),
        "allocate": lambda: library.cuMemAlloc_v2(ctypes.byref(memory), ctypes.c_size_t(1 << 20)),
    }
    found = {}
    for name, call in calls.items():
        for mode in (0, 2):
            graph, answers = ctypes.c_void_p(), []

            def run(call=call, mode=mode, answers=answers):
                cuda.cuCtxSetCurrent(job.context)
                library.cuThreadExchangeStreamCaptureMode(ctypes.byref(ctypes.c_int(mode)))
                answers.append(call())

            cuda.cuStreamBeginCapture_v2(job.a, 0)
            thread = threading.Thread(target=run)
            thread.start()
            thread.join()
            ended = library.cuStreamEndCapture(job.a, ctypes.byref(graph))
            found[f"{name}, {'relaxed' if mode else 'global'}"] = {"call": answers[0], "end": ended}
            cuda.cuCtxSynchronize()
    return found


def main():
    """Print a row."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--driver", default="libcuda.so.1")
    parser.add_argument("--streams", type=int, default=16)
    args = parser.parse_args()
    job = Job(args.driver)
    # Loaded before anything is measured.
    job.a_runs()
    job.word[0] = 1
    job.cuda.cuCtxSynchronize()
    behind = Behind(job)
    row = {"ask_us": ask_us(job, behind.untimed), "operations": {}}
    times = kernel_us(job, behind)
    for name in OPERATIONS:
        operation = getattr(behind, name)
        row["operations"][name] = {
            **times[name],
            "holds_up_one": holds_up(job, operation, 1),
            "holds_up_many": holds_up(job, operation, args.streams),
            "launches_before_one_is_held_up": depth(job, operation),
        }
    row["captures"] = captures(job, behind)
    print(json.dumps(row))


if __name__ == "__main__":
    main()
