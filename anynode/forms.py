"""Read what other agents say: JSON, as dataclasses of strings, integers, tuples and dataclasses."""

import dataclasses
import json
from typing import Any, TypeVar, get_args

T = TypeVar("T")


def parse_json(content: bytes | str) -> Any:
    """Parse JSON. Raises ValueError if that fails, for example at too deep nesting."""
    try:
        return json.loads(content)
    except RecursionError:
        raise ValueError("JSON that is nested too deeply") from None


def to_form(form: type[T], value: Any) -> T:
    """Convert a value from `json.loads` to the dataclass `form`, whose tuples are lists in JSON.

    Raises ValueError if `value` is no dict, or if a field is unknown, is missing without a default, or has
    another type than in `form`.
    """
    types = {field.name: field.type for field in dataclasses.fields(form)}  # type: ignore[arg-type]
    if not isinstance(value, dict) or not types.keys() >= value.keys():
        raise ValueError(f"not the fields of {form.__name__}")
    fields = {name: to_type(types[name], one) for name, one in value.items()}
    try:
        return form(**fields)
    except TypeError as error:  # a field is missing
        raise ValueError(str(error)) from None


def to_type(wanted: Any, value: Any) -> Any:
    """Convert a value from `json.loads` to a field's type `wanted`. Raises ValueError if it does not fit."""
    if get_args(wanted):  # tuple[X, ...]
        if not isinstance(value, list):
            raise ValueError(f"not a list: {value!r:.100}")
        return tuple(to_type(get_args(wanted)[0], one) for one in value)
    if isinstance(wanted, type) and dataclasses.is_dataclass(wanted):
        return to_form(wanted, value)
    if type(value) is not wanted:  # true is no integer
        raise ValueError(f"not of type {wanted.__name__}: {value!r:.100}")
    return value
