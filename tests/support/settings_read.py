"""Which settings a program reads, each as an attribute of its own section.

A section is known by the annotation of a parameter, or by assignment from what is known: after
`trainer = config.trainer`, `trainer.device` reads the setting trainer.device, and `context.device` none.
"""

import ast
import dataclasses
from collections.abc import Iterable
from typing import TypeGuard

from mingpt.config import Config

# Class name -> {field: class name of the section, or None for a setting}
CLASSES: dict[str, dict[str, str | None]] = {}
PREFIXES = {"Config": ""}
RETURN_CONFIG = ("parse", "build")


def add_class(section: type) -> None:
    fields = CLASSES[section.__name__] = {}
    for field in dataclasses.fields(section):
        fields[field.name] = None
        if isinstance(field.type, type) and dataclasses.is_dataclass(field.type):
            fields[field.name] = field.type.__name__
            PREFIXES[field.type.__name__] = f"{field.name}."
            add_class(field.type)


add_class(Config)


def read_settings(programs: Iterable[str]) -> set[str]:
    """The dotted keys of all settings that the source code of these programs reads."""
    read: set[str] = set()
    for program in programs:
        reader = Reader()
        reader.visit(ast.parse(program))
        read |= reader.read
    return read


class Reader(ast.NodeVisitor):
    """Follows the assignments of a module in the order of its lines."""

    def __init__(self) -> None:
        self.read: set[str] = set()
        self.variables: dict[str, str] = {}  # name -> class name of the section that it holds
        self.attributes: dict[str, str] = {}  # of `self`

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        outside = self.attributes
        self.attributes = {}
        for _ in range(2):  # a method may come before the one that assigns the attribute
            self.generic_visit(node)
        self.attributes = outside

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        outside = self.variables
        self.variables = dict(outside)
        for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs):
            self.bind(argument.arg, annotated_section(argument.annotation))
        self.generic_visit(node)
        self.variables = outside

    def visit_Assign(self, node: ast.Assign) -> None:
        self.generic_visit(node)
        for target in node.targets:
            self.assign(target, node.value)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self.generic_visit(node)
        section = self.section(node.value)
        is_setting = section is not None and CLASSES[section].get(node.attr, "") is None
        if section is not None and is_setting and isinstance(node.ctx, ast.Load):
            self.read.add(PREFIXES[section] + node.attr)

    def assign(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            for one_target, one_value in zip(target.elts, value.elts, strict=True):
                self.assign(one_target, one_value)
        elif isinstance(target, ast.Name):
            self.bind(target.id, self.section(value))
        elif is_attribute_of_self(target):
            section = self.section(value)
            if section is not None:
                self.attributes[target.attr] = section

    def bind(self, name: str, section: str | None) -> None:
        self.variables.pop(name, None)
        if section is not None:
            self.variables[name] = section

    def section(self, value: ast.expr) -> str | None:
        """The class name of the section that an expression gives; None if it gives something else."""
        if isinstance(value, ast.Name):
            return self.variables.get(value.id)
        if isinstance(value, ast.Call) and isinstance(value.func, ast.Name):
            return "Config" if value.func.id in RETURN_CONFIG else None
        if is_attribute_of_self(value):
            return self.attributes.get(value.attr)
        if isinstance(value, ast.Attribute):
            owner = self.section(value.value)
            return CLASSES[owner].get(value.attr) if owner is not None else None
        return None


def annotated_section(annotation: ast.expr | None) -> str | None:
    """The class name of the section in a parameter's annotation, which may be quoted."""
    name = None
    if isinstance(annotation, ast.Name):
        name = annotation.id
    elif isinstance(annotation, ast.Constant):
        name = str(annotation.value)
    return name if name in CLASSES else None


def is_attribute_of_self(node: ast.expr) -> TypeGuard[ast.Attribute]:
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
