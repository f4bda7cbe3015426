"""What holds for every hook and every plugin folder: examples, pages, fakes, templates, files, pins, and what a start
may load."""

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

import attrs
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import turnwise
from turnwise import Implementation
from turnwise.cli.new import TEMPLATES
from turnwise.hookspecs import KINDS, Hooks
from turnwise.plugins import Registry
from turnwise.testing import plugin as fakes

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = sorted(path.parent for path in ROOT.glob("plugins/*/*/pyproject.toml"))
LIBRARIES = {"serving"}
TOP = set(turnwise.__all__)
PUBLIC = {
    "turnwise.contracts",
    "turnwise.data",
    "turnwise.declared",
    "turnwise.devices",
    "turnwise.errors",
    "turnwise.plugins.registry",
    "turnwise.ports",
    "turnwise.rollout.standing",
    "turnwise.rollout.origin",
    "turnwise.rollout.worker",
}
"""What plugins share, without hooks of its own."""
HOOKS = sorted(KINDS)
HEAVY = {
    "torch",
    "transformers",
    "ray",
    "vllm",
    "sglang",
    "deepspeed",
    "gymnasium",
    "tensorboard",
    "matplotlib",
    "wandb",
    "swanlab",
}
LATER = {"numpy", "cattrs", "omegaconf"}


def project(folder: Path) -> dict[str, Any]:
    facts: dict[str, Any] = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))
    return facts


def package(folder: Path) -> Path:
    """The only package below `src`."""
    (found,) = [path for path in (folder / "src").iterdir() if (path / "__init__.py").exists()]
    return found


def every_folder(libraries: bool = True) -> Any:
    chosen = [folder for folder in FOLDERS if libraries or folder.name not in LIBRARIES]
    return pytest.mark.parametrize("folder", chosen, ids=[folder.name for folder in chosen])


def test_the_hooks_are_the_kinds() -> None:
    assert {name for name, value in vars(Hooks).items() if inspect.isfunction(value)} == set(KINDS)


@pytest.mark.parametrize("hook", HOOKS)
def test_the_example_in_the_docstring_of_a_hook_is_an_implementation_of_it(hook: str) -> None:
    lines = [line.strip() for line in (getattr(Hooks, hook).__doc__ or "").splitlines()]
    code = "\n".join(line[4:] for line in lines if line.startswith((">>> ", "... ")))
    assert code, f"hook {hook} has no example in its docstring"
    names = {
        node.id: node.id for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Name)
    }  # the classes that it leaves out
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
    assert len((folder / "README.md").read_text(encoding="utf-8").splitlines()) > 5, "the README says nothing"
    assert list((folder / "tests").glob("test_*.py")), "there are no tests"
    assert (package(folder) / "py.typed").is_file()
    facts = project(folder)["project"]
    assert facts["name"] == f"turnwise-{folder.name.replace('_', '-')}"
    assert package(folder).name == f"turnwise_{folder.name.replace('-', '_')}"
    hooks = {} if folder.name in LIBRARIES else {"turnwise": {folder.name.replace("-", "_"): package(folder).name}}
    assert facts.get("entry-points", {}) == hooks
    assert facts["license"] == "Apache-2.0"
    core = next(Requirement(line) for line in facts["dependencies"] if Requirement(line).name == "turnwise")
    assert core.specifier.contains(project(ROOT / "core")["project"]["version"])


@pytest.mark.parametrize("folder", FOLDERS, ids=[folder.name for folder in FOLDERS])
def test_a_plugin_imports_what_is_public_alone(folder: Path) -> None:
    """Contracts, data and errors, and the few helpers that are written for plugins; the kit's fakes in fixtures of
    tests."""
    for path in sorted((folder / "src").rglob("*.py")):
        public = PUBLIC | ({"turnwise.testing"} if path.name == "fixtures.py" else set())
        for line, name in imported(path):
            module = next((known for known in public if name == known or name.startswith(f"{known}.")), None)
            top = name.removeprefix("turnwise.") in TOP  # `from turnwise import hookimpl`
            assert module or top or name == "turnwise", (
                f"{path.relative_to(ROOT)}, line {line}: {name} is no public part of turnwise"
            )


def imported(path: Path) -> list[tuple[int, str]]:
    """(line, dotted name) of what a file imports from the core, at the top or within a function."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found += [(node.lineno, f"{node.module}.{alias.name}") for alias in node.names]
    return [(line, name) for line, name in found if name.split(".")[0] == "turnwise"]


@every_folder()
def test_the_init_of_a_plugin_holds_hooks_only(folder: Path) -> None:
    tree = ast.parse((package(folder) / "__init__.py").read_text(encoding="utf-8"))
    assert ast.get_docstring(tree)
    for node in tree.body[1:]:
        if isinstance(node, ast.ImportFrom):
            assert node.module in {"__future__", "turnwise"}, f"line {node.lineno} imports {node.module}"
        else:
            assert isinstance(node, ast.FunctionDef), f"line {node.lineno} is no hook"
            assert node.name in KINDS
            assert [ast.unparse(decorator) for decorator in node.decorator_list] in (
                ["hookimpl"],
                ["turnwise.hookimpl"],
            )


@every_folder(libraries=False)
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
            assert re.search(rf"^(class|def) {attribute}\b", path.read_text(encoding="utf-8"), re.MULTILINE), (
                f"{record.name}: {what!r} is not there"
            )


def test_test_files_have_unique_names() -> None:
    paths = [path for root in ("core", "plugins", "tests") for path in (ROOT / root).rglob("test_*.py")]
    names = [path.name for path in paths if ".venv" not in path.parts]
    assert sorted(names) == sorted(set(names))


def test_the_core_imports_no_plugin() -> None:
    """The import rules name the engines; plugins are known by their prefix, and here alone."""
    found = []
    for path in (ROOT / "core" / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = (
                [a.name for a in node.names]
                if isinstance(node, ast.Import)
                else [node.module or ""]
                if isinstance(node, ast.ImportFrom)
                else []
            )
            found += [
                f"{path.relative_to(ROOT)}:{node.lineno}: {name}" for name in names if name.startswith("turnwise_")
            ]  # type: ignore[attr-defined]
    assert found == []


def pins() -> dict[str, str]:
    lines = [
        line.split("#")[0].strip()
        for line in (ROOT / "requirements" / "run.txt").read_text(encoding="utf-8").splitlines()
    ]
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
    ended = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport json, sys\nprint(json.dumps(sorted(sys.modules)), file=sys.stderr)"],
        capture_output=True,
        text=True,
        check=True,
    )
    return {name.partition(".")[0] for name in json.loads(ended.stderr.splitlines()[-1])}


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


OPTIONAL = {
    "capabilities": ("declared.py",),  # the one place that reads the records
    "num_tasks": ("rollout/trial.py", "testing/contracts/environment.py"),  # an environment's, as are the next two
    "close": ("rollout/trial.py", "testing/contracts/environment.py"),
    "render": ("testing/contracts/environment.py",),
}
"""Members that an implementation may leave out, and where the core looks for them."""
OF_PYTHON = {
    "__notes__",
    "besides",
    "__dict__",
    "__file__",
    "__await__",
    "_fields",
    "turnwise_impl",
    "register_resolver",
}
OF_PYTHON |= {"getpgid", "setsid", "killpg", "sched_getaffinity"}
"""Members of Python's own objects and of libraries, which versions and platforms lack."""
CORE = ROOT / "core" / "src" / "turnwise"


def test_the_core_reads_no_undeclared_member_of_an_implementation() -> None:
    found = []
    for file in sorted(CORE.rglob("*.py")):
        where = file.relative_to(CORE).as_posix()
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if not (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id in ("getattr", "hasattr")
            ):
                continue
            name = node.args[1].value if isinstance(node.args[1], ast.Constant) else None
            if name is not None and name not in OF_PYTHON and where not in OPTIONAL.get(str(name), ()):
                found.append(f"{where}:{node.lineno}: {name}")
    assert found == [], "declare it: a member of the contract's Protocol, or a field of its record of capabilities"


NAMED = {
    "config/schema.py": "the defaults of a run",
    "config/docgen.py": "the page that explains choices",
    "config/choices.py": (
        "short names that the field has for the sizes of any strategy, and the option that collects an engine's"
        " arguments"
    ),
}
"""Files of the core that may name implementations; config/foreign holds the field's own keys."""


def test_the_core_names_no_option_and_no_algorithm_of_a_plugin() -> None:
    schema = {
        a.name
        for cls in vars(importlib.import_module("turnwise.config.schema")).values()
        if attrs.has(cls)
        for a in attrs.fields(cls)
    }
    names: set[str] = set()
    for entry in Registry.discover().entries():
        if entry.distribution == "turnwise" or entry.kind in ("environment", "logger"):
            continue
        options = entry.config_class()
        names |= {entry.name} | ({a.name for a in attrs.fields(options)} if options is not None else set())
    names = {name for name in names - schema if "_" in name}  # one plain word may be anything
    assert {"by_trajectory", "merge_steps", "dual_clip_c", "pg_clip", "step_reward_gamma", "base_url"} <= names
    word = re.compile(rf"\b({'|'.join(sorted(names))})\b")
    found = []
    for file in sorted(CORE.rglob("*.py")):
        where = file.relative_to(CORE).as_posix()
        if where in NAMED or where.startswith(("config/foreign/", "testing/")):
            continue
        lines = file.read_text(encoding="utf-8").splitlines()
        found += [
            f"{where}:{number}: {hit[0]}" for number, line in enumerate(lines, 1) for hit in [word.search(line)] if hit
        ]
    assert found == []


def public_functions(body: list[ast.stmt]) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    """The public functions of a module or class, and those of its public classes."""
    found: list[ast.FunctionDef | ast.AsyncFunctionDef] = []
    for one in body:
        if isinstance(one, ast.ClassDef) and not one.name.startswith("_"):
            found += public_functions(one.body)
        elif isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef):
            found += [one] if one.name == "__init__" or not one.name.startswith("_") else []
    return found


def test_any_in_a_public_signature_of_the_core_says_what_it_stands_for() -> None:
    """Beside the signature or in the line before: `# Any: …`, or `# Any, …`."""
    found = []
    for file in sorted(CORE.rglob("*.py")):
        if "testing" in file.parts:
            continue
        text = file.read_text(encoding="utf-8")
        lines = text.splitlines()
        for one in public_functions(ast.parse(text).body):
            signature = "\n".join(lines[one.lineno - 2 : one.body[0].lineno])
            named = {node.id for node in ast.walk(one.args) if isinstance(node, ast.Name)}
            named |= {node.id for node in ast.walk(one.returns or one.args) if isinstance(node, ast.Name)}
            if "Any" in named and "# Any" not in signature:
                found.append(f"{file.relative_to(CORE)}:{one.lineno}: {one.name}")
    assert found == []
