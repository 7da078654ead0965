"""Every setting of a run: frozen dataclasses, one per stage, read from TOML and saved with the run.

A recipe is a TOML file of differences from the defaults below; `--set train.epochs=5` is one more difference. Unknown
keys are errors that name the nearest known key. Values of 0 that say "0: chosen" are chosen from the data by
`dexter.training.presets`, printed, and saved with the run.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import tomllib
import typing
from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal

from dexter.errors import UsageError
from dexter.recipes import DEFAULT_RECIPE, read_recipe

_METRIC = re.compile(r"(P|R|nDCG|PSP|PSnDCG|MRR)@[1-9][0-9]*")

MAX_VALIDATION_QUERIES = 2_000
"""At most this many training queries are held out, to choose the model and how it predicts."""
KEPT_BY_WORDS = 10
"""Training queries that are kept by their words alone, as a multiple of those whose vectors may be kept."""
CORRECTED_LOSSES = ("decoupled_softmax", "softmax", "psl")
"""The losses that can correct the scores of negatives for the sampling of the pool."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """How the data are understood."""

    own_labels: Literal["auto", "exclude", "keep"] = "auto"
    """Labels with the id or the text of the query itself, which data about related items have. `exclude`: they are
    left out of losses, mining and predictions; `auto`: so if many queries have one and hardly any is relevant."""


@dataclass(frozen=True, kw_only=True)
class EncoderConfig:
    """Text to vector."""

    kind: Literal["static", "transformer"] = "static"
    """`static`: a table of token vectors and a weighted mean, for CPUs; `transformer`: any Hugging Face encoder."""
    pretrained: str = "minilm"
    """Where weights come from: `minilm` (the packaged model), a folder, a hub name, or `none` (static encoder only)."""
    dimension: int = 0
    """Size of an embedding; 0: the pretrained size (static without pretrained weights: 256)."""
    normalize: bool = True
    """Whether embeddings have unit length."""
    max_length_query: int = 192
    """Tokens kept of a query."""
    max_length_label: int = 32
    """Tokens kept of a label text."""
    query_prefix: str = ""
    """Text put before every query (transformer)."""
    label_prefix: str = ""
    """Text put before every label text (transformer)."""
    pooling: Literal["mean", "cls"] = "mean"
    """How the token vectors of a transformer become one vector."""
    dropout: float = -1.0
    """Transformer: probability of every dropout inside it; -1: what the pretrained model was trained with."""
    token_dropout: float = 0.0
    """Static: share of query tokens left out at random in training."""
    words: int = 100_000
    """Static: at most this many whole words of the training texts get a vector, besides the pretrained word pieces."""
    ngrams: int = 1
    """Static: the longest run of neighbouring tokens that gets a (hashed) vector of its own; 1: single tokens only."""
    ngram_buckets: int = 200_000
    """Static: number of hashed vectors that n-grams share."""
    label_vectors: bool = False
    """Static: each label text also has a vector of its own, so that labels that share all words can differ."""
    labels_per_vector: int = 1
    """Static, with `label_vectors`: similar labels share a vector (DEXA), at most this many; 1: each has its own. The
    clusters of labels are made once, before training."""
    positions: bool = True
    """Static: learn how much a token counts by its position in the query (titles come first)."""

    def __post_init__(self) -> None:
        _require(self.max_length_query > 0 and self.max_length_label > 0, "encoder.max_length_*", "above 0")
        own = self.dropout == -1.0
        _require(own or 0.0 <= self.dropout < 1.0, "encoder.dropout", "-1 (the model's own), or at least 0 and below 1")
        _require(0.0 <= self.token_dropout < 1.0, "encoder.token_dropout", "at least 0 and below 1")
        _require(self.ngrams >= 1, "encoder.ngrams", "1 or more")
        _require(self.ngram_buckets > 0, "encoder.ngram_buckets", "above 0")
        _require(self.labels_per_vector >= 1, "encoder.labels_per_vector", "1 or more")
        _require(
            self.labels_per_vector == 1 or (self.label_vectors and self.kind == "static"),
            "encoder.labels_per_vector",
            "1 (a vector per label) unless encoder.label_vectors is true and encoder.kind is static: transformers have "
            "no vectors of labels",
        )


@dataclass(frozen=True, kw_only=True)
class BatchConfig:
    """The queries of a step and the labels they are scored against."""

    size: int = 0
    """Queries per step; 0: chosen from the data, together with the pool where that is `auto`. Clustered batches are
    N / 2^depth queries, at most this many."""
    order: Literal["shuffled", "clustered"] = "shuffled"
    """Random batches, or batches of similar queries (balanced clusters of their embeddings)."""
    pool: Literal["auto", "all", "in-batch", "sampled"] = "all"
    """Labels of a step: every label; the positives of the batch's queries; or drawn positives and hard negatives.
    `auto`: every label up to 16 per query of the batch and 8,192 in all, else the batch's positives and random labels
    (6 per query, at most 768), corrected for the sampling."""
    positives: int = 0
    """Positives that a query brings into an in-batch or sampled pool (beta), drawn by relevance; 0: all of them. The
    others are its positives where another query brought them. How many count in the loss is `loss.positives`."""
    hard_negatives: int = 0
    """Mined negatives per query and step (eta), drawn from its shortlist."""
    shortlist: int = 0
    """Labels kept per query at each mining, to draw hard negatives from; 0: `hard_negatives` times `refresh`, so that
    each can be drawn once before the next mining."""
    random_labels: int = 0
    """Labels drawn uniformly that join an in-batch or sampled pool."""
    cap: int = 0
    """Largest number of labels of a sampled pool: the commonest positives of the batch first, then the commonest
    negatives; 0: no limit."""
    label_queries: bool = False
    """Every label text is a training query too, with its label as its positive (Renee)."""
    classifier_positives: int = 0
    """More positives per query that join the classifier's pool only (POS-CLF)."""
    correct_pool: bool = False
    """Correct the scores of negatives in an in-batch pool for the sampling of the pool (softmax losses)."""
    start: int = 0
    """The first epoch with clusters and hard negatives; before it batches are shuffled and pools have none."""
    refresh: int = 5
    """Epochs between two refreshes of clusters and hard negatives."""
    cluster_doubling: int = 0
    """Epochs after which clusters double in size, from one query to a batch (NGAME); 0: whole batches at once."""

    def __post_init__(self) -> None:
        for name in (
            "size",
            "positives",
            "hard_negatives",
            "shortlist",
            "random_labels",
            "cap",
            "start",
            "cluster_doubling",
        ):
            _require(getattr(self, name) >= 0, f"batch.{name}", "0 or more")
        _require(self.refresh >= 1, "batch.refresh", "1 or more")
        _require(not (self.hard_negatives and self.pool == "all"), "batch.hard_negatives", "0 with pool = 'all'")
        _require(
            not (self.positives and self.pool == "all"),
            "batch.positives",
            "0 with pool = 'all', which holds every label: set loss.positives to draw those that count in the loss",
        )
        _require(
            not self.shortlist or self.shortlist >= self.hard_negatives > 0,
            "batch.shortlist",
            "0, or at least batch.hard_negatives, which must be above 0",
        )
        _require(
            not self.correct_pool or self.pool == "in-batch", "batch.correct_pool", "false unless pool = 'in-batch'"
        )


@dataclass(frozen=True, kw_only=True)
class HeadConfig:
    """How representations become the vectors that are scored."""

    projection: int = 0
    """Size of the heads' output (d); 0: representations are scored as they are."""
    dropout: float = 0.0
    """Dropout after the heads' projections."""
    classifier: bool = False
    """Train a table with a row per label together with the encoder, and search both as one."""
    encoder_weight: float = 0.5
    """Share of the dual encoder in the loss (lambda); the rest is the classifier's."""
    classifier_start: int = 0
    """The first epoch of a second stage, in which the encoder is frozen and the classifier alone is trained, from the
    encoder's vectors at that point (NGAME); before it the encoder alone is trained. 0: one stage, both together."""
    storage: Literal["float32", "bfloat16"] = "float32"
    """How the classifier's table and its optimiser's moments are kept; bfloat16, half as large, is written with
    stochastic rounding."""
    row_dropout: float = 0.0
    """Dropout on the classifier's rows."""

    def __post_init__(self) -> None:
        _require(0.0 <= self.dropout < 1.0, "head.dropout", "at least 0 and below 1")
        _require(0.0 <= self.row_dropout < 1.0, "head.row_dropout", "at least 0 and below 1")
        _require(0.0 <= self.encoder_weight <= 1.0, "head.encoder_weight", "between 0 and 1")
        _require(self.projection >= 0, "head.projection", "0 or more")
        _require(self.classifier or not self.classifier_start, "head.classifier_start", "0 without head.classifier")


@dataclass(frozen=True, kw_only=True)
class LossConfig:
    """The loss."""

    name: Literal["softmax", "decoupled_softmax", "soft_topk", "psl", "bce", "triplet"] = "decoupled_softmax"
    """The loss function, by its name in `dexter.losses`."""
    temperature: float = 0.05
    """Scores are dot products divided by this."""
    reduction: Literal["pal-n", "pal"] = "pal-n"
    """softmax, decoupled_softmax and psl: mean (recall) or sum (precision) over the positives of a query."""
    positives: int = 0
    """Positives of a query that count in a step, drawn in proportion to their relevance from those in the pool, each
    with weight 1; 0: all, weighted by relevance."""
    undrawn: Literal["ignore", "negative"] = "ignore"
    """What the positives that were not drawn are in that step: left out, or negatives of their query."""
    average: Literal["mean", "query", "sum"] = "mean"
    """`mean`: over the queries (psl: and over the labels of its second direction; bce: over all pairs of queries and
    labels). `query`, for bce: the sum over labels, averaged over queries. `sum`, for psl and bce: no average."""
    balance: float = 0.5
    """psl: weight of query-to-label against label-to-query in the loss of the dual encoder."""
    classifier_balance: float = 0.5
    """psl: the same in the loss of the classifier."""
    k: int = 5
    """soft_topk: the number of labels that the probabilities of a query sum to."""
    alpha: float = 2.0
    """soft_topk: sharpness of the sigmoid."""
    margin: float = 0.3
    """triplet: how far a positive must stand above a negative."""
    num_negatives: int = 10
    """triplet: hardest negatives per query."""
    learn_scale: bool = False
    """bce: learn one scale and one bias for all scores (SigLIP)."""
    prior: bool = False
    """Learn a bias per label that is added to its scores; it starts at the log frequency of the label."""
    memory_megabytes: int = 256
    """Memory for blocks of scores in megabytes; the matrix batch x labels is never held as a whole."""

    def __post_init__(self) -> None:
        _require(self.temperature > 0, "loss.temperature", "above 0")
        _require(0.0 <= self.balance <= 1.0, "loss.balance", "between 0 and 1")
        _require(0.0 <= self.classifier_balance <= 1.0, "loss.classifier_balance", "between 0 and 1")
        _require(self.positives >= 0, "loss.positives", "0 or more")
        _require(self.undrawn == "ignore" or self.positives > 0, "loss.undrawn", "ignore unless loss.positives is set")
        averages = {"psl": ("mean", "sum"), "bce": ("mean", "query", "sum")}.get(self.name, ("mean",))
        _require(self.average in averages, "loss.average", f"{' or '.join(averages)} with loss {self.name}")
        _require(self.k > 0, "loss.k", "above 0")
        _require(self.memory_megabytes > 0, "loss.memory_megabytes", "above 0")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The training loop and its optimisers."""

    epochs: int = 3
    """Passes over the training queries; 0: chosen from the data."""
    learning_rate: float = 0.0
    """Peak learning rate of the encoder; 0: chosen for the encoder."""
    head_learning_rate: float = 0.0
    """Peak learning rate of the heads' projections; 0: twice a transformer's, or a fifth of a static encoder's."""
    classifier_learning_rate: float = 0.0
    """Peak learning rate of the classifier's rows; 0: ten times a transformer's, or the static encoder's own."""
    weight_decay: float = 0.0
    """AdamW's decay of matrices; vectors and biases are never decayed."""
    beta2: float = 0.99
    """Decay of Adam's average of squared gradients."""
    warmup: float = 0.05
    """Share of the steps in which the learning rate rises linearly; it then falls linearly to zero."""
    gradient_clip: float = 0.0
    """Largest norm of the gradient; 0: no limit."""
    label_refresh: int = 1
    """All-label pools: labels that no query of the batch needs are encoded again every this many steps; 1: every step.
    Saves time with transformers; the gradient is then not exact (bench/README.md has both)."""
    scale_with_processes: bool = False
    """Whether batch.size and the learning rates are those of one process, to be multiplied by the number of processes
    when the run starts. The saved settings have the products, and false here."""
    tokens_per_micro_batch: int = 0
    """Tokens encoded at once; 0: chosen for the device."""
    precision: Literal["float32", "tf32", "bfloat16", "float16"] = "float32"
    """Arithmetic inside a transformer; losses, weights and optimiser states are always float32. All but `float32` let a
    CUDA device multiply matrices as TF32; `float16` scales gradients and skips steps whose gradient overflows."""
    activation_checkpointing: bool = False
    """Keep only the input of each layer of a transformer for the backward pass, and compute the rest again: about a
    third more time for a fraction of the memory."""
    compile: bool = False
    """Compile the transformer with torch.compile: minutes at the start, faster steps on a GPU."""
    device: str = "auto"
    """`auto` (CUDA where there is one), `cpu`, `cuda`, `cuda:1`, `mps`."""
    threads: int = 0
    """CPU threads; 0: as many as the process may use cores, at most `OMP_NUM_THREADS` where that is set."""
    checkpoint_minutes: float = 5.0
    """Largest number of minutes between checkpoints; one is also written at every validation."""
    checkpoint_steps: int = 0
    """Steps between checkpoints, in addition; 0: none."""

    def __post_init__(self) -> None:
        _require(self.epochs >= 0, "train.epochs", "0 or more")
        _require(self.learning_rate >= 0, "train.learning_rate", "0 or more")
        _require(0 <= self.warmup <= 1, "train.warmup", "between 0 and 1")
        _require(self.label_refresh >= 1, "train.label_refresh", "1 or more")
        _require(0 <= self.beta2 < 1, "train.beta2", "at least 0 and below 1")


@dataclass(frozen=True, kw_only=True)
class ValidationConfig:
    """How the best model is chosen: on queries held out of training, never on the test split."""

    fraction: float = 0.05
    """Share of the training queries held out; 0: none, the last model is kept."""
    metric: str = "auto"
    """The metric that decides which model is best, such as P@1; `auto`: nDCG@5, which varies less than P@1."""
    every_epochs: float = 1.0
    """Epochs between validations. A run whose epochs are chosen from the data is validated at its end only."""
    patience: int = 0
    """Stop after this many validations without improvement; 0: never."""

    @property
    def cut_off(self) -> int:
        """The k of the metric, such as 5 of `PSP@5`."""
        return int(self.metric.partition("@")[2])

    def __post_init__(self) -> None:
        _require(0.0 <= self.fraction < 1.0, "validation.fraction", "at least 0 and below 1")
        named = self.metric == "auto" or _METRIC.fullmatch(self.metric) is not None
        _require(
            named,
            f"validation.metric {self.metric!r}",
            "auto, or P, R, nDCG, PSP, PSnDCG or MRR with a number, such as P@1",
        )
        _require(self.every_epochs > 0, "validation.every_epochs", "above 0")


@dataclass(frozen=True, kw_only=True)
class ScoringConfig:
    """What is kept and chosen after training, for predictions."""

    neighbours: int = 200_000
    """Training queries (vectors, labels, beginnings of texts) are kept with the model, so that the nearest can vote and
    be shown, if there are at most this many; up to ten times as many by their words alone, if these vote. 0: never."""

    def __post_init__(self) -> None:
        _require(self.neighbours >= 0, "scoring.neighbours", "0 or more")


@dataclass(frozen=True, kw_only=True)
class Config:
    """A whole run."""

    recipe: str = DEFAULT_RECIPE
    """The recipe this configuration started from."""
    seed: int = 0
    """Fixes every random choice."""
    data: DataConfig = field(default_factory=DataConfig)
    """How the data are understood."""
    encoder: EncoderConfig = field(default_factory=EncoderConfig)
    """Text to vector."""
    batch: BatchConfig = field(default_factory=BatchConfig)
    """The queries of a step and the labels they are scored against."""
    head: HeadConfig = field(default_factory=HeadConfig)
    """How representations become the vectors that are scored."""
    loss: LossConfig = field(default_factory=LossConfig)
    """The loss."""
    train: TrainConfig = field(default_factory=TrainConfig)
    """The training loop and its optimisers."""
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    """How the best model is chosen."""
    scoring: ScoringConfig = field(default_factory=ScoringConfig)
    """What is kept and chosen after training."""

    def __post_init__(self) -> None:
        # The chance of being in the pool is known where batches are random and nothing else brings labels.
        added = self.batch.hard_negatives + self.batch.classifier_positives
        known = self.batch.order == "shuffled" and added == 0
        possible = not self.batch.correct_pool or (self.loss.name in CORRECTED_LOSSES and known)
        names = ", ".join(CORRECTED_LOSSES)
        what = f"false unless the loss is {names}, batches are shuffled and no labels are added to a pool"
        _require(possible, "batch.correct_pool", what)
        # A query's own positives are always in the pool: as negatives they would be corrected for a chance of 1.
        ignored = not self.batch.correct_pool or self.loss.undrawn == "ignore"
        _require(ignored, "loss.undrawn", "ignore with batch.correct_pool")


def load_config(recipe: str | Path, overrides: Mapping[str, Any] | None = None) -> Config:
    """Read a recipe by name or from a TOML file, and apply overrides by dotted name."""
    read = read_recipe(recipe)
    values: dict[str, Any] = {"recipe": read.name} | deepcopy(read.values)
    for key, value in (overrides or {}).items():
        _assign(values, key, value)
    return config_from_dict(values)


def parse_overrides(assignments: Iterable[str]) -> dict[str, Any]:
    """Parse `a.b=c` of the command line into overrides; a value that is not TOML is a string."""
    overrides: dict[str, Any] = {}
    for assignment in assignments:
        key, separator, text = assignment.partition("=")
        if not separator or not key.strip():
            raise UsageError(f"--set {assignment!r}: expected KEY=VALUE, such as --set train.epochs=5")
        try:
            overrides[key.strip()] = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            overrides[key.strip()] = text
    return overrides


def config_from_dict(values: Mapping[str, Any]) -> Config:
    """Check names and types of a nested mapping and build the configuration."""
    return typing.cast(Config, _build(Config, values, ""))


def config_to_toml(config: Config) -> str:
    """The whole configuration as TOML."""
    import tomli_w

    return tomli_w.dumps(dataclasses.asdict(config))


def _assign(values: dict[str, Any], key: str, value: Any) -> None:
    *parents, last = key.split(".")
    for parent in parents:
        values = values.setdefault(parent, {})
        if not isinstance(values, dict):
            raise UsageError(f"{key}: {parent!r} is a value, not a section")
    values[last] = value


def _build(kind: type, values: Mapping[str, Any], prefix: str) -> Any:
    known = {entry.name: entry for entry in fields(kind)}
    hints = typing.get_type_hints(kind)
    built: dict[str, Any] = {}
    for key, value in values.items():
        if key not in known:
            raise UsageError(f"unknown setting {prefix + key!r}{_nearest(prefix + key, [*known, *_all_keys()])}")
        if is_dataclass(hints[key]):
            if not isinstance(value, Mapping):
                raise UsageError(f"{prefix + key}: expected a section, got {value!r}")
            built[key] = _build(typing.cast(type, hints[key]), value, f"{prefix}{key}.")
        else:
            built[key] = _checked(value, hints[key], prefix + key)
    return kind(**built)


def _checked(value: Any, hint: Any, key: str) -> Any:
    if typing.get_origin(hint) is Literal:
        choices = typing.get_args(hint)
        if value not in choices:
            raise UsageError(f"{key}: expected one of {', '.join(map(str, choices))}, got {value!r}")
        return value
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, hint) or (hint is int and isinstance(value, bool)):
        raise UsageError(f"{key}: expected {hint.__name__}, got {value!r}")
    return value


def _all_keys(kind: type = Config, prefix: str = "") -> list[str]:
    hints = typing.get_type_hints(kind)
    keys = []
    for entry in fields(kind):
        nested = is_dataclass(hints[entry.name])
        keys += _all_keys(hints[entry.name], f"{prefix}{entry.name}.") if nested else [prefix + entry.name]
    return keys


def _nearest(name: str, known: Iterable[str]) -> str:
    known = list(known)
    by_last = {key.rpartition(".")[2]: key for key in known}
    match = difflib.get_close_matches(name, known, 1, 0.5)
    match = match or [by_last[last] for last in difflib.get_close_matches(name.rpartition(".")[2], by_last, 1, 0.5)]
    return f" (did you mean {match[0]!r}?)" if match else ""


def _require(condition: bool, key: str, expectation: str) -> None:
    if not condition:
        raise UsageError(f"{key} must be {expectation}")
