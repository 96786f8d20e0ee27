"""Starting, talking to and reliably ending processes.

Every process gets a session of its own, so that ending it ends its children,
and dies with its step (PR_SET_PDEATHSIG). What escapes both is found by the
token in its environment: `python3 procs.py sweep TOKEN`, which run.sh calls
after each step.
"""

import contextlib
import ctypes
import json
import os
import pathlib
import select
import signal
import subprocess
import sys
import time

PR_SET_PDEATHSIG = 1
LIBC = ctypes.CDLL(None)


def _die_with_parent():
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


class Process:
    """A child in a session of its own; its stderr (and stdout, unless piped) goes to a log."""

    def __init__(self, command, log, env, pipe=False):
        self.command, self.log = [str(part) for part in command], pathlib.Path(log)
        self.pipe = pipe
        self.unread = b""
        with open(self.log, "ab") as sink:
            sink.write(("$ " + " ".join(self.command) + "\n").encode())
            sink.flush()
            self.child = subprocess.Popen(
                self.command,
                stdin=subprocess.PIPE if pipe else subprocess.DEVNULL,
                stdout=subprocess.PIPE if pipe else sink,
                stderr=sink,
                env=env,
                start_new_session=True,
                preexec_fn=_die_with_parent,  # noqa: PLW1509 - the steps have one thread
            )

    @property
    def pid(self):
        return self.child.pid

    def alive(self):
        return self.child.poll() is None

    def tail(self, lines=25):
        """The end of its log, for error messages."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def send(self, message):
        """Write one JSON line to its stdin."""
        self.child.stdin.write(json.dumps(message).encode() + b"\n")
        self.child.stdin.flush()

    def receive(self, timeout_s):
        """The next JSON line of its stdout. Lines that are not JSON objects are skipped."""
        end = time.monotonic() + timeout_s
        fd = self.child.stdout.fileno()
        while True:
            line, newline, rest = self.unread.partition(b"\n")
            if newline:
                self.unread = rest
                if line.lstrip().startswith(b"{"):
                    return json.loads(line)
                continue
            left = end - time.monotonic()
            if left <= 0:
                raise TimeoutError(f"no answer in {timeout_s} s from {self.command}; its log ends:\n{self.tail()}")
            if select.select([fd], [], [], left)[0]:
                chunk = os.read(fd, 1 << 16)
                if not chunk:
                    code = self.wait(5)
                    raise RuntimeError(f"{self.command} ended (exit {code}); its log ends:\n{self.tail()}")
                self.unread += chunk

    def wait(self, timeout_s):
        """Its exit status, or None if it is still running after `timeout_s`."""
        try:
            return self.child.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def stop(self, grace_s=5.0):
        """End it and its session: close stdin or SIGTERM first, SIGKILL after `grace_s`."""
        code = self.child.poll()
        if code is None:
            if self.pipe:
                with contextlib.suppress(OSError):
                    self.child.stdin.close()
            else:
                self.child.terminate()
            code = self.wait(grace_s)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.child.pid, signal.SIGKILL)
        if code is None:
            code = self.wait(10)
        for stream in (self.child.stdin, self.child.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        return code

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stop()


def wait_until(condition, timeout_s, what, every_s=0.05):
    """Poll `condition` until it returns something true; that value."""
    end = time.monotonic() + timeout_s
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > end:
            raise TimeoutError(f"waited {timeout_s} s for {what}")
        time.sleep(every_s)


def threads(wanted):
    """What the threads of processes are at, of those `wanted(pid, session)`: name, where the kernel has them, system call."""
    lines = []
    for process in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, IndexError):
            session = int((process / "stat").read_text().rsplit(")", 1)[1].split()[3])
            if not wanted(int(process.name), session):
                continue
            for thread in sorted((process / "task").iterdir()):
                at = [(thread / what).read_text().strip() for what in ("comm", "wchan", "syscall")]
                lines.append(f"{process.name} {thread.name} {' '.join(at)[:120]}")
    return "\n".join(lines)


def with_token(token):
    """Pids whose environment holds this suite's token, but for this process and its ancestors."""
    needle = f"TALLY_GPU_SUITE={token}".encode()
    spare, pid = set(), os.getpid()
    while pid > 1:
        spare.add(pid)
        pid = int(pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    found = []
    for entry in pathlib.Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) not in spare:
            with contextlib.suppress(OSError):
                if needle in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
    return found


def sweep(token, grace_s=4.0):
    """End every process that carries the token; the pids found."""
    found = with_token(token)
    for sig, wait_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, 2.0)):
        for pid in with_token(token):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, sig)
        end = time.monotonic() + wait_s
        while with_token(token) and time.monotonic() < end:
            time.sleep(0.1)
    return found


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] != "sweep" or not sys.argv[2]:
        sys.exit("usage: procs.py sweep TOKEN")
    left = sweep(sys.argv[2])
    if left:
        print(f"ended what the step left running: {left}")
