"""The loop, top to bottom: `train` opens a run folder, a `Trainer` goes from the first step to a published model."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dexter.batches.pool import Pool, restrict
from dexter.batches.sampler import Sampler
from dexter.batches.stopwatch import Stopwatch
from dexter.config import Config
from dexter.data import Dataset
from dexter.data.tokens import Tokens
from dexter.encoders import build_encoder, embed
from dexter.encoders.static import StaticEncoder
from dexter.errors import DivergedError, Interrupted
from dexter.files import write_json
from dexter.model.labels import Labels
from dexter.model.model import Model
from dexter.positives import Positives
from dexter.predict.scoring import SCORING_FILE, Scoring
from dexter.processes import LabelShard
from dexter.training.checkpoint import load_checkpoint, save_checkpoint
from dexter.training.distributed import ProcessGroup, joined
from dexter.training.gradcache import Outcome, Side, backward
from dexter.training.gradients import add_gradients
from dexter.training.interrupts import Interrupts
from dexter.training.journal import Journal, SilentJournal
from dexter.training.labels import DistinctTexts, LabelSide, spread
from dexter.training.parts import build_objective, build_optimizers, make_splits
from dexter.training.presets import describe
from dexter.training.run import Run, is_finished, open_run, read_config, read_run, record_end, was_started_by
from dexter.training.sharing import check_alike, query_vectors, start_alike, whole_model
from dexter.training.state import put_state, seed_rank, take_state
from dexter.training.tuning import choose_scoring, keep_training_queries
from dexter.training.validation import validate

log = logging.getLogger("dexter")
_LOG_STEPS = 10


def train(
    data: Dataset | str | Path,
    *,
    recipe: str | Path = "dexml",
    out: str | Path,
    overrides: Mapping[str, Any] | None = None,
    resume: bool = False,
    tensorboard: bool = False,
) -> Run:
    """Train a dual encoder and publish the best model below `out`.

    Under `torchrun` all its processes train one model together; after a restart they resume by themselves.

    Args:
        data: a data set, or the path or name of one.
        recipe: a recipe's name or TOML file. A resumed run keeps the settings it was started with.
        out: the run folder; it must be new, or `resume` given.
        overrides: settings by dotted name, such as {"train.epochs": 5}.
        resume: go on from the newest checkpoint in `out`; starts afresh where there is none.
        tensorboard: also write TensorBoard files (extra `track`).
    """
    dataset = _loaded(data)
    folder = Path(out)
    with joined() as processes:
        launch = processes.launch
        if processes.is_first:
            resume = resume or (launch.restarts > 0 and was_started_by(folder, launch.name))
            open_run(folder, dataset, recipe, overrides or {}, resume=resume, launch=launch.name)
        resume = bool(processes.agree(resume)[0])
        if resume and is_finished(folder):
            log.info("%s is finished already", folder)
            return read_run(folder)
        trainer = Trainer(read_config(folder), dataset, folder, processes)
        if processes.is_first:
            log.info("%s", describe(trainer.config, num_steps=trainer.steps_per_epoch, num_processes=processes.size))
        if resume:
            trainer.restore()
        trainer.run(tensorboard=tensorboard)
        return read_run(folder)


class Trainer:
    """The state of a run, and the steps that change it; of several ranks, each has one."""

    def __init__(self, config: Config, dataset: Dataset, folder: Path, processes: ProcessGroup | None = None) -> None:
        self.config, self.dataset, self.folder = config, dataset, folder
        self.processes = processes = processes or ProcessGroup()
        self.device = processes.device(config.train.device)
        torch.set_num_threads(processes.threads(config.train.threads))
        torch.manual_seed(config.seed)
        self.train_split, self.validation_split = make_splits(dataset, config)
        self.encoder = build_encoder(
            config.encoder, self.train_split.texts, dataset.label_texts, device=self.device, seed=config.seed
        )
        self.encoder.tokens_per_batch = config.train.tokens_per_micro_batch
        distinct = DistinctTexts.of(dataset.label_texts)
        self.places = distinct.places
        self.shard = LabelShard.of(distinct.places, rank=processes.rank, size=processes.size)
        self.query_tokens = self.encoder.tokenize(self.train_split.texts, side="query", progress=processes.is_first)
        if isinstance(self.encoder, StaticEncoder):
            self.encoder.weigh_tokens(self.query_tokens)
        start_alike(processes, self.encoder)
        held_texts = [distinct.texts[text] for text in self.shard.texts]
        self.label_tokens = self.encoder.tokenize(held_texts, side="label", progress=processes.is_first)
        self.label_side = LabelSide(self.shard.text_of_label, refresh=config.train.label_refresh, processes=processes)
        counts = np.bincount(self.train_split.relevance.indices, minlength=dataset.num_labels)
        self.labels = Labels(dataset.label_ids, dataset.label_texts, counts)
        self.sampler = Sampler(self.train_split, config.batch, seed=config.seed)
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
        start_alike(processes, self.objective.dual.project)
        if self.objective.classifier is not None:
            start_alike(processes, self.objective.classifier.project)
        self.optimizers = build_optimizers(
            config,
            self.encoder,
            self.objective,
            num_steps=self.num_steps,
            touched=self._first_ids(),
            processes=processes,
        )
        if processes.size > 1:
            seed_rank(config.seed, processes.rank)
        self.step = 0
        self.best: dict[str, float] = {}
        self.best_step = 0
        self.num_worse = 0
        self.seconds = 0.0
        self.watch = Stopwatch()
        """Seconds of steps (batch, encode, loss, backward, update), refreshes (embed, cluster, mine) and the rest
        (validation, checkpoint, tuning)."""
        self.validation_tokens: Tokens | None = None

    def run(self, *, tensorboard: bool = False) -> None:
        """Take every remaining step, validate, and publish; a signal saves a checkpoint and raises `Interrupted`."""
        journal = self._journal(tensorboard=tensorboard)
        started, earlier = time.monotonic(), self.seconds
        saved_at, saved_step = started, self.step
        try:
            with Interrupts() as interrupts:
                while self.step < self.num_steps and not self._is_patient_no_more():
                    outcome, rows = self.take_step()
                    self._log(journal, outcome, rows, time.monotonic() - started + earlier)
                    validated = self._is_due_validation()
                    if validated:
                        with self.watch("validation"):
                            self._validate(journal)
                    now = time.monotonic()
                    self.seconds = earlier + now - started
                    every = self.config.train.checkpoint_steps
                    is_late = now - saved_at > 60 * self.config.train.checkpoint_minutes
                    # Clocks and signals differ between ranks; what follows must not.
                    signal_number, is_due = self.processes.agree(interrupts.received or 0, is_late)
                    if validated or signal_number or is_due or (every and self.step - saved_step >= every):
                        self.save()
                        saved_at, saved_step = now, self.step
                    if signal_number:
                        raise Interrupted(
                            f"stopped by a signal after step {self.step:,} of {self.num_steps:,}; "
                            f"continue with --resume --out {self.folder}",
                            signal_number=int(signal_number),
                        )
                self._finish()
        finally:
            journal.close()

    def restore(self) -> None:
        """Continue from the newest checkpoint as if the run had never stopped; from the start where there is none."""
        held = {"label": self.shard.labels, "text": self.shard.texts}
        checkpoint = load_checkpoint(self.folder / "checkpoints", held=held, processes=self.processes)
        if checkpoint is None:
            return
        put_state(self, checkpoint)
        if self.processes.is_first:
            log.info("resumed after step %d of %d", self.step, self.num_steps)

    def save(self) -> None:
        """Publish a checkpoint of everything that the rest of the run depends on."""
        with self.watch("checkpoint"):
            check_alike(self.processes, self.encoder)
            save_checkpoint(self.folder / "checkpoints", take_state(self), self.processes)

    def take_step(self) -> tuple[Outcome, NDArray[np.int64]]:
        """One batch: encode, loss, gradients, update."""
        if self.sampler.is_due_refresh(self.step):
            self._refresh()
        with self.watch("batch"):
            rows = self.sampler.rows(self.step)
            whole_pool = self.sampler.pool(rows, self.step)
            pool = restrict(whole_pool, self.shard)
            classifier_pool = restrict(self.sampler.classifier_pool(whole_pool, rows, self.step), self.shard)
            texts = self.label_side.texts_to_encode(pool.labels, needed=_columns(pool), step=self.step)

        def objective(queries_BD: Tensor, texts_UD: Tensor | None = None) -> Tensor:
            labels_MD = None if texts_UD is None else self.label_side.assemble(texts_UD, texts, pool.labels)
            loss: Tensor = self.objective(queries_BD, labels_MD, pool, classifier_pool, num_queries=len(rows))
            return loss

        sides = [self._side(self.query_tokens, rows[self.processes.part(len(rows))])]
        if self.objective.needs_label_texts:
            sides.append(self._side(self.label_tokens, texts, label=True))
        self.encoder.train()
        self.objective.train()
        outcome = backward(objective, *sides, watch=self.watch)
        self._check_finite(outcome, rows)
        with self.watch("update"):
            self.label_side.learn()
            add_gradients(self.optimizers.parts, self.processes)
            self.optimizers.step(self.step, gradient_clip=self.config.train.gradient_clip)
        self.step += 1
        return outcome, rows

    def _refresh(self) -> None:
        """Cluster the queries and mine hard negatives with the model as it is now."""
        with self.watch("embed"):
            model = self._model()
            queries = query_vectors(self.processes, model, self.query_tokens, head="encoder")
            labels = model.label_vectors(head="encoder")
        self.sampler.refresh(self.step, queries, labels, shard=self.shard, processes=self.processes, watch=self.watch)

    def _side(self, tokens: Tokens, rows: NDArray[np.int64], *, label: bool = False) -> Side:
        """How gradient caching encodes some rows of a token table."""
        lengths = tokens.lengths

        def encode(positions: NDArray[np.int64]) -> Tensor:
            ids, offsets = tokens.select(rows[positions])
            return self.encoder(_tensor(ids, self.device), _tensor(offsets, self.device))  # type: ignore[no-any-return]

        def cut(positions: NDArray[np.int64]) -> list[NDArray[np.int64]]:
            return self.encoder.micro_batches(lengths[rows[positions]])

        return Side(
            encode=encode,
            micro_batches=cut(np.arange(len(rows))),
            backward_share=self.config.train.label_backward if label else 0.0,
            cut_again=None if self.config.encoder.dropout else cut,
            empty=next(self.encoder.parameters()).new_empty(0, self.encoder.dimension),
            over_processes=self.processes.max,
        )

    def _check_finite(self, outcome: Outcome, rows: NDArray[np.int64]) -> None:
        finite = torch.isfinite(outcome.loss) and all(torch.isfinite(part.sum()) for part in outcome.gradients)
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

    def _journal(self, *, tensorboard: bool) -> SilentJournal:
        if not self.processes.is_first:
            return SilentJournal()
        return Journal(
            self.folder / "metrics.jsonl", num_steps=self.num_steps, first_step=self.step, tensorboard=tensorboard
        )

    def _log(self, journal: SilentJournal, outcome: Outcome, rows: NDArray[np.int64], seconds: float) -> None:
        loss = float(outcome.loss)
        rate = self.step * self.config.batch.size / max(seconds, 1e-9)
        if self.step % _LOG_STEPS == 0 or self.step == self.num_steps:
            journal.record(
                self.step,
                "train",
                epoch=self.step / self.steps_per_epoch,
                loss=loss,
                learning_rate=self.config.train.learning_rate * self.optimizers.schedule(self.step - 1),
                queries_per_second=rate,
                seconds=seconds,
            )
        journal.advance(self.step, loss=loss, texts_per_second=rate)

    def _is_due_validation(self) -> bool:
        if self.validation_split is None:
            return False
        every = max(1, round(self.config.validation.every_epochs * self.steps_per_epoch))
        return self.step % every == 0 or self.step == self.num_steps

    def _is_patient_no_more(self) -> bool:
        return 0 < self.config.validation.patience <= self.num_worse

    def _validate(self, journal: SilentJournal) -> None:
        """Score the validation queries, and publish the model if it is the best so far."""
        assert self.validation_split is not None
        model = self._model()
        if self.validation_tokens is None:
            self.validation_tokens = self.encoder.tokenize(self.validation_split.texts, side="query")
        metric = self.config.validation.metric
        metrics = validate(
            query_vectors(self.processes, model, self.validation_tokens),
            model.label_vectors(),
            self.validation_split,
            self.train_split.relevance,
            cut_off=self.config.validation.cut_off,
            label_ids=self.shard.labels,
            processes=self.processes,
        )
        is_better = not self.best or metrics[metric] > self.best[metric]
        journal.record(self.step, "validation", epoch=self.step / self.steps_per_epoch, best=is_better, **metrics)
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
            self._publish(model)

    def _publish(self, model: Model) -> None:
        """Write the model with the labels of all ranks."""
        whole = whole_model(self.processes, model, self.labels, self.places)
        if whole is not None:
            whole.save(self.folder / "model")
        self.processes.barrier("model published")

    def _finish(self) -> None:
        if self.validation_split is None:
            self.best_step = self.step
            self._publish(self._model())
        self.save()
        if self.processes.is_first:
            with self.watch("tuning"):
                self._tune()
            record_end(
                self.folder,
                best=self.best,
                best_step=self.best_step,
                seconds=self.seconds,
                steps=self.step,
            )
        self.processes.barrier("finish")

    def _tune(self) -> None:
        """Keep the training queries with the published model, and choose on validation how it scores."""
        config, published = self.config, self.folder / "model"
        # The labels of all ranks may be more than the device of one holds.
        model = Model.load(published, device=self.device if self.processes.size == 1 else "cpu")
        model = replace(model, training_queries=keep_training_queries(model, self.train_split, config))
        scoring = Scoring()
        if self.validation_split is not None:
            metric, maximum = config.validation.metric, config.scoring.tuning_queries
            scoring = choose_scoring(model, self.train_split, self.validation_split, metric=metric, maximum=maximum)
        model.save(published, records={SCORING_FILE: scoring.to_json()})

    def _first_ids(self) -> NDArray[np.int64]:
        """The token ids of the first step: what a typical step touches."""
        parts = [self.query_tokens.select(self.sampler.rows(0)).ids]
        if self.config.batch.pool == "all" and self.objective.needs_label_texts:
            parts.append(self.label_tokens.ids)
        return np.concatenate(parts)

    def _model(self) -> Model:
        """The model as it is now, with every label of this rank freshly encoded."""
        texts_UD = embed(self.encoder, self.label_tokens, device=self.device)
        facts = {
            "recipe": self.config.recipe,
            "data": self.dataset.name,
            "seed": self.config.seed,
            "step": self.step,
            "train_queries": len(self.train_split),
        }
        self.objective.eval()
        return Model(
            encoder=self.encoder,
            head=self.objective.dual,
            classifier=self.objective.classifier,
            labels=self.labels if self.shard.is_all else self.labels.select(self.shard.labels),
            representations_LD=spread(texts_UD, self.shard.text_of_label),
            facts=facts,
            processes=self.processes,
        )


def _loaded(data: Dataset | str | Path) -> Dataset:
    if isinstance(data, Dataset):
        return data
    from dexter.data.formats import load_dataset

    return load_dataset(data)


def _columns(pool: Pool) -> NDArray[np.int64]:
    """The labels that the batch's queries point to, once for each query."""
    positives: Positives = pool.positives
    columns: NDArray[np.int64] = positives.columns.numpy()
    return columns if pool.labels is None else pool.labels[columns]


def _tensor(values: NDArray[Any], device: str) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values, dtype=np.int64)).to(device)
