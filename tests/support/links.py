"""Finds the files, headings, names and commands that a page mentions and the repository does not have."""

import re
from collections.abc import Iterator, Set
from pathlib import Path
from urllib.parse import unquote

FENCED = re.compile(r"^[ \t]*(```+|~~~+).*?^[ \t]*\1[ \t]*$", re.MULTILINE | re.DOTALL)
COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
HEADING = re.compile(r"^ {0,3}#{1,6}[ \t]+(.*?)[ \t]*#*[ \t]*$", re.MULTILINE)
TARGET = re.compile(
    r"\]\(\s*<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\s*\)"
)  # [text](target), ![text](target "title")
CODE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
NAME_LINK = re.compile(r"\[`([^`\n]+)`\]\(([^)\s#]+\.py)(?:#[^)\s]*)?\)")
NAME = re.compile(r"(?!.*\.py$)[A-Za-z_][\w.]*(\(\))?")
MODULE = re.compile(r"python3? -m ((?:mingpt|tutorial)(?:\.\w+)+)")
COMMAND = re.compile(r"-m\s+mingpt\s+([a-z]\w*)")
FOLDERS = ("benchmarks", "configs", "data", "docs", "launch", "mingpt", "tests", "tutorial")
SUFFIXES = (".py", ".yaml", ".sbatch", ".sh", ".txt", ".md", ".svg")


def wrong_statements(page: Path, root: Path, added: Set[str] = frozenset()) -> list[str]:
    """Return an error text for each file, heading, name or command on the page that does not exist.

    `root` is the repository's folder. `added` are paths of files that the page tells the reader to write.
    """
    text = page.read_text()
    prose = COMMENT.sub("", FENCED.sub("", text))
    return [
        *wrong_links(prose, page, root),
        *wrong_paths(prose, root, added),
        *wrong_names(prose, page),
        *wrong_modules(text, root),
    ]


def wrong_links(prose: str, page: Path, root: Path) -> Iterator[str]:
    for target in TARGET.findall(prose):
        if re.match(r"[a-z][a-z0-9+.-]*:|//", target):
            continue  # a link to another site
        path, _, anchor = unquote(target).partition("#")
        base = root if path.startswith("/") else page.parent
        file = (base / path.lstrip("/")).resolve() if path else page.resolve()
        if not file.exists() or not file.is_relative_to(root.resolve()):
            yield f"{target}: no such file in the repository"
        elif anchor and (file.suffix != ".md" or anchor not in anchors(file.read_text())):
            yield f"{target}: no such heading"


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as GitHub spells them."""
    found: list[str] = []
    for heading in HEADING.findall(COMMENT.sub("", FENCED.sub("", text))):
        words = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        found.append(re.sub(r"[^\w\- ]", "", words.lower()).replace(" ", "-"))
    again = {f"{slug}-{number}" for slug in found for number in range(1, found.count(slug))}
    return {*found, *again}


def wrong_paths(prose: str, root: Path, added: Set[str]) -> Iterator[str]:
    """Yield an error text for each missing file or folder that the page names in backticks.

    A path whose first part is one of FOLDERS starts at `root`. Any other path that ends in one of SUFFIXES,
    and any name that ends in .py, may be anywhere below `root`. Names in `added` are not checked.
    """
    for name in dict.fromkeys(CODE.findall(prose)):
        if name in added or not re.fullmatch(r"[\w.*-]+(/[\w.*-]+)*/?", name):
            continue
        is_path = "/" in name and name.split("/")[0] in FOLDERS
        is_file = name.endswith(".py") or ("/" in name and name.endswith(SUFFIXES))
        if is_path and not list(root.glob(name)):
            yield f"`{name}`: no such file or folder"
        elif is_file and not is_path and not list(root.rglob(name)):
            yield f"`{name}`: no such file"


def wrong_names(prose: str, page: Path) -> Iterator[str]:
    """Yield an error text for each link [`name`](file.py) to an existing file that does not define the name.

    If the name ends in .py, the file's path must end in the name.
    """
    for name, target in NAME_LINK.findall(prose):
        file = (page.parent / target).resolve()
        if not file.exists():
            continue  # wrong_links reports it
        if name.endswith(".py") and not file.as_posix().endswith(f"/{name}"):
            yield f"`{name}`: leads to {target}"
        elif NAME.fullmatch(name) and not is_defined(name.removesuffix("()"), file.read_text()):
            yield f"`{name}`: not defined in {target}"


def is_defined(name: str, program: str) -> bool:
    """Whether a line of `program` begins with `name`, perhaps after def or class.

    For `Class.name`, the line must begin with four spaces and `name`; the class is not looked up.
    """
    last, indent = name.rpartition(".")[2], "    " * name.count(".")
    return re.search(rf"^{indent}(?:async def |def |class )?{last}\b", program, re.MULTILINE) is not None


def wrong_modules(text: str, root: Path) -> Iterator[str]:
    """Yield an error text for each missing module, or command of `python -m mingpt`, that the page runs."""
    for module in dict.fromkeys(MODULE.findall(text)):
        path = root / module.replace(".", "/")
        if not path.with_suffix(".py").exists() and not (path / "__main__.py").exists():
            yield f"python -m {module}: no such program"
    main = root / "mingpt" / "__main__.py"
    for command in dict.fromkeys(COMMAND.findall(text)):
        if not main.exists() or f'\n    "{command}": (' not in main.read_text():
            yield f"python -m mingpt {command}: no such command"
