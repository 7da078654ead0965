"""What `dexter plan` predicts for the papers' runs on the papers' hardware, beside what the papers report.

    python bench/paper_plans.py

Nothing is run: every plan is made from published counts. A time is that of the steps of an epoch at the float16 peak
of the devices, which no run reaches: the ratio says how many times longer the reported epoch is. A ratio of memory is
the reported figure over ours. Sources of the reported figures: the papers of DEXML and UniDEC, the table of the ELMO
repository, and for LF-Wikipedia-500K a transcription of RAE-XMC's table.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from dexter.data.benchmarks import BENCHMARKS
from dexter.planning.plan import Plan, in_time, plan_counts

GIB = 2**30
FULL_TEXT = 128.0
"""Tokens of texts that are longer than their encoder reads: the limit of all encoders here."""


@dataclass(frozen=True)
class Device:
    """An accelerator: memory in GiB, and floating-point operations per second of dense float16 products."""

    name: str
    memory: float
    peak: float


A100, A6000 = Device("A100", 80, 312e12), Device("A6000", 48, 155e12)


def title_tokens(words: float) -> float:
    """Word pieces of a title with a mean number of words: 1.4 per word, and the two that enclose a text."""
    return 1.4 * words + 2


AMAZON_131K, AMAZON_1_3M, WIKI_TITLE = (title_tokens(words) for words in (6.92, 8.74, 3.01))
"""Mean words of titles as published (UniDEC, table 4)."""


@dataclass(frozen=True)
class Case:
    """One published run."""

    recipe: str
    data: str
    labels_per_query: float
    tokens: tuple[float, float]
    """Mean tokens of a query and of a label."""
    devices: int
    device: Device
    memory: float | None = None
    """GiB that were reported."""
    epoch: float | None = None
    """Seconds of an epoch that were reported."""
    overrides: dict[str, object] = field(default_factory=dict)
    note: str = ""


E_NOTE = "reported by ELMO; its device and batch are not known to us"
OURS = "number of devices not published"
CASES = (
    Case("dexml-eurlex-4k", "EURLex-4K", 5.3, (FULL_TEXT, 6.0), 1, A100, note=OURS),
    Case("dexml-lf-amazontitles-131k", "LF-AmazonTitles-131K", 2.29, (AMAZON_131K, AMAZON_131K), 4, A100, note=OURS),
    Case(
        "dexml-lf-wikipedia-500k",
        "LF-WikiSeeAlso-320K",
        2.11,
        (FULL_TEXT, WIKI_TITLE),
        1,
        A100,
        41.45,
        243 * 60,
        note=E_NOTE,
    ),
    Case(
        "dexml-lf-wikipedia-500k",
        "LF-Wikipedia-500K",
        4.77,
        (FULL_TEXT, WIKI_TITLE),
        8,
        A100,
        None,
        37.0 * 3600 / 100,
        note="37.0 h in all, second-hand; taken as 100 epochs",
    ),
    Case(
        "dexml-lf-amazontitles-1.3m",
        "LF-AmazonTitles-1.3M",
        22.2,
        (AMAZON_1_3M, AMAZON_1_3M),
        1,
        A100,
        81.1,
        1054 * 60,
        note=E_NOTE,
    ),
    Case(
        "dexml-lf-amazontitles-1.3m",
        "LF-AmazonTitles-1.3M",
        22.2,
        (AMAZON_1_3M, AMAZON_1_3M),
        16,
        A100,
        overrides={"batch.size": 512},
        note="the paper's batch of 8,192",
    ),
    Case("unidec-lf-amazon-131k", "LF-Amazon-131K", 2.29, (FULL_TEXT, FULL_TEXT), 1, A6000),
    Case("unidec-lf-wikiseealso-320k", "LF-WikiSeeAlso-320K", 2.11, (FULL_TEXT, WIKI_TITLE), 1, A6000),
    Case("unidec-lf-amazontitles-1.3m", "LF-AmazonTitles-1.3M", 22.2, (AMAZON_1_3M, AMAZON_1_3M), 1, A6000),
)


def make_plan(case: Case) -> Plan:
    """Plan a case from published counts; EURLex-4K in the variant of DEXML."""
    counts = next(one.counts for one in reversed(BENCHMARKS) if one.name == case.data)
    return plan_counts(
        num_queries=counts[0],
        num_labels=counts[2],
        tokens_per_text=case.tokens[0],
        tokens_per_label=case.tokens[1],
        labels_per_query=case.labels_per_query,
        recipe=case.recipe,
        overrides=case.overrides,
        world_size=case.devices,
        gpu_memory=case.device.memory,
    )


def row(case: Case, plan: Plan) -> Iterator[str]:
    """The cells of a case."""
    seconds = plan.num_steps * plan.operations / case.device.peak
    yield f"{case.recipe.partition('-')[0]}, {case.data}"
    yield f"{case.devices} x {case.device.name}"
    yield f"{plan.config.batch.size:,}"
    yield f"{plan.peak_memory / GIB:.1f} of {case.device.memory:g} GiB"
    yield "-" if case.memory is None else f"{case.memory:g} GiB"
    yield "-" if case.memory is None else f"{case.memory * GIB / plan.peak_memory:.1f}"
    yield f"{plan.num_steps:,}"
    yield in_time(seconds)
    yield "-" if case.epoch is None else in_time(case.epoch)
    yield "-" if case.epoch is None else f"{case.epoch / seconds:.1f}"
    yield case.note


def main() -> None:
    """Print the table."""
    columns = (
        "run",
        "devices",
        "batch",
        "memory, plan",
        "reported",
        "ratio",
        "steps",
        "epoch at peak, plan",
        "reported",
        "ratio",
        "note",
    )
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for case in CASES:
        print(f"| {' | '.join(row(case, make_plan(case)))} |")


if __name__ == "__main__":
    main()
