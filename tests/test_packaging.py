"""The checkout, the wheel and an import hold what they should, and nothing that would shadow another's package."""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest

from ringattn.launch.cli import COMMANDS

ROOT = Path(__file__).resolve().parent.parent
if sys.version_info >= (3, 11):
    import tomllib

    PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
LINKED = ("kernels", "launch")
needs_toml = pytest.mark.skipif(sys.version_info < (3, 11), reason="tomllib came with Python 3.11")


def python(code: str, *options: str, folder: Path | None = None) -> str:
    """What a fresh interpreter prints."""
    command = [sys.executable, *options, "-c", code]
    return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True, timeout=200).stdout.strip()


@pytest.mark.parametrize("name", LINKED)
def test_links_are_relative_and_resolve(name: str) -> None:
    link = ROOT / "ringattn" / name
    assert link.is_symlink() and os.readlink(link) == f"../{name}"
    assert link.resolve() == ROOT / name and (ROOT / name).is_dir()


@pytest.mark.parametrize("name", LINKED)
def test_linked_folders_are_no_top_level_packages(name: str) -> None:
    assert not list((ROOT / name).rglob("__init__.py"))
    spec = find_spec(name)
    assert spec is None or not any(str(ROOT) in path for path in spec.submodule_search_locations or [])


@pytest.mark.parametrize("name", LINKED)
def test_an_installed_package_of_that_name_wins(name: str, tmp_path: Path) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").touch()
    code = f"import sys; sys.path[:0] = [{str(ROOT)!r}, {str(tmp_path)!r}]; import {name}; print({name}.__file__)"
    assert python(code, "-I", folder=tmp_path) == str(tmp_path / name / "__init__.py")


def code(*folders: str) -> list[Path]:
    """The Python files of some folders, those under version control where there is any."""
    found = [path.relative_to(ROOT) for name in folders for path in sorted((ROOT / name).rglob("*.py"))]
    listed = subprocess.run(["git", "ls-files", *folders], cwd=ROOT, capture_output=True, text=True)
    return [path for path in found if listed.returncode or path.as_posix() in listed.stdout.splitlines()]


@needs_toml
def test_every_folder_with_code_is_in_the_package_list() -> None:
    folders = {Path("ringattn", path.parent) for path in code(*LINKED)} | {path.parent for path in code("ringattn")}
    assert set(PROJECT["tool"]["setuptools"]["packages"]) >= {".".join(folder.parts) for folder in folders}


@needs_toml
def test_every_tool_is_pinned() -> None:
    pinned = set(re.findall(r"^([a-z-]+)==", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    groups = PROJECT["project"]["optional-dependencies"]
    wanted = [*PROJECT["project"]["dependencies"], *groups["dev"], *groups["bench"], *groups["interpret"]]
    assert {re.split(r"[^a-z-]", requirement)[0] for requirement in wanted} <= pinned


def test_a_wheel_holds_the_linked_code_and_the_type_marker(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, source)
    for name in ("ringattn", *LINKED):
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    built = python("from setuptools.build_meta import build_wheel; print(build_wheel('.'))", folder=source)
    files = set(zipfile.ZipFile(source / built.splitlines()[-1]).namelist())
    expected = {"ringattn/py.typed", "ringattn/backends/reference.py", "ringattn/launch/cli.py"}
    expected |= {f"ringattn/{path.as_posix()}" for path in code(*LINKED)}
    assert expected <= files
    assert {name.split("/")[0].split("-")[0] for name in files} == {"ringattn"}


def test_import_is_light() -> None:
    heavy = ("triton", "transformers", "matplotlib", "rich")
    assert python(f"import sys, ringattn; print([m for m in {heavy} if m in sys.modules])") == "[]"


def test_the_command_is_installed() -> None:
    command = Path(sys.executable).with_name("ringattn")
    listed = subprocess.run([command, "--help"], capture_output=True, text=True, check=True, timeout=100).stdout
    assert listed.startswith("usage: ringattn COMMAND")


def readme_blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


def test_the_example_of_the_readme_runs(tmp_path: Path) -> None:
    (example,) = readme_blocks("python")
    assert len([line for line in example.splitlines() if line]) <= 11
    script = tmp_path / "example.py"
    script.write_text(example)
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True, timeout=200)
    assert done.stdout == "True\n"


def test_the_commands_of_the_readme_exist() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    lines = [line.split("#")[0].split() for block in readme_blocks("sh") for line in block.splitlines()]
    made = {line[1] for line in lines if line[:1] == ["make"]}
    called = {line[1] for line in lines if line[:1] == ["ringattn"]}
    assert {"verify", "test"} <= made <= targets and called <= set(COMMANDS) and called


def test_the_files_that_documents_point_at_exist() -> None:
    for document in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        for target in re.findall(r"\]\((?!http)([^)#]+)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.name} points at {target}"
