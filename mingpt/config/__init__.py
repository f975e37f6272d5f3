"""The settings of a run, all on one page, and the command line and YAML files that set them.

This package imports neither torch nor any package of mingpt except `base`.
"""

from mingpt.config.settings import (
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
    project_folder,
    result_settings,
    settings,
    to_dict,
    to_yaml,
)

__all__ = [
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
    "project_folder",
    "result_settings",
    "settings",
    "to_dict",
    "to_yaml",
]
