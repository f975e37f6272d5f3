"""The settings of config.py by their dotted keys; configurations as dictionaries, as YAML, compared."""

import dataclasses
import typing
from collections.abc import Iterable
from typing import Any, Literal

import yaml

from mingpt.config import Config
from mingpt.redact import redact_all

# The settings that are auto or something else.
AUTO_OR = {
    "trainer.workers": "auto or a whole number at least 1",
    "trainer.compile": "auto, true or false",
}
LIMITS = {"ge": "at least", "gt": "above", "lt": "below", "le": "at most"}


@dataclasses.dataclass(frozen=True)
class Setting:
    """One leaf of Config by its dotted key."""

    key: str
    type: Any
    default: Any
    description: str
    affects_result: bool
    limits: dict[str, float]  # {"at least": 1}

    def allowed(self) -> str:
        """The values it may take, in words."""
        if self.key in AUTO_OR:
            return AUTO_OR[self.key]
        options = [kind for kind in typing.get_args(self.type) if kind is not type(None)]
        is_optional = type(None) in typing.get_args(self.type)
        kind, limits = (options[0], {}) if is_optional else (self.type, self.limits)
        if typing.get_origin(kind) is typing.Annotated:
            kind, *rules = typing.get_args(kind)
            limits = find_limits([limit for rule in rules for limit in rule.metadata])
        return describe_kind(kind, limits) + (" or null" if is_optional else "")


def describe_kind(kind: Any, limits: dict[str, float]) -> str:
    """The values of a type within limits, in words."""
    if typing.get_origin(kind) is Literal:
        return "one of " + ", ".join(typing.get_args(kind))
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    return " ".join(
        [names[kind], " and ".join(f"{words} {limit:g}" for words, limit in limits.items())]
    ).rstrip()


def find_limits(rules: Iterable[Any]) -> dict[str, float]:
    """{"at least": 1} of the rules that pydantic keeps for a field."""
    return {
        words: getattr(rule, kind) for rule in rules for kind, words in LIMITS.items() if hasattr(rule, kind)
    }


def settings() -> dict[str, Setting]:
    """Every setting by its dotted key, in the order of this page."""
    found = {}

    def walk(section: Any, prefix: str) -> None:
        for name, info in section.__pydantic_fields__.items():
            if dataclasses.is_dataclass(info.annotation):
                walk(info.annotation, name + ".")
                continue
            limits = find_limits(info.metadata)
            affects_result = info.json_schema_extra["affects_result"]
            key = prefix + name
            found[key] = Setting(key, info.annotation, info.default, info.description, affects_result, limits)

    walk(Config, "")
    return found


def flatten(nested: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"model": {"n_layer": 4}} as {"model.n_layer": 4}."""
    flat: dict[str, Any] = {}
    for key, value in nested.items():
        if isinstance(value, dict) and value:
            flat.update(flatten(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Settings that affect the result and differ, as "key: old -> new"; both nested as in a file."""
    was, now = flatten(old), flatten(new)
    found = []
    for key, setting in settings().items():
        before, after = was.get(key, setting.default), now.get(key, setting.default)
        if setting.affects_result and before != after:
            found.append(f"{key}: {before} -> {after}")
    return found


def to_dict(config: Config) -> dict[str, Any]:
    """The configuration as nested dictionaries, as a config file spells it; URLs without credentials."""
    return redact_all(dataclasses.asdict(config))


def to_yaml(config: Config) -> str:
    """The configuration as YAML that `cli.parse` reads back, to the same one but for credentials in URLs."""
    return yaml.safe_dump(to_dict(config), sort_keys=False)
