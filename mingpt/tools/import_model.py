"""Turn a model in Hugging Face's format into a run folder: python -m mingpt import SOURCE OUT.

SOURCE is a folder with config.json, of GPT-2 or NanoChat; or gpt2, gpt2-medium, gpt2-large or gpt2-xl, which
is downloaded from Hugging Face's hub. Without a network, an earlier download is used. OUT must be new or
empty, and becomes a run folder with one snapshot, of step 0, with the weights in float32 and the tokenizer,
if there is one. So `snapshot.init_from=OUT`, sample.py, export and snapshots read OUT like any run. If the
command was killed, remove OUT.

transformers reads only the configuration. The weights are read from model.safetensors, and never from a
pickle; no tensor may be missing, unknown or of a different shape. Causal masks in old files are ignored.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from mingpt.base.command import CommandParser
from mingpt.base.errors import UserError
from mingpt.base.files import reason_of
from mingpt.base.paths import typed_path
from mingpt.base.urls import redact
from mingpt.config import Config, DataConfig, ModelConfig, to_dict
from mingpt.data import Tokenizer, load_named_tokenizer
from mingpt.model import parameter_shapes
from mingpt.snapshot import Manifest, Saver, Store, Tier
from mingpt.snapshot.manifest import DataFields, SoftwareFields
from mingpt.snapshot.reading import check_finite
from mingpt.tools.hugging_face import config_from_hf, from_hf, import_transformers
from mingpt.training.contents import describe_tokenizer, tensor_shapes

NAMES = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")
CONFIG, WEIGHTS, TOKENIZER = "config.json", "model.safetensors", "tokenizer.json"
BUFFERS = (".attn.bias", ".attn.masked_bias")  # causal masks, which old files of GPT-2 hold
FLOATS = {torch.float16, torch.bfloat16, torch.float32, torch.float64}
CONVERT = (  # a command that adds WEIGHTS to the folder
    'python -c "from transformers import AutoModelForCausalLM as M; '
    "M.from_pretrained('{0}').save_pretrained('{0}', max_shard_size='1TB')\""
)


def main(arguments: Sequence[str]) -> int:
    parser = CommandParser("python -m mingpt import", __doc__)
    parser.add_argument("source", type=typed_path, metavar="SOURCE", help=f"a folder, or {', '.join(NAMES)}")
    parser.add_argument("out", type=typed_path, metavar="OUT", help="a new or empty folder, or a URL")
    options = parser.parse_args(arguments)
    sys.stderr.write(redact(import_model(options.source, options.out)) + "\n")
    return 0


def import_model(source: str, out: str) -> str:
    """Write a run folder `out` with the weights and the tokenizer of `source`; return a line for the user.

    Raises UserError if `source` cannot be used, or if `out` is not empty or cannot be written. If `out` is a
    URL, errors of fsspec's driver may also be raised.
    """
    store = Store(f"{out}/snapshots")
    try:
        if Store(out).names():
            raise UserError(f"{out} is not empty: give another folder")
        config, tensors, tokenizer = read_model(source)
        rows = len(tensors["wte.weight"])
        manifest = Manifest(
            step=0,
            windows=0,
            config=to_dict(config),
            tokenizer=describe_tokenizer(tokenizer, rows),
            data=DataFields(path=redact(source), sha256=64 * "0"),  # no data have this hash
            software=SoftwareFields.model_validate(
                {"torch": str(torch.__version__), "device": "cpu", "threads": 1, "dtype": "float32"}
            ),
        )
        # The optimizer has done nothing yet: its state is zeros.
        state = {name: torch.zeros(()).expand(shape) for name, shape in tensor_shapes(config, rows).items()}
        state |= {f"model.{name}": tensor for name, tensor in tensors.items()}
        store.prepare()
        tier = Tier("disk", store)
        saver = Saver([tier], tokenizer.to_bytes() if tokenizer else None)
        saver.save(manifest, state)
        saver.wait()
        if tier.error:
            raise tier.error
    except OSError as error:
        raise UserError(f"{out} cannot be written: {reason_of(error)}") from None
    return f"{source} written to {out}; snapshot.init_from={out} starts a run with its weights"


def read_model(source: str) -> tuple[Config, dict[str, Tensor], Tokenizer | None]:
    """Return the configuration, the weights and the tokenizer of `source`.

    The tokenizer is None if the file TOKENIZER is missing. Raises UserError if `source` cannot be used.
    """
    transformers = import_transformers()
    try:
        folder = Path(download(source) if source in NAMES and not os.path.exists(source) else source)
        if not (folder / CONFIG).is_file():
            raise UserError(f"it is neither a folder with {CONFIG}, nor one of {', '.join(NAMES)}")
        theirs = transformers.AutoConfig.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
        sizes = {"vocab_size": theirs.vocab_size, "block_size": theirs.max_position_embeddings}
        model = config_from_hf(theirs)
        tensors = read_weights(folder, model, sizes)
        tokenizer = None
        if (folder / TOKENIZER).exists():
            tokenizer = load_named_tokenizer(str(folder), "the tokenizer in")
            if len(tokenizer) > theirs.vocab_size:
                raise UserError(f"its tokenizer has {len(tokenizer):,} tokens, and the model fewer")
    except Exception as error:  # transformers raises the errors of many packages
        reason = " ".join(str(error).split())[:500]
        raise UserError(f"{source} cannot be used: {reason or repr(error)}") from None
    return Config(data=DataConfig(block_size=sizes["block_size"]), model=model), tensors, tokenizer


def download(name: str) -> str:
    """Download the GPT-2 `name` from Hugging Face's hub; return its folder in the cache of huggingface_hub.

    The package huggingface_hub is installed together with transformers. Without a network, an earlier
    download is used; if there was no earlier download, an error of huggingface_hub is raised.
    """
    from huggingface_hub import snapshot_download

    return snapshot_download(f"openai-community/{name}", allow_patterns=[CONFIG, WEIGHTS, TOKENIZER])


def read_weights(folder: Path, config: ModelConfig, sizes: dict[str, int]) -> dict[str, Tensor]:
    """Return the weights in a folder, in float32, by their names in mingpt/model/.

    `config` and `sizes` (vocab_size and block_size) describe the model in the folder. Raises UserError, or an
    error of torch, if a tensor is missing, has a wrong shape, or is one that such a model lacks. Raises
    CorruptSnapshot if a number is not finite. Also raises the errors of `read_tensors`.
    """
    found = read_tensors(folder)  # `from_hf` takes out what it uses
    if config.n_layer > len(found):  # parameter_shapes takes time in proportion
        raise UserError(f"{CONFIG} asks for {config.n_layer:,} layers, and there are {len(found):,} tensors")
    shapes = parameter_shapes(config, **sizes)
    try:
        tensors = from_hf(found, config, shapes)
    except KeyError as error:
        raise UserError(f"the tensor {error} is missing") from None
    for name, tensor in tensors.items():
        if tensor.shape != shapes[name]:
            there = tuple(tensor.shape)
            raise UserError(f"the tensor {name} has shape {there}, and {CONFIG} asks for {shapes[name]}")
        tensors[name] = tensor.float()
        check_finite(name, tensors[name])
    head = found.pop("lm_head.weight", tensors["wte.weight"]).float()
    if not torch.equal(head, tensors["wte.weight"]):
        raise UserError(
            "the tensor lm_head.weight differs from wte.weight, and GPT-2 has one matrix for both"
        )
    if found:
        raise UserError(f"it holds {min(found)!r:.100}, which such a model lacks")
    return tensors


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Return the tensors in WEIGHTS, except BUFFERS, by their names in transformers.

    Raises UserError if the folder lacks this file, or if a tensor's type is not one of FLOATS. Raises
    SafetensorError or OSError if the file is damaged or cannot be read.
    """
    if not (folder / WEIGHTS).exists():
        raise UserError(
            f"it has no {WEIGHTS}; if you trust its other files, of which a pickle such as pytorch_model.bin "
            f"can run any code when it is loaded, make one file of them by {CONVERT.format(folder)}"
        )
    found = {}
    for key, tensor in load_file(folder / WEIGHTS).items():
        if not key.endswith(BUFFERS):
            has_prefix = key.startswith(("transformer.", "model.", "lm_head."))
            found[key if has_prefix else f"transformer.{key}"] = tensor
    for other in {tensor.dtype for tensor in found.values()} - FLOATS:
        raise UserError(f"it holds {other}, as quantized models do, and weights are floats of 16 to 64 bits")
    return found
