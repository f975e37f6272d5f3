"""Load saved weights if their names and shapes fit a model, which may have fewer learned positions."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from mingpt.base.errors import UserError
from mingpt.base.rows import Shape
from mingpt.model.gpt import GPT


def fit_weights(tensors: dict[str, Tensor], shapes: Mapping[str, Shape], origin: str) -> dict[str, Tensor]:
    """Return views of the weights `tensors` that fit a model whose parameters have the shapes in `shapes`.

    The weights may have more learned positions than the model: the views leave out the last positions. Raises
    UserError, whose message calls the weights `origin`, if the weights do not fit the model.
    """
    there = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    check_shapes(there, shapes, origin)
    return {name: tensor[: shapes[name][0]] if tensor.ndim else tensor for name, tensor in tensors.items()}


def check_shapes(there: Mapping[str, Shape], here: Mapping[str, Shape], origin: str) -> None:
    """Raise UserError if saved weights do not fit a model.

    `there` has the shape of each of the weights, and `here` the shape of each parameter of the model, by
    name. The weights may have more learned positions than the model. The error's message calls the weights
    `origin`.
    """
    wrong = []
    for name, shape in here.items():
        found: Any = there.get(name, "missing")
        if there.get(name) and name.endswith("wpe.weight"):
            if found[0] < shape[0]:
                raise UserError(
                    f"{origin} holds {found[0]} positions and data.block_size is {shape[0]}: set "
                    f"data.block_size={found[0]}, or less"
                )
            found = (shape[0], *found[1:])
        if found != shape:
            wrong.append(f"{name}: {found} -> {shape}")
    surplus = there.keys() - here.keys()
    if wrong or surplus:
        reasons = wrong[:3] + ([f"{len(surplus)} tensors that this model lacks"] if surplus else [])
        raise UserError(f"{origin} holds the weights of another model ({'; '.join(reasons)})")


def load_weights(model: GPT, tensors: dict[str, Tensor], origin: str) -> None:
    """Copy the weights `tensors` into `model`, except learned positions past the model's block_size.

    Raises UserError, whose message calls the weights `origin`, if the weights do not fit the model.
    """
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    model.load_state_dict(fit_weights(tensors, shapes, origin), strict=False)  # buffers are not stored
