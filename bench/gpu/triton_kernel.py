"""The kernel that `jit_job` has Triton compile; Triton reads its source from this file."""

import triton
import triton.language as tl


@triton.jit
def step(out, n, rounds, constant: tl.constexpr, block: tl.constexpr):
    i = tl.program_id(0) * block + tl.arange(0, block)
    x = i
    for _ in range(rounds):
        x = x * 1664525 + constant
    tl.store(out + i, x, mask=i < n)
