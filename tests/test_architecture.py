"""The tree keeps its promises: nothing unsafe is called, nothing heavy is imported early, every setting is read."""

import ast
import os
import subprocess
import sys
from dataclasses import field, fields, is_dataclass, make_dataclass
from pathlib import Path

import pytest

from dexter import config

SOURCE = Path(config.__file__).parent
FORBIDDEN = ("pickle", "joblib", "marshal", "shelve")


def modules():
    return sorted(SOURCE.rglob("*.py"))


def imports_of(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_only_one_module_knows_torch_distributed():
    users = [path for path in modules() if any(name.startswith("torch.distributed") for name in imports_of(path))]
    assert [path.name for path in users] == ["distributed.py"]


def test_no_unsafe_loading_anywhere():
    for path in modules():
        assert not any(name.split(".")[0] in FORBIDDEN for name in imports_of(path)), path
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                assert called not in ("torch.load", "eval", "exec"), f"{path}:{node.lineno} calls {called}"
                for keyword in node.keywords:
                    unsafe = keyword.arg == "allow_pickle" and ast.unparse(keyword.value) != "False"
                    assert not unsafe, f"{path}:{node.lineno} allows pickle"


def test_no_module_has_a_catch_all_name():
    assert not [path for path in modules() if path.stem in {"utils", "util", "common", "helpers", "misc"}]


def test_every_module_opens_with_a_docstring():
    assert not [path for path in modules() if not ast.get_docstring(ast.parse(path.read_text()))]


SECTIONS = {entry.name: entry.default_factory for entry in fields(config.Config) if is_dataclass(entry.default_factory)}


def setting_names(sections):
    """Every setting as section.name, and those of the whole run by name alone."""
    whole = {f"config.{entry.name}" for entry in fields(config.Config) if entry.name not in SECTIONS}
    return whole | {f"{section}.{entry.name}" for section, kind in sections.items() for entry in fields(kind)}


class SettingReads(ast.NodeVisitor):
    """Collects which settings a module reads.

    A read is an attribute of a section, as in `config.train.epochs`. A section also goes by other names: an argument
    that is annotated with its class, or a variable or attribute that one of these was assigned to.
    """

    def __init__(self, sections):
        self.classes = {kind.__name__: section for section, kind in sections.items()} | {"Config": "config"}
        self.sections, self.names, self.read = set(sections), {}, set()

    def section_of(self, node):
        if isinstance(node, ast.Name):
            return self.names.get(node.id, "config" if node.id == "config" else None)
        if isinstance(node, ast.Attribute):
            if node.attr in self.sections and self.section_of(node.value) == "config":
                return node.attr
            return self.names.get(f".{node.attr}", "config" if node.attr == "config" else None)
        return None

    def visit_ClassDef(self, node):
        outer = dict(self.names)
        self.generic_visit(node)
        self.names = outer

    def visit_FunctionDef(self, node):
        outer = dict(self.names)
        for argument in [*node.args.args, *node.args.kwonlyargs]:
            annotated = {name.id for name in ast.walk(argument.annotation or node) if isinstance(name, ast.Name)}
            known = annotated & self.classes.keys() if argument.annotation else set()
            self.names[argument.arg] = self.classes[known.pop()] if known else None
            if argument.arg == "config" and not argument.annotation:
                self.names["config"] = "config"
        self.generic_visit(node)
        # What a method keeps in an attribute is known to the methods after it.
        self.names = outer | {name: section for name, section in self.names.items() if name.startswith(".")}

    def visit_Assign(self, node):
        self.generic_visit(node)
        for target in node.targets:
            pairs = [(target, node.value)]
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                pairs = list(zip(target.elts, node.value.elts, strict=True))
            for left, right in pairs:
                name = left.id if isinstance(left, ast.Name) else f".{left.attr}" if hasattr(left, "attr") else None
                if name and (section := self.section_of(right)):
                    self.names[name] = section

    def visit_Attribute(self, node):
        self.generic_visit(node)
        if isinstance(node.ctx, ast.Load) and (section := self.section_of(node.value)):
            self.read.add(f"{section}.{node.attr}")


def settings_read(sections, paths):
    reads = set()
    for path in paths:
        visitor = SettingReads(sections)
        visitor.visit(ast.parse(path.read_text()))
        reads |= visitor.read
    return reads


def test_every_setting_is_read_somewhere():
    known = setting_names(SECTIONS)
    assert len(known) > 40, "the settings were not found"
    paths = [path for path in modules() if path != SOURCE / "config.py"]
    assert known - settings_read(SECTIONS, paths) == set()


@pytest.mark.parametrize("name", ["bogus", "rows", "shape", "name"])
def test_a_setting_that_nobody_reads_is_found(name):
    """Also one whose name is an attribute of other things."""
    kind = make_dataclass("BatchConfig", [(name, int, field(default=0))], bases=(config.BatchConfig,), frozen=True)
    sections = SECTIONS | {"batch": kind}
    unread = setting_names(sections) - settings_read(sections, modules())
    assert unread == {f"batch.{name}"}


def run_python(code):
    """Output and CPU seconds of a fresh interpreter."""
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": ""}
    best = float("inf")
    for _ in range(3):
        before = os.times()
        result = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True
        )
        after = os.times()
        best = min(best, after.children_user + after.children_system - before.children_user - before.children_system)
    return result.stdout, best


def test_import_is_light():
    output, seconds = run_python("import sys, dexter; print('torch' in sys.modules, 'numpy' in sys.modules)")
    assert output.split() == ["False", "False"]
    assert seconds < 0.3


def test_help_is_light():
    code = "import sys\nsys.argv = ['dexter', '--help']\nfrom dexter.cli.main import main\n"
    code += "try: main()\nexcept SystemExit: pass\n"
    output, seconds = run_python(code + "print('torch' in sys.modules)")
    assert "evaluate" in output
    assert output.split()[-1] == "False"
    assert seconds < 0.5
