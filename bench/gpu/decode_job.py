"""A decode service of Llama-3.1-8B's shape: paged KV cache, continuous batching, a CUDA graph for each batch size.

decode_job.py [--layers N] [--seconds S] [--rate R] [--trace conv|code] [--exact STEPS | --check]

Half precision, random weights made on the GPU, greedy tokens. Prefills run eagerly, a chunk between two decode steps.
Each step is one graph launch and one wait. As a program it prints one JSON object; worker.py serves it as the job
`llama-8b-service`, with the commands `decode` and `decode_exact`. `prefill_work` is best-effort work of the same shape.
"""

import argparse
import contextlib
import hashlib
import json
import os
import sys
import time
from typing import NamedTuple

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import decode_batch
import models
from decode_batch import BATCH_MAX, CHUNK, PAGE, PAGES, SCRATCH_PAGE, TOKENS_MAX
from models import DEVICE, HALF, SMALL
from stats import percentile

F = torch.nn.functional
# Batch sizes that have a graph; a smaller batch is padded.
SIZES = (1, 2, 4, 8, 12, 16)
# Columns of a row of a step's input: token, position, then the block table.
TABLE_AT = 2
# How far the Triton kernel's attention may be from plain attention (half precision).
TOLERANCE = 0.02
BEST_EFFORT_LAYERS = 8


class Shape(NamedTuple):
    layers: int = 32
    width: int = 4096
    heads: int = 32
    kv: int = 8
    head: int = 128
    inner: int = 14336
    vocabulary: int = 128256


def shape_of(layers=None):
    """Llama-3.1-8B's, or a tiny one with SUITE_SMALL; SUITE_LAYERS cuts it."""
    shape = Shape(2, 64, 4, 2, 16, 128, 256) if SMALL else Shape()
    layers = layers or int(os.environ.get("SUITE_LAYERS") or shape.layers)
    return shape._replace(layers=min(layers, shape.layers))


def rotated(x, cos, sin):
    """Rotary position embedding of x, [tokens, heads, head]."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def gathered_attention(q, keys, values, tables, positions):
    """Attention of q, [batch, heads, head], over all pages of the block tables, gathered: plain PyTorch."""
    (batch, heads, head), kv = q.shape, keys.shape[0]
    k, v = (cache[:, tables].reshape(kv, batch, -1, head) for cache in (keys, values))
    scores = (q.view(batch, kv, heads // kv, head).transpose(0, 1) @ k.transpose(-1, -2)).float() * head**-0.5
    behind = torch.arange(k.shape[2], device=q.device) > positions[:, None]
    weights = scores.masked_fill(behind[None, :, None], -torch.inf).softmax(-1).to(v.dtype)
    return (weights @ v).transpose(0, 1).reshape(batch, heads, head)


class Model:
    """Weights, the KV cache and one pass over some tokens."""

    def __init__(self, shape, pages=PAGES):
        self.shape = shape

        def weights(rows, columns):
            return torch.empty(rows, columns, device=DEVICE, dtype=HALF).normal_(std=0.02)

        queries, cached = shape.heads * shape.head, shape.kv * shape.head
        sizes = ((queries + 2 * cached, shape.width), (shape.width, queries), (2 * shape.inner, shape.width), (shape.width, shape.inner))
        self.stack = [[weights(*size) for size in sizes] for _ in range(shape.layers)]
        self.embed, self.head = weights(shape.vocabulary, shape.width), weights(shape.vocabulary, shape.width)
        self.scale = torch.ones(shape.width, device=DEVICE, dtype=HALF)
        # Zeros: what a mask hides must be finite.
        self.caches = torch.zeros(shape.layers, 2, shape.kv, pages, PAGE, shape.head, device=DEVICE, dtype=HALF)
        frequency = 500_000.0 ** (-torch.arange(0, shape.head, 2, device=DEVICE, dtype=torch.float32) / shape.head)
        angle = torch.arange(TOKENS_MAX, device=DEVICE, dtype=torch.float32)[:, None] * frequency
        self.cos, self.sin = angle.cos().to(HALF), angle.sin().to(HALF)

    def _writer(self, slots):
        """What writes a layer's new keys and values into these tokens of the cache."""

        def write(keys, values, k, v):
            for cache, new in ((keys, k), (values, v)):
                cache.view(self.shape.kv, -1, self.shape.head).index_copy_(1, slots, new.transpose(0, 1))

        return write

    def run(self, tokens, positions, tables, attend, keep=None):
        """The last hidden states of some tokens, whose keys and values go into the pages of their tables, or to `keep`."""
        shape, n = self.shape, tokens.shape[0]
        keep = keep or self._writer(tables.gather(1, positions[:, None] // PAGE)[:, 0] * PAGE + positions % PAGE)
        cos, sin = self.cos[positions][:, None], self.sin[positions][:, None]
        parts = (shape.heads * shape.head, shape.kv * shape.head, shape.kv * shape.head)
        x = F.embedding(tokens, self.embed)
        for (qkv, out, up, down), (keys, values) in zip(self.stack, self.caches, strict=True):
            q, k, v = F.linear(F.rms_norm(x, (shape.width,), self.scale), qkv).split(parts, dim=-1)
            q, k = (rotated(part.reshape(n, -1, shape.head), cos, sin) for part in (q, k))
            keep(keys, values, k, v.reshape(n, -1, shape.head))
            x = x + F.linear(attend(q, keys, values).reshape(n, -1), out)
            gate, value = F.linear(F.rms_norm(x, (shape.width,), self.scale), up).chunk(2, dim=-1)
            x = x + F.linear(F.silu(gate) * value, down)
        return x

    def plain(self, tokens):
        """Logits of the last of all tokens of a sequence without a cache: what the pages must give."""
        tokens, group = torch.tensor(tokens, device=DEVICE), self.shape.heads // self.shape.kv
        positions = torch.arange(len(tokens), device=DEVICE)
        fresh = []

        def attend(q, keys, values):
            k, v = (part.transpose(0, 1).repeat_interleave(group, dim=0) for part in fresh[-1])
            scores = (q.transpose(0, 1) @ k.transpose(-1, -2)).float() * self.shape.head**-0.5
            weights = scores.masked_fill(positions > positions[:, None], -torch.inf).softmax(-1).to(v.dtype)
            return (weights @ v).transpose(0, 1)

        return self.logits(self.run(tokens, positions, None, attend, lambda keys, values, k, v: fresh.append((k, v)))[-1:])

    def logits(self, x):
        return F.linear(F.rms_norm(x, (self.shape.width,), self.scale), self.head)

    def prefill(self, tokens, start, pages):
        """Logits of the last of some tokens of one sequence, which begin at `start`."""
        shape, count = self.shape, len(tokens)
        tokens, table = (torch.tensor(numbers, device=DEVICE) for numbers in (tokens, pages))
        positions = torch.arange(start, start + count, device=DEVICE)
        visible = torch.arange(len(pages) * PAGE, device=DEVICE)[None, :] <= positions[:, None]

        def attend(q, keys, values):
            k, v = (cache[:, table].reshape(shape.kv, -1, shape.head) for cache in (keys, values))
            k, v = (part.repeat_interleave(shape.heads // shape.kv, dim=0)[None] for part in (k, v))
            # Not cuDNN's, which prepares each new shape.
            with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
                return F.scaled_dot_product_attention(q.transpose(0, 1)[None], k, v, attn_mask=visible)[0].transpose(0, 1)

        return self.logits(self.run(tokens, positions, table.expand(count, -1), attend)[-1:])


@torch.no_grad()
def choose_attention(shape, asked):
    """(name, function) of a decode step's attention: the Triton kernel if it agrees with plain PyTorch, else that."""
    if asked == "gather" or (asked == "auto" and DEVICE != "cuda"):
        return "gather", gathered_attention
    try:
        import decode_kernel

        generator = torch.Generator(DEVICE).manual_seed(5)
        pages, width = 64, 8
        q = torch.randn(3, shape.heads, shape.head, device=DEVICE, generator=generator).to(HALF)
        keys, values = torch.randn(2, shape.kv, pages, PAGE, shape.head, device=DEVICE, generator=generator).to(HALF)
        tables = torch.randperm(pages, device=DEVICE, generator=generator)[: 3 * width].view(3, width)
        inputs = torch.cat((torch.tensor([[0, 0], [0, 37], [0, width * PAGE - 1]], device=DEVICE), tables), dim=1)
        given = (q, keys, values, inputs[:, TABLE_AT:], inputs[:, 1])
        off = (decode_kernel.attend(*given).float() - gathered_attention(*given).float()).abs().max().item()
        if not off <= TOLERANCE:
            raise ValueError(f"its attention is off by {off}")
        return "pages", decode_kernel.attend
    except Exception as error:
        if asked != "auto":
            raise
        print(f"the Triton kernel is not used: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return "gather", gathered_attention


@contextlib.contextmanager
def marked(name, wanted):
    """An NVTX range around the work, if wanted."""
    if wanted and DEVICE == "cuda":
        torch.cuda.nvtx.range_push(name)
    try:
        yield
    finally:
        if wanted and DEVICE == "cuda":
            torch.cuda.nvtx.range_pop()


class Service:
    """The model with its graphs, and the loop that serves requests."""

    @torch.no_grad()
    def __init__(self, layers=None, attention=None):
        torch.manual_seed(0)
        shape = shape_of(layers)
        self.attention, self.attend = choose_attention(shape, attention or os.environ.get("SUITE_ATTENTION") or "auto")
        self.model, self.launches = Model(shape), 0
        width = TABLE_AT + TOKENS_MAX // PAGE
        on_host = {"dtype": torch.long, "pin_memory": DEVICE == "cuda"}
        self.given_host, self.chosen_host = torch.zeros(BATCH_MAX, width, **on_host), torch.zeros(BATCH_MAX, **on_host)
        self.given = torch.zeros(BATCH_MAX, width, dtype=torch.long, device=DEVICE)
        self.chosen = torch.zeros(BATCH_MAX, dtype=torch.long, device=DEVICE)
        self.rows = self.given_host.numpy()
        self._fill([])
        self.given.copy_(self.given_host)
        self.graphs, self.last_logits = {}, None
        for size in sorted(SIZES, reverse=True):
            self.graphs[size] = self._graph(size)
        self.exact(24)

    def _tokens(self, size):
        """The work of a step of this batch size; its logits."""
        given = self.given[:size]
        positions, tables = given[:, 1], given[:, TABLE_AT:]
        attend = lambda q, keys, values: self.attend(q, keys, values, tables, positions)
        logits = self.model.logits(self.model.run(given[:, 0], positions, tables, attend))
        self.chosen[:size].copy_(logits.argmax(-1))
        return logits

    def _graph(self, size):
        """(replay, logits) of a batch size."""
        if DEVICE != "cuda":
            return lambda: self._tokens(size), None
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                self._tokens(size)
        models.sync()
        graph = torch.cuda.CUDAGraph()
        # They share memory: a step's output is read before the next one starts.
        pool = next((known[2] for known in self.graphs.values()), None)
        with torch.cuda.graph(graph, pool=pool):
            logits = self._tokens(size)
        return graph.replay, logits, graph.pool()

    def _fill(self, sequences):
        """A step's input: a row each, and padding rows that write into the scratch page."""
        for index, one in enumerate(sequences):
            row = self.rows[index]
            row[0], row[1] = one.answer[-1], one.cached
            row[TABLE_AT : TABLE_AT + len(one.pages)] = one.pages
        for index in range(len(sequences), BATCH_MAX):
            row = self.rows[index]
            row[0], row[1], row[TABLE_AT] = 0, index % PAGE, SCRATCH_PAGE

    def step(self, sequences):
        """One token for each sequence."""
        self._fill(sequences)
        replay, logits, *_ = self.graphs[next(size for size in SIZES if size >= len(sequences))]
        self.given.copy_(self.given_host, non_blocking=True)
        out = replay()
        self.last_logits = (out if logits is None else logits)[: len(sequences)]
        self.chosen_host.copy_(self.chosen, non_blocking=True)
        models.sync_stream()
        self.launches += 1
        return self.chosen_host[: len(sequences)].tolist()

    def prefill(self, one, count):
        """A chunk of a prompt; the token that follows it."""
        tokens = decode_batch.prompt(one.request.number, one.cached, count, self.model.shape.vocabulary)
        token = self.model.prefill(tokens, one.cached, one.pages).argmax(-1)
        return token.item()

    @torch.no_grad()
    def decode(self, start_at, warm_s, seconds, trace="conv", rate_per_s=None, marks=False):
        """Serve a trace at a rate, or without a pause if there is none; what took how long after `warm_s`, ms.

        A gap is the time between two tokens of one sequence, with prefills in between.
        """
        rows = decode_batch.read(trace)
        requests = decode_batch.at_rate(rows, rate_per_s, warm_s + seconds) if rate_per_s else decode_batch.backlog(rows)
        batcher = decode_batch.Batcher(requests)
        steps_ms, batches, gaps_ms, prefills_ms, launches = [], [], [], [], self.launches
        count_from, end_at, ended_before = start_at + warm_s, start_at + warm_s + seconds, None
        models.wait_for(start_at)
        while (now := time.monotonic()) < end_at:
            batcher.arrive(now - start_at)
            work = batcher.next()
            if work is None:
                continue
            if now >= count_from and ended_before is None:
                ended_before = batcher.finished
            what, whose, *rest = work
            with marked("tally:prefill" if what == "prefill" else "tally:token", marks):
                begin = time.monotonic()
                token = self.prefill(whose, *rest) if what == "prefill" else self.step(whose)
                ended = time.monotonic()
            if what == "prefill":
                batcher.prefilled(whose, *rest, token)
                whose.last_at = ended
                if begin >= count_from:
                    prefills_ms.append(round((ended - begin) * 1e3, 3))
                continue
            if begin >= count_from:
                steps_ms.append(round((ended - begin) * 1e3, 3))
                batches.append(len(whose))
                gaps_ms += [round((ended - one.last_at) * 1e3, 3) for one in whose]
            for one in whose:
                one.last_at = ended
            batcher.decoded(whose, token)
        elapsed = time.monotonic() - count_from
        return {
            "steps_ms": steps_ms,
            "batches": batches,
            "gaps_ms": gaps_ms,
            "prefills_ms": prefills_ms,
            "tokens": sum(batches),
            "seconds": elapsed,
            "tokens_per_s": sum(batches) / elapsed,
            "busy_percent": round((sum(steps_ms) + sum(prefills_ms)) / elapsed / 10, 2),
            "requests": batcher.finished - (ended_before or 0),
            "waiting": len(batcher.waiting),
            # Also those before `warm_s`.
            "launches": self.launches - launches,
            **self.facts(),
        }

    def facts(self):
        return {"layers": self.model.shape.layers, "attention": self.attention}

    @torch.no_grad()
    def exact(self, steps, trace="conv"):
        """So many decode steps of short requests that arrive at given steps: the digest must always be the same."""
        batcher, step = decode_batch.Batcher(decode_batch.fixed(decode_batch.read(trace), steps)), 0
        total, tokens = hashlib.sha256(), 0
        while step < steps:
            batcher.arrive(step)
            work = batcher.next()
            if work is None:
                step += 1
            elif work[0] == "prefill":
                batcher.prefilled(*work[1:], self.prefill(*work[1:]))
            else:
                chosen = self.step(work[1])
                total.update(repr([(one.request.number, token) for one, token in zip(work[1], chosen, strict=True)]).encode())
                batcher.decoded(work[1], chosen)
                step, tokens = step + 1, tokens + len(chosen)
        logits = models.digest([self.last_logits]) if self.last_logits is not None else ""
        return {"digest": hashlib.sha256((total.hexdigest() + logits).encode()).hexdigest(), "tokens": tokens, "finished": batcher.finished, **self.facts()}

    @torch.no_grad()
    def check(self, steps=6):
        """How far logits are from those without a cache, on average, as a share of their spread; of the worst sequence."""
        contexts = (3, 17, CHUNK - 2, CHUNK + 40)
        requests = [decode_batch.Request(number, 0.0, context, steps + 2) for number, context in enumerate(contexts)]
        batcher, step = decode_batch.Batcher(requests), 0
        batcher.arrive(0)
        while True:
            what, whose, *rest = batcher.next()
            if what == "prefill":
                batcher.prefilled(whose, *rest, self.prefill(whose, *rest))
                continue
            step += len(whose) == len(contexts)
            inputs = [decode_batch.prompt(one.request.number, 0, one.request.context, self.model.shape.vocabulary) + one.answer for one in whose]
            batcher.decoded(whose, self.step(whose))
            if step == 2 or batcher.finished:
                break
        plain = torch.cat([self.model.plain(tokens) for tokens in inputs]).float()
        return {"sequences": len(inputs), "off": ((self.last_logits.float() - plain).abs().mean(-1) / plain.std(-1)).max().item(), **self.facts()}


def prefill_work():
    """Best-effort work: one chunk of a prefill after the other, of the same shape with fewer layers; (step, weights)."""
    with torch.no_grad():
        shape = shape_of(BEST_EFFORT_LAYERS)
        model = Model(shape, pages=1 + CHUNK // PAGE)
    tokens, pages = decode_batch.prompt(0, 0, CHUNK, shape.vocabulary), list(range(1, 1 + CHUNK // PAGE))

    @torch.no_grad()
    def step():
        return model.prefill(tokens, 0, pages)

    return step, [model.head]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, help="of the model; default: all")
    parser.add_argument("--attention", choices=("auto", "pages", "gather"), help="of a decode step; auto: pages, if it works")
    parser.add_argument("--trace", choices=decode_batch.TRACES, default="conv", help="requests")
    parser.add_argument("--rate", type=float, help="requests a second; default: as many as it serves")
    parser.add_argument("--warm", type=float, default=2, help="seconds that are not counted")
    parser.add_argument("--seconds", type=float, default=8, help="seconds that are")
    parser.add_argument("--exact", type=int, metavar="STEPS", help="so many steps of a fixed schedule instead; a digest")
    parser.add_argument("--check", action="store_true", help="compare logits with those without a cache instead")
    parser.add_argument("--marks", action="store_true", help="mark tokens and prefills with NVTX")
    args = parser.parse_args()
    begin = time.monotonic()
    service = Service(args.layers, args.attention)
    built_s = round(time.monotonic() - begin, 1)
    if args.check:
        told = service.check()
    elif args.exact:
        told = service.exact(args.exact, args.trace)
    else:
        told = service.decode(time.monotonic(), args.warm, args.seconds, args.trace, args.rate, args.marks)
        for key in ("steps_ms", "gaps_ms", "prefills_ms", "batches"):
            values = told.pop(key)
            told[key] = {f"p{q}": percentile(values, q / 100) for q in (50, 95, 99)} if values else None
    print(json.dumps({"build_s": built_s, **told}))


if __name__ == "__main__":
    main()
