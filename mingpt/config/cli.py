"""Turn a command line and a YAML file into a checked Config, and report a mistake in one sentence.

A command line is `[CONFIG.yaml] [section.key=value ...]`, in any order; run_dir and seed have no section.
`--section.key value` is accepted, too. Settings on the line replace those in the file. If no file is named,
the file is gpt2_train_cfg.yaml in the folder that `project_folder` finds, if any.
"""

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pydantic
import yaml

from mingpt.base.command import write_stdout
from mingpt.base.errors import UserError
from mingpt.base.paths import refuse_pipe, typed_path
from mingpt.config.settings import (
    DEFAULT_FILE,
    PATHS,
    Config,
    Setting,
    check,
    flatten,
    project_folder,
    settings,
    to_yaml,
)

# The YAML tags that are allowed, also implicit ones. PyYAML's constructor for None refuses all other tags.
TAGS = (None, "tag:yaml.org,2002:str", "tag:yaml.org,2002:seq", "tag:yaml.org,2002:map")


def parse(argv: Sequence[str]) -> Config:
    """Return the configuration for the command-line arguments `argv`, which lack the program's name.

    With --help or -h, prints the help text and raises SystemExit. With --print_config, prints the
    configuration and raises SystemExit. Raises UserError for a mistake.
    """
    if "--help" in argv or "-h" in argv:
        write_stdout(help_text())
        raise SystemExit(0)
    path, given = read_arguments([word for word in argv if word != "--print_config"])
    folder = project_folder()
    if path is not None:
        given = read_file(typed_path(path, "the configuration file")) | given
    elif folder:  # else the defaults, which DEFAULT_FILE repeats
        given = read_file(str(folder / DEFAULT_FILE)) | given
    config = build(given)
    if "--print_config" in argv:
        write_stdout(to_yaml(config))
        raise SystemExit(0)
    return config


def read_arguments(argv: Sequence[str]) -> tuple[str | None, dict[str, str]]:
    """Return the config file's path (None if no file is given) and the settings as {dotted key: text}.

    Raises UserError for a second file, a key with two different values, or an option without a value. Does
    not check whether keys and values are valid.
    """
    path, given, left = None, dict[str, str](), list(argv)
    while left:
        word = left.pop(0)
        key, equals, text = word.removeprefix("--").partition("=")
        if not equals and word.startswith("--"):
            if not left:
                raise UserError(f"{word} needs a value, as in {word}=VALUE")
            text = left.pop(0)
        elif not equals:
            if path is not None:
                raise UserError(
                    f"two configuration files are given, {path} and {word}, and there may be one; "
                    "settings are spelled section.key=value"
                )
            path = word
            continue
        if given.get(key, text) != text:
            raise UserError(f"{key} is given twice, as {given[key]} and as {text}: leave one of them out")
        given[key] = text
    return path, given


class Loader(yaml.SafeLoader):
    """A YAML loader that reads scalars as strings, and refuses a repeated key or a tag such as !!int."""

    # Declared as in PyYAML, so not ClassVar.
    yaml_implicit_resolvers: dict[str, list[Any]] = {}  # noqa: RUF012
    yaml_constructors = {tag: yaml.SafeLoader.yaml_constructors[tag] for tag in TAGS}  # noqa: RUF012

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            name = str(key.value)  # the base class refuses a key that is a list or a mapping
            if name in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{name!r} is repeated", key.start_mark)
            seen.add(name)
        return super().construct_mapping(node, deep)


def read_file(path: str) -> dict[str, Any]:
    """Return the settings in a config file as {dotted key: text}, unchecked.

    A value may also be a list, or {} for an empty section. Raises UserError if the file cannot be read, is
    not YAML that `Loader` accepts, or is neither a mapping nor empty.
    """
    refuse_pipe(path, "the configuration file")
    try:
        content = yaml.load(Path(path).read_text(encoding="utf-8"), Loader=Loader) or {}
        if not isinstance(content, dict):
            raise yaml.YAMLError("it must hold sections such as 'model:' with settings below them")
        return flatten(content)
    except (OSError, ValueError) as error:  # ValueError: bytes that are not UTF-8
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"the configuration file {path} cannot be read: {reason}") from None
    except (yaml.YAMLError, RecursionError) as error:  # RecursionError: an anchor contains itself
        raise UserError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from None


def build(flat: dict[str, Any]) -> Config:
    """Return a checked Config from {dotted key: text or value}; a setting that is not given has its default.

    Raises UserError for an unknown key, a value that is not allowed, or settings that contradict each other.
    """
    known = settings()
    nested: dict[str, Any] = {}
    for key, value in flat.items():
        if key not in known:
            raise UserError(unknown_key(key, known))
        section, _, name = key.rpartition(".")
        target = nested.setdefault(section, {}) if section else nested
        target[name] = convert(value, known[key])
    try:
        config = Config(**nested)
    except pydantic.ValidationError as error:
        # pydantic gives an error for each type that a setting may have.
        places = [(".".join(map(str, one["loc"][:2])), one["msg"]) for one in error.errors()]
        key = places[0][0]
        wrong = [
            said.partition(" should ")[2].partition(", unable")[0] or "be shorter"
            for place, said in places
            if place == key
        ]
        raise UserError(f"{key} must {' or '.join(wrong)}, not {flat[key]!r}") from None
    check(config)
    return config


def convert(text: Any, setting: Setting) -> Any:
    """Convert null and ~ to None if the setting may be null, and a path by `typed_path`, which expands ~.

    Any other value is returned unchanged, and pydantic converts it later. If the setting is a path, raises
    UserError for a text that `typed_path` refuses.
    """
    if setting.is_optional and text in ("null", "~"):  # both are null in YAML
        return None
    return typed_path(text, setting.key) if setting.key in PATHS and isinstance(text, str) else text


def unknown_key(key: str, known: dict[str, Setting]) -> str:
    near = difflib.get_close_matches(key, known, 1) or [full for full in known if full.endswith(f".{key}")]
    return f"unknown setting '{key}'" + (f"; did you mean '{near[0]}'?" if near else "; see --help")


def help_text() -> str:
    lines = [
        "usage: train.py [CONFIG.yaml] [section.key=value ...] [--print_config] [--help]",
        "",
        f"CONFIG.yaml is {DEFAULT_FILE} beside train.py if none is named. Settings marked * can change the",
        "result of a run.",
        "",
    ]
    for setting in settings().values():
        lines += [
            f"  {'*' if setting.affects_result else ' '} {setting.key}="
            f"{'null' if setting.default is None else setting.default}",
            f"        {setting.description} ({setting.allowed})",
        ]
    return "\n".join(lines) + "\n"
