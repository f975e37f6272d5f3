"""What a micro-batch keeps for its backward pass, and what both passes need beside it, in bytes.

The terms are the tensors of mingpt/model, one by one; a test counts those that are alive. N is the tokens of
a micro-batch, C = n_embd, V = vocab_size, e the bytes of an element in the type of the products. The residual
stream is float32.
"""

from mingpt.evaluate import MIN_BATCH_TOKENS
from mingpt.model import cpu_ops, gpt, loss
from mingpt.plan.workload import FLOAT_BYTES, Workload


def kept(work: Workload) -> int:
    """By all blocks and what surrounds them, at the end of the forward pass."""
    config = work.config
    stream = work.tokens_per_micro_batch * config.model.n_embd  # N C
    dropped = work.element_bytes * stream if config.model.dropout else 0  # a mask
    around = dropped + outer_norms(work, stream) + loss_kept(work)
    if config.trainer.recompute == "block":
        return config.model.n_layer * FLOAT_BYTES * stream + around  # each block's input
    return config.model.n_layer * block(work) + around


def block(work: Workload) -> int:
    """By one block."""
    model, e = work.config.model, work.element_bytes
    tokens = work.tokens_per_micro_batch
    stream = tokens * model.n_embd
    # The input of c_attn, that of the attention's c_proj, of c_fc and, 4 C wide, of the MLP's c_proj; the
    # activation's own input.
    products = (1 + 1 + 1 + 4 + 4) * e * stream
    if model.arch == "gpt2":  # LayerNorm keeps its input, mean and deviation; RMSNorm its result and a scale
        norms = 2 * (FLOAT_BYTES * stream + 2 * FLOAT_BYTES * tokens)
    else:
        norms = 2 * FLOAT_BYTES * tokens
    masks = 2 * e * stream if model.dropout else 0
    return products + norms + attention(work) + masks


def attention(work: Workload) -> int:
    """Between c_attn and c_proj."""
    model, e = work.config.model, work.element_bytes
    tokens, length = work.tokens_per_micro_batch, work.config.data.block_size
    stream = tokens * model.n_embd
    heads = work.config.trainer.micro_batch_size * model.n_head
    qkv = 3 * e * stream
    if work.on_cpu and length <= gpt.MAX_MATH_ATTENTION:
        rotary = 0
        if model.arch == "modern":  # normed queries and keys, their scales, and tables in the products' type
            tables = 0 if e == FLOAT_BYTES else e * length * model.n_embd // model.n_head
            rotary = 2 * e * stream + 2 * FLOAT_BYTES * tokens * model.n_head + tables
        ends = [min(first + cpu_ops.ROWS, length) for first in range(0, length, cpu_ops.ROWS)]
        seen = sum((end - first) * end for first, end in zip([0, *ends], ends, strict=False))
        return qkv + rotary + heads * seen * e * (2 if model.dropout else 1)
    rotary = 0
    if model.arch == "modern":  # rotated queries and keys, their scales, the result in another layout
        rotary = 3 * e * stream + 2 * FLOAT_BYTES * tokens * model.n_head
        if work.on_cpu and e != FLOAT_BYTES:
            rotary += 2 * FLOAT_BYTES * stream  # the norm computes in float32
    return qkv + rotary + FLOAT_BYTES * heads * length  # and a sum for each row


def outer_norms(work: Workload, stream: int) -> int:
    """By ln_f, its result being the input of the head, and under modern by the norm of the embedding."""
    statistics = 2 * FLOAT_BYTES * work.tokens_per_micro_batch
    return FLOAT_BYTES * stream + statistics + work.element_bytes * stream


def logits_at_once(work: Workload, tokens: int) -> int:
    """How many exist at the same time."""
    return min(tokens * work.vocab_size, loss.MAX_LOGITS)


def is_chunked(work: Workload) -> bool:
    return work.tokens_per_micro_batch * work.vocab_size > loss.MAX_LOGITS


def loss_kept(work: Workload) -> int:
    """For the backward pass: log-softmax, or gradients that are computed with the loss in chunks."""
    width = work.config.model.n_embd
    if not is_chunked(work):
        return FLOAT_BYTES * work.tokens_per_micro_batch * work.vocab_size
    head = FLOAT_BYTES * work.vocab_size * width
    return head + work.element_bytes * work.tokens_per_micro_batch * width


def loss_work(work: Workload) -> int:
    """Beside what is kept: gradients of the logits, or a chunk of scores and what is computed from them."""
    if not is_chunked(work):
        logits = work.tokens_per_micro_batch * work.vocab_size
        return logits * (2 * FLOAT_BYTES + (0 if work.element_bytes == FLOAT_BYTES else work.element_bytes))
    head = work.vocab_size * work.config.model.n_embd
    cast = 0 if work.element_bytes == FLOAT_BYTES else work.element_bytes * head
    return 4 * FLOAT_BYTES * logits_at_once(work, work.tokens_per_micro_batch) + FLOAT_BYTES * head + cast


def backward_work(work: Workload) -> int:
    """Of one block: gradients of the widest activations and of the residual stream; what is recomputed."""
    stream = work.tokens_per_micro_batch * work.config.model.n_embd
    again = 0
    if work.config.trainer.recompute == "block":
        again = block(work) + cast_bytes(work) * work.block_parameters
    return 2 * 4 * work.element_bytes * stream + 2 * FLOAT_BYTES * stream + again


def cast_bytes(work: Workload) -> int:
    """Of an element of the copy of a weight that autocast makes in the type of the products."""
    is_cast = work.element_bytes != FLOAT_BYTES and not work.config.trainer.fsdp_param_dtype
    return work.element_bytes if is_cast else 0


def casts(work: Workload) -> int:
    """Copies of weights that are kept until the backward pass; those of blocks are not if it recomputes."""
    head = work.vocab_size * work.config.model.n_embd
    return cast_bytes(work) * (head if work.config.trainer.recompute == "block" else work.matrices)


def evaluation_work(work: Workload) -> int:
    """Of a batch of validation without a backward pass."""
    block_size = work.config.data.block_size
    windows = max(work.config.trainer.micro_batch_size, MIN_BATCH_TOKENS // block_size)
    tokens = windows * block_size
    logits = logits_at_once(work, tokens) * (2 * FLOAT_BYTES + work.element_bytes)
    wide = tokens * work.config.model.n_embd * (FLOAT_BYTES + 8 * work.element_bytes)
    return logits + wide
