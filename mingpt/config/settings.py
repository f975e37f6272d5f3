"""Every setting of a run on one page: type, default, range, meaning, and whether it has `affects_result`.

gpt2_train_cfg.yaml repeats the defaults; `train.py` reads it unless another file is given. As a rule,
settings with affects_result=True must be the same when a run is resumed, unless snapshot.resume=changed.
Nothing here imports torch, so settings can be checked before that slow import.
"""

import dataclasses
import os
import re
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Optional

import pydantic
import yaml
from pydantic.dataclasses import dataclass

from mingpt.base.errors import UserError
from mingpt.base.urls import redact_all

RULES = pydantic.ConfigDict(extra="forbid", allow_inf_nan=False)
PATHS = (
    "run_dir",
    "data.path",
    "data.tokenizer",
    "snapshot.path",
    "snapshot.memory_path",
    "snapshot.init_from",
)
Arch = Literal["gpt2", "modern"]  # each is a file, mingpt/model/<arch>.py
ROOT = Path(__file__).resolve().parents[2]  # the folder with mingpt/, from where it is imported
DEFAULT_FILE = "gpt2_train_cfg.yaml"
WORDS = {int: "whole number", float: "number", bool: "true or false", str: "text", type(None): "null"}
LIMITS = {"ge": "at least", "gt": "above", "lt": "below", "le": "at most"}
DURATION = re.compile(r"(?=\d)(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?|(\d+(?:\.\d+)?(?:e[+-]?\d+)?)", re.ASCII)


def Field(default: Any, description: str, *, affects_result: bool = False, **limits: Any) -> Any:
    """Declare a setting. `limits` are those of pydantic, such as ge=1.

    `affects_result` marks a setting that can change the result of a run and is compared when a run resumes.
    """
    extra: dict[str, Any] = {"affects_result": affects_result}
    return pydantic.Field(default, description=description, json_schema_extra=extra, **limits)


def to_seconds(value: Any) -> float:
    """Convert a number of seconds, or a text such as 90 or 5h30m, to seconds.

    Raises ValueError for any other value, also for a negative number.
    """
    match = DURATION.fullmatch(str(value))
    if match is None:
        raise ValueError("it should be seconds, or hours, minutes and seconds as in 5h30m")
    hours, minutes, seconds, number = map(float, match.groups("0"))
    return 3600 * hours + 60 * minutes + seconds + number


def project_folder() -> Path | None:
    """Return the folder that has DEFAULT_FILE, gpt2_train_cfg.yaml; None if there is no such folder.

    In a checkout, this is the folder of train.py. After `pip install .`, it is the folder share/mingpt below
    pip's --target or prefix.
    """
    # parents[2:3] has the prefix, if mingpt/ is in PREFIX/lib/python3.x/site-packages.
    places = [ROOT, *(folder / "share/mingpt" for folder in (ROOT, *ROOT.parents[2:3]))]
    return next((place for place in places if (place / DEFAULT_FILE).is_file()), None)


@dataclass(frozen=True, config=RULES)
class DataConfig:
    """The data that the run reads, and their tokenizer."""

    path: str = Field(
        "data/input.txt",
        "UTF-8 text: a path, or any fsspec URL, which is cached under ~/.cache/mingpt; or token shards: a "
        "folder of .bin files; if the default path is absent, it is the text beside train.py",
    )
    sha256: Optional[str] = Field(
        None, "expected SHA-256 of the text in hex; null accepts any", pattern="^[0-9a-fA-F]{64}$"
    )
    block_size: int = Field(
        256, "context length in tokens; a window holds one more", ge=1, affects_result=True
    )
    val_fraction: float = Field(
        0.1,
        "share of the data, its tail, kept for validation; shards with the word val in their names take its "
        "place",
        gt=0,
        lt=1,
        affects_result=True,
    )
    tokenizer: str = Field(
        "auto",
        "char, gpt2, or a tokenizer.json by path or URL; auto: the one beside the data, else init_from's, "
        "else char for a text",
    )
    vocab_size: Optional[int] = Field(
        None,
        "rows of the embedding; null: the tokenizer's size, or 50257 for shards without one",
        ge=1,
        affects_result=True,
    )

    @property
    def resolved_path(self) -> str:
        """The path of the data: `path`, with one exception.

        If `path` is the default and does not exist, the result is the same path below `project_folder()`, if
        there is such a folder.
        """
        is_missing = self.path == "data/input.txt" and not os.path.lexists(self.path)
        return str((project_folder() or Path()) / self.path) if is_missing else self.path


@dataclass(frozen=True, config=RULES)
class ModelConfig:
    """The model's architecture, size and dropout."""

    arch: Arch = Field(
        "modern",
        "gpt2: GPT-2 exactly; modern: rotary positions, RMSNorm, QK-norm, squared ReLU",
        affects_result=True,
    )
    n_layer: int = Field(3, "number of blocks", ge=1, affects_result=True)
    n_head: int = Field(2, "attention heads per block; divides n_embd", ge=1, affects_result=True)
    n_embd: int = Field(128, "width of the residual stream", ge=1, affects_result=True)
    dropout: float = Field(
        0.0, "dropout probability; on a CPU rounded to a multiple of 1/256", ge=0, lt=1, affects_result=True
    )


@dataclass(frozen=True, config=RULES)
class OptimizerConfig:
    """The optimizer, its learning rate and other hyperparameters, and gradient clipping."""

    name: Literal["adamw", "muon"] = Field(
        "muon",
        "adamw for every tensor, or muon for the blocks' matrices and adamw for the rest",
        affects_result=True,
    )
    learning_rate: float = Field(
        0.007,
        "peak learning rate; muon's updates are scaled to the size of adamw's",
        gt=0,
        affects_result=True,
    )
    schedule: Literal["cosine", "linear"] = Field(
        "cosine", "how the learning rate falls after warm-up, until max_steps", affects_result=True
    )
    min_lr_fraction: float = Field(
        0.02, "learning rate at the last step, as a share of the peak", ge=0, le=1, affects_result=True
    )
    warmup_steps: int = Field(
        20, "steps over which the learning rate rises linearly from zero", ge=0, affects_result=True
    )
    weight_decay: float = Field(
        0.1, "decoupled weight decay of tensors with two or more dimensions", ge=0, affects_result=True
    )
    beta1: float = Field(0.9, "adamw's decay of the mean gradient", ge=0, lt=1, affects_result=True)
    beta2: float = Field(0.95, "adamw's decay of the mean squared gradient", ge=0, lt=1, affects_result=True)
    momentum: float = Field(0.95, "muon's decay of the mean gradient", ge=0, lt=1, affects_result=True)
    grad_clip: float = Field(
        1.0, "largest norm of the whole gradient; 0 turns clipping off", ge=0, affects_result=True
    )


@dataclass(frozen=True, config=RULES)
class TrainerConfig:
    """The training loop: steps, batches, evaluation, device, numerics and workers."""

    max_steps: int = Field(340, "optimizer steps in the run", ge=0, affects_result=True)
    batch_size: int = Field(
        16, "windows per step over all workers; their number never changes it", ge=1, affects_result=True
    )
    micro_batch_size: int = Field(
        2, "windows in one forward and backward pass; divides batch_size", ge=1, affects_result=True
    )
    eval_every: int = Field(85, "steps between evaluations of the validation split", ge=1)
    eval_windows: Optional[int] = Field(
        None, "windows of the validation split to evaluate, evenly spaced; null: all of it", ge=1
    )
    eval_at_start: bool = Field(True, "also evaluate before the first step")
    log_every: int = Field(10, "steps between records of the training loss", ge=1)
    on_nonfinite: Literal["stop", "skip"] = Field(
        "stop",
        "at a gradient that is not finite: stop ends the job, skip leaves the step's update out",
        affects_result=True,
    )
    replay_every: int = Field(
        100, "steps between comparisons of what the workers compute and hold; 0 for none", ge=0
    )
    sample_tokens: int = Field(
        200, "tokens of sample text written at each evaluation of trained weights; 0 for none", ge=0
    )
    eval_only: bool = Field(False, "evaluate the newest snapshot and train nothing")
    device: Literal["auto", "cpu", "cuda", "mps"] = Field(
        "auto", "auto takes cuda if there is a GPU for each worker, else cpu; mps only by its name"
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto",
        "autocast type of the matrix products; auto: bfloat16 if it is fast, float16 on older CUDA GPUs",
        affects_result=True,
    )
    compile: Literal["auto"] | bool = Field(
        "auto",
        "torch.compile each block of the model; auto: in a long run; if it fails, train without it",
        affects_result=True,
    )
    threads: int = Field(
        1,
        "CPU threads per worker; a fresh run's bits depend on them, a resumed one keeps its own; if left at "
        "1, OMP_NUM_THREADS is obeyed",
        ge=1,
        le=1024,
    )
    reduction: Literal["exact", "fast"] = Field(
        "exact", "exact: the same bits for any number of workers; fast: DDP's all-reduce", affects_result=True
    )
    parallel: Literal["ddp", "fsdp"] = Field(
        "ddp",
        "ddp: each worker holds the whole model; fsdp: each holds a share of parameters, gradients and "
        "optimizer state",
    )
    shard_optimizer: bool = Field(
        False, "under ddp, each worker holds and updates its share of the optimizer's state"
    )
    fsdp_reshard: bool = Field(True, "under fsdp, free a block's gathered weights after its forward pass")
    fsdp_param_dtype: Optional[Literal["bfloat16"]] = Field(
        None,
        "under fsdp, gather weights and compute in this type instead of autocast; null: as ddp computes",
        affects_result=True,
    )
    recompute: Literal["none", "block"] = Field(
        "none", "block: keep only each block's input and compute its activations again in the backward pass"
    )
    timeout_s: float = Field(60, "timeout of a collective in seconds; one step must fit in", gt=0)
    pause_after: Optional[Annotated[pydantic.PositiveFloat, pydantic.BeforeValidator(to_seconds)]] = Field(
        None,
        "time of the job, restarts included, after which it stops as by SIGUSR1, and the same command goes "
        "on: seconds, or as in 90m, 5h30m or 1h2m3s; null: it never does",
    )
    workers: Literal["auto"] | pydantic.PositiveInt = Field(
        "auto", "workers that plain `python train.py` starts; auto: one per GPU, else one per `threads` cores"
    )
    max_restarts: int = Field(3, "how often plain `python train.py` restarts failed workers", ge=0)


@dataclass(frozen=True, config=RULES)
class SnapshotConfig:
    """When and where snapshots are saved, and how a run starts from one."""

    every: int = Field(20, "steps between snapshots; there is always one at max_steps", ge=1)
    memory_every: int = Field(
        5, "steps between snapshots in the node's memory, for killed workers; 0 for none", ge=0
    )
    memory_path: str = Field(
        "/dev/shm", "folder in memory; if it is absent or too small, no snapshots are saved in memory"
    )
    local_every: Optional[int] = Field(
        None,
        "like `every`, on each node's own disk if nodes share none; null: as `every`; 0: only the last",
        ge=0,
    )
    keep_last: int = Field(3, "number of newest snapshots kept", ge=1)
    keep_best: bool = Field(
        True, "also save a snapshot at each new lowest validation loss, and keep the last of these"
    )
    path: Optional[str] = Field(None, "folder or fsspec URL for snapshots; null is run_dir/snapshots")
    resume: Literal["auto", "changed", "must", "never"] = Field(
        "auto",
        "auto resumes from the newest valid snapshot if there is one; changed does so with other settings "
        "too; must fails if there is none; never fails if there is one",
    )
    init_from: Optional[str] = Field(
        None,
        "start with the weights of another run: its folder (the newest, or the best as RUN@best), or a "
        "snapshot; `python -m mingpt import` makes a run of a model of Hugging Face's",
        affects_result=True,
    )


@dataclass(frozen=True, config=RULES)
class ReportConfig:
    """Reports to TensorBoard or an experiment tracker, beside the run's own records."""

    tensorboard: bool = Field(False, "also write events for TensorBoard to run_dir/tensorboard")
    tracker: Optional[Literal["wandb", "trackio"]] = Field(
        None, "experiment tracker that also gets the metrics: wandb or trackio"
    )


@dataclass(frozen=True, config=RULES)
class Config:
    """All settings of a run."""

    run_dir: str = Field("out/default", "folder for everything that the run writes")
    seed: int = Field(
        1337, "determines initial weights, data order and dropout", ge=0, le=2**63 - 1, affects_result=True
    )
    data: DataConfig = DataConfig()
    model: ModelConfig = ModelConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    trainer: TrainerConfig = TrainerConfig()
    snapshot: SnapshotConfig = SnapshotConfig()
    report: ReportConfig = ReportConfig()


def check(config: Config) -> None:
    """Raise UserError if settings contradict each other, or run_dir or memory_path is a URL or /.

    Not all contradictions are found here: some checks need the workers, their devices or the data.
    """
    model, trainer = config.model, config.trainer
    for key, path in (("run_dir", config.run_dir), ("snapshot.memory_path", config.snapshot.memory_path)):
        if "://" in path or not path.strip("/"):
            raise UserError(
                f"{key} must be a local folder below /, not {path!r}; snapshot.path may also be a URL"
            )
    if model.n_embd % model.n_head:
        raise UserError(f"model.n_embd ({model.n_embd}) must be divisible by model.n_head ({model.n_head})")
    if trainer.batch_size % trainer.micro_batch_size:
        raise UserError(
            f"trainer.batch_size ({trainer.batch_size}) must be divisible by "
            f"trainer.micro_batch_size ({trainer.micro_batch_size})"
        )
    if trainer.fsdp_param_dtype and trainer.parallel != "fsdp":
        raise UserError(
            f"trainer.fsdp_param_dtype={trainer.fsdp_param_dtype} needs trainer.parallel=fsdp; "
            "trainer.dtype is the type of the products under both"
        )
    if trainer.recompute != "none" and trainer.compile is True:
        raise UserError(
            "trainer.recompute does not go with trainer.compile, which chooses by itself what to keep; "
            "drop either"
        )


def check_workers(config: Config, workers: int) -> None:
    """Raise UserError if a step has fewer micro-batches than the `workers` that a job starts with."""
    trainer = config.trainer
    micro_batches = trainer.batch_size // trainer.micro_batch_size
    if micro_batches < workers:
        raise UserError(
            f"{workers} workers cannot share the {micro_batches} micro-batches of a step: start at most "
            f"{micro_batches} workers, or lower trainer.micro_batch_size (now {trainer.micro_batch_size})"
        )


@dataclasses.dataclass(frozen=True)
class Setting:
    """The declaration of one setting of Config; a `key` is, for example, "model.n_layer"."""

    key: str
    default: Any
    description: str
    affects_result: bool
    is_optional: bool  # whether it may be null
    allowed: str  # the values that it may have, in words, such as "whole number, at least 1"


def find_kinds(kind: Any) -> list[Any]:
    """Return the innermost parts of the annotation `kind`, in order, such as types, literals and limits."""
    parts = typing.get_args(kind)
    return [one for part in parts for one in find_kinds(part)] if parts else [kind]


def settings() -> dict[str, Setting]:
    """Return {dotted key: Setting} for every setting, in the order of Config's fields."""
    found = {}

    def walk(section: Any, prefix: str) -> None:
        for name, info in section.__pydantic_fields__.items():
            if dataclasses.is_dataclass(info.annotation):
                walk(info.annotation, name + ".")
                continue
            kinds, affects_result = find_kinds(info.annotation), info.json_schema_extra["affects_result"]
            words = [WORDS.get(kind, kind) for kind in kinds if kind in WORDS or isinstance(kind, str)]
            for limit, what in LIMITS.items():
                words += [
                    f"{what} {getattr(rule, limit):g}"
                    for rule in (*kinds, *info.metadata)
                    if hasattr(rule, limit)
                ]
            about = info.default, info.description, affects_result, type(None) in kinds, ", ".join(words)
            found[prefix + name] = Setting(prefix + name, *about)

    walk(Config, "")
    return found


def flatten(nested: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Turn {"model": {"n_layer": 4}} into {"model.n_layer": 4}; an empty dictionary stays as a value.

    `prefix` is put before every key.
    """
    flat: dict[str, Any] = {}
    for key, value in nested.items():
        if isinstance(value, dict) and value:
            flat.update(flatten(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def result_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return {dotted key: value} for each setting that is declared with affects_result=True.

    `config` is a nested configuration. If a setting is absent there, its value is the default. Other keys of
    `config` are left out.
    """
    given = flatten(dict(config))
    known = settings().items()
    return {key: given.get(key, setting.default) for key, setting in known if setting.affects_result}


def differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Return "key: old -> new" for each setting that differs, among those declared with affects_result=True.

    `old` and `new` are nested configurations, as `to_dict` returns them.
    """
    was, now = result_settings(old), result_settings(new)
    return [f"{key}: {was[key]} -> {now[key]}" for key in was if was[key] != now[key]]


def to_dict(config: Config) -> dict[str, Any]:
    """Return the configuration as nested dictionaries, as in a config file; URLs are without credentials."""
    return redact_all(dataclasses.asdict(config))


def to_yaml(config: Config) -> str:
    """Return the configuration as the text of a YAML config file; URLs are without credentials."""
    return yaml.safe_dump(to_dict(config), sort_keys=False)
