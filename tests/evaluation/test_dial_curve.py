"""The dial's curve: each point is what an evaluation at that value gives, drawn as asked."""

import pytest

from dexter import Predictor
from dexter.errors import UsageError
from dexter.evaluation.dial import dial_curve
from dexter.evaluation.runs import evaluate


def test_each_point_is_an_evaluation(trained, world):
    curve = dial_curve(Predictor.load(trained, neighbours=False), world, dials=(0.0, 0.5))
    assert list(curve.points) == [0.0, 0.5, 1.0]
    assert curve.current == 1.0
    for dial, metrics in curve.points.items():
        expected = evaluate(Predictor.load(trained, neighbours=False, dial=dial), world, ks=(1, 3, 5), num_resamples=0)
        assert metrics == pytest.approx(expected.metrics, nan_ok=True)
    lines = curve.render().splitlines()
    assert lines[0].split() == ["dial", "P@1", "P@3", "P@5", "PSP@1", "PSP@3", "PSP@5"]
    assert [line.split()[0] for line in lines[1:]] == ["0", "0.5", "1*"]


def test_a_curve_is_drawn(trained, world, tmp_path):
    pytest.importorskip("matplotlib")
    dial_curve(Predictor.load(trained), world).save_plot(tmp_path / "dial.png")
    assert (tmp_path / "dial.png").read_bytes().startswith(b"\x89PNG")


def test_no_values_no_curve(trained, world):
    with pytest.raises(UsageError, match="at least one value"):
        dial_curve(Predictor.load(trained), world, dials=())
