"""The manifests in launch/, and the shell scripts in them."""

from collections.abc import Iterator
from typing import Any

import yaml
from conftest import ROOT

LAUNCH = ROOT / "launch"
KUBERNETES = [f"kubernetes/{path.name}" for path in sorted((LAUNCH / "kubernetes").glob("*.yaml"))]
MANIFESTS = [*KUBERNETES, "skypilot.yaml"]


def resources(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((LAUNCH / name).read_text()))


def with_key(value: Any, key: str) -> Iterator[dict[str, Any]]:
    """Yield each mapping that has `key`, in `value` or below it."""
    if isinstance(value, dict) and key in value:
        yield value
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else []
    for each in inner:
        yield from with_key(each, key)


def script_of(name: str) -> tuple[str, dict[str, str]]:
    """(the shell script of a manifest, the environment that the manifest itself sets)."""
    for task in with_key(resources(name), "run"):
        return task["run"], {key: value or "" for key, value in task["envs"].items()}
    container, *_ = with_key(resources(name), "args")
    assert container["command"] == ["bash", "-euc"]
    (script,) = container["args"]
    return script, {entry["name"]: entry.get("value", "") for entry in container["env"]}
