"""The settings of a run, all on one page, and the command line and YAML files that set them.

Settings are checked before torch is imported. This package imports no package of mingpt but `base`.
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
