"""The training loop: `train` opens a run folder, a `Trainer` goes from the first step to a published model."""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dexter.batches.clusters import balanced_clusters
from dexter.batches.pool import count_relevant_pairs, restrict
from dexter.batches.sampler import Sampler
from dexter.config import Config
from dexter.data import Dataset
from dexter.data.own_labels import find_own_labels
from dexter.data.tokens import Ragged, Tokens
from dexter.encoders import build_encoder, embed
from dexter.encoders.static import StaticEncoder
from dexter.encoders.transformer import TransformerEncoder
from dexter.errors import DivergedError, Interrupted
from dexter.files import write_json
from dexter.index import place, search_shards
from dexter.metrics import score
from dexter.model.labels import Labels
from dexter.model.model import Model
from dexter.predict.calibration import FITTED_PLACES
from dexter.predict.scoring import SCORING_FILE, Scoring, choose_ranking
from dexter.processes import LabelShard, SingleProcess
from dexter.recipes import DEFAULT_RECIPE
from dexter.training.checkpoint import load_checkpoint, restore_state, save_checkpoint, seed_rank, take_state
from dexter.training.distributed import (
    ProcessGroup,
    add_gradients,
    broadcast_weights,
    check_weights_agree,
    joined,
    query_vectors,
    whole_model,
)
from dexter.training.gradcache import EncoderInput, StepResult, backward
from dexter.training.label_cache import LabelCache
from dexter.training.log import Interrupts, SilentLog, Stopwatch, TrainingLog
from dexter.training.new_labels import NUM_GENERATOR_QUERIES, fit_generator
from dexter.training.objective import build_objective, spread, start_classifier
from dexter.training.optimizers import build_optimizers
from dexter.training.precision import GradientScaler, autocast, tf32_products
from dexter.training.presets import describe
from dexter.training.run import (
    Run,
    discard_run,
    is_finished,
    make_splits,
    open_run,
    read_config,
    read_run,
    record_end,
    was_started_by,
)
from dexter.training.tuning import Trial, choose_scoring, drop_unused, keep_training_queries
from dexter.types import TopK

log = logging.getLogger("dexter")
_LOG_STEPS = 10
"""Steps between two records in `metrics.jsonl`."""
_CHECKPOINTS = "checkpoints"


def train(
    data: Dataset | str | Path,
    *,
    recipe: str | Path = DEFAULT_RECIPE,
    out: str | Path,
    overrides: Mapping[str, Any] | None = None,
    resume: bool = False,
    tensorboard: bool = False,
    keep_checkpoints: bool = False,
) -> Run:
    """Train a dual encoder and publish the best model below `out`.

    Under `torchrun` all its processes train one model together; after a restart they resume without `resume`.

    Args:
        data: a data set, or the path or name of one.
        recipe: a recipe's name or TOML file. A resumed run keeps the settings it was started with.
        out: the run folder; it must be new, or `resume` given.
        overrides: settings by dotted name, such as {"train.epochs": 5}.
        resume: continue from the newest checkpoint in `out`, or from the start where there is none.
        tensorboard: also write TensorBoard files (extra `track`).
        keep_checkpoints: keep the last two checkpoints of a finished run, which only needs its model.
    """
    dataset = data if isinstance(data, Dataset) else _load_dataset(data)
    folder = Path(out)
    with joined() as processes:
        launch = processes.launch
        if processes.is_first:
            resume = resume or (launch.restarts > 0 and was_started_by(folder, launch.name))
            open_run(
                folder,
                dataset,
                recipe,
                overrides or {},
                resume=resume,
                launch=launch.name,
                num_processes=processes.size,
            )
        resume = bool(processes.agree(resume)[0])
        if resume and is_finished(folder):
            log.info("%s is finished already", folder)
            return read_run(folder)
        try:
            trainer = Trainer(read_config(folder), dataset, folder, processes)
        except BaseException:
            if processes.is_first and not resume:
                discard_run(folder)
            raise
        if processes.is_first:
            if own_labels := trainer.own_labels.describe():
                log.info("%s", own_labels)
            log.info("%s", describe(trainer.config, num_steps=trainer.steps_per_epoch, num_processes=processes.size))
        if resume:
            trainer.restore()
        trainer.run(tensorboard=tensorboard, keep_checkpoints=keep_checkpoints)
        return read_run(folder)


def share_label_vectors(
    encoder: StaticEncoder, label_texts: Sequence[str], config: Config, processes: ProcessGroup
) -> None:
    """Let similar labels share a vector: balanced clusters of what the encoder makes of their texts before training."""
    vectors_LD = encoder.embed(encoder.tokenize(label_texts, side="label"))
    largest = config.encoder.labels_per_vector
    clusters = balanced_clusters(vectors_LD, largest, seed=config.seed, processes=processes)
    encoder.tokens.share_label_rows(label_texts, clusters)


class Trainer:
    """The state of a run and the steps that change it; every process has one."""

    def __init__(self, config: Config, dataset: Dataset, folder: Path, processes: ProcessGroup | None = None) -> None:
        self.config, self.dataset, self.folder = config, dataset, folder
        self.processes = processes = processes or ProcessGroup()
        self.device = processes.device(config.train.device)
        torch.set_num_threads(processes.threads(config.train.threads))
        torch.manual_seed(config.seed)
        self.own_labels = find_own_labels(dataset, config.data.own_labels)
        self.train_split, self.validation_split = make_splits(self.own_labels.filter_train(dataset), config)
        self.encoder = build_encoder(
            config.encoder, self.train_split.texts, dataset.label_texts, device=self.device, seed=config.seed
        )
        self.encoder.tokens_per_batch = config.train.tokens_per_micro_batch
        if isinstance(self.encoder, TransformerEncoder):
            if config.train.activation_checkpointing:
                self.encoder.checkpoint_activations()
            if config.train.compile:
                self.encoder.compile_model()
        label_texts, self.text_of_label = distinct_texts(dataset.label_texts)
        self.shard = LabelShard.of(self.text_of_label, rank=processes.rank, size=processes.size)
        self.query_tokens = self.encoder.tokenize(self.train_split.texts, side="query", progress=processes.is_first)
        if isinstance(self.encoder, StaticEncoder):
            self.encoder.weigh_tokens(self.query_tokens)
        broadcast_weights(processes, self.encoder)
        if isinstance(self.encoder, StaticEncoder) and config.encoder.labels_per_vector > 1:
            share_label_vectors(self.encoder, label_texts, config, processes)
        held_texts = [label_texts[text] for text in self.shard.texts]
        self.label_tokens = self.encoder.tokenize(held_texts, side="label", progress=processes.is_first)
        counts = np.bincount(self.train_split.relevance.indices, minlength=dataset.num_labels)
        self.labels = Labels(dataset.label_ids, dataset.label_texts, counts)
        self.sampler = Sampler(self.train_split, config.batch, config.loss, seed=config.seed)
        self.steps_per_epoch = self.sampler.steps_per_epoch
        self.num_steps = config.train.epochs * self.steps_per_epoch
        self.objective = build_objective(
            config,
            self.encoder,
            counts,
            query_tokens=self.query_tokens,
            label_tokens=self.label_tokens,
            shard=self.shard,
            relevance=self.train_split.relevance,
            processes=processes,
        )
        broadcast_weights(processes, self.objective.dual.project)
        if self.objective.classifier is not None:
            broadcast_weights(processes, self.objective.classifier.project)
        self.optimizers = build_optimizers(
            config,
            self.encoder,
            self.objective,
            num_steps=self.num_steps,
            touched=self._first_ids(),
            processes=processes,
        )
        scaled = config.train.precision == "float16" and isinstance(self.encoder, TransformerEncoder)
        self.scaler = GradientScaler() if scaled else None
        if processes.size > 1:
            seed_rank(config.seed, processes.rank)
        self.step = 0
        self.best: dict[str, float] = {}
        self.best_step = 0
        self.num_worse = 0
        self.seconds = 0.0
        self.step_sizes: dict[str, int] = {}
        """Of the last step, over all processes: queries, labels in the pool, relevant pairs of these."""
        self.epoch_sums: dict[str, float] = {}
        """Sums over the steps of the current epoch: steps, their losses and their sizes."""
        self.watch = Stopwatch()
        """Seconds of steps (batch, encode, loss, backward, update), refreshes (embed, cluster, mine) and the rest
        (validation, checkpoint, tuning)."""
        self.validation_tokens: Tokens | None = None
        self.validation_found: TopK | None = None
        """The best labels of the validation queries by the best model, where this process has searched all labels."""
        self.unpublished: Model | None = None
        """The best model so far, where it is not on disk yet; it shares the weights that the next step changes."""
        self.label_cache: LabelCache | None = None
        if config.train.label_refresh > 1:
            self.label_cache = LabelCache(
                len(self.shard.texts), refresh=config.train.label_refresh, processes=processes
            )

    def run(self, *, tensorboard: bool = False, keep_checkpoints: bool = False) -> None:
        """Take every remaining step, validate, and publish; a signal saves a checkpoint and raises `Interrupted`."""
        training_log = self._open_log(tensorboard=tensorboard)
        started, earlier = time.monotonic(), self.seconds
        saved_at, saved_step = started, self.step
        try:
            with Interrupts() as interrupts:
                while self.step < self.num_steps and not self._should_stop_early():
                    result = self.take_step()
                    self._report(training_log, float(result.loss), time.monotonic() - started + earlier)
                    validated = self._is_due_validation()
                    if validated:
                        with self.watch("validation"):
                            self._validate(training_log)
                    now = time.monotonic()
                    self.seconds = earlier + now - started
                    every = self.config.train.checkpoint_steps
                    is_late = now - saved_at > 60 * self.config.train.checkpoint_minutes
                    # Clocks and signals differ between processes; what follows must not.
                    signal_number, is_due = self.processes.agree(interrupts.received or 0, is_late)
                    # After the last step a checkpoint would be deleted at once.
                    is_due = is_due or (validated and self.step < self.num_steps)
                    if signal_number or is_due or (every and self.step - saved_step >= every):
                        self.save()
                        saved_at, saved_step = now, self.step
                    if signal_number:
                        raise Interrupted(
                            f"stopped by a signal after step {self.step:,} of {self.num_steps:,}; "
                            f"continue with --resume --out {self.folder}",
                            signal_number=int(signal_number),
                        )
                self._finish(keep_checkpoints=keep_checkpoints)
        finally:
            training_log.close()

    def restore(self) -> None:
        """Continue from the newest checkpoint as if the run had never stopped; from the start where there is none."""
        folder = self.folder / _CHECKPOINTS
        checkpoint = load_checkpoint(folder, label_ids=self.shard.labels, processes=self.processes)
        if checkpoint is None:
            return
        restore_state(self, checkpoint)
        if self.processes.is_first:
            log.info("resumed after step %d of %d", self.step, self.num_steps)

    def save(self) -> None:
        """Publish a checkpoint of everything that the rest of the run depends on, the best model among it."""
        self._publish()
        with self.watch("checkpoint"):
            check_weights_agree(self.processes, self.encoder)
            save_checkpoint(self.folder / _CHECKPOINTS, take_state(self), self.processes)

    def take_step(self) -> StepResult:
        """Train on one batch: encode, loss, gradients, update."""
        frozen = self._enter_stage()
        if self.sampler.is_due_refresh(self.step):
            with tf32_products(self.config.train.precision, self.device):
                self._refresh()
        with self.watch("batch"):
            rows = self.sampler.rows(self.step)
            whole_pool = self.sampler.pool(rows, self.step)
            pool = restrict(whole_pool, self.shard)
            classifier_pool = restrict(self.sampler.classifier_pool(whole_pool, rows, self.step), self.shard)
            texts, text_of_label = self._label_texts(pool.labels)
            cache = self.label_cache if pool.labels is None else None
            if cache is not None:
                texts = cache.texts_to_encode(text_of_label[pool.positives.columns.numpy()], step=self.step)
            self.step_sizes = {
                "queries": len(rows),
                "labels": whole_pool.num_labels,
                "positives": count_relevant_pairs(whole_pool, self.train_split.relevance, rows),
            }

        def objective(queries_BD: Tensor, texts_UD: Tensor | None = None) -> Tensor:
            if texts_UD is None and self.objective.needs_label_texts:
                queries_BD, texts_UD = torch.split(queries_BD, [len(queries_BD) - len(texts), len(texts)])
            if cache is not None and texts_UD is not None:
                texts_UD = cache.combine(texts_UD, texts)
            labels_MD = None if texts_UD is None else spread(texts_UD, text_of_label)
            loss: Tensor = self.objective(queries_BD, labels_MD, pool, classifier_pool, num_queries=len(rows))
            return loss

        parts = [(self.query_tokens, rows[self.processes.part(len(rows))])]
        if self.objective.needs_label_texts:
            parts.append((self.label_tokens, texts))
        # A static encoder reads queries and labels together: a row of its table that both have is then updated once.
        together = isinstance(self.encoder, StaticEncoder)
        inputs = [self._encoder_input(*group) for group in ([parts] if together else [[part] for part in parts])]
        self.encoder.train()
        self.objective.train()
        scale = 1.0 if self.scaler is None else self.scaler.scale
        with tf32_products(self.config.train.precision, self.device):
            result = backward(objective, *inputs, scale=scale, watch=self.watch)
        self._check_finite(result, rows)
        with self.watch("update"):
            if cache is not None:
                cache.note_gradients()
            add_gradients(self.optimizers.parts, self.processes)
            if frozen:
                self.encoder.zero_grad(set_to_none=True)
            if self.scaler is None or self.scaler.unscale(self.encoder.parameters(), self.processes):
                self.optimizers.step(self.step, gradient_clip=self.config.train.gradient_clip)
            else:
                self.optimizers.forget_gradients()
                log.info("step %d: skipped, float16 gradient overflowed; scale now %g", self.step, self.scaler.scale)
        self.step += 1
        return result

    def _enter_stage(self) -> bool:
        """Choose what the next step trains where a run has two stages; return whether the encoder is frozen."""
        start = self.config.head.classifier_start * self.steps_per_epoch
        if not start:
            return False
        self.objective.encoder_weight = 1.0 if self.step < start else 0.0
        if self.step == start:
            start_classifier(
                self.objective,
                self.encoder,
                query_tokens=self.query_tokens,
                label_tokens=self.label_tokens,
                shard=self.shard,
                relevance=self.train_split.relevance,
            )
        return self.step >= start

    def _label_texts(self, labels: NDArray[np.int64] | None) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The distinct texts of a pool's labels (None: all held ones), and for each label the position of its text."""
        if labels is None:
            return np.arange(len(self.shard.texts)), self.shard.text_of_label
        return np.unique(self.shard.text_of_label[labels], return_inverse=True)

    def _refresh(self) -> None:
        """Cluster the queries and mine hard negatives with the current model."""
        with self.watch("embed"):
            model = self._model()
            queries = query_vectors(self.processes, model, self.query_tokens, head="encoder")
            labels = place(model.label_vectors(head="encoder"), self.device)
        self.sampler.refresh(self.step, queries, labels, shard=self.shard, processes=self.processes, watch=self.watch)

    def _encoder_input(self, *parts: tuple[Tokens, NDArray[np.int64]]) -> EncoderInput:
        """Some texts, given by their rows in token tables, as gradient caching wants them."""
        precision = self.config.train.precision if isinstance(self.encoder, TransformerEncoder) else "float32"
        lengths = np.concatenate([tokens.lengths_of(rows) for tokens, rows in parts])

        def encode(positions: NDArray[np.int64]) -> Tensor:
            ids, offsets = _select(parts, positions)
            with autocast(precision, self.device):
                vectors_ND: Tensor = self.encoder(_tensor(ids, self.device), _tensor(offsets, self.device))
            return vectors_ND

        return EncoderInput(
            encode=encode,
            micro_batches=self.encoder.micro_batches(lengths),
            empty=next(self.encoder.parameters()).new_empty(0, self.encoder.dimension),
        )

    def _check_finite(self, result: StepResult, rows: NDArray[np.int64]) -> None:
        finite = torch.isfinite(result.loss) and all(torch.isfinite(part.sum()) for part in result.gradients)
        if not self.processes.agree(not finite)[0]:
            return
        uids = [self.train_split.uids[row] for row in rows]
        path = self.folder / "diverged.json"
        if self.processes.is_first:
            write_json(path, {"step": self.step, "epoch": self.step // self.steps_per_epoch, "queries": uids})
        raise DivergedError(
            f"the loss or its gradient is not finite in step {self.step:,} (queries {uids[0]!r} ... {uids[-1]!r}, "
            f"all in {path}): lower train.learning_rate or set train.gradient_clip; the last checkpoint is kept"
        )

    def _open_log(self, *, tensorboard: bool) -> SilentLog:
        if not self.processes.is_first:
            return SilentLog()
        return TrainingLog(
            self.folder / "metrics.jsonl", num_steps=self.num_steps, first_step=self.step, tensorboard=tensorboard
        )

    def _report(self, training_log: SilentLog, loss: float, seconds: float) -> None:
        rate = self.step * self.config.batch.size / max(seconds, 1e-9)
        sizes = self.step_sizes
        for name, value in {"steps": 1, "loss": loss, **sizes}.items():
            self.epoch_sums[name] = self.epoch_sums.get(name, 0) + value
        if self.step % _LOG_STEPS == 0 or self.step == self.num_steps:
            training_log.record(
                self.step,
                "train",
                epoch=self.step / self.steps_per_epoch,
                loss=loss,
                positives_per_query=sizes["positives"] / sizes["queries"],
                pool_labels=sizes["labels"],
                learning_rate=self.config.train.learning_rate * self.optimizers.schedule(self.step - 1),
                queries_per_second=rate,
                seconds=seconds,
            )
        training_log.advance(self.step, loss=loss, texts_per_second=rate)
        if self.step % self.steps_per_epoch == 0:
            self._report_epoch(training_log)

    def _report_epoch(self, training_log: SilentLog) -> None:
        """Record the means over an epoch: the loss of a step, positives in the pool per query, labels in the pool."""
        sums, self.epoch_sums = self.epoch_sums, {}
        epoch = self.step // self.steps_per_epoch
        means = {
            "loss": sums["loss"] / sums["steps"],
            "positives_per_query": sums["positives"] / sums["queries"],
            "pool_labels": sums["labels"] / sums["steps"],
        }
        training_log.record(self.step, "epoch", epoch=epoch, **means)
        if self.processes.is_first:
            log.info(
                "epoch %d: loss %.4f, %.2f positives in the pool per query, %.0f labels in the pool",
                epoch,
                *means.values(),
            )

    def _is_due_validation(self) -> bool:
        if self.validation_split is None:
            return False
        every = max(1, round(self.config.validation.every_epochs * self.steps_per_epoch))
        return self.step % every == 0 or self.step == self.num_steps

    def _should_stop_early(self) -> bool:
        return 0 < self.config.validation.patience <= self.num_worse

    def _validate(self, training_log: SilentLog) -> None:
        """Score the validation queries, and publish the model if it is the best so far."""
        assert self.validation_split is not None
        model = self._model()
        if self.processes.size == 1:
            model = model.fill_rows()
        if self.validation_tokens is None:
            self.validation_tokens = self.encoder.tokenize(self.validation_split.texts, side="query")
        metric = self.config.validation.metric
        found = self._rank_validation(model, self.validation_tokens)
        metrics = self._score(found)
        is_better = not self.best or metrics[metric] > self.best[metric]
        training_log.record(self.step, "validation", epoch=self.step / self.steps_per_epoch, best=is_better, **metrics)
        shown = ", ".join(
            f"{name} {metrics[name]:.2f}" for name in dict.fromkeys((metric, "P@1", "P@5", "PSP@5")) if name in metrics
        )
        if self.processes.is_first:
            best = " (best)" if is_better else ""
            log.info("epoch %.1f: validation %s%s", self.step / self.steps_per_epoch, shown, best)
        self.num_worse = 0 if is_better else self.num_worse + 1
        if is_better:
            self.best, self.best_step = metrics, self.step
            model.facts["validation"] = metrics
            self.unpublished = model
            self.validation_found = found if self.processes.size == 1 else None

    def _rank_validation(self, model: Model, tokens: Tokens) -> TopK:
        """The best labels of the validation queries by exact search, as many as tuning needs."""
        split = self.validation_split
        assert split is not None
        places = min(max(FITTED_PLACES, self.config.validation.cut_off), split.num_labels)
        exclude = split.filtered
        if exclude is not None and not self.shard.is_all:
            exclude = exclude[:, self.shard.labels]
        return search_shards(
            query_vectors(self.processes, model, tokens),
            place(model.label_vectors(), self.device),
            places,
            label_ids=self.shard.labels,
            processes=self.processes,
            exclude=exclude,
        )

    def _score(self, found: TopK) -> dict[str, float]:
        """Metrics of the validation queries at 1, 3, 5 and at the cut-off that decides."""
        split = self.validation_split
        assert split is not None
        ks = sorted({1, 3, 5, self.config.validation.cut_off} & set(range(1, split.num_labels + 1)))
        return score(found.ids, split.relevance, self.train_split.relevance, ks, self.dataset.propensity)

    def _publish(self) -> None:
        """Write the best model with the labels of all processes, unless it is on disk already."""
        if self.unpublished is None:
            return
        whole = whole_model(self.processes, self.unpublished, self.labels, self.text_of_label)
        if whole is not None:
            whole.save(self.folder / "model")
        self.unpublished = None
        self.processes.barrier("model published")

    def _finish(self, *, keep_checkpoints: bool) -> None:
        if self.validation_split is None:
            self.best_step = self.step
            self.unpublished = self._model()
        if self.processes.size > 1:
            self._publish()
        if self.processes.is_first:
            with self.watch("tuning"):
                self._tune()
            log.info("indexed, tuned and published in %.1f processor seconds", self.watch.seconds["tuning"])
        self.unpublished = None
        if keep_checkpoints:
            self.save()
        if self.processes.is_first:
            record_end(self.folder, best=self.best, best_step=self.best_step, seconds=self.seconds, steps=self.step)
            if not keep_checkpoints:
                shutil.rmtree(self.folder / _CHECKPOINTS, ignore_errors=True)
        self.processes.barrier("finish")

    def _tune(self) -> None:
        """Publish the best model with the training queries it keeps and how it ranks, chosen on validation."""
        config, published = self.config, self.folder / "model"
        # The labels of all processes may be more than the device of one can hold.
        model = self._best_model(device=self.device if self.processes.size == 1 else "cpu")
        kept = keep_training_queries(model, self.train_split, self.query_tokens, config)
        model = replace(model, training_queries=kept)
        scoring = Scoring()
        if self.validation_split is not None:
            trial = Trial(
                model,
                self.train_split,
                self.validation_split,
                metric=config.validation.metric,
                propensity=self.dataset.propensity,
                tokens=self.validation_tokens,
                found=self.validation_found if self.unpublished is not None else None,
            )
            scoring = choose_scoring(trial, learn=True)
            learned = trial.model.training_queries
            if kept is not None and learned is not None:
                model = replace(model, training_queries=replace(kept, word_weights=learned.word_weights))
            queries_QD = model.encode_tokens(self.query_tokens.spaced(NUM_GENERATOR_QUERIES), side="query")
            generator = fit_generator(trial, choose_ranking(model, scoring), queries_QD)
            model = replace(model, generator=generator)
        model = replace(model, training_queries=drop_unused(model.training_queries, scoring.choice))
        model.save(published, records={SCORING_FILE: scoring.to_json()})

    def _best_model(self, *, device: str) -> Model:
        """Return the best model of the run, from disk unless it is in memory."""
        if self.unpublished is None:
            return Model.load(self.folder / "model", device=device)
        return replace(self.unpublished, processes=SingleProcess()).fill_rows()

    def _first_ids(self) -> NDArray[np.int64]:
        """The token ids of the first step, as an example of what a step touches."""
        parts = [self.query_tokens.select(self.sampler.rows(0)).ids]
        if self.config.batch.pool == "all" and self.objective.needs_label_texts:
            parts.append(self.label_tokens.ids)
        return np.concatenate(parts)

    def _model(self) -> Model:
        """The current model, with every label of this process encoded."""
        texts_UD = embed(self.encoder, self.label_tokens)
        facts = {
            "recipe": self.config.recipe,
            "data": self.dataset.name,
            "text_fields": self.dataset.text_fields,
            "own_labels": self.own_labels.to_json(),
            "seed": self.config.seed,
            "step": self.step,
            "train_queries": len(self.train_split),
        }
        classifier, representations_LD = self.objective.classifier, spread(texts_UD, self.shard.text_of_label)
        return Model(
            encoder=self.encoder,
            head=self.objective.dual.arrays(),
            classifier=None if classifier is None else classifier.arrays(),
            labels=self.labels if self.shard.is_all else self.labels.select(self.shard.labels),
            representations_LD=representations_LD.numpy(),
            facts=facts,
            names=self.dataset.names,
            processes=self.processes,
            device=self.device,
        )


def distinct_texts(texts: Sequence[str]) -> tuple[list[str], NDArray[np.int64]]:
    """The texts without repeats, in order of first occurrence, and for every text its position among them."""
    first: dict[str, int] = {}
    positions = np.array([first.setdefault(text, len(first)) for text in texts], dtype=np.int64)
    return list(first), positions


def _select(parts: Sequence[tuple[Tokens, NDArray[np.int64]]], positions: NDArray[np.int64]) -> Ragged:
    """Gather texts by their positions among the texts of all parts; ascending where there are several parts."""
    if len(parts) == 1:
        return parts[0][0].select(parts[0][1][positions])
    ends = np.cumsum([len(rows) for _, rows in parts])
    groups = np.split(positions, np.searchsorted(positions, ends[:-1]))
    found = [
        tokens.select(rows[group - end + len(rows)])
        for (tokens, rows), group, end in zip(parts, groups, ends, strict=True)
    ]
    lengths = np.concatenate([np.diff(part.offsets) for part in found])
    return Ragged(np.concatenate([part.ids for part in found]), np.concatenate([[0], np.cumsum(lengths)]))


def _load_dataset(data: str | Path) -> Dataset:
    from dexter.data.formats import load_dataset

    return load_dataset(data)


def _tensor(values: NDArray[Any], device: str) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values, dtype=np.int64)).to(device)
