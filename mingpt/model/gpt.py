"""What every architecture is made of: layers, a model from tokens to logits and loss, and generation.

An architecture is a subclass of GPT in the file <arch>.py, where <arch> is its value of model.arch.
docs/extending.md shows how to add an architecture.

In shapes, B is the batch size, T the length of the input, C = n_embd, H = n_head, D = C / H, V = vocab_size.
"""

import functools
import hashlib
import importlib
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.utils import checkpoint

from mingpt.base.errors import UserError
from mingpt.base.rows import Shape
from mingpt.config import ModelConfig
from mingpt.model.operations import KeyValues, Positions, PositionTables, head_logits, head_loss, ops_for


class Linear(nn.Linear):
    """nn.Linear that leaves its weights unset; `GPT.draw_weight` draws them."""

    def reset_parameters(self) -> None:
        """Do nothing: on the meta device nn.Linear's method would import torch._dynamo, which is slow."""


class Embedding(nn.Embedding):
    """nn.Embedding that leaves its weights unset; `GPT.draw_weight` draws them."""

    def reset_parameters(self) -> None:
        """Do nothing, for the reason given in `Linear.reset_parameters`."""


class Dropout(nn.Dropout):
    def forward(self, x: Tensor) -> Tensor:
        return ops_for(x).dropout(x, self.p if self.training else 0.0)


class RMSNorm(nn.Module):
    """RMSNorm without parameters. `width` is ignored: only norms with parameters need the width."""

    def __init__(self, width: int) -> None:
        super().__init__()

    def forward(self, x: Tensor) -> Tensor:
        return ops_for(x).rms_norm(x)


class CausalSelfAttention(nn.Module):
    """Multi-head attention of each position to itself and to the positions before it."""

    def __init__(self, config: ModelConfig, bias: bool) -> None:
        super().__init__()
        self.n_head, self.dropout = config.n_head, config.dropout
        self.c_attn = Linear(config.n_embd, 3 * config.n_embd, bias=bias)
        self.c_proj = Linear(config.n_embd, config.n_embd, bias=bias)

    def forward(self, x: Tensor, positions: Positions, cache: KeyValues | None = None) -> Tensor:
        """Map (B, T, C) features to (B, T, C); see `Operations.attention`, also for `cache`."""
        qkv = self.c_attn(x)  # (B, T, 3 C)
        dropout = self.dropout if self.training else 0.0
        return self.c_proj(ops_for(x).attention(qkv, self.n_head, positions, dropout, cache))


class MLP(nn.Module):
    """Two linear layers with 4 C features and an activation between them.

    `activation` is the name of a method of Operations.
    """

    def __init__(self, config: ModelConfig, activation: str, bias: bool) -> None:
        super().__init__()
        self.activation = activation
        self.c_fc = Linear(config.n_embd, 4 * config.n_embd, bias=bias)
        self.c_proj = Linear(4 * config.n_embd, config.n_embd, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        activation: Callable[[Tensor], Tensor] = getattr(ops_for(x), self.activation)
        return self.c_proj(activation(self.c_fc(x)))


class Block(nn.Module):
    """A transformer block: attention, then an MLP.

    The attention and the MLP each get the normalised residual stream as input. The output of each is added to
    the residual stream after dropout.
    """

    def __init__(self, config: ModelConfig, norm: type[nn.Module], attn: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.ln_1, self.attn, self.ln_2, self.mlp = norm(config.n_embd), attn, norm(config.n_embd), mlp
        self.drop_1, self.drop_2 = Dropout(config.dropout), Dropout(config.dropout)
        self.recompute = False

    def forward(self, x: Tensor, positions: Positions, cache: KeyValues | None = None) -> Tensor:
        """Map (B, T, C) features to (B, T, C); `positions` and `cache` are for the attention.

        In training mode with gradients, `cache` is ignored, and if the attribute `recompute` is true, the
        backward pass computes activations again.
        """
        if not (self.training and torch.is_grad_enabled()):  # never compiled: there are many shapes
            return type(self).compute(self, x, positions, cache)
        if not self.recompute:
            return self.compute(x, positions)
        y: Tensor = checkpoint.checkpoint(self.compute, x, positions, use_reentrant=False)
        return y

    def compute(self, x: Tensor, positions: Positions, cache: KeyValues | None = None) -> Tensor:
        x = x + self.drop_1(self.attn(self.ln_1(x), positions, cache))
        return x + self.drop_2(self.mlp(self.ln_2(x)))


DRAWN = (nn.Linear, nn.Embedding, nn.LayerNorm, nn.RMSNorm)  # `GPT.draw_weight` has rules for their weights


class GPT(nn.Module):
    """A decoder-only transformer over `vocab_size` tokens and up to `block_size` positions.

    GPT(config, ...) makes an instance of the subclass that `config.arch` names. This class has rotary
    positions, RMSNorm without parameters, no biases, and a head that is not tied to the embedding; a subclass
    overrides what it does differently. Torch's global generator determines the initial weights. On the meta
    device no weight and no buffer is computed: later call `to_empty`, `init_weights` and `init_buffers`.
    """

    norm: type[nn.Module] = RMSNorm
    activation, bias = "squared_relu", False

    def __new__(cls, config: ModelConfig, **sizes: int) -> "GPT":
        return super().__new__(architecture(config.arch) if cls is GPT else cls)

    def __init__(self, config: ModelConfig, *, vocab_size: int, block_size: int) -> None:
        super().__init__()
        self.config, self.vocab_size, self.block_size = config, vocab_size, block_size
        self.drop = Dropout(config.dropout)
        self.make_modules(config)
        self.check_parameters()
        if not self.wte.weight.is_meta:
            self.init_weights(int(torch.randint(2**63 - 1, (), device="cpu")))

    def make_modules(self, config: ModelConfig) -> None:
        """Make the modules. Their order is that of `parameters()`, and the bits of a run depend on it."""
        self.wte = Embedding(self.vocab_size, config.n_embd)
        self.positions = PositionTables(self.block_size, config.n_embd // config.n_head)
        self.h = nn.ModuleList(self.make_block(config) for _ in range(config.n_layer))
        self.ln_f = self.norm(config.n_embd)
        self.lm_head = Linear(config.n_embd, self.vocab_size, bias=False)

    def make_block(self, config: ModelConfig) -> Block:
        """Return a new block, whose weights are not drawn yet; `init_weights` draws them."""
        attn, mlp = CausalSelfAttention(config, self.bias), MLP(config, self.activation, self.bias)
        return Block(config, self.norm, attn, mlp)

    def embed(self, tokens: Tensor, start: int) -> Tensor:
        """Return the (B, T, C) embeddings of (B, T) tokens at positions `start`, `start` + 1, ..."""
        return self.wte(tokens)

    @property
    def head(self) -> nn.Linear | nn.Embedding:
        """The module whose weight, (V, C), maps features to logits; a tied head is the embedding."""
        return self.lm_head if hasattr(self, "lm_head") else self.wte

    def initial_std(self, name: str, shape: Shape) -> float:
        """Return the standard deviation with which matrix `name` is drawn; 0 means all zeros."""
        if name.endswith("c_proj.weight") or name == "lm_head.weight":
            return 0.0
        return 1.0 if name == "wte.weight" else shape[1] ** -0.5

    def flops_per_token(self) -> float:
        """Return the FLOPs of a forward and backward pass per token (Chowdhery et al. 2022, appendix B).

        The weights of an embedding count only if the embedding is also the head.
        """
        embeddings = {module.weight for module in self.modules() if isinstance(module, nn.Embedding)}
        used = set(self.parameters()) - (embeddings - {self.head.weight})
        sizes = [weight.numel() for weight in used if weight.ndim > 1]
        return 6.0 * sum(sizes) + 12.0 * self.config.n_layer * self.config.n_embd * self.block_size

    def draw_weight(self, name: str, shape: Shape, seed: int) -> Tensor:
        """Return the initial value of parameter `name`, drawn with `seed`: a float32 tensor on the CPU.

        If the parameter's module has a method `initial_weight(name, shape, generator)`, this method draws the
        value; its `name` is the parameter's name in the module. Otherwise matrices are normally distributed
        with `initial_std`, biases are zeros and weights of norms are ones. The value depends only on the
        arguments and the configuration, so a worker can draw any parameter by itself.
        """
        digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
        generator = torch.Generator(device="cpu").manual_seed(int.from_bytes(digest[:8], "little"))
        path, _, own_name = name.rpartition(".")
        draw: Callable[..., Tensor] | None = getattr(self.get_submodule(path), "initial_weight", None)
        if draw:
            return draw(own_name, shape, generator)
        weight = torch.zeros(shape, dtype=torch.float32, device="cpu")
        if len(shape) < 2:
            return weight if name.endswith("bias") else weight.fill_(1.0)
        std = self.initial_std(name, shape)
        return weight.normal_(std=std, generator=generator) if std else weight

    def check_parameters(self) -> None:
        """Raise UserError for a parameter that is not float32, or for which `draw_weight` has no rule."""
        for name, weight in self.named_parameters():
            if weight.dtype != torch.float32:
                raise UserError(f"{name} of model.arch={self.config.arch} is {weight.dtype}: make it float32")
            module = self.get_submodule(name.rpartition(".")[0])
            if not isinstance(module, DRAWN) and not hasattr(module, "initial_weight"):
                raise UserError(
                    f"no rule says with which values {name} of model.arch={self.config.arch} begins: give "
                    f"{type(module).__name__} a method initial_weight (docs/extending.md)"
                )

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """Set every parameter to the initial value that `draw_weight` draws with `seed`."""
        for name, weight in self.named_parameters():
            weight.copy_(self.draw_weight(name, tuple(weight.shape), seed))

    def init_buffers(self) -> None:
        """Compute all buffers, by the methods `init_buffers` of their modules.

        Call this after Module.to_empty. Raises UserError for a buffer whose module has no such method. A
        subclass of GPT that itself has buffers must extend this method.
        """
        for path, module in self.named_modules():
            names = [name for name, _ in module.named_buffers(recurse=False)]
            if names and not hasattr(module, "init_buffers"):
                raise UserError(
                    f"nothing computes the buffer {path}.{names[0]} of model.arch={self.config.arch}: give "
                    f"{type(module).__name__} a method init_buffers (docs/extending.md)"
                )
            if names and module is not self:
                module.init_buffers()  # type: ignore[operator]

    def set_recompute(self, recompute: bool) -> None:
        """Set whether blocks recompute activations in the backward pass instead of keeping them."""
        for block in self.h:
            assert isinstance(block, Block)
            block.recompute = recompute

    def forward(
        self, tokens: Tensor, targets: Tensor | None = None, caches: Sequence[KeyValues] | None = None
    ) -> tuple[Tensor | None, Tensor | None]:
        """Map (B, T) tokens to (B, T, V) logits and, given (B, T) targets, the mean loss in nats per token.

        Without targets the loss is None. With targets, logits have no gradient, and are None if `head_loss`
        computes them in chunks. With caches, one per block, the tokens follow the cached positions. If the
        caches are empty, there may be any number of tokens, else only one. In training mode with gradients,
        use no caches: blocks ignore them. Raises ValueError if there are more than block_size positions.
        """
        start = caches[0].length if caches else 0
        end = start + tokens.size(1)
        if end > self.block_size:
            raise ValueError(f"{end} tokens do not fit in block_size {self.block_size}")
        x = self.drop(self.embed(tokens, start))  # (B, T, C)
        positions: Positions = self.positions()
        for number, block in enumerate(self.h):
            x = block(x, positions, caches[number] if caches else None)
        x, weight = self.ln_f(x), self.head.weight
        return (head_logits(x, weight), None) if targets is None else head_loss(x, weight, targets)


# {value of model.arch: class}; the file of an architecture adds its class.
ARCHITECTURES: dict[str, type[GPT]] = {}


def architecture(arch: str) -> type[GPT]:
    """Return the class for `arch`, a value of model.arch, after importing mingpt/model/<arch>.py."""
    importlib.import_module(f"mingpt.model.{arch}")
    return ARCHITECTURES[arch]


@functools.cache  # a dozen blocks take ten milliseconds
def parameter_shapes(
    config: ModelConfig, *, vocab_size: int, block_size: int, is_trained: bool = False
) -> dict[str, Shape]:
    """Return {name: shape} for the parameters of GPT(config, ...), without allocating the parameters.

    With `is_trained`, leave frozen parameters out. Raises UserError if a tensor would be too large for torch,
    or if GPT raises UserError, for example for an odd size of a head with rotary positions.
    """
    try:
        with torch.device("meta"):
            model = GPT(config, vocab_size=vocab_size, block_size=block_size)
    except (RuntimeError, TypeError, OverflowError):  # torch counts sizes and bytes in 63 bits
        raise UserError("no tensor can be as large as one of this model") from None
    return {
        name: tuple(weight.shape)
        for name, weight in model.named_parameters()
        if weight.requires_grad or not is_trained
    }


class LossModule(nn.Module):
    """The module that is trained. It returns only the loss, so a caller cannot keep logits in memory."""

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
    """Draw a token from (V,) logits with `generator`; temperature 0 takes the most likely token.

    Only the `top_k` most likely tokens, and tokens as likely as the last of them, can be drawn; all tokens if
    `top_k` is None or 0. Among them the least likely tokens are left out, as long as the other tokens'
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
        probabilities[tokens[ordered.cumsum(0) - ordered >= top_p]] = 0  # the more likely tokens suffice
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
    """Generate one sample per seed, a continuation of `prompt`; yield the samples' next tokens.

    The iterator yields up to `count` lists, with a token per sample. A sample ends with the token `end`; None
    stands for this token and all later tokens. The iterator ends early once all samples have ended. From its
    first step until it ends or is closed, the model is in eval mode. If FSDP shards the model, all ranks must
    iterate together. `prompt` must have at least one token; only its last `block_size` tokens are used. If
    `vocab_size` is not None, only tokens below it are drawn. `temperature`, `top_k` and `top_p` are arguments
    of `choose`.

    Each sample has its own random generator, made from its seed, so other samples change only the rounding of
    its logits. When the context (prompt and new tokens) becomes longer than `block_size`, only its last
    max(1, block_size // 2) tokens are kept. If a model does not fill the key/value caches, each token costs a
    forward pass over the whole context.
    """
    was_training, block_size = model.training, model.block_size
    model.eval()
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    context = torch.tensor([list(prompt)[-block_size:] for _ in seeds])  # (samples, T)
    caches = [KeyValues(block_size) for _ in model.h]
    has_ended = [False for _ in seeds]
    try:
        for _ in range(count):
            if context.size(1) > block_size:
                context = context[:, -max(1, block_size // 2) :]
                for cache in caches:
                    cache.length = 0
            unread = context[:, caches[0].length :]
            logits, _ = model(unread.to(model.wte.weight.device), caches=caches)
            rows = zip(logits[:, -1, :vocab_size].cpu(), generators, strict=True)
            tokens = [choose(row, temperature, top_k, generator, top_p) for row, generator in rows]
            has_ended = [ended or token == end for ended, token in zip(has_ended, tokens, strict=True)]
            if all(has_ended):
                return
            context = torch.cat((context, torch.tensor(tokens).unsqueeze(1)), dim=1)
            yield [None if ended else token for ended, token in zip(has_ended, tokens, strict=True)]
    finally:
        model.train(was_training)
