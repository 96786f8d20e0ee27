"""Workers (worker.py processes) started plainly or as clients of a core, and how to talk to several at once."""

import contextlib
import sys
import time

from common import HERE, clean_environment
from procs import Process

# Several at once that load all their libraries' kernels take long.
READY_TIMEOUT_S = 180
STOP_TIMEOUT_S = 6  # for all together
# Between the moment a start is announced and the start: enough for every worker to read it.
LEAD_S = 0.25


class Client:
    """One worker process, ready to serve."""

    def __init__(self, suite, name, jobs, core=None, priority=None, env=None, options=()):
        self.name, self.sent = name, 0
        command = [sys.executable, str(HERE / "worker.py"), *jobs]
        if core is not None:
            # Nothing is logged on the launch path; this says how it attached.
            env = {"TALLY_SHIM_LOG": str(suite.logs / f"shim-{name}.log"), **(env or {})}
            command = core.client_command(priority, name, command, options)
        log = suite.logs / f"{name}.log"
        self.process = Process(command, log, clean_environment(**(env or {})), pipe=True)
        self.pid = None

    def ready(self, timeout_s=READY_TIMEOUT_S):
        """Wait until its jobs are built and warmed."""
        first = self.process.receive(timeout_s)
        self.pid = first["pid"]
        return first

    def send(self, do, **arguments):
        self.sent += 1
        self.process.send({"id": self.sent, "do": do, **arguments})

    def receive(self, timeout_s=60):
        """The next answer to the last command; late answers to earlier ones are dropped."""
        while True:
            answer = self.process.receive(timeout_s)
            if answer["id"] == self.sent:
                return answer

    def ask(self, do, timeout_s=60, **arguments):
        self.send(do, **arguments)
        return self.receive(timeout_s)


@contextlib.contextmanager
def started(clients):
    """Wait until all are ready (they were started at once, so they build at the same time); end them after."""
    try:
        for one in clients:
            one.ready()
        yield clients
        # In good order: each sees its stdin end, all at once. A worker that is still busy is killed below.
        for one in clients:
            with contextlib.suppress(OSError):
                one.process.child.stdin.close()
        end = time.monotonic() + STOP_TIMEOUT_S
        for one in clients:
            one.process.wait(max(0.0, end - time.monotonic()))
    finally:
        for one in clients:
            one.process.stop(grace_s=0)


def soon():
    """A start time that every worker will have read in time."""
    return time.monotonic() + LEAD_S
