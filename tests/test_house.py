"""The rooms of mingpt/: imports point one way, private names stay private, files and functions stay short."""

import ast
from pathlib import Path

import pytest
from conftest import ROOT

# From the ground up; nothing imports from a later floor.
FLOORS = [
    ["errors", "config", "settings", "events", "redact"],
    ["model", "optim", "data", "snapshot", "distributed", "elastic"],
    ["parallel"],
    ["cli", "state", "audit", "report", "weights", "hf_folder", "initial_weights"],
    ["run_folder", "stored_state"],
    ["memory_search"],
    ["latest", "claims", "handover"],
    ["resume"],
    ["gathering"],
    ["sharded_saver", "sharded_memory"],
    ["corpus", "batches", "saving", "evaluate", "initialize", "failures"],
    ["trainer"],
    [
        "agent",
        "worker",
        "prestart",
        "jobs",
        "fault_injection",
        "verify",
        "doctor",
        "prepare",
        "plan",
        "export",
    ],
]
ROOMS_APART = FLOORS[1]  # of these none imports another
FILES = sorted((ROOT / "mingpt").rglob("*.py"))
PROGRAMS = [ROOT / "train.py", ROOT / "sample.py", *sorted((ROOT / "benchmarks").glob("*.py"))]


def room_of(module: str) -> str:
    """ "model" for mingpt.model.gpt"""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def imported(path: Path) -> set[str]:
    """Modules of mingpt that a file imports, wherever it does; those for annotations alone are left out."""
    tree = ast.parse(path.read_text())
    for_types = {id(inner) for node in ast.walk(tree) if is_type_checking(node) for inner in ast.walk(node)}
    found = set()
    for node in ast.walk(tree):
        if id(node) in for_types:
            continue
        if isinstance(node, ast.ImportFrom) and node.module == "mingpt":
            found |= {f"mingpt.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("mingpt."):
            found.add(node.module)
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.startswith("mingpt.")}
    return found


def test_every_module_has_a_floor() -> None:
    placed = {room for floor in FLOORS for room in floor}
    assert {room_of(module_of(path)) for path in FILES if module_of(path) != "mingpt"} == placed


def test_nothing_imports_from_a_higher_floor() -> None:
    height = {room: number for number, floor in enumerate(FLOORS) for room in floor}
    for path in FILES:
        here = room_of(module_of(path))
        for module in imported(path):
            there = room_of(module)
            assert height[there] <= height[here], f"{path} imports {module}"
            if here in ROOMS_APART and there in ROOMS_APART:
                assert here == there, f"{path} imports {module}"


def test_no_import_cycles() -> None:
    modules = {module_of(path): path for path in FILES}
    graph = {
        name: {module for module in imported(path) if module in modules} for name, path in modules.items()
    }
    for name in graph:  # a package's __init__ exports what its modules define
        if modules[name].name != "__init__.py":
            graph[name].discard(name.rpartition(".")[0])
    done: set[str] = set()

    def visit(name: str, above: tuple[str, ...]) -> None:
        assert name not in above, f"import cycle: {' -> '.join([*above, name])}"
        if name not in done:
            for other in graph[name]:
                visit(other, (*above, name))
            done.add(name)

    for name in graph:
        visit(name, ())


def test_every_room_says_what_it_promises_and_what_it_exports() -> None:
    rooms = [path for path in FILES if path.name == "__init__.py" and path.parent.name != "mingpt"]
    assert len(rooms) == 11
    for path in rooms:
        tree = ast.parse(path.read_text())
        assert ast.get_docstring(tree), f"{path} has no docstring"
        assert "__all__" in path.read_text(), f"{path} exports nothing"


def private_accesses(path: Path) -> list[str]:
    """Names with a single underscore that are read from something other than self, super, cls or torch."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            source = ast.unparse(node.value)
            if source not in ("self", "super()", "cls") and source.split(".")[0] not in ("torch", "os"):
                found.append(f"{path.name}:{node.lineno} {source}.{node.attr}")
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("mingpt"):
            found += [
                f"{path.name}:{node.lineno} {alias.name}" for alias in node.names if alias.name[0] == "_"
            ]
    return found


def test_nobody_reaches_into_private_names() -> None:
    tests = sorted((ROOT / "tests").rglob("*.py"))
    assert [found for path in [*FILES, *PROGRAMS, *tests] for found in private_accesses(path)] == []


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_have_at_most_300_lines_and_functions_50(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 300
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            assert node.end_lineno and node.end_lineno - node.lineno + 1 <= 50, f"{path} {node.name}"


def calls(function: str, path: Path) -> str:
    """The source of a function or method."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef) and node.name == function:
            return ast.unparse(node)
    raise AssertionError(f"{path} has no {function}")


def test_from_the_command_to_a_gradient_are_three_calls() -> None:
    trainer = ROOT / "mingpt" / "trainer.py"
    assert "Trainer(" in calls("main", ROOT / "train.py") and ".run()" in calls("main", ROOT / "train.py")
    assert "self.step()" in calls("run", trainer)
    assert ".backward()" in calls("step", trainer)
