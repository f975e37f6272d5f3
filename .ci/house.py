"""Print the figures of the house, and say which of them break its rules; exit code 1 if any does.

    python .ci/house.py

An import counts wherever it stands, also in a function or under TYPE_CHECKING. A statement
is an `ast.stmt`, and a node is one that `ast.walk` finds, without `ast.expr_context`: both figures are the
same on every Python. The share of comments and docstrings is that of lines that are not blank.
"""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "mingpt"
# From the top down: a package of mingpt/ imports only packages of lower layers. So nothing imports the top
# layer: `__main__.py` and the tables of the core name its modules as strings. APART lists what stands beside
# mingpt/ and is imported from neither side.
LAYERS = [
    ["tools", "extras"],
    ["launch"],
    ["training"],
    ["snapshot", "report"],
    ["parallel"],
    ["distributed", "data", "model", "optim"],
    ["config"],
    ["base"],
]
APART = ("anynode",)
LOOSE = {"__init__.py", "__main__.py"}
MAX_FILE_LINES, MAX_FUNCTION_LINES = 500, 60
Function = ast.FunctionDef | ast.AsyncFunctionDef
# Where docstrings are read, and the words with which none begins: the noun is left out.
READ = ("mingpt", "anynode", "train.py", "sample.py", "tests", "benchmarks", "tutorial", "examples")
NO_NOUN = re.compile(r"(Of|Those|That|Whose)\b")


@dataclass(frozen=True)
class Size:
    """How large some files are, or may be; None where there is no limit."""

    statements: int | None = None
    nodes: int | None = None
    lines: int | None = None


# What a fork may add to the program; all additions of docs/extending.md fit in it. A fork raises it.
MARGIN = {"statements": 55, "nodes": 400, "files": 3}
MAX_FILES = 107 + MARGIN["files"]
# What is counted together, and its budget. The core is what a run needs, without the folders of NOT_CORE.
PROGRAM = ("mingpt", "anynode", "train.py", "sample.py", "launch")
CORE = ("mingpt", "train.py")
NOT_CORE = ("mingpt/tools", "mingpt/extras")
BUDGETS: dict[tuple[str, ...], Size] = {
    PROGRAM: Size(statements=11_430 + MARGIN["statements"], nodes=85_200 + MARGIN["nodes"]),
    CORE: Size(statements=8_545 + MARGIN["statements"], nodes=62_790 + MARGIN["nodes"]),
    ("tests",): Size(statements=8_500),
    ("benchmarks",): Size(lines=3_500),
}


def python_files(*places: str) -> list[Path]:
    found = [path for place in places for path in ((ROOT / place).rglob("*.py"), [ROOT / place])]
    return sorted({path for paths in found for path in paths if path.suffix == ".py" and path.is_file()})


def core_files() -> list[Path]:
    return sorted({*python_files(*CORE)} - {*python_files(*NOT_CORE)})


def module_of(path: Path) -> str:
    """mingpt/model/gpt.py -> mingpt.model.gpt"""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def package_of(module: str) -> str:
    """mingpt.model.gpt -> model; "" for the package itself."""
    parts = module.removesuffix(".__main__").split(".")
    return parts[1] if len(parts) > 1 else ""


def imports_of(path: Path, modules: Iterable[str]) -> set[str]:
    """The modules that a file names in its imports; of a package in `modules`, the module that is meant."""
    known, found = set(modules), set[str]()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            submodules = {f"{node.module}.{alias.name}" for alias in node.names} & known
            found |= submodules or {node.module}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found


def crossings() -> Iterator[str]:
    """A line for each import of mingpt in a package of APART, and of such a package in the program."""
    for package in APART:
        inside = python_files(package)
        for path in python_files(*PROGRAM):
            forbidden = "mingpt" if path in inside else package
            names = {name.partition(".")[0] for name in imports_of(path, [])}
            if forbidden in names:
                yield f"{path.relative_to(ROOT)} imports {forbidden}"


def find_circle(graph: Mapping[str, set[str]]) -> list[str]:
    """Nodes that lead back to the first one, if there are any."""
    done = set[str]()

    def visit(node: str, way: list[str]) -> list[str]:
        if node in way:
            return [*way[way.index(node) :], node]
        if node in done:
            return []
        for other in sorted(graph[node]):
            circle = visit(other, [*way, node])
            if circle:
                return circle
        done.add(node)
        return []

    return next((circle for circle in (visit(node, []) for node in sorted(graph)) if circle), [])


def longest_function(files: Iterable[Path]) -> tuple[int, str]:
    """Lines of the longest function, and its name."""
    nodes = [(path, node) for path in files for node in ast.walk(ast.parse(path.read_text()))]
    lengths = [
        ((node.end_lineno or 0) - node.lineno + 1, f"{path.relative_to(ROOT)} {node.name}")
        for path, node in nodes
        if isinstance(node, Function)
    ]
    return max(lengths)


def size_of(files: Iterable[Path]) -> Size:
    texts = [path.read_text() for path in files]
    nodes = [node for text in texts for node in ast.walk(ast.parse(text))]
    # Python 3.12.1 puts an empty constant behind a format specification in braces.
    parts = [part for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values]
    empty = sum(isinstance(part, ast.Constant) and part.value == "" for part in parts)
    return Size(
        statements=sum(isinstance(node, ast.stmt) for node in nodes),
        nodes=sum(not isinstance(node, ast.expr_context) for node in nodes) - empty,
        lines=sum(text.count("\n") for text in texts),
    )


def docstrings_of(text: str) -> Iterator[tuple[ast.stmt, str]]:
    """Each docstring of a file, as the statement that holds it and its text."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | Function):
            docstring = ast.get_docstring(node)
            if docstring:
                yield node.body[0], docstring


def without_noun(files: Iterable[Path]) -> list[str]:
    """The place and the first line of each docstring that begins with a word of NO_NOUN."""
    return [
        f"{path}:{statement.lineno} {docstring.splitlines()[0]}"
        for path in files
        for statement, docstring in docstrings_of(path.read_text())
        if NO_NOUN.match(docstring)
    ]


def share_of_words(files: Iterable[Path]) -> float:
    """Lines with a comment or of a docstring, over all that are not blank."""
    words = lines = 0
    for path in files:
        text = path.read_text()
        tokens = tokenize.generate_tokens(io.StringIO(text).readline)
        found = {token.start[0] for token in tokens if token.type == tokenize.COMMENT}
        for statement, _ in docstrings_of(text):
            found |= set(range(statement.lineno, (statement.end_lineno or 0) + 1))
        filled = {number for number, line in enumerate(text.splitlines(), 1) if line.strip()}
        words, lines = words + len(found & filled), lines + len(filled)
    return words / lines


def over_budget(name: str, size: Size, budget: Size) -> Iterator[str]:
    """A sentence for each limit that is passed."""
    for kind, limit in asdict(budget).items():
        found = asdict(size)[kind]
        if limit is not None and found > limit:
            yield f"{name}: {found:,} {kind}, and its budget is {limit:,}"


def main() -> int:
    files = python_files("mingpt")
    modules = {module_of(path): path for path in files}
    graph = {
        module: (imports_of(path, modules) & modules.keys()) - {module, "mingpt"}
        for module, path in modules.items()
    }
    arrows = {(package_of(module), package_of(other)) for module in graph for other in graph[module]}
    arrows = {(here, there) for here, there in arrows if here != there}
    height = {package: -number for number, layer in enumerate(LAYERS) for package in layer}
    height[""] = 0  # the loose files are as high as the top layer, and do not import it either
    packages = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    loose = {path.name for path in PACKAGE.glob("*.py")} - LOOSE
    upward = sorted(f"{here} -> {there}" for here, there in arrows if height[here] <= height[there])
    circle = find_circle(graph)
    program = python_files(*PROGRAM)
    longest = max(program, key=lambda path: path.read_text().count("\n"))
    file_lines = longest.read_text().count("\n")
    function_lines, function = longest_function(program)
    lines = [
        f"packages {len(packages)}, layers {len(LAYERS)}, arrows {len(arrows)}, loose files {len(loose)}",
        f"files {len(files)}, the longest {longest.relative_to(ROOT)} with {file_lines} lines",
        f"the longest function {function} with {function_lines} lines",
    ]
    excess: list[str] = []
    for places, budget in BUDGETS.items():
        name, files_counted = ", ".join(places), python_files(*places)
        if places == CORE:
            name, files_counted = "the core", core_files()
        size = size_of(files_counted)
        lines.append(f"{name}: {size.statements:,} statements, {size.nodes:,} nodes, {size.lines:,} lines")
        excess += over_budget(name, size, budget)
    share = share_of_words(program)
    lines.append(f"comments and docstrings: {share:.0%} of the program's lines")
    broken = [f"a file outside the packages: {name}" for name in sorted(loose)]
    broken += [f"not a package of LAYERS: {package}" for package in sorted({*packages, ""} ^ height.keys())]
    broken += [f"an import that does not point down: {arrow}" for arrow in upward]
    broken += [f"across a border: {line}" for line in crossings()]
    broken += [f"a circle: {' -> '.join(circle)}"] if circle else []
    broken += [f"more than {MAX_FILES} files"] if len(files) > MAX_FILES else []
    broken += [f"a file of more than {MAX_FILE_LINES} lines"] if file_lines > MAX_FILE_LINES else []
    broken += [f"a function of more than {MAX_FUNCTION_LINES} lines"] * (function_lines > MAX_FUNCTION_LINES)
    broken += excess
    broken += [f"a docstring begins without its noun: {place}" for place in without_noun(python_files(*READ))]
    sys.stdout.write("\n".join([*lines, *(f"broken: {rule}" for rule in broken)]) + "\n")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
