"""What every step shares: arguments, where things are, result files, the machine's identity.

A step is a script `step_NAME.py` with a `main(suite)`; `Suite` is all it gets.
Result files are JSON objects `{"machine": …, …}`, written whole and renamed
into place, so that a killed step leaves the last complete state behind.
"""

import argparse
import contextlib
import datetime
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import traceback

HERE = pathlib.Path(__file__).resolve().parent
# Set by run.sh for everything it starts; `procs.sweep` finds leftovers by it.
ENV_TOKEN = "TALLY_GPU_SUITE"
# Where a driver's libcuda may lie when the toolkit has no stub of it.
SYSTEM_LIBRARIES = ("/usr/local/nvidia/lib64", "/usr/local/nvidia/lib", "/usr/lib/x86_64-linux-gnu", "/usr/lib64")

# NVLink multicast stays off in NCCL, PyTorch and NVSHMEM: hosts are shared.
MULTICAST_OFF = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}


class Suite:
    """The folders and identity of one run of the suite."""

    def __init__(self, step, bundle, out, args):
        self.step = step
        self.bundle = pathlib.Path(bundle).resolve()
        self.out = pathlib.Path(out).resolve()
        self.args = args
        # Socket paths may have 108 bytes: keep this short.
        self.work = pathlib.Path(os.environ.get("SUITE_WORK") or tempfile.mkdtemp(prefix="tgs-", dir="/tmp"))
        self.logs = self.work / "logs" / step
        self.logs.mkdir(parents=True, exist_ok=True)
        self.out.mkdir(parents=True, exist_ok=True)
        os.environ.setdefault(ENV_TOKEN, str(self.work))
        self.machine = machine(self.bundle)

    def program(self, name):
        """A program of the bundle; fails by name if it is not there."""
        path = self.bundle / "bin" / name
        if not path.exists():
            raise FileNotFoundError(f"the bundle has no bin/{name} ({path})")
        return str(path)

    def write(self, name, content):
        """Write `content` with the machine's identity as `OUT/name`."""
        write_json(self.out / name, {"machine": self.machine, **content})

    def read(self, name):
        """An earlier result of this output folder, `{}` if there is none."""
        path = self.out / name
        return json.loads(path.read_text()) if path.exists() else {}


def write_json(path, content):
    """Write and rename, one array element or key a line where that stays readable."""
    path = pathlib.Path(path)
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(content, indent=1) + "\n")
    temporary.replace(path)


def merge_rows(old, new, key_fields):
    """`old` rows with those of the same key replaced by `new` ones, which follow in order."""

    def key(row):
        return tuple(str(row.get(field)) for field in key_fields)

    replaced = {key(row) for row in new}
    return [row for row in old if key(row) not in replaced] + list(new)


def machine(bundle):
    """GPU, driver, commit and date: the identity every result carries."""
    query = first_line(["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"])
    device, _, driver = (query or "unknown, unknown").partition(", ")
    commit = os.environ.get("SUITE_COMMIT")
    for name in ("COMMIT", "commit"):
        path = bundle / name
        if not commit and path.is_file():
            commit = path.read_text().strip()
    commit = commit or first_line(["git", "-C", str(HERE), "rev-parse", "--short=12", "HEAD"]) or "unknown"
    return {
        "device": device,
        "driver": driver,
        "torch": first_line([sys.executable, "-c", "import importlib.metadata as m; print(m.version('torch'))"]),
        "commit": commit,
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "cpus": os.cpu_count(),
    }


def first_line(command):
    """The first line a short command prints, or None if it fails."""
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=30, env=clean_environment())
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip().splitlines()[0] if done.returncode == 0 and done.stdout.strip() else None


def clean_environment(**extra):
    """This process's environment without what makes a program a client or an MPS client."""
    env = {k: v for k, v in os.environ.items() if k != "LD_PRELOAD" and not k.startswith(("TALLY_", "CUDA_MPS_"))}
    if ENV_TOKEN in os.environ:
        env[ENV_TOKEN] = os.environ[ENV_TOKEN]
    # A later CUDA must not load all kernels at start.
    env.setdefault("CUDA_MODULE_LOADING", "LAZY")
    for name, off in MULTICAST_OFF.items():
        env.setdefault(name, off)
    env.setdefault("TOKENIZERS_PARALLELISM", "false")
    env.setdefault("PYTHONUNBUFFERED", "1")
    env.update(extra)
    return env


def compile_program(suite, source, name, flags=("-O2",)):
    """Compile `native/source` with nvcc into the work folder (once a run); the path."""
    target = suite.work / name
    if target.exists():
        return str(target)
    nvcc = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    command = [nvcc, *flags, "-std=c++17", "-o", str(target), str(HERE / "native" / source), *libcuda_flags(nvcc)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=180, env=clean_environment())
    (suite.logs / f"{name}.compile.log").write_text(" ".join(command) + "\n" + done.stdout + done.stderr)
    if done.returncode:
        raise RuntimeError(f"compiling {source} failed: {done.stderr[-2000:]}")
    return str(target)


def libcuda_flags(nvcc):
    """How to link the driver's library: the toolkit's stub, else the driver itself."""
    toolkit = pathlib.Path(nvcc).resolve().parent.parent
    folders = [toolkit / "lib64" / "stubs", toolkit / "targets/x86_64-linux/lib/stubs"]
    folders += map(pathlib.Path, SYSTEM_LIBRARIES)
    for folder in folders:
        for name in ("libcuda.so", "libcuda.so.1"):
            if (folder / name).exists():
                return [f"-L{folder}", f"-l:{name}", "-ldl"]
    return ["-lcuda", "-ldl"]


class Failures:
    """Collects what went wrong without ending the step at the first."""

    def __init__(self):
        self.messages = []

    def add(self, message):
        print(f"FAIL {message}", flush=True)
        self.messages.append(message)

    @contextlib.contextmanager
    def guard(self, what):
        """Record an exception of the block under `what` and go on."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - a step reports everything that failed, whatever it is
            traceback.print_exc()
            self.add(f"{what}: {type(error).__name__}: {error}")


def step_main(step, main, add_arguments=lambda parser: None):
    """Entry point of a step script: parse, run, exit 1 with the failures listed."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--bundle", required=True, help="folder with bin/ and gpu/")
    parser.add_argument("--out", required=True, help="where the result files go")
    add_arguments(parser)
    args = parser.parse_args()
    # `timeout` sends SIGTERM: unwind, so that context managers end what was started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(124))
    suite = Suite(step, args.bundle, args.out, args)
    failures = main(suite) or []
    for message in failures:
        print(f"FAIL {message}", flush=True)
    sys.exit(1 if failures else 0)
