"""Workers by every way in which multiprocessing starts them; with an argument each initialises CUDA."""
import ctypes
import multiprocessing
import sys


def work(number):
    if len(sys.argv) > 1 or number >= 10:
        return number, ctypes.CDLL("libcuda.so.1").cuInit(0)
    return number, None


if __name__ == "__main__":
    first = 10 if len(sys.argv) > 1 else 0
    for method in ("fork", "spawn", "forkserver"):
        with multiprocessing.get_context(method).Pool(2) as pool:
            print(method, pool.map(work, range(first, first + 4)), flush=True)
    sys.exit(9)
