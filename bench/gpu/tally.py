"""The parts that share a GPU: `tally-core`, its status, and a private MPS daemon for the baselines.

`Core` and `MpsDaemon` are context managers: what they start is gone when the
block ends. The only place that knows the command lines and the status schema.
"""

import contextlib
import json
import os
import pathlib
import shutil
import subprocess
import tempfile

from common import clean_environment
from procs import Process, wait_until

STATUS_TIMEOUT_S = 15


class Core:
    """A running `tally-core` with a socket of its own."""

    def __init__(self, suite, name, policy, sharing, policy_config=None, extra=(), environment=None):
        self.suite, self.name, self.policy, self.sharing = suite, name, policy, sharing
        self.policy_config, self.extra = policy_config, list(extra)
        self.environment = environment or {}
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="c-", dir=suite.work))
        self.socket = self.folder / "clients" / "s"
        self.log = suite.logs / f"core-{name}.log"
        self.process = None

    def start(self):
        """Start it and wait until it answers."""
        command = [
            self.suite.program("tally-core"),
            "--policy", self.suite.program(f"policies/{self.policy}.wasm"),
            "--sharing", self.sharing,
            "--socket", self.socket,
            "--log-format", "json",
            *self.extra,
        ]  # fmt: skip
        if self.policy_config is not None:
            file = self.folder / "policy.toml"
            file.write_text(self.policy_config)
            command += ["--policy-config", file]
        # What an earlier measurement learned of kernels must not matter to this one.
        self.process = Process(command, self.log, clean_environment(XDG_STATE_HOME=str(self.folder / "state"), **self.environment))
        wait_until(self._answers, 30, f"tally-core {self.name} to answer", every_s=0.1)
        return self

    def _answers(self):
        if not self.process.alive():
            raise RuntimeError(f"tally-core ended (exit {self.process.child.returncode}):\n{self.process.tail()}")
        with contextlib.suppress(RuntimeError, subprocess.TimeoutExpired, ValueError):
            return self.status()
        return None

    def stop(self):
        """Drain it (SIGTERM); its exit status must be 0."""
        if self.process is None:
            return None
        code, self.process = self.process.stop(grace_s=15), None
        return code

    def kill(self):
        """SIGKILL, as a crash would."""
        self.process.child.kill()
        self.process.wait(10)
        self.process = None

    def status(self):
        return status(self.suite.program("tallyctl"), self.socket)

    def ctl(self, *arguments):
        """Run `tallyctl` with these arguments. Its environment carries no shim."""
        command = [str(part) for part in (self.suite.program("tallyctl"), "--socket", self.socket, *arguments)]
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=STATUS_TIMEOUT_S, env=clean_environment())
        if done.returncode:
            raise RuntimeError(f"tallyctl {' '.join(map(str, arguments))}: exit {done.returncode}: {done.stderr.strip()[-500:]}")

    def client_command(self, priority, name, command, options=()):
        """The command line that runs `command` as a client."""
        return [
            self.suite.program("tallyctl"), "--socket", self.socket,
            "run", "--priority", priority, "--name", name, *options, "--", *command,
        ]  # fmt: skip

    def __enter__(self):
        return self.start()

    def __exit__(self, *exc):
        code = self.stop()
        if code not in (0, None) and exc[0] is None:
            raise RuntimeError(f"tally-core {self.name} did not drain: exit {code}; its log ends:\n{tail(self.log)}")


def tail(path, lines=25):
    return "\n".join(pathlib.Path(path).read_text(errors="replace").splitlines()[-lines:])


def status(tallyctl, socket):
    """`tallyctl status --json`, parsed. Its environment carries no shim."""
    command = [str(tallyctl), "--socket", str(socket), "status", "--json"]
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, timeout=STATUS_TIMEOUT_S, env=clean_environment()
    )
    if done.returncode:
        raise RuntimeError(f"tallyctl status: exit {done.returncode}: {done.stderr.strip()[-500:]}")
    return json.loads(done.stdout)


def client(state, name, pid=None):
    """The entry of a client: the connected one of that name (and pid), else the one that left last."""
    for part in ("clients", "departed"):
        found = [c for c in state.get(part, []) if c.get("name") == name]
        if pid is not None and any(c.get("pid") == pid for c in found):
            found = [c for c in found if c.get("pid") == pid]
        if found:
            # Departed ones come newest first.
            return found[0]
    return None


def launches(entry):
    """The launch counters of a connected client (schema 1); a missing one is an error."""
    return {
        "total": entry["launches"],
        "by_entry_point": entry["launches_by_entry_point"],
        "graph_kernels": entry["graph_kernels"],
        "captured": entry["captured"],
    }


def sharing_of(state):
    """(mode in force, reason) as status says them."""
    return state["sharing"]["in_force"], state["sharing"]["reason"]


def shortfalls(state, sharing, expected):
    """What of a core's promises is not in force, as sentences; `expected` names the clients that must be governed."""
    found = []
    in_force, reason = sharing_of(state)
    if in_force != sharing:
        found.append(f"sharing mode in force is {in_force}, not {sharing}: {reason}")
    for name in expected:
        entry = client({"clients": state["clients"]}, name)
        if entry is None:
            found.append(f"the core has no client {name}")
            continue
        if not entry["governed"]:
            found.append(f"{name} is not governed: {entry['not_governed_reason']}")
        report = entry["report"]
        if report["time_slice"] == "failed":
            found.append(f"{name}: time slice {report['time_slice']}: {report}")
        if report["linger"] == "failed":
            found.append(f"{name} does not linger: CUDA error {report['linger_error']}")
        if sharing == "mps" and report["mps"] != "as asked":
            found.append(f"{name}: {report['mps']}")
    faults = {kind: n for kind, n in state["policy"]["faults"].items() if n}
    if faults or state["policy"]["disabled"]:
        found.append(f"the policy failed: {faults}, last {state['policy']['last_fault']}")
    return found


class MpsDaemon:
    """An MPS daemon on pipe and log folders of its own, for baselines without Tally."""

    def __init__(self, suite):
        self.suite = suite
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="m-", dir=suite.work))
        self.control = shutil.which("nvidia-cuda-mps-control") or "/usr/local/nvidia/bin/nvidia-cuda-mps-control"
        self.environment = {
            "CUDA_MPS_PIPE_DIRECTORY": str(self.folder / "pipe"),
            "CUDA_MPS_LOG_DIRECTORY": str(self.folder / "log"),
        }

    def _run(self, arguments, stdin=None):
        # Not pipes: the daemon would hold them open.
        with open(self.suite.logs / f"mps-{self.folder.name}.log", "a") as sink:
            return subprocess.run(
                [self.control, *arguments], check=False, input=stdin, text=True, timeout=20,
                stdout=sink, stderr=sink, env=clean_environment(**self.environment),
            )  # fmt: skip

    def __enter__(self):
        for folder in self.environment.values():
            os.makedirs(folder, exist_ok=True)
        done = self._run(["-d"])
        if done.returncode:
            raise RuntimeError(f"{self.control} -d ended with {done.returncode}: see its log")
        return self

    def __exit__(self, *_):
        with contextlib.suppress(subprocess.TimeoutExpired, OSError):
            self._run([], stdin="quit\n")
        # The control program writes its pid; wait until it is gone, or the next mode would join it.
        pid_file = self.folder / "pipe" / "nvidia-cuda-mps-control.pid"
        with contextlib.suppress(OSError, ValueError, TimeoutError):
            pid = int(pid_file.read_text())
            wait_until(lambda: not pathlib.Path(f"/proc/{pid}").exists(), 10, "the MPS daemon to end")
        for name in ("control.log", "server.log"):
            with contextlib.suppress(OSError):
                shutil.copy(self.folder / "log" / name, self.suite.logs / f"mps-{self.folder.name}-{name}")
