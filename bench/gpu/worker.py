"""One GPU program under remote control: `worker.py JOB…` builds its jobs, then serves.

Commands are JSON lines on stdin, answers JSON lines on stdout; what libraries
print goes to stderr. It ends when stdin does. Commands (times in seconds on the
machine-wide monotonic clock, so that two workers can start together); each has
an `id` that its answers repeat:

| do | arguments | answer |
| --- | --- | --- |
| closed | job, n | service_ms of n requests back to back, or of as many as there are in 4 s |
| requests | job, start_at, seconds, rate_per_s, seed, limit_s, until_stop, put_off_ms | service_ms and queued_ms of open-loop Poisson arrivals, digest of the last output; with until_stop only until the next line |
| train | job, start_at, seconds, until_stop | steps done in the window and their rate; then goes on until the next line, if asked |
| streams | job | nothing; runs kernels in two streams at the same time |
| decode | job, start_at, warm_s, seconds, trace, rate_per_s, marks | what decode_job.py's service served, and how long its steps took |
| decode_exact | job, steps, trace | digest of the tokens of a fixed schedule |
| decode_check | job | how far its logits are from those without a KV cache |
| exact | steps, names | digests and losses of deterministic trainings, when they ended; first `{"progress": …}` once each is under way |
| gaps | job, steps | how long the GPU was idle between the kernels of so many steps of a training, by CUPTI: where the stream changed, and where not |
| serial_kernels | | bytes of records of kernels that CUPTI has run one at a time; from the first one on it does |
"""

import gc
import json
import os
import pathlib
import select
import sys
import tempfile
import time

import torch

import kernel_gaps
import models
import serial_kernels
from stats import poisson_schedule

WARM_REQUESTS = 30
WARM_STEPS = 5
# Requests back to back go on for no longer.
CLOSED_S_MAX = 4


# Deterministic trainings.
EXACT = {
    "resnet50": lambda: models.resnet50_training(batch=32),
    "bert": models.bert_training,
    "gpt2-small": lambda: models.gpt2_training(batch=4, tokens=512),
    "resnet50-graph": lambda: models.captured(models.resnet50_training(batch=32)),
}


class Worker:
    """The built jobs and the commands on them."""

    def __init__(self, jobs, progress):
        self.progress, self.serial = progress, None
        # When the last step of a training began and ended.
        self.last_step = 0.0, 0.0
        self.requests, self.trainings, self.services = {}, {}, {}
        for job in jobs:
            torch.manual_seed(0)
            if job in models.REQUESTS:
                self.requests[job] = models.REQUESTS[job]()
                self.closed(job, WARM_REQUESTS)
            elif job in models.TRAININGS:
                self.trainings[job], _ = models.TRAININGS[job]()
                for _ in range(WARM_STEPS):
                    self.trainings[job]()
            elif job in models.SERVICES:
                self.services[job] = models.SERVICES[job]()
            elif job == "exact":
                models.load_libraries()
            else:
                raise SystemExit(f"unknown job {job}")
        models.sync()

    @torch.no_grad()
    def closed(self, job, n):
        request, service_ms, began = self.requests[job], [], time.perf_counter()
        for _ in range(n):
            begin = time.perf_counter()
            if begin > began + CLOSED_S_MAX:
                break
            request()
            models.sync_stream()
            service_ms.append((time.perf_counter() - begin) * 1e3)
        return {"service_ms": service_ms}

    @torch.no_grad()
    def streams(self, job):
        models.two_streams()
        return {"job": job}

    @torch.no_grad()
    def open_loop(self, job, start_at, seconds, rate_per_s, seed, limit_s, until_stop=False, put_off_ms=0):
        """Serve arrivals in order; one that finds the program busy waits (queued).

        One that finds it idle begins `put_off_ms` later, which counts as service.

        All arrivals of the window are served, late ones too, until `limit_s`
        from the start: what is unserved then is counted, with its wait so far.
        With `until_stop` it ends at the next line, and not before.
        """
        request = self.requests[job]
        arrivals = poisson_schedule(rate_per_s, seconds, seed)
        service_ms, queued_ms, output = [], [], None
        models.wait_for(start_at)
        for arrival in arrivals:
            due = start_at + arrival
            begin = time.monotonic()
            if begin > start_at + limit_s or (until_stop and line_waits()):
                break
            goes_at = due + put_off_ms / 1e3 if begin < due else begin
            while begin < due:
                begin = time.monotonic()
            models.wait_for(goes_at)
            output = request()
            models.sync_stream()
            end = time.monotonic()
            service_ms.append((end - begin) * 1e3)
            queued_ms.append((end - due) * 1e3)
        ended = time.monotonic()
        unserved = [arrival for arrival in arrivals[len(service_ms) :] if start_at + arrival <= ended]
        if until_stop:
            read_line()
        queued_ms += [(ended - start_at - arrival) * 1e3 for arrival in unserved]
        return {
            "service_ms": service_ms,
            "queued_ms": queued_ms,
            "unserved": len(unserved),
            "overrun_s": max(0.0, ended - start_at - seconds),
            "digest": models.digest([output]) if output is not None else None,
        }

    def train(self, job, start_at, seconds, until_stop=False):
        """Train, waiting for each step; one that began in time counts with its time. Of one that was under way at the
        start the part counts that was left.

        With `until_stop` it trains on, uncounted, until another line arrives:
        so an inference that lags behind is not served alone at the end.
        """
        step, begin, (last_from, last_to) = self.trainings[job], start_at, self.last_step
        steps = (last_to - begin) / (last_to - last_from) if last_from < begin < last_to else 0
        models.wait_for(start_at)
        while (now := time.monotonic()) < begin + seconds:
            step()
            models.sync()
            steps += 1
            self.last_step = now, time.monotonic()
        elapsed = time.monotonic() - begin
        while until_stop and not line_waits():
            now = time.monotonic()
            step()
            models.sync()
            self.last_step = now, time.monotonic()
        if until_stop:
            read_line()
        return {"steps": steps, "seconds": elapsed, "steps_per_s": steps / elapsed}

    def gaps(self, job, steps):
        """The steps are not waited for."""
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            for _ in range(steps):
                self.trainings[job]()
            models.sync()
        with tempfile.TemporaryDirectory() as folder:
            trace = pathlib.Path(folder) / "trace.json"
            profiler.export_chrome_trace(str(trace))
            changed, same = kernel_gaps.gaps_us(json.loads(trace.read_text())["traceEvents"])
        return {"changed": kernel_gaps.described(changed), "same": kernel_gaps.described(same)}

    def serial_kernels(self):
        if self.serial is None:
            self.serial = serial_kernels.enable()
        return {"record_bytes": self.serial.flush()}

    def exact(self, steps, names=("resnet50", "gpt2-small")):
        """Train models from a fixed seed; digests of losses and parameters."""
        digests, all_losses, begin = {}, {}, time.monotonic()
        with models.deterministic():
            for name in names:
                build = EXACT[name]
                torch.manual_seed(1234)
                step, parameters = build()
                losses = []
                for index in range(steps):
                    losses.append(step().detach().float())
                    if index == 0:
                        models.sync()
                        self.progress({"progress": name})
                models.sync()
                ended = time.monotonic()
                digests[name] = models.digest([torch.stack(losses), *parameters])
                all_losses[name] = torch.stack(losses).tolist()
                del step, parameters
        return {"digests": digests, "losses": all_losses, "ended": ended, "seconds": ended - begin}

    def decode(self, job, **arguments):
        return self.services[job].decode(**arguments)

    def decode_exact(self, job, **arguments):
        return self.services[job].exact(**arguments)

    def decode_check(self, job):
        return self.services[job].check()

    def serve(self, command):
        """One command's answer."""
        what = command.pop("do")
        serve = {"streams": self.streams, "closed": self.closed, "requests": self.open_loop, "train": self.train, "exact": self.exact, "gaps": self.gaps, "serial_kernels": self.serial_kernels, "decode": self.decode, "decode_exact": self.decode_exact, "decode_check": self.decode_check}[what]
        gc.collect()
        gc.disable()
        try:
            return serve(**command)
        finally:
            gc.enable()
            models.sync()


def line_waits():
    """Whether stdin has something to read, or has ended."""
    return bool(select.select([0], [], [], 0)[0])


def read_line():
    """One line of stdin, unbuffered (select must see what is left); empty at its end."""
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte:
            return b""
        line += byte
    return line


def main():
    # The answers keep the real stdout; everything else that prints goes to stderr.
    channel = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    current = {"id": 0}

    def answer(message):
        channel.write(json.dumps(current | message) + "\n")

    begin = time.monotonic()
    worker = Worker(sys.argv[1:], answer)
    answer({"ready": True, "pid": os.getpid(), "build_s": round(time.monotonic() - begin, 2)})
    while line := read_line():
        command = json.loads(line)
        current["id"] = command.pop("id")
        answer(worker.serve(command))


if __name__ == "__main__":
    main()
