"""Imports go one way, only launch/ reads the environment, and no file or function grows beyond its budget."""

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FILES = {
    ".".join(("ringattn", *path.relative_to(base).with_suffix("").parts)).removesuffix(".__init__"): path
    for base, folder in ((ROOT / "ringattn", "."), (ROOT, "kernels"), (ROOT, "launch"))
    for path in (base.glob("*.py") if folder == "." else (base / folder).rglob("*.py"))
} | {
    f"ringattn.{package}.{path.stem}".removesuffix(".__init__"): path
    for package in ("backends", "integrations")
    for path in (ROOT / "ringattn" / package).glob("*.py")
}

ALLOWED = {
    "layout": "",
    "mask": "",
    "merge": "",
    "transport": "",
    "ring": "transport",
    "header": "transport",
    "control": "header recorder transport",
    "comm": "control header recorder transport",
    "heads": "layout ring transport",
    "kernels": "kernels",
    "plan": "layout mask",
    "schedule": "plan layout mask",
    "shard": "layout comm",
    "backends": "merge plan kernels",
    "dispatch": "backends",
    "ops": "ring schedule plan comm header heads transport backends dispatch layout mask merge",
    "attention": "ops schedule plan comm header heads backends dispatch layout mask merge",
    "parallel": "attention shard comm layout",
    "loss_ops": "comm draw kernel_choice merge sampling",
    "loss": "comm keys loss_ops",
    "integrations": "integrations parallel attention shard comm layout mask",
}
"""What each part may import of ours; parts without an entry may import anything but launch and testing."""

PRIVATE = {"ops", "ring", "kernels", "backends"}
"""Parts that launch/ reaches through public names only."""

FILE_LINES, FUNCTION_LINES, KERNEL_LINES = 500, 60, 120


def part(module: str) -> str:
    """The part of the library that a module belongs to: its first name below ringattn."""
    return (module.split(".") + [""])[1]


def imports(module: str) -> Iterator[str]:
    """Our modules that a module imports, wherever in the file."""
    for node in ast.walk(ast.parse(FILES[module].read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "ringattn")
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} imports relatively"
            if (node.module or "").split(".")[0] == "ringattn":
                names = [f"{node.module}.{alias.name}" for alias in node.names]
                yield from (name if name in FILES else str(node.module) for name in names)


@pytest.mark.parametrize("module", FILES)
def test_imports_go_one_way(module: str) -> None:
    own = part(module)
    for imported in imports(module):
        other = part(imported)
        if own == "launch":
            assert other not in PRIVATE, f"{module} imports {imported}"
        elif own in ALLOWED and other != "":
            shared = own == "backends" and imported == "ringattn.backends"
            assert shared or other in ALLOWED[own].split(), f"{module} imports {imported}"
        else:
            assert other not in {"launch", "testing"} and own != other, f"{module} imports {imported}"


def test_no_module_imports_itself_in_a_circle() -> None:
    TopologicalSorter({module: set(imports(module)) - {module} for module in FILES}).prepare()


def test_the_rule_sees_the_imports_that_there_are() -> None:
    assert set(imports("ringattn.plan")) == {"ringattn.layout", "ringattn.mask"}
    assert {"ringattn.merge", "ringattn.plan"} <= set(imports("ringattn.backends.reference"))
    assert {part(module) for module in FILES} >= {"attention", "ring", "backends", "kernels", "launch", "testing"}


@pytest.mark.parametrize("module", [module for module in FILES if part(module) != "launch"])
def test_only_launch_reads_arguments_and_environment(module: str) -> None:
    read = {
        name
        for node in ast.walk(ast.parse(FILES[module].read_text()))
        for name in ([node.attr] if isinstance(node, ast.Attribute) else [])
    }
    assert not read & {"environ", "getenv", "argv"}


@pytest.mark.parametrize("module", FILES)
def test_files_and_functions_keep_to_their_budget(module: str) -> None:
    source = FILES[module].read_text()
    assert source.count("\n") <= FILE_LINES
    tree = ast.parse(source)
    assert ast.get_docstring(tree), f"{module} has no docstring"
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            body = node.body[1:] if ast.get_docstring(node) else node.body
            lines = 0 if not body else (body[-1].end_lineno or 0) - body[0].lineno + 1
            limit = KERNEL_LINES if part(module) == "kernels" else FUNCTION_LINES
            assert lines <= limit, f"{module}.{node.name} has {lines} lines"
