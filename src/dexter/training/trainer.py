"""The loop, top to bottom: `train` opens a run folder, a `Trainer` goes from the first step to a published model."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dexter.batches.batch import Positives
from dexter.batches.pool import Pool
from dexter.config import Config
from dexter.data import Dataset
from dexter.data.tokens import Tokens
from dexter.encoders import build_encoder
from dexter.encoders.embed import embed
from dexter.encoders.static import StaticEncoder
from dexter.errors import DivergedError, Interrupted, ModelError
from dexter.files import write_json
from dexter.model import Labels, Model
from dexter.training.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from dexter.training.gradcache import Outcome, Side, backward
from dexter.training.interrupts import Interrupts
from dexter.training.journal import Journal
from dexter.training.labels import DistinctTexts, LabelSide
from dexter.training.parts import build_objective, build_optimizers, make_splits
from dexter.training.presets import describe
from dexter.training.run import Run, is_finished, open_run, read_run, record_end
from dexter.training.sampling import Sampler
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
    config = open_run(folder, dataset, recipe, overrides or {}, resume=resume)
    if resume and is_finished(folder):
        log.info("%s is finished already", folder)
        return read_run(folder)
    trainer = Trainer(config, dataset, folder)
    log.info("%s", describe(config, num_steps=trainer.steps_per_epoch))
    if resume:
        trainer.restore(load_checkpoint(folder / "checkpoints"))
    trainer.run(tensorboard=tensorboard)
    return read_run(folder)


class Trainer:
    """The state of a run, and the steps that change it."""

    def __init__(self, config: Config, dataset: Dataset, folder: Path) -> None:
        self.config, self.dataset, self.folder = config, dataset, folder
        self.device = config.train.device
        torch.set_num_threads(config.train.threads)
        torch.manual_seed(config.seed)
        self.train_split, self.validation_split = make_splits(dataset, config)
        self.encoder = build_encoder(
            config.encoder, self.train_split.texts, dataset.label_texts, device=self.device, seed=config.seed
        )
        self.encoder.tokens_per_batch = config.train.tokens_per_micro_batch
        distinct = DistinctTexts.of(dataset.label_texts)
        self.query_tokens = self.encoder.tokenize(self.train_split.texts, side="query", progress=True)
        if isinstance(self.encoder, StaticEncoder):
            self.encoder.weigh_tokens(self.query_tokens)
        self.label_tokens = self.encoder.tokenize(distinct.texts, side="label", progress=True)
        self.label_side = LabelSide(distinct.places, refresh=config.train.label_refresh)
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
            places=distinct.places,
            relevance=self.train_split.relevance,
        )
        self.optimizers = build_optimizers(
            config, self.encoder, self.objective, num_steps=self.num_steps, touched=self._first_ids()
        )
        self.step = 0
        self.best: dict[str, float] = {}
        self.best_step = 0
        self.num_worse = 0
        self.seconds = 0.0
        self.validation_tokens: Tokens | None = None

    def run(self, *, tensorboard: bool = False) -> None:
        """Take every remaining step, validate, and publish; a signal saves a checkpoint and raises `Interrupted`."""
        journal = Journal(
            self.folder / "metrics.jsonl", num_steps=self.num_steps, first_step=self.step, tensorboard=tensorboard
        )
        started, earlier = time.monotonic(), self.seconds
        saved_at, saved_step = started, self.step
        try:
            with Interrupts() as interrupts:
                while self.step < self.num_steps and not self._is_patient_no_more():
                    outcome, rows = self._take_step()
                    self._log(journal, outcome, rows, time.monotonic() - started + earlier)
                    validated = self._is_due_validation()
                    if validated:
                        self._validate(journal)
                    now = time.monotonic()
                    self.seconds = earlier + now - started
                    every = self.config.train.checkpoint_steps
                    if (
                        validated
                        or interrupts.received is not None
                        or now - saved_at > 60 * self.config.train.checkpoint_minutes
                        or (every and self.step - saved_step >= every)
                    ):
                        self.save()
                        saved_at, saved_step = now, self.step
                    if interrupts.received is not None:
                        raise Interrupted(
                            f"stopped by a signal after step {self.step:,} of {self.num_steps:,}; "
                            f"continue with --resume --out {self.folder}",
                            signal_number=interrupts.received,
                        )
                self._finish()
        finally:
            journal.close()

    def restore(self, checkpoint: Checkpoint | None) -> None:
        """Continue from a checkpoint as if the run had never stopped."""
        if checkpoint is None:
            return
        sections: dict[str, dict[str, Tensor]] = {}
        for name, tensor in checkpoint.tensors.items():
            section, _, rest = name.partition(":")
            sections.setdefault(section, {})[rest] = tensor
        try:
            self.encoder.load_state_dict(sections["encoder"])
            self.objective.load_state_dict(sections.get("objective", {}))
        except (KeyError, RuntimeError) as error:
            raise ModelError(f"{self.folder}: its checkpoint does not fit the data and settings ({error})") from None
        self.optimizers.load_state(sections.get("optimizer", {}))
        self.label_side.load_state(sections.get("labels", {}), self.device)
        self.sampler.load_state(sections["sampler"])
        torch.set_rng_state(sections["random"]["cpu"])
        if "cuda" in sections["random"] and torch.cuda.is_available():
            torch.cuda.set_rng_state(sections["random"]["cuda"])
        self.step = checkpoint.step
        self.best = dict(checkpoint.values["best"])
        self.best_step = int(checkpoint.values["best_step"])
        self.num_worse = int(checkpoint.values["num_worse"])
        self.seconds = float(checkpoint.values["seconds"])
        log.info("resumed after step %d of %d", self.step, self.num_steps)

    def save(self) -> None:
        """Publish a checkpoint of everything that the rest of the run depends on."""
        tensors = {f"encoder:{name}": value for name, value in self.encoder.state_dict().items()}
        tensors |= {f"objective:{name}": value for name, value in self.objective.state_dict().items()}
        tensors |= {f"optimizer:{name}": value for name, value in self.optimizers.state().items()}
        tensors |= {f"labels:{name}": value for name, value in self.label_side.state().items()}
        tensors |= {f"sampler:{name}": value for name, value in self.sampler.state().items()}
        tensors["random:cpu"] = torch.get_rng_state()
        if torch.cuda.is_available():
            tensors["random:cuda"] = torch.cuda.get_rng_state()
        values = {
            "best": self.best,
            "best_step": self.best_step,
            "num_worse": self.num_worse,
            "seconds": self.seconds,
        }
        save_checkpoint(self.folder / "checkpoints", Checkpoint(self.step, tensors, values))

    def _take_step(self) -> tuple[Outcome, NDArray[np.int64]]:
        """One batch: encode, loss, gradients, update."""
        if self.sampler.is_due_refresh(self.step):
            self._refresh()
        rows = self.sampler.rows(self.step)
        pool = self.sampler.pool(rows, self.step)
        classifier_pool = self.sampler.classifier_pool(pool, rows, self.step)
        texts = self.label_side.texts_to_encode(pool.labels, needed=_columns(pool), step=self.step)

        def objective(queries_BD: Tensor, texts_UD: Tensor | None = None) -> Tensor:
            labels_MD = None if texts_UD is None else self.label_side.assemble(texts_UD, texts, pool.labels)
            loss: Tensor = self.objective(queries_BD, labels_MD, pool, classifier_pool)
            return loss

        sides = [self._side(self.query_tokens, rows)]
        if self.objective.needs_label_texts:
            sides.append(self._side(self.label_tokens, texts, label=True))
        self.encoder.train()
        self.objective.train()
        outcome = backward(objective, *sides)
        self._check_finite(outcome, rows)
        self.label_side.learn()
        self.optimizers.step(self.step, gradient_clip=self.config.train.gradient_clip)
        self.step += 1
        return outcome, rows

    def _refresh(self) -> None:
        """Cluster the queries and mine hard negatives with the model as it is now."""
        model = self._model()
        representations = embed(self.encoder, self.query_tokens, device=self.device)
        queries, labels = model.search_vectors(representations, head="encoder"), model.label_vectors(head="encoder")
        self.sampler.refresh(self.step, queries, labels)

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
        )

    def _check_finite(self, outcome: Outcome, rows: NDArray[np.int64]) -> None:
        if torch.isfinite(outcome.loss) and all(torch.isfinite(gradient.sum()) for gradient in outcome.gradients):
            return
        uids = [self.train_split.uids[row] for row in rows]
        path = self.folder / "diverged.json"
        write_json(path, {"step": self.step, "epoch": self.step // self.steps_per_epoch, "queries": uids})
        raise DivergedError(
            f"the loss or its gradient is not finite in step {self.step:,} (queries {uids[0]!r} ... {uids[-1]!r}, "
            f"all in {path}): lower train.learning_rate or set train.gradient_clip; the last checkpoint is kept"
        )

    def _log(self, journal: Journal, outcome: Outcome, rows: NDArray[np.int64], seconds: float) -> None:
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

    def _validate(self, journal: Journal) -> None:
        """Score the validation queries, and publish the model if it is the best so far."""
        assert self.validation_split is not None
        model = self._model()
        if self.validation_tokens is None:
            self.validation_tokens = self.encoder.tokenize(self.validation_split.texts, side="query")
        metric = self.config.validation.metric
        metrics = validate(
            model.search_vectors(embed(self.encoder, self.validation_tokens, device=self.device)),
            model.label_vectors(),
            self.validation_split,
            self.train_split.relevance,
            cut_off=self.config.validation.cut_off,
        )
        is_better = not self.best or metrics[metric] > self.best[metric]
        journal.record(self.step, "validation", epoch=self.step / self.steps_per_epoch, best=is_better, **metrics)
        shown = ", ".join(
            f"{name} {metrics[name]:.2f}" for name in dict.fromkeys((metric, "P@1", "P@5", "PSP@5")) if name in metrics
        )
        log.info("epoch %.1f: validation %s%s", self.step / self.steps_per_epoch, shown, " (best)" if is_better else "")
        self.num_worse = 0 if is_better else self.num_worse + 1
        if is_better:
            self.best, self.best_step = metrics, self.step
            model.facts["validation"] = metrics
            model.save(self.folder / "model")

    def _finish(self) -> None:
        if self.validation_split is None:
            self.best_step = self.step
            self._model().save(self.folder / "model")
        self.save()
        record_end(
            self.folder,
            best=self.best,
            best_step=self.best_step,
            seconds=self.seconds,
            steps=self.step,
            skipped_gradient_share=self.objective.saving.fraction,
        )

    def _first_ids(self) -> NDArray[np.int64]:
        """The token ids of the first step: what a typical step touches."""
        parts = [self.query_tokens.select(self.sampler.rows(0)).ids]
        if self.config.batch.pool == "all" and self.objective.needs_label_texts:
            parts.append(self.label_tokens.ids)
        return np.concatenate(parts)

    def _model(self) -> Model:
        """The model as it is now, with every label freshly encoded."""
        texts_UD = embed(self.encoder, self.label_tokens, device=self.device)
        places = torch.from_numpy(self.label_side.places).to(self.device)
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
            labels=self.labels,
            representations_LD=texts_UD[places],
            facts=facts,
        )


def _loaded(data: Dataset | str | Path) -> Dataset:
    if isinstance(data, Dataset):
        return data
    from dexter.data.formats import load_dataset

    return load_dataset(data)


def _columns(pool: Pool) -> NDArray[np.int64]:
    """The labels that the batch's queries point to."""
    positives: Positives = pool.positives
    columns = np.unique(positives.columns.numpy())
    return columns if pool.labels is None else pool.labels[columns]


def _tensor(values: NDArray[Any], device: str) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values, dtype=np.int64)).to(device)
