"""A run with a static encoder predicts, serves and takes label edits where torch is not installed."""

import shutil
import subprocess
import sys

import pytest

REFUSING = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "transformers"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Refuse())
"""
"""Makes every import of torch and transformers fail as if they were not installed."""


def run_without_torch(code, *arguments):
    return subprocess.run([sys.executable, "-c", REFUSING + code, *arguments], capture_output=True, text=True)


def dexter(*arguments):
    return run_without_torch("from dexter.cli.main import main; main()", *map(str, arguments))


@pytest.fixture(scope="module")
def run(trained, tmp_path_factory):
    return shutil.copytree(trained, tmp_path_factory.mktemp("without") / "run")


def test_labels_are_added_and_predicted(run):
    added = dexter("labels", "add", run, "new", "orchid lantern quartz")
    assert added.returncode == 0, added.stderr
    found = dexter("predict", run, "orchid lantern quartz", "-k", 2, "--explain", "--no-neighbours")
    assert found.returncode == 0, found.stderr
    assert "new  orchid lantern quartz" in found.stdout.splitlines()[1]


def test_everything_a_service_does(run):
    code = """
from dexter.predict import Predictor
from dexter.serving.app import create_app

predictor = Predictor.load(sys.argv[1], neighbours=True)
label = predictor.predict(["river stone"], k=1, bands=["tail", "torso", "frequent"])[0][0].id
predictor.explain("river stone", label), predictor.similar_labels("river"), predictor.nearest(["river"])
predictor.preview_label("river stone", "river bank"), predictor.embed(["river"]), predictor.search_labels("river")
create_app(predictor)
assert "torch" not in sys.modules
"""
    served = run_without_torch(code, str(run))
    assert served.returncode == 0, served.stderr


def test_what_needs_torch_says_so_in_one_line(run, tmp_path):
    for arguments in (("train", tmp_path, "--out", tmp_path / "run"), ("demo", "--out", tmp_path / "demo")):
        refused = dexter(*arguments)
        assert refused.returncode == 5
        [line] = refused.stderr.splitlines()
        assert "pip install 'dexter-xmc[train]'" in line


def test_one_text_imports_neither_scipy_nor_the_formats_of_data(run):
    code = """
from dexter.predict import Predictor

assert Predictor.load(sys.argv[1], neighbours=True).predict(["river stone"])[0]
assert not {"scipy", "tqdm", "dexter.data.formats"} & sys.modules.keys()
"""
    predicted = run_without_torch(code, str(run))
    assert predicted.returncode == 0, predicted.stderr
