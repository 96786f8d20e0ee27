"""Continuous batching of a decode service without its model: requests, KV cache pages, and what to run next.

Standard library only: CI tests it without torch. `decode_job.py` runs the model.
"""

import collections
import csv
import dataclasses
import pathlib

DATA = pathlib.Path(__file__).resolve().parent / "data"
TRACES = ("conv", "code")
# Tokens of a page of the KV cache, of a sequence with its answer, of an answer, and of one chunk of a prefill.
PAGE, TOKENS_MAX, ANSWER_MAX, CHUNK = 16, 2048, 1024, 512
BATCH_MAX = 16
# Padding rows of a batch write here, each into a token of its own.
SCRATCH_PAGE = 0
PAGES = 1 + BATCH_MAX * TOKENS_MAX // PAGE
# Requests of the fixed schedule: one every so many steps, and so short that many begin and end.
EXACT_EVERY, EXACT_CONTEXT, EXACT_ANSWER = 3, 600, 24


@dataclasses.dataclass(frozen=True)
class Request:
    """A request: when it arrives (seconds, or steps), tokens of its prompt and of its answer."""

    number: int
    arrives: float
    context: int
    generated: int


def read(trace, folder=DATA):
    """The (arrival in s, context, generated) of an excerpt, lengths cut to what the service takes."""
    with open(folder / f"azure-llm-{trace}.csv", newline="") as file:
        rows = [(int(row["arrival_ms"]) / 1e3, int(row["context"]), int(row["generated"])) for row in csv.DictReader(file)]
    return [(at, *cut(context, generated)) for at, context, generated in rows]


def cut(context, generated, answer_max=ANSWER_MAX, tokens_max=TOKENS_MAX):
    """Lengths of a request that fits: at least one token of each, and no more than a sequence may have."""
    generated = min(max(generated, 1), answer_max)
    return min(max(context, 1), tokens_max - generated), generated


def generated_mean(rows):
    """Tokens that a request of a trace generates, on average."""
    return sum(generated for _, _, generated in rows) / len(rows)


def backlog(rows):
    """All requests, there from the start and again and again: the service never pauses."""
    number = 0
    while True:
        for _, context, generated in rows:
            yield Request(number, 0.0, context, generated)
            number += 1


def at_rate(rows, rate_per_s, seconds):
    """The first requests at this mean rate over `seconds`, with the trace's own gaps, scaled.

    Past its end the trace begins again.
    """
    if rate_per_s <= 0:
        raise ValueError(f"the rate must be positive, got {rate_per_s}")
    wanted = max(1, round(rate_per_s * seconds))
    length_s = rows[-1][0] + rows[-1][0] / len(rows)

    def arrival_s(number):
        return number // len(rows) * length_s + rows[number % len(rows)][0]

    # The first request that is not wanted arrives at the end.
    scale = seconds / arrival_s(wanted)
    return [Request(number, arrival_s(number) * scale, *rows[number % len(rows)][1:]) for number in range(wanted)]


def fixed(rows, steps):
    """Short requests that arrive at given steps, for runs that must give the same tokens."""
    sizes = (cut(min(context, EXACT_CONTEXT), generated, EXACT_ANSWER) for _, context, generated in rows)
    return [Request(n, n * EXACT_EVERY, *size) for n, size in zip(range(steps // EXACT_EVERY + 1), sizes)]


def prompt(number, start, count, vocabulary):
    """Tokens `start` to `start + count` of a request's prompt."""
    return [(at * 7919 + number * 104729 + 1) % vocabulary for at in range(start, start + count)]


class Pages:
    """The free pages of the KV cache. A page belongs to one sequence until it is released."""

    def __init__(self, total):
        self.free = [page for page in range(total - 1, -1, -1) if page != SCRATCH_PAGE]

    def take(self, count):
        if count > len(self.free):
            raise RuntimeError(f"{count} pages wanted, {len(self.free)} free")
        return [self.free.pop() for _ in range(count)]

    def release(self, pages):
        self.free.extend(reversed(pages))


class Sequence:
    """A request that is served."""

    def __init__(self, request):
        self.request = request
        # Tokens in the cache, its pages, tokens of the answer so far, when the last of them was there.
        self.cached, self.pages, self.answer, self.last_at = 0, [], [], None

    @property
    def is_prefilled(self):
        return self.cached >= self.request.context

    @property
    def is_done(self):
        return len(self.answer) >= self.request.generated


class Batcher:
    """What to run next: at most one chunk of a prefill between two decode steps."""

    def __init__(self, requests, pages=PAGES, batch_max=BATCH_MAX):
        self.requests, self.pages, self.batch_max = iter(requests), Pages(pages), batch_max
        self.coming = next(self.requests, None)
        self.waiting, self.running, self.prefilling = collections.deque(), [], None
        self.was_prefill, self.finished = False, 0

    def arrive(self, now):
        """Take the requests that have arrived; of a backlog no more than can be served."""
        while self.coming and self.coming.arrives <= now and (self.coming.arrives or len(self.waiting) < self.batch_max):
            self.waiting.append(self.coming)
            self.coming = next(self.requests, None)

    def next(self):
        """("prefill", sequence, tokens), ("decode", sequences), or None: nothing is there.

        Its sequences have the pages that it writes.
        """
        if self.prefilling is None and self.waiting and len(self.running) < self.batch_max:
            self.prefilling = Sequence(self.waiting.popleft())
        if self.prefilling and not (self.was_prefill and self.running):
            one = self.prefilling
            count = min(CHUNK, one.request.context - one.cached)
            self._grow(one, count)
            self.was_prefill = True
            return "prefill", one, count
        self.was_prefill = False
        if not self.running:
            return None
        for one in self.running:
            self._grow(one, 1)
        return "decode", list(self.running)

    def prefilled(self, one, count, token):
        """A chunk is in the cache; the last one gives the first token of the answer."""
        one.cached += count
        if one.is_prefilled:
            self.prefilling = None
            self.running.append(one)
            self._answered(one, token)

    def decoded(self, sequences, tokens):
        """Each has one more token in the cache and in its answer."""
        for one, token in zip(sequences, tokens, strict=True):
            one.cached += 1
            self._answered(one, token)

    def _answered(self, one, token):
        one.answer.append(token)
        if one.is_done:
            self.running.remove(one)
            self.pages.release(one.pages)
            one.pages, self.finished = [], self.finished + 1

    def _grow(self, one, tokens):
        wanted = -(-(one.cached + tokens) // PAGE)
        one.pages += self.pages.take(wanted - len(one.pages))
