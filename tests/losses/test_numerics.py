"""Large scores, low precision, autocast, partial gradients, and the ways backward is called."""

from __future__ import annotations

import pytest
import torch
from cases import NAMES, STREAMED, assert_agrees, make_case, random_pairs, relative_errors, run, value_and_gradients
from reference_losses import Case, bce, bisect_offset, reference
from torch.nn.functional import normalize

import dexter.losses
from dexter.batches import Positives
from dexter.errors import DataError, UsageError
from dexter.losses import Streaming

MODES = [Streaming(mode="tiles", row_block=3, label_chunk=10), Streaming(mode="chunks", row_block=4, label_chunk=7)]


def loss_of(name: str):
    return getattr(dexter.losses, name)


def exact_products(num_queries: int, num_labels: int, size: float) -> Case:
    """Embeddings whose scores at temperature 1 are multiples of 16 up to +- size, exact in float32."""
    generator = torch.Generator().manual_seed(0)
    queries = torch.randint(-4, 5, (num_queries, 4), generator=generator).float() * 4
    labels = torch.randint(-4, 5, (num_labels, 4), generator=generator).float()
    factor = 2.0 ** round(torch.log2(size / (queries @ labels.T).abs().max()).item())
    return Case(queries, labels * factor, random_pairs(num_queries, num_labels, 15))


@pytest.mark.parametrize("streaming", MODES, ids=["tiles", "chunks"])
@pytest.mark.parametrize("name", STREAMED)
def test_scores_of_ten_thousand(name, streaming):
    case = exact_products(7, 53, 1e4)
    case.settings = {"temperature": 1.0, **({"k": 2.5} if name == "soft_topk" else {})}
    got = run(name, case, streaming)
    assert all(torch.isfinite(tensor).all() for tensor in got)
    assert float((got[0].double() - reference(name, case)[0]).abs() / got[0].abs().clamp_min(1.0)) < 1e-5
    if name != "soft_topk":
        assert max(relative_errors(got, reference(name, case))) < 1e-5


def test_a_positive_far_below_a_hundred_is_masked_nonetheless():
    case = Case(
        torch.tensor([[1.0]]),
        torch.tensor([[-500.0], [-300.0], [-600.0]]),
        Positives([0, 0], [0, 1]),
        None,
        {"temperature": 1.0},
    )
    assert max(relative_errors(run("decoupled_softmax", case), reference("decoupled_softmax", case))) < 1e-6


@pytest.mark.parametrize("streaming", MODES, ids=["tiles", "chunks"])
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("name", NAMES)
def test_other_floating_types(name, kind, streaming):
    case = make_case(7, 53, 11)
    case.queries, case.labels = case.queries.to(kind), case.labels.to(kind)
    got = run(name, case, streaming)
    assert got[0].dtype == (torch.float64 if kind == torch.float64 else torch.float32)
    assert got[1].dtype == got[2].dtype == kind
    resolution = max(torch.finfo(kind).eps, 1e-5)
    assert max(relative_errors(got, reference(name, case))) < resolution


@pytest.mark.parametrize("name", NAMES)
def test_autocast_changes_nothing(name):
    case = make_case(7, 53, 11)
    plain = run(name, case)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = run(name, case)
    assert all(torch.equal(one, other) for one, other in zip(plain, inside, strict=True))


@pytest.mark.parametrize("streaming", MODES, ids=["tiles", "chunks"])
@pytest.mark.parametrize("name", NAMES)
def test_one_side_alone(name, streaming):
    case = make_case(7, 53, 11)
    both = run(name, case, streaming)
    queries, labels = case.queries.clone().requires_grad_(), case.labels.clone().requires_grad_()
    loss_of(name)(queries, case.labels, case.positives, streaming=streaming).backward()
    loss_of(name)(case.queries, labels, case.positives, streaming=streaming).backward()
    torch.testing.assert_close(queries.grad, both.queries)
    torch.testing.assert_close(labels.grad, both.labels)
    neither = loss_of(name)(case.queries, case.labels, case.positives, streaming=streaming)
    assert not neither.requires_grad
    torch.testing.assert_close(neither, both.value)


@pytest.mark.parametrize("name", NAMES)
def test_backward_scales_and_can_be_repeated(name):
    case = make_case(7, 53, 11)
    once = run(name, case)
    queries, labels = case.queries.clone().requires_grad_(), case.labels.clone().requires_grad_()
    value = loss_of(name)(queries * 1.0, labels * 1.0, case.positives) * 3.0
    value.backward(retain_graph=True)
    torch.testing.assert_close(queries.grad, 3.0 * once.queries)
    value.backward()
    torch.testing.assert_close(queries.grad, 6.0 * once.queries)
    torch.testing.assert_close(labels.grad, 6.0 * once.labels)


@pytest.mark.parametrize("name", NAMES)
def test_no_positive_gives_zero_that_still_backpropagates(name):
    if name == "bce":
        pytest.skip("bce counts queries without a positive")
    queries, labels = torch.randn(3, 4, requires_grad=True), torch.randn(5, 4, requires_grad=True)
    value = loss_of(name)(queries, labels, Positives([], []))
    value.backward()
    assert value.item() == 0.0
    assert not queries.grad.any()
    assert not labels.grad.any()


def test_label_gradient_is_handed_over_without_a_copy(monkeypatch):
    from dexter.losses import differentiable

    addresses, solve = [], differentiable._solve

    def spy(*arguments):
        value, gradients = solve(*arguments)
        addresses.append(gradients.labels.data_ptr())
        return value, gradients

    monkeypatch.setattr(differentiable, "_solve", spy)
    case = make_case(7, 53, 11)
    labels = case.labels.clone().requires_grad_()
    dexter.losses.softmax(case.queries, labels, case.positives).backward()
    assert addresses == [labels.grad.data_ptr()]


@pytest.mark.parametrize("streaming", [None, *MODES], ids=["default", "tiles", "chunks"])
@pytest.mark.parametrize("start", [(1.0, 0.0), (2.5, -10.0), (0.0, 0.3), (-1.0, 0.1)])
def test_learned_scale_and_bias(start, streaming):
    case = make_case(7, 53, 11, positives=random_pairs(7, 53, 20, weighted=True), ignore=random_pairs(7, 53, 9, seed=2))
    scale, bias = (torch.tensor(number, requires_grad=True) for number in start)
    exact_scale, exact_bias = (torch.tensor(number, dtype=torch.float64, requires_grad=True) for number in start)
    more = {"temperature": 0.3}
    bce(case, case.queries.double(), case.labels.double(), scale=exact_scale, bias=exact_bias, **more).backward()
    got = value_and_gradients(
        dexter.losses.bce,
        case.queries,
        case.labels,
        case.positives,
        ignore=case.ignore,
        scale=scale,
        bias=bias,
        streaming=streaming,
        **more,
    )
    case.settings = {"scale": start[0], "bias": start[1], **more}
    assert max(relative_errors(got, reference("bce", case))) < 1e-5
    torch.testing.assert_close(scale.grad.double(), exact_scale.grad, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(bias.grad.double(), exact_bias.grad, rtol=1e-5, atol=1e-7)
    scale.grad = bias.grad = None
    dexter.losses.bce(
        case.queries, case.labels, case.positives, ignore=case.ignore, scale=scale, bias=bias, **more
    ).backward()
    torch.testing.assert_close(scale.grad.double(), exact_scale.grad, rtol=1e-5, atol=1e-7)


class TestSoftTopK:
    @pytest.mark.parametrize("temperature", [0.02, 0.05, 1.0])
    @pytest.mark.parametrize("k", [1, 5, 100, 1999])
    def test_probabilities_agree_with_bisection(self, k, temperature):
        """A positive's loss is -log p, so one positive per query and query by query gives p."""
        generator = torch.Generator().manual_seed(1)
        queries = normalize(torch.randn(3, 16, generator=generator), dim=1)
        labels = normalize(torch.randn(2000, 16, generator=generator), dim=1)
        scores = (queries.double() @ labels.double().T) / temperature
        for row in range(3):
            offset = bisect_offset(scores[row].tolist(), k, 2.0)
            for column in (0, int(scores[row].argmax()), int(scores[row].argsort(descending=True)[k - 1])):
                expected = torch.sigmoid(2.0 * (scores[row, column] + offset))
                loss = dexter.losses.soft_topk(
                    queries[row : row + 1], labels, Positives([0], [column]), temperature=temperature, k=k
                )
                assert abs(torch.exp(-loss).item() - expected.item()) < 1e-5

    @pytest.mark.parametrize("k", [1, 3, 26, 50.5])
    @pytest.mark.parametrize("streaming", MODES, ids=["tiles", "chunks"])
    def test_a_poor_starting_point(self, k, streaming, monkeypatch):
        """With few sampled labels the offset is far from its start, and found by sweeps and the Taylor series."""
        monkeypatch.setattr("dexter.losses.topk.FEWEST_SAMPLED", 5)
        pairs = {"positives": random_pairs(7, 53, 20), "ignore": random_pairs(7, 53, 2, seed=1)}
        for temperature in (0.05, 0.5):
            case = make_case(7, 53, 11, settings={"k": k, "temperature": temperature}, **pairs)
            assert_agrees("soft_topk", case, streaming)

    def test_equal_scores_among_many_labels(self):
        queries, labels = torch.ones(2, 1), torch.ones(131_072, 1)
        loss = dexter.losses.soft_topk(queries, labels, Positives([0, 1], [0, 131_071]), temperature=1.0, k=5)
        torch.testing.assert_close(torch.exp(-loss), torch.tensor(5 / 131_072))

    def test_finite_differences(self):
        case = make_case(4, 30, 6, settings={"k": [1, 2, 5, 29], "temperature": 0.5})
        _, dq, dy = run("soft_topk", case)
        for name, gradient in (("queries", dq), ("labels", dy)):
            direction = torch.randn(gradient.shape, dtype=torch.float64)
            values = []
            for sign in (1, -1):
                moved = Case(case.queries.double(), case.labels.double(), case.positives, None, case.settings)
                setattr(moved, name, getattr(moved, name) + sign * 1e-5 * direction)
                values.append(reference("soft_topk", moved)[0])
            slope = (values[0] - values[1]) / 2e-5
            torch.testing.assert_close((gradient.double() * direction).sum(), slope, rtol=1e-5, atol=1e-6)

    @pytest.mark.parametrize("k", [0, -1, 53, 54, float("nan"), [1, 2, 3], [53] * 7])
    def test_k_without_solution(self, k):
        case = make_case(7, 53, 11)
        with pytest.raises(UsageError, match=r"k must be|needs 0 < k"):
            dexter.losses.soft_topk(case.queries, case.labels, case.positives, k=k)

    def test_k_counts_labels_that_are_not_ignored(self):
        case = make_case(1, 6, 3, positives=Positives([0], [0]), ignore=Positives([0, 0, 0], [3, 4, 5]))
        with pytest.raises(UsageError, match="with 3 labels for query 0"):
            dexter.losses.soft_topk(case.queries, case.labels, case.positives, k=3, ignore=case.ignore)

    def test_k_of_queries_without_positive_is_not_asked(self):
        case = make_case(2, 6, 3, positives=Positives([1], [0]))
        assert torch.isfinite(dexter.losses.soft_topk(case.queries, case.labels, case.positives, k=[0, 1]))


class TestErrors:
    def test_shapes_and_pairs(self):
        queries, labels, pairs = torch.randn(3, 4), torch.randn(5, 4), Positives([0], [0])
        for name in NAMES:
            with pytest.raises(UsageError, match="dimensions"):
                loss_of(name)(queries, torch.randn(5, 3), pairs)
            with pytest.raises(UsageError, match="matrix"):
                loss_of(name)(queries[0], labels, pairs)
            with pytest.raises(DataError, match=r"query 0, label 5"):
                loss_of(name)(queries, labels, Positives([0], [5]))
            with pytest.raises(DataError, match=r"query 3, label 1"):
                loss_of(name)(queries, labels, pairs, ignore=Positives([3], [1]))

    @pytest.mark.parametrize(
        ("name", "wrong"),
        [
            ("softmax", {"temperature": 0.0}),
            ("decoupled_softmax", {"temperature": -1.0}),
            ("softmax", {"reduction": "mean"}),
            ("psl", {"balance": 1.5}),
            ("bce", {"bias": torch.zeros(2)}),
            ("soft_topk", {"alpha": 0.0}),
            ("triplet", {"num_negatives": 0}),
        ],
    )
    def test_settings(self, name, wrong):
        with pytest.raises(UsageError):
            loss_of(name)(torch.randn(3, 4), torch.randn(5, 4), Positives([0], [0]), **wrong)
