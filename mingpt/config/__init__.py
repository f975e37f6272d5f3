"""Every setting of a run on one page, checked before torch is imported; the command line that sets them.

Uses pydantic and YAML, and imports no package of mingpt but base.
"""

from mingpt.config.settings import (
    PROJECT,
    Config,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    SnapshotConfig,
    TrainerConfig,
    check,
    check_workers,
    differences,
    flatten,
    result_settings,
    settings,
    to_dict,
    to_yaml,
)

__all__ = [
    "PROJECT",
    "Config",
    "DataConfig",
    "ModelConfig",
    "OptimizerConfig",
    "SnapshotConfig",
    "TrainerConfig",
    "check",
    "check_workers",
    "differences",
    "flatten",
    "result_settings",
    "settings",
    "to_dict",
    "to_yaml",
]
