"""What holds for every hook and every plugin folder: examples, pages, fakes, templates, files, pins, and what a start may load."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import re
import resource
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from turnwise import Implementation
from turnwise.cli.new import TEMPLATES
from turnwise.hookspecs import KINDS, Hooks
from turnwise.testing import plugin as fakes

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = sorted(path.parent for path in ROOT.glob("plugins/*/*/pyproject.toml"))
HOOKS = sorted(KINDS)
HEAVY = {"torch", "transformers", "ray", "vllm", "sglang", "deepspeed", "gymnasium", "tensorboard", "matplotlib"}
LATER = {"numpy", "cattrs", "omegaconf"}


def project(folder: Path) -> dict[str, Any]:
    facts: dict[str, Any] = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))
    return facts


def package(folder: Path) -> Path:
    """The only package below `src`."""
    (found,) = [path for path in (folder / "src").iterdir() if (path / "__init__.py").exists()]
    return found


def every_folder() -> Any:
    return pytest.mark.parametrize("folder", FOLDERS, ids=[folder.name for folder in FOLDERS])


def test_the_hooks_are_the_kinds() -> None:
    assert {name for name, value in vars(Hooks).items() if inspect.isfunction(value)} == set(KINDS)


@pytest.mark.parametrize("hook", HOOKS)
def test_the_example_in_the_docstring_of_a_hook_is_an_implementation_of_it(hook: str) -> None:
    lines = [line.strip() for line in (getattr(Hooks, hook).__doc__ or "").splitlines()]
    code = "\n".join(line[4:] for line in lines if line.startswith((">>> ", "... ")))
    assert code, f"hook {hook} has no example in its docstring"
    names = {node.id: node.id for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Name)}  # the classes that it leaves out
    scope: dict[str, Any] = {**names, "turnwise": importlib.import_module("turnwise")}
    exec(code, scope)
    assert scope[hook].turnwise_impl is not None
    assert all(isinstance(record, Implementation) for record in scope[hook]())


@pytest.mark.parametrize("hook", HOOKS)
def test_every_hook_has_a_page_that_names_it(hook: str) -> None:
    page = ROOT / "docs" / "plugins" / f"{hook.replace('_', '-')}.md"
    assert page.is_file(), f"{page.relative_to(ROOT)} is missing"
    assert hook in page.read_text(encoding="utf-8")


@pytest.mark.parametrize("hook", HOOKS)
def test_every_hook_has_a_fake_that_can_be_loaded(hook: str) -> None:
    for record in getattr(fakes, hook)():
        module, _, name = record.target.partition(":")
        assert isinstance(getattr(importlib.import_module(module), name), type)


@pytest.mark.parametrize("hook", HOOKS)
def test_every_hook_has_a_template(hook: str) -> None:
    folder = ROOT / "core" / "src" / "turnwise" / "cli" / "templates" / KINDS[hook]
    assert KINDS[hook] in TEMPLATES
    assert {"README.md.txt", "__init__.py.txt", "test.py.txt"} <= {path.name for path in folder.iterdir()}
    assert f"def {hook}()" in (folder / "__init__.py.txt").read_text(encoding="utf-8")


@every_folder()
def test_a_plugin_folder_is_complete(folder: Path) -> None:
    assert len((folder / "README.md").read_text(encoding="utf-8").splitlines()) > 5, "the README tells nothing"
    assert list((folder / "tests").glob("test_*.py")), "there are no tests"
    assert (package(folder) / "py.typed").is_file()
    facts = project(folder)["project"]
    assert facts["name"] == f"turnwise-{folder.name.replace('_', '-')}"
    assert package(folder).name == f"turnwise_{folder.name.replace('-', '_')}"
    assert facts["entry-points"]["turnwise"] == {folder.name.replace("-", "_"): package(folder).name}
    assert facts["license"] == "Apache-2.0"
    core = next(Requirement(line) for line in facts["dependencies"] if Requirement(line).name == "turnwise")
    assert core.specifier.contains(project(ROOT / "core")["project"]["version"])


@every_folder()
def test_the_init_of_a_plugin_holds_hooks_only(folder: Path) -> None:
    tree = ast.parse((package(folder) / "__init__.py").read_text(encoding="utf-8"))
    assert ast.get_docstring(tree)
    for node in tree.body[1:]:
        if isinstance(node, ast.ImportFrom):
            assert node.module in {"__future__", "turnwise", "turnwise.hookspecs"}, f"line {node.lineno} imports {node.module}"
        else:
            assert isinstance(node, ast.FunctionDef), f"line {node.lineno} is no hook"
            assert node.name in KINDS
            assert [ast.unparse(decorator) for decorator in node.decorator_list] in (["hookimpl"], ["turnwise.hookimpl"])


@every_folder()
def test_every_implementation_of_a_plugin_says_what_it_is_and_can_be_imported_on_use(folder: Path) -> None:
    module = importlib.import_module(package(folder).name)
    records = [record for hook in HOOKS if hasattr(module, hook) for record in getattr(module, hook)()]
    assert records
    readme = (folder / "README.md").read_text(encoding="utf-8")
    for record in records:
        assert record.summary, f"{record.name} has no summary"
        assert record.name in readme, f"the README does not name {record.name}"
        for what in (record.target, record.config, record.fixtures):
            if what is None:
                continue
            where, _, attribute = what.partition(":")
            path = package(folder).parent / Path(*where.split(".")).with_suffix(".py")
            assert path.is_file(), f"{record.name}: {what!r} names no file"
            assert re.search(rf"^(class|def) {attribute}\b", path.read_text(encoding="utf-8"), re.MULTILINE), f"{record.name}: {what!r} is not there"


def test_test_files_have_unique_names() -> None:
    paths = [path for root in ("core", "plugins", "tests") for path in (ROOT / root).rglob("test_*.py")]
    names = [path.name for path in paths if ".venv" not in path.parts]
    assert sorted(names) == sorted(set(names))


def test_the_core_imports_no_plugin() -> None:
    """The import rules name the engines; plugins are known by their prefix, and here alone."""
    found = []
    for path in (ROOT / "core" / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            found += [f"{path.relative_to(ROOT)}:{node.lineno}: {name}" for name in names if name.startswith("turnwise_")]  # type: ignore[attr-defined]
    assert found == []


def pins() -> dict[str, str]:
    lines = [line.split("#")[0].strip() for line in (ROOT / "requirements" / "run.txt").read_text(encoding="utf-8").splitlines()]
    return {canonicalize_name(name): version for name, _, version in (line.partition("==") for line in lines if line)}


@pytest.mark.parametrize("folder", [ROOT / "core", *FOLDERS], ids=lambda folder: folder.name)
def test_every_dependency_is_pinned_to_a_version_that_it_admits(folder: Path) -> None:
    pinned = pins()
    for requirement in map(Requirement, project(folder)["project"].get("dependencies", [])):
        name = canonicalize_name(requirement.name)
        if name == "turnwise" or name in {f"turnwise-{other.name}" for other in FOLDERS}:
            continue
        assert name in pinned, f"{requirement} is not in requirements/run.txt"
        assert requirement.specifier.contains(pinned[name]), f"{requirement} does not admit the pinned {pinned[name]}"


def loaded_by(code: str) -> set[str]:
    """The top-level modules in a new process after `code`."""
    told = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport json, sys\nprint(json.dumps(sorted(sys.modules)), file=sys.stderr)"],
        capture_output=True,
        text=True,
        check=True,
    )
    return {name.partition(".")[0] for name in json.loads(told.stderr.splitlines()[-1])}


def test_import_turnwise_loads_no_engine() -> None:
    assert not loaded_by("import turnwise") & (HEAVY | LATER)


def test_the_list_of_plugins_loads_no_engine_and_not_even_numpy() -> None:
    listing = "from turnwise.cli.main import main\nmain(['plugins'], standalone_mode=False)"
    loaded = loaded_by(listing)
    assert {"turnwise_hf", "turnwise_torch"} <= loaded  # every plugin's hooks were asked
    assert not loaded & (HEAVY | LATER)


def test_the_list_of_plugins_takes_under_three_tenths_of_a_second_of_cpu() -> None:
    """The least of a few, for a machine that is busy with something else."""
    took = []
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-m", "turnwise.cli.main", "plugins"], capture_output=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        took.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        if took[-1] < 0.3:
            return
    raise AssertionError(f"seconds of CPU: {took}")
