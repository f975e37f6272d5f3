"""Load extras: modules of mingpt/extras/ that a run can do without.

Tables in other packages name the extras. A run goes on without an extra whose file is missing.
"""

import functools
import pkgutil
from typing import Any

missing: list[str] = []  # names of the extras that were asked for and are not there


@functools.cache
def load_extra(entry: str) -> Any:
    """Return the object that `entry` names, as "module:name"; None if there is no such module.

    The name of a module that is not there is appended to `extras.missing`. Raises the errors of importing the
    module, and AttributeError if the module has no such object.
    """
    module = entry.partition(":")[0]
    try:
        return pkgutil.resolve_name(entry)
    except ModuleNotFoundError as error:
        is_absent = f"{module}.".startswith(f"{error.name}.")  # the module, or a package that it is in
        if not is_absent:
            raise
    missing.append(module)
    return None
