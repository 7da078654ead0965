"""The public benchmarks: their counts, text fields and propensity constants, and what a copy differs in.

Counts and constants: the extreme classification repository (page of February 2025) and its reference metrics. EURLex-4K
has two variants under one name, whose results must not be mixed. The data sets of titles are the same records as those
of full texts, with the title alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dexter.data.dataset import Dataset
from dexter.types import PROPENSITY

TITLE, TITLE_AND_CONTENT = ("title",), ("title", "content")
_TOLERANCE = 0.02
"""Counts within this share of the published ones are taken for an altered copy."""


@dataclass(frozen=True)
class Benchmark:
    """One data set as its authors and the papers count it."""

    name: str
    counts: tuple[int, int, int]
    """Training queries, test queries, labels."""
    text_fields: tuple[str, ...] | None
    """The fields of a record that make its text; None where records have no fields."""
    propensity: tuple[float, float]
    """The constants (a, b) of its published propensity-scored metrics."""
    variant: str = ""
    """Which one it is, where several share the name."""
    source: str = "extreme classification repository, 2025-02"

    def describe(self) -> str:
        """Return name and counts."""
        counts = " / ".join(f"{count:,}" for count in self.counts)
        return f"{self.name} as published ({counts}{'; ' * bool(self.variant)}{self.variant})"


_DEFAULT, _AMAZON, _WIKIPEDIA = (PROPENSITY[family] for family in ("default", "amazon", "wikipedia"))
BENCHMARKS: Sequence[Benchmark] = (
    Benchmark("EURLex-4K", (15_539, 3_809, 3_993), None, _DEFAULT, "the repository's variant, not that of DEXML"),
    Benchmark(
        "EURLex-4K",
        (15_449, 3_865, 3_956),
        None,
        _DEFAULT,
        "the variant of DEXML and other transformer papers, not the repository's",
        "X-Transformer and DEXML, public code and data",
    ),
    Benchmark("LF-AmazonTitles-131K", (294_805, 134_835, 131_073), TITLE, _AMAZON),
    Benchmark("LF-Amazon-131K", (294_805, 134_835, 131_073), TITLE_AND_CONTENT, _AMAZON),
    Benchmark("LF-WikiSeeAlsoTitles-320K", (693_082, 177_515, 312_330), TITLE, _DEFAULT),
    Benchmark("LF-WikiSeeAlso-320K", (693_082, 177_515, 312_330), TITLE_AND_CONTENT, _DEFAULT),
    Benchmark("LF-WikiTitles-500K", (1_813_391, 783_743, 501_070), TITLE, _WIKIPEDIA),
    Benchmark("LF-Wikipedia-500K", (1_813_391, 783_743, 501_070), TITLE_AND_CONTENT, _WIKIPEDIA),
    Benchmark("LF-AmazonTitles-1.3M", (2_248_619, 970_237, 1_305_265), TITLE, _AMAZON),
)


def find_by_name(name: str) -> list[Benchmark]:
    """Return the benchmarks whose name a folder's name holds, whatever its case, punctuation and "LF"."""
    return [one for one in BENCHMARKS if _plain(one.name).removeprefix("lf") in _plain(name)]


def find_benchmark(name: str, counts: tuple[int, int, int]) -> Benchmark | None:
    """Return the first benchmark of this name or else of these counts; None without any.

    Those that share a name or counts have the same propensity constants.
    """
    found = find_by_name(name) or [one for one in BENCHMARKS if one.counts == counts]
    return found[0] if found else None


def describe_benchmark(dataset: Dataset) -> str | None:
    """Say which benchmark this is, or what differs where its name or counts nearly match one; else None."""
    named, counts = find_by_name(dataset.name), _counts(dataset)
    candidates = [one for one in BENCHMARKS if one in named or _is_near(counts, one.counts)]
    if not candidates:
        return None
    fewest = min(len(_differences(dataset, one)) for one in candidates)
    best = [one for one in candidates if len(_differences(dataset, one)) == fewest]
    best = [one for one in best if one in named] or best
    if len(best) > 1 and not fewest:
        either = " or ".join(one.describe() for one in best)
        return f"this is {either}: nothing says whether its texts are titles alone"
    chosen = min(best, key=lambda one: _distance(counts, one.counts))
    if fewest:
        return f"this is not {chosen.describe()}: {'; '.join(_differences(dataset, chosen))}"
    contradiction = f", although its name says {named[0].name}" if named and chosen not in named else ""
    return f"this is {chosen.describe()}{contradiction}"


def describe_fields(fields: Sequence[str]) -> str:
    """Return the fields in words."""
    return "the title alone" if tuple(fields) == TITLE else " and ".join(fields)


def _counts(dataset: Dataset) -> tuple[int, int, int]:
    """Return the numbers of training queries, test queries and labels."""
    return len(dataset.train), 0 if dataset.test is None else len(dataset.test), dataset.num_labels


def _differences(dataset: Dataset, benchmark: Benchmark) -> list[str]:
    """Say what of a data set is not as published."""
    names = ("training queries", "test queries", "labels")
    found = [
        f"{here:,} {name} instead of {there:,}"
        for name, here, there in zip(names, _counts(dataset), benchmark.counts, strict=True)
        if here != there
    ]
    if dataset.text_fields and benchmark.text_fields and dataset.text_fields != benchmark.text_fields:
        here, there = describe_fields(dataset.text_fields), describe_fields(benchmark.text_fields)
        found.append(f"texts are {here} instead of {there}")
    if dataset.propensity != benchmark.propensity:
        here, there = (" / ".join(f"{value:g}" for value in one.propensity) for one in (dataset, benchmark))
        found.append(f"propensity constants {here} instead of {there}")
    return found


def _is_near(counts: Sequence[int], published: Sequence[int]) -> bool:
    """Whether two of the three counts are equal, or all nearly so."""
    num_equal = sum(here == there for here, there in zip(counts, published, strict=True))
    return num_equal >= 2 or _distance(counts, published) <= _TOLERANCE


def _distance(counts: Sequence[int], published: Sequence[int]) -> float:
    """Return the largest relative difference of two counts."""
    return max(abs(here - there) / there for here, there in zip(counts, published, strict=True))


def _plain(name: str) -> str:
    return "".join(character for character in name.lower() if character.isalnum())
