"""The GPU programs that are measured: stock PyTorch, torchvision and transformers.

Imports happen where they are needed: a process pays only for what it runs.
Weights are random and made on the GPU; nothing is downloaded.
"""

import contextlib
import os
import time

import torch

DEVICE = os.environ.get("SUITE_DEVICE", "cuda")  # "cpu" only to try the scripts themselves
SMALL = bool(os.environ.get("SUITE_SMALL"))  # tiny models, likewise
HALF = torch.half if DEVICE == "cuda" else torch.bfloat16


def sync():
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def sync_stream():
    """Wait for the stream that work is in, as a server does that reads its answer from it."""
    if DEVICE == "cuda":
        torch.cuda.current_stream().synchronize()


def wait_for(start_at):
    """Wait until this time of the monotonic clock, exactly."""
    left = start_at - time.monotonic()
    if left > 0.01:
        time.sleep(left - 0.01)
    while time.monotonic() < start_at:
        pass


def autocast():
    return torch.autocast(DEVICE, dtype=torch.bfloat16)


def load_libraries():
    """What the deterministic trainings import: seconds, the first time."""
    import torchvision  # noqa: F401
    from transformers import BertForMaskedLM, GPT2LMHeadModel  # noqa: F401


def _resnet50():
    import torchvision

    with torch.device(DEVICE):
        return torchvision.models.resnet18() if SMALL else torchvision.models.resnet50()


def _bert(**config):
    from transformers import BertConfig, BertModel

    if SMALL:
        config = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    with torch.device(DEVICE):
        return BertModel(BertConfig(**config)).eval().to(HALF)


def _gpt2(**config):
    from transformers import GPT2Config, GPT2LMHeadModel

    if SMALL:
        config = {"n_embd": 64, "n_layer": 2, "n_head": 4}
    with torch.device(DEVICE):
        # The fused attention's backward pass adds in any order.
        eager = {"attn_implementation": "eager"} if torch.are_deterministic_algorithms_enabled() else {}
        return GPT2LMHeadModel(GPT2Config(**config, **eager))


def resnet50_request():
    """ResNet-50, half precision, channels last, batch 1; returns the output."""
    model = _resnet50().eval().to(HALF).to(memory_format=torch.channels_last)
    x = torch.randn(1, 3, 224, 224, device=DEVICE, dtype=HALF).to(memory_format=torch.channels_last)
    return lambda: model(x)


def bert_request(**config):
    """BERT-base, half precision, batch 1, 128 tokens; returns the output."""
    model = _bert(**config)
    x = torch.randint(0, 30000, (1, 128), device=DEVICE)
    return lambda: model(x).last_hidden_state


def graphed(request):
    """The same request as one CUDA graph, warmed; returns the static output."""
    with torch.no_grad():
        for _ in range(10):
            request()
    sync()
    if DEVICE != "cuda":
        return request
    side = torch.cuda.Stream()
    with torch.no_grad(), torch.cuda.stream(side):
        for _ in range(3):
            request()
    sync()
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        output = request()

    def replay():
        graph.replay()
        return output

    # The graph has the addresses of its weights and inputs, and nothing else keeps them.
    replay.request = request
    return replay


def captured(training):
    """The same training with its step as one CUDA graph; (step, parameters)."""
    step, parameters = training
    if DEVICE != "cuda":
        return training
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    sync()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        value = step()

    def replay():
        graph.replay()
        # The next replay writes the same place.
        return value.detach().clone()

    # The graph has the addresses of what the step uses.
    replay.step = step
    return replay, parameters


def _trainer(loss, optimizer):
    def step():
        with autocast():
            value = loss()
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        return value

    return step


def resnet50_training(batch=64):
    """ResNet-50 with bf16 autocast and SGD; (step, parameters)."""
    model = _resnet50()
    batch = 2 if SMALL else batch
    x = torch.randn(batch, 3, 224, 224, device=DEVICE)
    y = torch.randint(0, 1000, (batch,), device=DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    step = _trainer(lambda: torch.nn.functional.cross_entropy(model(x), y), optimizer)
    return step, list(model.parameters()) + list(model.buffers())


def gpt2_training(batch=8, tokens=1024, **config):
    """GPT-2 with bf16 autocast and AdamW; (step, parameters)."""
    model = _gpt2(**config)
    if SMALL:
        batch, tokens = 2, 32
    x = torch.randint(0, 50000, (batch, tokens), device=DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    step = _trainer(lambda: model(input_ids=x, labels=x).loss, optimizer)
    return step, list(model.parameters())


def bert_training(batch=8, tokens=128):
    """BERT-base, masked language model, with bf16 autocast and AdamW; (step, parameters)."""
    from transformers import BertConfig, BertForMaskedLM

    config = {"attn_implementation": "eager"} if torch.are_deterministic_algorithms_enabled() else {}
    if SMALL:
        config |= {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
        batch, tokens = 2, 32
    with torch.device(DEVICE):
        model = BertForMaskedLM(BertConfig(**config))
    x = torch.randint(0, 30000, (batch, tokens), device=DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    step = _trainer(lambda: model(input_ids=x, labels=x).loss, optimizer)
    return step, list(model.parameters())


def lstm_training(batch=20, steps=35, width=1500, layers=2, vocabulary=10000):
    """An LSTM language model with bf16 autocast and SGD; (step, parameters)."""
    if SMALL:
        batch, steps, width, vocabulary = 2, 5, 32, 100
    with torch.device(DEVICE):
        embed, head = torch.nn.Embedding(vocabulary, width), torch.nn.Linear(width, vocabulary)
        lstm = torch.nn.LSTM(width, width, layers)
        x = torch.randint(0, vocabulary, (steps + 1, batch))
    parameters = [weights for module in (embed, lstm, head) for weights in module.parameters()]

    def loss():
        return torch.nn.functional.cross_entropy(head(lstm(embed(x[:-1]))[0]).flatten(0, 1), x[1:].flatten())

    return _trainer(loss, torch.optim.SGD(parameters, lr=0.01)), parameters


def vgg16_training(batch=32):
    """VGG-16 with bf16 autocast and SGD; (step, parameters)."""
    import torchvision

    side = 32 if SMALL else 224
    batch = 2 if SMALL else batch
    with torch.device(DEVICE):
        model = torchvision.models.vgg11() if SMALL else torchvision.models.vgg16()
        x, y = torch.randn(batch, 3, side, side), torch.randint(0, 1000, (batch,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return _trainer(lambda: torch.nn.functional.cross_entropy(model(x), y), optimizer), list(model.parameters())


BERT_LARGE = {
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "intermediate_size": 4096,
}


@torch.no_grad()
def llama_decode_request(layers=32, width=4096, inner=11008, heads=32, cached=512, vocabulary=32000):
    """One token of a decoder of Llama-2-7B's shape, half precision, batch 1, random weights; the logits.

    Our own few lines in place of the model's code: the same matrix-vector products, attention over a
    cache of fixed length, normalisations and activation, in the same order.
    """
    if SMALL:
        layers, width, inner, heads, cached, vocabulary = 2, 64, 128, 4, 16, 256
    F = torch.nn.functional

    def weights(rows, columns):
        return torch.empty(rows, columns, device=DEVICE, dtype=HALF).normal_(std=0.02)

    sizes = ((3 * width, width), (width, width), (2 * inner, width), (width, inner))
    stack = [[weights(*size) for size in sizes] for _ in range(layers)]
    caches = torch.empty(layers, 2, 1, heads, cached, width // heads, device=DEVICE, dtype=HALF).normal_(std=0.02)
    head, scale = weights(vocabulary, width), torch.ones(width, device=DEVICE, dtype=HALF)
    token = torch.empty(1, width, device=DEVICE, dtype=HALF).normal_()

    def request():
        x = token
        for (qkv, out, up, down), (keys, values) in zip(stack, caches, strict=True):
            q, k, v = F.linear(F.rms_norm(x, (width,), scale), qkv).view(3, 1, heads, 1, width // heads).unbind(0)
            keys[:, :, -1:] = k
            values[:, :, -1:] = v
            x = x + F.linear(F.scaled_dot_product_attention(q, keys, values).reshape(1, width), out)
            gate, value = F.linear(F.rms_norm(x, (width,), scale), up).chunk(2, dim=-1)
            x = x + F.linear(F.silu(gate) * value, down)
        return F.linear(F.rms_norm(x, (width,), scale), head)

    return request


def translation_request(batch=16, tokens=32, width=512, layers=6, vocabulary=32000):
    """A Transformer that translates a batch greedily, half precision, random weights; the tokens.

    Without a cache of keys: each step decodes all tokens before it.
    """
    if SMALL:
        batch, tokens, width, layers, vocabulary = 2, 4, 64, 1, 256
    with torch.device(DEVICE):
        model = torch.nn.Transformer(width, width // 64, layers, layers, 4 * width, batch_first=True).eval().to(HALF)
        embed, head = torch.nn.Embedding(vocabulary, width).to(HALF), torch.nn.Linear(width, vocabulary).to(HALF)
        source, first = torch.randint(0, vocabulary, (batch, tokens)), torch.zeros(batch, 1, dtype=torch.long)
        masks = [torch.nn.Transformer.generate_square_subsequent_mask(n + 1, dtype=HALF) for n in range(tokens)]

    def request():
        memory, said = model.encoder(embed(source)), first
        for mask in masks:
            # Told, not looked up: a look at the mask would wait for the GPU.
            decoded = model.decoder(embed(said), memory, tgt_mask=mask, tgt_is_causal=True)
            said = torch.cat([said, head(decoded[:, -1]).argmax(-1, keepdim=True)], dim=1)
        return said

    return request


def small_kernels_request(count=300):
    """Very many kernels of one block, one behind the other; their number."""
    x = torch.zeros(1, device=DEVICE)

    def request():
        for _ in range(count):
            x.add_(1)
        return x

    return request


def short_kernels_training(count=200, elements=6 << 20):
    """Kernels of 10 us on an H200, each over the whole of a tensor; (step, parameters)."""
    x = torch.ones(1024 if SMALL else elements, device=DEVICE)

    def step():
        for _ in range(count):
            x.mul_(1.0001)
        return x[0]

    return step, [x]


def two_streams(launches=200):
    """Kernels of one block in two streams, at the same time."""
    if DEVICE != "cuda":
        return
    other, (x, y) = torch.cuda.Stream(), torch.zeros(2, device=DEVICE)
    for _ in range(launches):
        with torch.cuda.stream(other):
            y.add_(1)
        x.add_(1)
    sync()


def llama_service():
    """A decode service of Llama-3.1-8B's shape."""
    import decode_job

    return decode_job.Service()


def llama_prefill():
    """Prefills of that shape with fewer layers, one after the other; (step, parameters)."""
    import decode_job

    return decode_job.prefill_work()


# What a worker can serve by name. Requests are timed one by one, trainings by rate.
REQUESTS = {
    "resnet50-eager": resnet50_request,
    "resnet50-graph": lambda: graphed(resnet50_request()),
    "bert-graph": lambda: graphed(bert_request()),
    "bert-large-graph": lambda: graphed(bert_request(**BERT_LARGE)),
    "llama-7b-decode-graph": lambda: graphed(llama_decode_request()),
    "translation-eager": translation_request,
    "translation-graph": lambda: graphed(translation_request()),
    "small-kernels-graph": lambda: graphed(small_kernels_request()),
}
TRAININGS = {
    "resnet50-train": resnet50_training,
    "resnet50-b128-train": lambda: resnet50_training(batch=128),
    "resnet50-b8-graph-train": lambda: captured(resnet50_training(batch=8)),
    "bert-b8-train": bert_training,
    "lstm-graph-train": lambda: captured(lstm_training()),
    "bert-b32-train": lambda: bert_training(batch=32),
    "gpt2-large-train": lambda: gpt2_training(batch=4, tokens=512, n_embd=1280, n_layer=36, n_head=20),
    "gpt2-train": lambda: gpt2_training(n_embd=1280, n_layer=12, n_head=20),
    "llama-prefill": llama_prefill,
    "lstm-train": lstm_training,
    "vgg16-train": vgg16_training,
    "short-kernels-train": short_kernels_training,
    "short-kernels-graph-train": lambda: captured(short_kernels_training()),
}
SERVICES = {"llama-8b-service": llama_service}


@contextlib.contextmanager
def deterministic():
    """Same seed, same bits. CUBLAS_WORKSPACE_CONFIG must be set before CUDA starts."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True
    try:
        yield
    finally:
        torch.backends.cudnn.deterministic = False
        torch.use_deterministic_algorithms(False)


def digest(tensors):
    """SHA-256 of the bytes of some tensors, in order."""
    import hashlib

    total = hashlib.sha256()
    for tensor in tensors:
        flat = tensor.detach().contiguous().reshape(-1).cpu()
        total.update(flat.view(torch.uint8).numpy().tobytes())
    return total.hexdigest()
