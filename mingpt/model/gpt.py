"""GPT, in two architectures of the same shape; its parameters' shapes and initial weights; generation.

| | `gpt2` (Radford et al. 2019) | `modern` |
|---|---|---|
| positions | learned, added (`wpe`) | rotary, on queries and keys (Su et al. 2021) |
| normalisation | LayerNorm with weight and bias | RMSNorm, no parameters, on `wte`, queries and keys too |
| MLP | 4 x, tanh-approximated GELU | 4 x, squared ReLU |
| biases | everywhere | nowhere |
| head | tied to `wte` | its own matrix |
| weights begin as | N(0, 0.02) | N(0, 1 / sqrt(fan_in)); `wte` N(0, 1); head zero |
| `c_proj` begins as | N(0, 0.02 / sqrt(2 n_layer)) | zero |

N(0, s) has standard deviation s. B is the batch, T the length of the input, C = n_embd, H = n_head,
D = C / H, V = vocab_size. Each parameter has a random stream of its own, so a worker can draw any one alone.
"""

import hashlib
import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.utils import checkpoint

from mingpt.config import ModelConfig
from mingpt.model.operations import KeyValues, Positions, head_logits, head_loss, ops_for, rms_norm

Shape = tuple[int, ...]


def parameter_shapes(config: ModelConfig, *, vocab_size: int, block_size: int) -> dict[str, Shape]:
    """Return the shapes of GPT(config, vocab_size=..., block_size=...).named_parameters(), by name.

    No model is made: the function allocates little, and takes time in proportion to n_layer.
    """
    width, gpt2 = config.n_embd, config.arch == "gpt2"
    shapes: dict[str, Shape] = {"wte.weight": (vocab_size, width)}
    if gpt2:
        shapes["wpe.weight"] = (block_size, width)
    for number in range(config.n_layer):
        block: dict[str, Shape] = {
            "attn.c_attn": (3 * width, width),
            "attn.c_proj": (width, width),
            "mlp.c_fc": (4 * width, width),
            "mlp.c_proj": (width, 4 * width),
        }
        if gpt2:
            block |= {"ln_1": (width,), "ln_2": (width,)}
        for name, shape in block.items():
            shapes[f"h.{number}.{name}.weight"] = shape
            if gpt2:
                shapes[f"h.{number}.{name}.bias"] = shape[:1]
    if gpt2:
        return shapes | {"ln_f.weight": (width,), "ln_f.bias": (width,)}
    return shapes | {"lm_head.weight": (vocab_size, width)}


def flops_per_token(config: ModelConfig, *, vocab_size: int, block_size: int) -> float:
    """Return the FLOPs of a forward and backward pass per token (Chowdhery et al. 2022, appendix B)."""
    shapes = parameter_shapes(config, vocab_size=vocab_size, block_size=block_size)
    embeddings = {"wpe.weight"} if config.arch == "gpt2" else {"wte.weight"}  # gpt2's wte is the head too
    matrices = sum(
        math.prod(shape) for name, shape in shapes.items() if len(shape) == 2 and name not in embeddings
    )
    return 6.0 * matrices + 12.0 * config.n_layer * config.n_embd * block_size


def draw_weight(name: str, shape: tuple[int, ...], config: ModelConfig, seed: int) -> Tensor:
    """Return a parameter's initial value, float32 on the CPU, by the table at the top of this file.

    The value depends on the arguments alone, not on the device, the number of threads or other parameters.
    """
    is_projection = name.endswith("c_proj.weight")
    weight = torch.zeros(shape, dtype=torch.float32, device="cpu")
    if name.endswith("bias"):
        return weight
    if "ln_" in name:
        return weight.fill_(1.0)
    if config.arch == "gpt2":
        std = 0.02 / math.sqrt(2 * config.n_layer) if is_projection else 0.02
    elif is_projection or name == "lm_head.weight":
        return weight
    else:
        std = 1.0 if name == "wte.weight" else shape[1] ** -0.5
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    generator = torch.Generator(device="cpu").manual_seed(int.from_bytes(digest[:8], "little"))
    return weight.normal_(std=std, generator=generator)


class Linear(nn.Linear):
    """nn.Linear without initial weights: `draw_weight` draws them."""

    def reset_parameters(self) -> None:
        """Draw nothing: on the meta device nn.Linear would import torch._dynamo for it."""


class Embedding(nn.Embedding):
    """nn.Embedding without initial weights: `draw_weight` draws them."""

    def reset_parameters(self) -> None:
        """Draw nothing, as in Linear above."""


class Dropout(nn.Dropout):
    def forward(self, x: Tensor) -> Tensor:
        return ops_for(x).dropout(x, self.p if self.training else 0.0)


class RMSNorm(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return ops_for(x).rms_norm(x)


class CausalSelfAttention(nn.Module):
    """Attention of each position to itself and to the positions before it."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.n_head, self.dropout = config.n_head, config.dropout
        bias = config.arch == "gpt2"
        self.c_attn = Linear(config.n_embd, 3 * config.n_embd, bias=bias)
        self.c_proj = Linear(config.n_embd, config.n_embd, bias=bias)
        self.resid_dropout = Dropout(config.dropout)

    def forward(self, x: Tensor, positions: Positions, cache: KeyValues | None = None) -> Tensor:
        """Map (B, T, C) to (B, T, C), as TorchOps.attention says."""
        qkv = self.c_attn(x)  # (B, T, 3 C)
        dropout = self.dropout if self.training else 0.0
        y = ops_for(x).attention(qkv, self.n_head, positions, dropout, cache)  # (B, T, C)
        return self.resid_dropout(self.c_proj(y))


class MLP(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.is_gpt2 = config.arch == "gpt2"
        self.c_fc = Linear(config.n_embd, 4 * config.n_embd, bias=self.is_gpt2)
        self.c_proj = Linear(4 * config.n_embd, config.n_embd, bias=self.is_gpt2)
        self.dropout = Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        ops, x = ops_for(x), self.c_fc(x)  # (B, T, 4 C)
        x = ops.gelu(x) if self.is_gpt2 else ops.squared_relu(x)
        return self.dropout(self.c_proj(x))


class Block(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.ln_1 = make_norm(config)
        self.attn = CausalSelfAttention(config)
        self.ln_2 = make_norm(config)
        self.mlp = MLP(config)
        self.recompute = False

    def forward(self, x: Tensor, positions: Positions, cache: KeyValues | None = None) -> Tensor:
        """Map (B, T, C) to (B, T, C); with `recompute`, the backward pass computes all activations again."""
        if cache is not None:  # never compiled: each token would have another shape
            return Block.compute(self, x, positions, cache)
        if not (self.recompute and self.training and torch.is_grad_enabled()):
            return self.compute(x, positions)
        y: Tensor = checkpoint.checkpoint(self.compute, x, positions, use_reentrant=False)
        return y

    def compute(self, x: Tensor, positions: Positions, cache: KeyValues | None = None) -> Tensor:
        x = x + self.attn(self.ln_1(x), positions, cache)
        return x + self.mlp(self.ln_2(x))


def make_norm(config: ModelConfig) -> nn.Module:
    return nn.LayerNorm(config.n_embd) if config.arch == "gpt2" else RMSNorm()


class GPT(nn.Module):
    """A decoder-only transformer over `vocab_size` tokens and up to `block_size` positions.

    Torch's global generator determines the initial weights. On the meta device nothing is drawn or computed:
    call `to_empty`, then `init_weights` and `init_buffers`.
    """

    def __init__(self, config: ModelConfig, *, vocab_size: int, block_size: int) -> None:
        super().__init__()
        self.config, self.vocab_size, self.block_size = config, vocab_size, block_size
        self.wte = Embedding(vocab_size, config.n_embd)
        self.wpe = Embedding(block_size, config.n_embd) if config.arch == "gpt2" else None
        self.drop = Dropout(config.dropout)
        self.positions = Positions(block_size, 0 if self.wpe else config.n_embd // config.n_head)
        self.h = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.ln_f = make_norm(config)
        self.lm_head = None if self.wpe else Linear(config.n_embd, vocab_size, bias=False)
        if not self.wte.weight.is_meta:
            self.init_weights(int(torch.randint(2**63 - 1, (), device="cpu")))

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """Set every parameter to the initial value that `draw_weight` draws for it."""
        for name, weight in self.named_parameters():
            weight.copy_(draw_weight(name, tuple(weight.shape), self.config, seed))

    def set_recompute(self, recompute: bool) -> None:
        """Set whether the backward pass computes a block's activations again instead of keeping them."""
        for block in self.h:
            assert isinstance(block, Block)
            block.recompute = recompute

    def init_buffers(self) -> None:
        """Compute masks and rotary tables again, after Module.to_empty."""
        self.positions.init_buffers()

    def forward(
        self, tokens: Tensor, targets: Tensor | None = None, caches: Sequence[KeyValues] | None = None
    ) -> tuple[Tensor | None, Tensor | None]:
        """Map (B, T) tokens to (B, T, V) logits and, given (B, T) targets, the mean loss in nats per token.

        With targets, logits have no gradient, and are None if `head_loss` computes them in chunks. With
        caches, one per block, the input continues the cached positions: any number of tokens if they are
        empty, else one. Raises ValueError past block_size.
        """
        start = caches[0].length if caches else 0
        end = start + tokens.size(1)
        if end > self.block_size:
            raise ValueError(f"{end} tokens do not fit in block_size {self.block_size}")
        x = self.wte(tokens)  # (B, T, C)
        x = self.drop(x + self.wpe.weight[start:end] if self.wpe else rms_norm(x))
        for number, block in enumerate(self.h):
            x = block(x, self.positions, caches[number] if caches else None)
        x, weight = self.ln_f(x), (self.lm_head or self.wte).weight
        return (head_logits(x, weight), None) if targets is None else head_loss(x, weight, targets)

    def flops_per_token(self) -> float:
        """Return the FLOPs of a forward and backward pass per token."""
        return flops_per_token(self.config, vocab_size=self.vocab_size, block_size=self.block_size)


class LossModule(nn.Module):
    """The module that is trained. It returns the loss alone, so no caller keeps logits or their gradient."""

    def __init__(self, model: GPT) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Map (B, T) tokens and targets to the mean loss in nats per token."""
        loss: Tensor = self.model(tokens, targets)[1]
        return loss


def choose(
    logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator, top_p: float = 1.0
) -> int:
    """Draw a token from (V,) logits; temperature 0 takes the most likely one.

    It draws from the `top_k` most likely tokens (all if None or 0), and of these from the fewest whose
    probabilities sum to at least `top_p` (Holtzman et al. 2020, section 3.1).
    """
    if temperature < torch.finfo(torch.float32).tiny:  # float32 may treat it as 0
        return int(logits.argmax())
    logits = (logits.float() - logits.max()) / temperature  # the largest is 0 at any temperature
    if top_k:
        logits[logits < logits.topk(min(top_k, len(logits))).values[-1]] = float("-inf")
    probabilities = torch.softmax(logits, dim=-1)
    if top_p < 1:
        ordered, tokens = probabilities.sort(descending=True, stable=True)
        probabilities[tokens[ordered.cumsum(0) - ordered >= top_p]] = 0  # the tokens before suffice
    return int(torch.multinomial(probabilities, 1, generator=generator))


@torch.no_grad()  # not inference_mode: FSDP2 goes on to train with tensors that it makes here
def generate_batch(
    model: GPT,
    prompt: Sequence[int],
    count: int,
    seeds: Sequence[int],
    *,
    temperature: float = 0.8,
    top_k: int | None = None,
    top_p: float = 1.0,
    vocab_size: int | None = None,
    end: int | None = None,
) -> Iterator[list[int | None]]:
    """Yield, up to `count` times, the next token of each sample that continues `prompt`, a sample per seed.

    The prompt must hold at least one token. The token `end` and those after it are None, and the iterator
    ends early once all samples have ended. Until it ends or is closed, the model is in eval mode. Only tokens
    below `vocab_size` are drawn, if the embedding has more rows. The same seeds give the same tokens on the
    same device. Each sample has a random stream of its own, so that more samples change no more than the
    rounding of its logits. At `block_size` positions the older half of the context is dropped.
    """
    was_training, block_size = model.training, model.block_size
    model.eval()
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    context = torch.tensor([list(prompt)[-block_size:] for _ in seeds])  # (samples, T)
    head_size = model.config.n_embd // model.config.n_head
    shape = len(seeds), model.config.n_head, block_size, head_size
    caches, unread = [KeyValues(model.wte.weight, *shape) for _ in model.h], context
    has_ended = [False for _ in seeds]
    try:
        for _ in range(count):
            if caches[0].length + unread.size(1) > block_size:
                unread = context[:, -max(1, block_size // 2) :]
                for cache in caches:
                    cache.length = 0
            logits, _ = model(unread.to(model.wte.weight.device), caches=caches)
            rows = zip(logits[:, -1, :vocab_size].cpu(), generators, strict=True)
            tokens = [choose(row, temperature, top_k, generator, top_p) for row, generator in rows]
            has_ended = [ended or token == end for ended, token in zip(has_ended, tokens, strict=True)]
            if all(has_ended):
                return
            unread = torch.tensor(tokens).unsqueeze(1)
            context = torch.cat((context, unread), dim=1)[:, -block_size:]
            yield [None if ended else token for ended, token in zip(has_ended, tokens, strict=True)]
    finally:
        model.train(was_training)
