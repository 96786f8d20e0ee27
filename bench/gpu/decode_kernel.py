"""Attention of a decode step over a paged KV cache, as a Triton kernel: each program is one sequence's KV head."""

import triton
import triton.language as tl


@triton.jit
def paged_attention(
    q, keys, values, tables, positions, out, scale, table_stride, position_stride, pages,
    GROUP: tl.constexpr, ROWS: tl.constexpr, KV: tl.constexpr, HEAD: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """q and out: [batch, KV, GROUP, HEAD]; keys and values: [KV, pages, PAGE, HEAD]; ROWS is GROUP, padded to 16."""
    sequence, kv = tl.program_id(0), tl.program_id(1)
    length = tl.load(positions + sequence * position_stride).to(tl.int32) + 1
    row, column = tl.arange(0, ROWS), tl.arange(0, HEAD)
    at = ((sequence * KV + kv) * GROUP + row[:, None]) * HEAD + column[None, :]
    query = tl.load(q + at, mask=row[:, None] < GROUP, other=0.0)
    most = tl.full([ROWS], -1e30, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, HEAD], tl.float32)
    for start in range(0, length, BLOCK):
        token = start + tl.arange(0, BLOCK)
        there = token < length
        page = tl.load(tables + sequence * table_stride + token // PAGE, mask=there, other=0).to(tl.int64)
        cell = ((kv * pages + page) * PAGE + token % PAGE) * HEAD
        key = tl.load(keys + cell[:, None] + column[None, :], mask=there[:, None], other=0.0)
        score = tl.dot(query, tl.trans(key)) * scale
        score = tl.where(there[None, :], score, -1e30)
        new_most = tl.maximum(most, tl.max(score, 1))
        weight = tl.exp(score - new_most[:, None])
        kept = tl.exp(most - new_most)
        value = tl.load(values + cell[:, None] + column[None, :], mask=there[:, None], other=0.0)
        mixed = mixed * kept[:, None] + tl.dot(weight.to(value.dtype), value)
        total = total * kept + tl.sum(weight, 1)
        most = new_most
    mixed = mixed / total[:, None]
    tl.store(out + at, mixed.to(out.dtype.element_ty), mask=row[:, None] < GROUP)


def attend(q, keys, values, tables, positions):
    """The attention of q, [batch, heads, head], over the pages of each sequence up to its position."""
    kv, pages, page, head = keys.shape
    batch, heads, _ = q.shape
    q, group = q.contiguous(), heads // kv
    out = q.new_empty(q.shape)
    paged_attention[(batch, kv)](
        q, keys, values, tables, positions, out, head**-0.5, tables.stride(0), positions.stride(0), pages,
        GROUP=group, ROWS=max(16, group), KV=kv, HEAD=head, PAGE=page, BLOCK=64, num_warps=4,
    )  # fmt: skip
    return out
