"""Which package may import which: the whole import graph, lazy imports included, against one declared list."""

import ast
from collections import defaultdict
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import dexter

SOURCE = Path(dexter.__file__).parent
BASE = {
    "errors",
    "types",
    "processes",
    "files",
    "tensor_files",
    "positives",
    "products",
    "progress",
    "recipes",
    "config",
}
PARTS = BASE | {"data", "metrics", "index", "losses", "batches", "encoders"}
MAY_IMPORT = {
    "errors": set(),
    "types": set(),
    "processes": {"errors"},
    "files": {"errors"},
    "tensor_files": {"errors"},
    "positives": {"errors"},
    "products": set(),
    "progress": set(),
    "recipes": {"errors"},
    "config": {"errors", "recipes"},
    "data": {"errors", "files", "types", "progress"},
    "metrics": {"errors", "types"},
    "index": {"errors", "files", "types", "processes"},
    "losses": {"errors", "positives", "processes", "products"},
    "batches": {"errors", "types", "processes", "positives", "config", "data", "index"},
    "encoders": {"errors", "types", "files", "tensor_files", "products", "config", "data"},
    "model": {"errors", "types", "processes", "files", "tensor_files", "config", "data", "encoders", "index"},
    "predict": {"errors", "types", "processes", "progress", "files", "data", "encoders", "index", "metrics", "model"},
    "training": PARTS | {"model", "predict"},
    "planning": PARTS | {"model", "predict", "training"},
    "evaluation": PARTS | {"model", "predict", "training"},
    "sklearn": {"errors", "files", "recipes", "data", "model", "predict", "training"},
    "serving": {"errors", "types", "files", "config", "data", "predict", "training", "evaluation"},
    "cli": PARTS | {"model", "predict", "training", "planning", "evaluation", "serving"},
}
"""For every package and top-level module, what it may import. `dexter/__init__.py` imports lazily and is left out."""


def module_names(source=SOURCE):
    """Every module of the package and its file."""
    for path in sorted(source.rglob("*.py")):
        parts = path.relative_to(source.parent).with_suffix("").parts
        yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def imported_modules(path, known):
    """The modules of this package that a file imports, at the top or inside a function."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "dexter":
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield name if name in known else node.module


def package_of(module):
    """`data` for `dexter.data.formats.jsonl`, "" for `dexter` itself."""
    return [*module.split("."), ""][1]


def package_edges(source=SOURCE):
    """(importing package, imported package) -> the files and imports behind it."""
    known, edges = dict(module_names(source)), defaultdict(list)
    for module, path in known.items():
        for name in imported_modules(path, known):
            edge = package_of(module), package_of(name)
            if edge[0] not in ("", "__main__", edge[1]) and edge[1]:
                edges[edge].append(f"{path.relative_to(source)} imports {name}")
    return edges


def module_graph():
    """Imports between modules at import time: the top level of a file, without type checking blocks."""
    known, graph = dict(module_names()), {}
    for module, path in known.items():
        tree = ast.parse(path.read_text())
        tree.body = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
        graph[module] = {
            name
            for node in tree.body
            for name in imported_of(node, known)
            if name != module and not module.startswith(name + ".")
        }
    return graph


def imported_of(node, known):
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names if alias.name in known]
    if not node.module or node.module.split(".")[0] != "dexter":
        return []
    return [name if (name := f"{node.module}.{alias.name}") in known else node.module for alias in node.names]


def test_every_package_is_declared():
    assert {package_of(module) for module, _ in module_names()} - {"", "__main__"} == set(MAY_IMPORT)


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_a_package_imports_only_what_is_declared(package):
    undeclared = {
        imported: where
        for (importing, imported), where in package_edges().items()
        if importing == package and imported not in MAY_IMPORT[package]
    }
    assert not undeclared


def test_packages_form_no_cycle():
    graph = defaultdict(set)
    for importing, imported in package_edges():
        graph[importing].add(imported)
    try:
        list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        pytest.fail(f"packages import each other: {error.args[1]}")


def test_the_declaration_forms_no_cycle():
    list(TopologicalSorter(MAY_IMPORT).static_order())


def test_modules_form_no_cycle():
    try:
        list(TopologicalSorter(module_graph()).static_order())
    except CycleError as error:
        pytest.fail(f"modules import each other: {error.args[1]}")


def test_a_forbidden_import_is_noticed(tmp_path):
    package = tmp_path / "dexter"
    (package / "losses").mkdir(parents=True)
    (package / "training").mkdir()
    (package / "training" / "trainer.py").write_text("")
    (package / "losses" / "psl.py").write_text("def loss():\n    from dexter.training import trainer\n")
    assert ("losses", "training") in package_edges(package)


def test_a_public_class_name_occurs_once():
    places = defaultdict(list)
    for module, path in module_names():
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(module)
    assert {name: modules for name, modules in places.items() if len(modules) > 1} == {}
