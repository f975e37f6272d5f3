"""The names of a snapshot's files, and which names belong to which step.

`step_00001200.json` is the manifest of step 1200, `step_00001200.safetensors` holds its weights and
`step_00001200.optimizer.safetensors` its optimizer's state. A group of tensors that is too large for one file
lies in `step_00001200-00001-of-00003.safetensors` and so on.
"""

import re
from collections.abc import Iterable, Sequence

FILE_NAME = re.compile(
    r"step_([0-9]{8,19})(?:\.json|(?P<group>\.optimizer)?(?:-(?P<part>[0-9]{5})-of-(?P<parts>[0-9]{5}))?"
    r"(?P<tensors>\.safetensors))"
)
QUARANTINED = re.compile(r"damaged-[0-9]+-step_([0-9]{8,19})\.json")
UNFINISHED = re.compile(r"partial-step_([0-9]{8,19})")
GROUPS = ("", ".optimizer")  # weights first
MAX_PARTS = 99_999


def file_name(step: int, kind: str) -> str:
    """kind is "json" for the manifest and "safetensors" for the weights, where they lie in one file."""
    return f"step_{step:08d}.{kind}"


def tensor_file_name(step: int, group: str, part: int, parts: int) -> str:
    """The name of part `part` (from 1) of `parts`; `group` is one of GROUPS."""
    number = "" if parts == 1 else f"-{part:05d}-of-{parts:05d}"
    return f"step_{step:08d}{group}{number}.safetensors"


def unfinished_name(step: int) -> str:
    """The file that is there while the snapshot of a step is being written."""
    return f"partial-step_{step:08d}"


def step_of(name: str, kind: str | None = None) -> int | None:
    """The step one of whose files (of kind "json" or "safetensors", or any) has this name, or None."""
    match = FILE_NAME.fullmatch(name)
    if not match:
        return None
    step, found = int(match[1]), "safetensors" if match["tensors"] else "json"
    expected = file_name(step, "json")
    if match["tensors"]:
        part, parts = int(match["part"] or 1), int(match["parts"] or 1)
        is_numbered = match["part"] is not None
        if not 1 <= part <= parts or is_numbered != (parts > 1):
            return None
        expected = tensor_file_name(step, match["group"] or "", part, parts)
    return step if name == expected and kind in (None, found) else None


def steps_in(names: Iterable[str], kind: str | None = None) -> list[int]:
    """Steps of the snapshots' files (of this kind, or of either) among these names; newest first."""
    found = {step_of(name, kind) for name in names}
    return sorted((step for step in found if step is not None), reverse=True)


def files_of(names: Iterable[str], step: int) -> list[str]:
    """Those of these names that are files of this step, the manifest last."""
    found = [name for name in names if step_of(name) == step]
    return sorted(found, key=lambda name: (name.endswith(".json"), name))


def group_files(step: int, group: str, parts: int) -> list[str]:
    """The names of a group of tensors that is cut into so many parts."""
    return [tensor_file_name(step, group, part, parts) for part in range(1, parts + 1)]


def are_tensor_files(names: Sequence[str], step: int) -> bool:
    """Whether these are all tensor files of a snapshot of this step, in their order: weights first."""
    weights, optimizer = GROUPS
    optimizer_parts = sum(optimizer in name for name in names)
    weight_parts = len(names) - optimizer_parts
    expected = [*group_files(step, weights, weight_parts), *group_files(step, optimizer, optimizer_parts)]
    return weight_parts > 0 and list(names) == expected
