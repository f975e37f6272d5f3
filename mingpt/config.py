"""Every setting of a run, typed and documented, on one page; and the sentences that a wrong one earns.

A command line is `[CONFIG.yaml] [section.key=value ...]`: the file first, whatever stands on the line over it, the
defaults below for the rest. Nothing here imports torch, so a mistake is answered at once.
"""

import difflib
import re
import sys
import typing
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, Optional

import yaml

DEFAULT_FILE = "gpt2_train_cfg.yaml"


class UserError(ValueError):
    """Something only the user can put right, said in one sentence. A worker that meets one exits with code 2."""


def knob(
    default: Any,
    about: str,
    *,
    result: bool = False,
    at_least: float | None = None,
    above: float | None = None,
    below: float | None = None,
    at_most: float | None = None,
) -> Any:
    """A setting: its default, its meaning, its range, and whether it can change the `result` of a run."""
    limits = {"at least": at_least, "above": above, "below": below, "at most": at_most}
    return field(
        default=default, metadata={"about": about, "result": result, "limits": {words: limit for words, limit in limits.items() if limit is not None}}
    )


@dataclass(frozen=True)
class DataConfig:
    """What is read."""

    path: str = knob("data/input.txt", "UTF-8 text: a path or any fsspec URL (https://, s3://, ...); a URL is cached under ~/.cache/mingpt")
    sha256: Optional[str] = knob(None, "expected SHA-256 of the text in hex; null accepts any")
    block_size: int = knob(256, "context length in tokens; a window holds one token more", at_least=1, result=True)
    val_fraction: float = knob(0.1, "share of the text, its tail, kept for validation", above=0, below=1, result=True)


@dataclass(frozen=True)
class ModelConfig:
    """What is trained."""

    arch: Literal["gpt2", "modern"] = knob("modern", "gpt2: GPT-2 exactly; modern: rotary positions, RMSNorm, QK-norm, squared ReLU", result=True)
    n_layer: int = knob(3, "blocks", at_least=1, result=True)
    n_head: int = knob(2, "attention heads per block; divides n_embd", at_least=1, result=True)
    n_embd: int = knob(128, "width of the residual stream", at_least=1, result=True)
    dropout: float = knob(
        0.0, "probability that an activation is dropped in training; on a CPU rounded to a multiple of 1/256", at_least=0, below=1, result=True
    )


@dataclass(frozen=True)
class OptimizerConfig:
    """How a gradient becomes an update. Linear warm-up, then a cosine down to `learning_rate * min_lr_fraction` at max_steps."""

    name: Literal["adamw", "muon"] = knob("muon", "adamw for every tensor, or muon for the blocks' matrices and adamw for the rest", result=True)
    learning_rate: float = knob(0.007, "peak learning rate; muon's updates are scaled to the size of adamw's", above=0, result=True)
    min_lr_fraction: float = knob(0.02, "learning rate at the last step, as a share of the peak", at_least=0, at_most=1, result=True)
    warmup_steps: int = knob(20, "steps over which the learning rate rises from zero", at_least=0, result=True)
    weight_decay: float = knob(0.1, "decoupled weight decay of tensors with two or more dimensions", at_least=0, result=True)
    beta1: float = knob(0.9, "adamw's decay of the mean gradient", at_least=0, below=1, result=True)
    beta2: float = knob(0.95, "adamw's decay of the mean squared gradient", at_least=0, below=1, result=True)
    momentum: float = knob(0.95, "muon's decay of the mean gradient", at_least=0, below=1, result=True)
    grad_clip: float = knob(1.0, "largest norm of the whole gradient; 0 leaves it alone", at_least=0, result=True)


@dataclass(frozen=True)
class TrainerConfig:
    """How long, how large, how often, on what."""

    max_steps: int = knob(340, "optimizer steps in the run", at_least=0, result=True)
    batch_size: int = knob(16, "windows per step over all workers; their number never changes it", at_least=1, result=True)
    micro_batch_size: int = knob(2, "windows in one forward and backward pass; divides batch_size", at_least=1, result=True)
    eval_every: int = knob(85, "steps between evaluations of the whole validation split", at_least=1)
    eval_at_start: bool = knob(True, "also evaluate before the first step")
    log_every: int = knob(10, "steps between records of the training loss", at_least=1)
    sample_tokens: int = knob(200, "tokens of text written at each evaluation; 0 for none", at_least=0)
    eval_only: bool = knob(False, "evaluate the newest snapshot and train nothing")
    device: Literal["auto", "cpu", "cuda", "mps"] = knob("auto", "auto takes cuda, else mps for a single process, else cpu")
    dtype: Literal["auto", "float32", "bfloat16"] = knob(
        "auto", "arithmetic of the matrix products; auto takes bfloat16 where it is native", result=True
    )
    compile: bool = knob(False, "torch.compile the model; where that fails the run goes on without", result=True)
    threads: int = knob(1, "CPU threads per worker; OMP_NUM_THREADS is obeyed where this stands at 1", at_least=1, at_most=1024)
    reduction: Literal["exact", "fast"] = knob("exact", "exact: the same bits for any number of workers; fast: DDP's own all-reduce", result=True)
    timeout_s: float = knob(60, "seconds after which a worker that waits for another gives it up; a step must fit in", above=0)


@dataclass(frozen=True)
class SnapshotConfig:
    """What survives, and how a run goes on."""

    every: int = knob(20, "steps between snapshots; there is always one at max_steps", at_least=1)
    memory_every: int = knob(5, "steps between snapshots in the node's memory, which a killed worker comes back from; 0 for none", at_least=0)
    memory_path: str = knob("/dev/shm", "folder in memory; where it is absent or too small the run does without")
    keep_last: int = knob(3, "newest snapshots kept", at_least=1)
    keep_best: bool = knob(True, "also keep the snapshot with the lowest validation loss")
    path: Optional[str] = knob(None, "folder or fsspec URL for snapshots; null is run_dir/snapshots")
    resume: Literal["auto", "changed", "must", "never"] = knob(
        "auto", "auto goes on where the newest valid snapshot stands; changed also under other settings; must needs one; never wants none"
    )
    init_from: Optional[str] = knob(
        None, "start a fresh run with the weights of another: run folder, snapshot, or GPT-2 safetensors file", result=True
    )


@dataclass(frozen=True)
class Config:
    """A run."""

    run_dir: str = knob("out/default", "folder for everything that the run writes")
    seed: int = knob(1337, "decides initial weights, order of the windows and dropout", at_least=0, at_most=2**63 - 1, result=True)
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    snapshot: SnapshotConfig = field(default_factory=SnapshotConfig)


@dataclass(frozen=True)
class Setting:
    """One leaf of Config: dotted key, type, and what `knob` was told of it."""

    key: str
    type: Any
    default: Any
    about: str
    result: bool
    limits: dict[str, float]

    def allowed(self) -> str:
        """The values it may take, in words."""
        options = typing.get_args(self.type)
        if typing.get_origin(self.type) is Literal:
            return "one of " + ", ".join(options)
        kind = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}.get(self.type, "text or null")
        return (
            " and ".join([f"{kind} {words} {limit:g}" if not i else f"{words} {limit:g}" for i, (words, limit) in enumerate(self.limits.items())])
            or kind
        )

    def accepts(self, value: Any) -> bool:
        """Whether `value`, already of the right type, is in range."""
        checks = {
            "at least": lambda limit: value >= limit,
            "above": lambda limit: value > limit,
            "below": lambda limit: value < limit,
            "at most": lambda limit: value <= limit,
        }
        return value not in (float("inf"), float("-inf")) and value == value and all(checks[words](limit) for words, limit in self.limits.items())


def settings() -> dict[str, Setting]:
    """Every setting by its dotted key, in the order of this page."""
    found = {}

    def walk(kind: type, prefix: str) -> None:
        types = typing.get_type_hints(kind)
        for item in fields(kind):
            if is_dataclass(types[item.name]):
                walk(types[item.name], item.name + ".")
            else:
                found[prefix + item.name] = Setting(prefix + item.name, types[item.name], item.default, **item.metadata)

    walk(Config, "")
    return found


def flatten(nested: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"model": {"n_layer": 4}} as {"model.n_layer": 4}."""
    flat = {}
    for key, value in nested.items():
        flat.update(flatten(value, f"{prefix}{key}.") if isinstance(value, dict) and value else {f"{prefix}{key}": value})
    return flat


def nest(flat: dict[str, Any]) -> dict[str, Any]:
    """The inverse of `flatten`."""
    nested: dict[str, Any] = {}
    for key, value in flat.items():
        section, _, name = key.rpartition(".")
        (nested.setdefault(section, {}) if section else nested)[name] = value
    return nested


def differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Settings that can change the result and do not agree, as "key: old -> new"; both nested as in a config file."""
    was, now = flatten(old), flatten(new)
    return [
        f"{key}: {was.get(key, item.default)} -> {now.get(key, item.default)}"
        for key, item in settings().items()
        if item.result and was.get(key, item.default) != now.get(key, item.default)
    ]


def to_dict(config: Config) -> dict[str, Any]:
    """The configuration as plain nested dictionaries, as a config file spells it."""
    return asdict(config)


class Loader(yaml.SafeLoader):
    """YAML, in which the second of two equal keys does not silently win."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{key.value!r} stands there twice", key.start_mark)
            seen.add(str(key.value))
        return super().construct_mapping(node, deep)


def read_file(path: str) -> dict[str, Any]:
    """A config file as {dotted key: value}."""
    try:
        content = yaml.load(Path(path).read_text(encoding="utf-8"), Loader=Loader)
        if content is not None and not isinstance(content, dict):
            raise UserError(f"{path} must hold sections such as 'model:' with settings below them, not {type(content).__name__}")
        return flatten({str(key): value for key, value in (content or {}).items()})
    except RecursionError:
        raise UserError(f"{path} is not valid YAML for settings: it is nested without end") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"the configuration file {path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise UserError(f"{path} is not valid YAML: {getattr(error, 'problem', None) or str(error).splitlines()[0]}{where}") from None


def read_arguments(argv: Sequence[str]) -> tuple[str | None, dict[str, str]]:
    """The one argument that names a file, and {dotted key: text} for the others."""
    path, given, left = None, {}, list(argv)
    while left:
        word = left.pop(0)
        key, equals, value = word.removeprefix("--").partition("=")
        if not equals and word.startswith("--"):
            if not left:
                raise UserError(f"{word} needs a value, as in {word}=VALUE")
            value = left.pop(0)
        elif not equals:
            if path is not None:
                raise UserError(f"two configuration files are given, {path} and {word}, and there may be one; settings are spelled section.key=value")
            path = word
            continue
        given[key] = value
    return path, given


def build(flat: dict[str, Any]) -> Config:
    """A checked Config from {dotted key: value}; values may still be text.

    Raises UserError for an unknown key, a wrong type or range, or settings that contradict each other.
    """
    from jsonargparse import ArgumentParser

    known = settings()
    for key, value in flat.items():
        if key not in known:
            near = difflib.get_close_matches(key, known, 1) or [full for full in known if full.endswith("." + key)]
            if key in (item.name for item in fields(Config)):
                raise UserError(
                    f"{key} is a section and takes settings such as {next(full for full in known if full.startswith(key))}, not {value!r}"
                )
            raise UserError(f"unknown setting '{key}'" + (f"; did you mean '{near[0]}'?" if near else f"; there is no section '{key.split('.')[0]}'"))
    typed = {}
    for key, item in known.items():
        parser = ArgumentParser(exit_on_error=False)
        parser.add_argument("--value", type=item.type, default=item.default)
        value = flat.get(key, item.default)
        try:
            if value is None and type(None) not in typing.get_args(item.type):
                raise TypeError("null is no value here")
            # YAML would read text such as 1e3 or 12:30 as a number; where text is wanted, text it stays.
            given = str(value) if item.type is str and not isinstance(value, (str, dict, list, type(None))) else value
            typed[key] = parser.parse_object({"value": given}).value if key in flat else value
        except Exception:  # jsonargparse raises several kinds; whichever, the value does not fit
            raise UserError(f"{key} must be {item.allowed()}, not {value!r}") from None
    nested = nest(typed)
    config = Config(
        run_dir=nested["run_dir"],
        seed=nested["seed"],
        data=DataConfig(**nested["data"]),
        model=ModelConfig(**nested["model"]),
        optimizer=OptimizerConfig(**nested["optimizer"]),
        trainer=TrainerConfig(**nested["trainer"]),
        snapshot=SnapshotConfig(**nested["snapshot"]),
    )
    check(config)
    return config


def check(config: Config) -> None:
    """Raises UserError if a setting is out of range or two contradict each other."""
    flat = flatten(to_dict(config))
    for key, item in settings().items():
        if not item.accepts(flat[key]):
            raise UserError(f"{key} must be {item.allowed()}, not {flat[key]!r}")
    model, trainer = config.model, config.trainer
    if not config.run_dir or "://" in config.run_dir or "\0" in config.run_dir:
        raise UserError(f"run_dir must be a local folder, not {config.run_dir!r}; snapshot.path may be a URL")
    if model.n_embd % model.n_head:
        raise UserError(f"model.n_embd ({model.n_embd}) must be divisible by model.n_head ({model.n_head})")
    if model.arch == "modern" and model.n_embd // model.n_head % 2:
        raise UserError(f"model.n_embd / model.n_head ({model.n_embd // model.n_head}) must be even for the rotary positions of model.arch=modern")
    if trainer.batch_size % trainer.micro_batch_size:
        raise UserError(f"trainer.batch_size ({trainer.batch_size}) must be divisible by trainer.micro_batch_size ({trainer.micro_batch_size})")
    if config.data.sha256 and not re.fullmatch("[0-9a-fA-F]{64}", config.data.sha256):
        raise UserError(f"data.sha256 must be 64 hexadecimal digits, not {config.data.sha256!r}")
    if config.snapshot.init_from and config.snapshot.resume == "must":
        raise UserError("snapshot.init_from starts a fresh run and snapshot.resume=must forbids one; drop either")


def check_workers(config: Config, workers: int) -> None:
    """Raises UserError if a step has fewer micro-batches than the job's first generation has workers."""
    micro_batches = config.trainer.batch_size // config.trainer.micro_batch_size
    if micro_batches < workers:
        raise UserError(
            f"{workers} workers cannot share the {micro_batches} micro-batches of a step: lower trainer.micro_batch_size "
            f"(now {config.trainer.micro_batch_size}) to {config.trainer.batch_size // workers} or less, or start at most {micro_batches} workers"
        )


def parse(argv: Sequence[str]) -> Config:
    """The configuration that a command line asks for; see the top of this page.

    --help and --print_config print and raise SystemExit(0). Raises UserError with one sentence for anything wrong.
    """
    argv = list(argv)
    if "--help" in argv or "-h" in argv:
        sys.stdout.write(help_text(settings().values()))
        raise SystemExit(0)
    print_config = "--print_config" in argv
    path, given = read_arguments([word for word in argv if word != "--print_config"])
    config = build(read_file(DEFAULT_FILE if path is None else path) | given)
    if print_config:
        sys.stdout.write(dump(config))
        raise SystemExit(0)
    return config


def dump(config: Config) -> str:
    """The configuration as YAML that `parse` reads back to the same one."""
    return yaml.safe_dump(to_dict(config), sort_keys=False)


def help_text(items: Iterable[Setting]) -> str:
    lines = [
        "usage: train.py [CONFIG.yaml] [section.key=value ...] [--print_config] [--help]",
        "",
        f"CONFIG.yaml is {DEFAULT_FILE} if none is named. Settings marked * can change the result of a run.",
        "",
    ]
    lines += [
        f"  {'*' if item.result else ' '} {item.key}={item.default if item.default is not None else 'null'}\n        {item.about} ({item.allowed()})"
        for item in items
    ]
    return "\n".join(lines) + "\n"
