"""The tree keeps its promises: parts do not import drivers, nothing heavy is imported early, every setting is read."""

import ast
import os
import subprocess
import sys
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest

from dexter import config

SOURCE = Path(config.__file__).parent
PARTS = ("data", "batches", "encoders", "losses", "index", "metrics", "inference")
DRIVERS = (
    "training",
    "planning",
    "evaluation",
    "predictor",
    "model",
    "indexing",
    "serving",
    "cli",
    "cli_data",
    "cli_json",
    "cli_labels",
    "demo",
    "exporting",
    "streams",
    "live",
)
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


@pytest.mark.parametrize("part", PARTS)
def test_parts_never_import_drivers(part):
    for path in sorted((SOURCE / part).rglob("*.py")):
        for name in imports_of(path):
            first = name.removeprefix("dexter.").split(".")[0]
            assert not (name.startswith("dexter.") and first in DRIVERS), f"{path} imports {name}"


def test_only_one_module_knows_torch_distributed():
    users = [path for path in modules() if any(name.startswith("torch.distributed") for name in imports_of(path))]
    assert all(path.name == "distributed.py" for path in users)


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


def test_rooms_have_names():
    assert not [path for path in modules() if path.stem in {"utils", "util", "common", "helpers", "misc"}]


def test_every_module_opens_with_a_docstring():
    assert not [path for path in modules() if not ast.get_docstring(ast.parse(path.read_text()))]


def setting_names(kind=config.Config):
    for entry in fields(kind):
        default = entry.default_factory() if callable(entry.default_factory) else entry.default
        if is_dataclass(default):
            yield from setting_names(type(default))
        else:
            yield entry.name


def test_every_setting_is_read_somewhere():
    read = set()
    for path in modules():
        if path.name != "config.py":
            tree = ast.parse(path.read_text())
            read |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    assert set(setting_names()) - read == set()


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
