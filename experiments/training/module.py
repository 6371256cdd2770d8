"""The base of every experiment: one training step, exact means, metrics, and what a checkpoint holds."""

from __future__ import annotations

import logging
import math
from abc import abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Self

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

from experiments.training import gradients, optim, saved
from experiments.training.losses import LossMean
from experiments.training.regrouping import fit_to_processes
from experiments.training.saved import refuse_other_facts

if TYPE_CHECKING:
    from experiments.training.exporting import Part
    from experiments.training.samples import Samples

log = logging.getLogger("experiments")

Stage = Literal["train", "val", "test"]


class Step(NamedTuple):
    """What one batch gives.

    Attributes:
        loss_sum: scalar, the loss summed over what `count` counts.
        count: scalar integer tensor, how many samples or tokens that are.
        aux: scalar to be added to the mean loss in training (MoE balance, head diversity), or None.
        outputs: arguments for `update` of the metrics.
        plain_sum: like `loss_sum` without smoothing, to be logged as `train/nll`, or None.
    """

    loss_sum: Tensor
    count: Tensor
    aux: Tensor | None = None
    outputs: tuple[Any, ...] = ()
    plain_sum: Tensor | None = None


class Experiment(pl.LightningModule):
    """Base class. A task writes `build_network`, `build_metrics`, `step` and `primary`.

    The network is built from the options and from `facts`: plain values that only the data knows (classes,
    picture size, vocabulary), given by `datamodule.facts` and kept in the checkpoint. Every argument of a
    task's `__init__` must be a plain value, a dataclass of these, or a factory of a mechanism, and must be
    typed.

    Args:
        optim: optimiser and schedule.

    Attributes:
        task: short name of the task.
        unit: what `Step.count` counts, for messages and throughput.
        network: the network, None until `configure_model`.
        facts: what the data said, None until known.
        accumulated: losses and gradients of the batches of the step that is being made.
        remarks: plain values that belong to the test figures, such as what a score was computed by.
    """

    task: ClassVar[str]
    unit: ClassVar[str] = "samples"

    def __init__(self, optim: optim.Optim = optim.Optim()) -> None:  # noqa: B008 - frozen
        super().__init__()
        # Collects the arguments of the subclass too, by walking up to the outermost __init__.
        self.save_hyperparameters(logger=False)
        self.optim = optim
        self.network: nn.Module | None = None
        self.facts: dict[str, Any] | None = None
        self.remarks: dict[str, Any] = {}
        self.evaluation = nn.ModuleDict()
        self.accumulated = gradients.AccumulatedLoss()
        self._row: dict[str, Any] = {}

    # What a task writes.

    @abstractmethod
    def build_network(self, facts: dict[str, Any]) -> nn.Module:
        """The network for data with these facts. Called once."""

    @abstractmethod
    def build_metrics(self, facts: dict[str, Any]) -> dict[str, Metric]:
        """Metrics by their names without prefix, each taking `Step.outputs`; called for val and for test."""

    @abstractmethod
    def step(self, batch: Any, stage: Stage) -> Step:
        """Loss and outputs of one batch."""

    @abstractmethod
    def primary(self, values: dict[str, float]) -> float:
        """The figure that chooses the best checkpoint, larger is better, from the metrics and `loss`."""

    def update_metrics(self, metrics: MetricCollection, step: Step, batch: Any) -> None:
        """Count one evaluated batch in."""
        metrics.update(*step.outputs)

    def attention_pictures(self, batch: Any) -> dict[str, Any]:
        """Matplotlib figures of what was attended to in `batch`, by name; drawn when training has ended."""
        return {}

    def sample_table(self, data: pl.LightningDataModule, count: int) -> Samples | None:
        """What the model says of `count` fixed validation samples, see `samples.py`; made when training has ended."""
        return None

    def next_commands(self, checkpoint: str) -> list[str]:
        """Commands to be proposed when training has ended."""
        return []

    def export_parts(self) -> list[Part]:
        """The networks that `export` writes, none where a task has none."""
        return []

    def export_texts(self) -> dict[str, str]:
        """Further files of an export: name -> text."""
        return {}

    def check_facts(self, saved: dict[str, Any], found: dict[str, Any]) -> None:
        """Refuse data that the saved model was not made for. Measured figures (floats) may differ."""
        refuse_other_facts(saved, found)

    def receive(self, batch: Any, data: pl.LightningDataModule) -> Any:
        """A batch as the trainer hands it to ``step``: in the precision of the run, on the device."""
        if self._trainer is not None:  # None where a model is used without one
            batch = self._trainer.precision_plugin.convert_input(batch)
        return data.transfer_batch_to_device(batch, self.device, 0)

    # Set-up.

    def setup(self, stage: str) -> None:
        """Take the facts over from the data, or compare them with those of the checkpoint."""
        found = dict(self.trainer.datamodule.facts)  # type: ignore[attr-defined]
        if self.facts is None:
            self.facts = found
        else:
            self.check_facts(self.facts, found)

    def configure_model(self) -> None:
        """Build the network and the metrics, once."""
        if self.network is not None:
            return
        if self.facts is None:
            raise ValueError("The network needs facts of the data: pass a datamodule, or load a checkpoint.")
        self.network = self.build_network(self.facts)
        for stage in ("val", "test"):
            self.evaluation[stage] = MetricCollection(self.build_metrics(self.facts), compute_groups=False)
            self.evaluation[f"{stage}_loss"] = LossMean()

    def configure_optimizers(self) -> dict[str, Any]:
        """AdamW and a schedule that moves once per optimiser step."""
        assert self.network is not None
        total = optim.total_steps(self.trainer)
        self.optim.check_length(total, optim.bound(self.trainer))
        optimizer = self.optim.optimizer(self.network)
        scheduler = self.optim.scheduler(optimizer, total)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def on_train_start(self) -> None:
        """Check what exact resuming rests on; let the options of this run win over those of a checkpoint."""
        loader = self.trainer.train_dataloader
        if not hasattr(loader, "load_state_dict"):
            raise ValueError(
                f"train_dataloader() gave a {type(loader).__name__}, which cannot be taken up in the middle "
                "of an epoch; use experiments.training.sampling.ResumableLoader."
            )
        if self.automatic_optimization:
            self.optim.enforce(self.trainer.optimizers[0], self.trainer.lr_scheduler_configs[0].scheduler)

    # Training.

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        """Mean loss of the batch, aux included."""
        step = self.step(batch, "train")
        count = torch.as_tensor(step.count, device=step.loss_sum.device)
        loss = self.accumulated.add(self.trainer, step.loss_sum, count, step.aux, step.plain_sum)
        return {"loss": loss, "count": count}

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Exact mean over the accumulated batches, norm, clipping; Lightning has unscaled the gradients."""
        correction, logs = self.accumulated.correction(self.trainer), self.logs_this_step()
        before = float(self.accumulated.norm(optimizer) * correction) if logs else 0.0
        parameters = gradients.true_gradients(optimizer, correction)
        self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)
        if logs:
            self._row = {"lr": optimizer.param_groups[0]["lr"], "grad_norm": before}
            if gradient_clip_val:
                self._row["grad_norm_clipped"] = float(gradients.norm(parameters))

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """One update; then what mechanisms do after one, and the row of the log."""
        super().optimizer_step(*args, **kwargs)
        done = self.trainer.global_step + 1
        for module in self.modules():
            if hasattr(module, "after_step"):
                module.after_step(done)
        if self.logs_this_step():
            means = self.accumulated.means(self.trainer)
            self.log("train/loss", means["train/loss"], prog_bar=True, logger=False)
            row = {**means, **self._row}.items()
            self.write({name: value for name, value in row if math.isfinite(value)}, step=done)
        self.accumulated = gradients.AccumulatedLoss()

    def logs_this_step(self) -> bool:
        """Whether the step that is being made has a row in the logs."""
        every = self.trainer.log_every_n_steps
        # An epoch shorter than the interval must show in the log, too.
        return bool(every) and ((self.trainer.global_step + 1) % every == 0 or self.trainer.is_last_batch)

    def write(self, values: dict[str, float], step: int | None = None) -> None:
        """One row for every logger, at the number of optimiser steps done: the one axis of all rows."""
        at = self.trainer.global_step if step is None else step
        row = {"epoch": self.current_epoch, **values} if self.trainer.state.fn == "fit" else values
        for logger in self.trainer.loggers:
            logger.log_metrics(row, step=at)

    # Evaluation.

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Count one batch in."""
        self._evaluate(batch, "val")

    def test_step(self, batch: Any, batch_idx: int) -> None:
        """Count one batch in."""
        self._evaluate(batch, "test")

    def on_validation_epoch_end(self) -> None:
        """`val/loss`, every metric as `val/<name>`, and `val/primary`."""
        self._finish("val")

    def on_test_epoch_end(self) -> None:
        """`test/loss`, every metric as `test/<name>`, and `test/primary`."""
        self._finish("test")

    def _evaluate(self, batch: Any, stage: Literal["val", "test"]) -> None:
        step = self.step(batch, stage)
        self.evaluation[f"{stage}_loss"].update(step.loss_sum, torch.as_tensor(step.count))
        self.update_metrics(self.evaluation[stage], step, batch)  # type: ignore[arg-type]

    def _finish(self, stage: Literal["val", "test"]) -> None:
        metrics, loss = self.evaluation[stage], self.evaluation[f"{stage}_loss"]
        values = {name: float(value) for name, value in metrics.compute().items()}  # type: ignore[operator]
        values["loss"] = float(loss.compute())  # type: ignore[operator]
        values["primary"] = self.primary(values)
        metrics.reset()  # type: ignore[operator]
        loss.reset()  # type: ignore[operator]
        if self.trainer.sanity_checking:
            return
        named = {f"{stage}/{name}": value for name, value in values.items()}
        # The values are those of all processes already; this only tells Lightning so.
        self.log_dict(named, logger=False, sync_dist=True)
        self.write(named)

    # Checkpoints.

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add what the model was made from, as plain values, and take objects out."""
        saved.add_origin(checkpoint, self, self.trainer.datamodule)  # type: ignore[attr-defined]

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Compare the file with this model before any weight is copied."""
        facts = saved.origin(checkpoint)["facts"]
        if self.facts is not None:
            self.check_facts(facts, self.facts)
        if "raw_state_dict" in checkpoint and self.trainer.state.fn == "fit":
            # Training goes on with the weights that are trained, whether or not it still averages them.
            checkpoint["average_state_dict"] = checkpoint["state_dict"]
            checkpoint["state_dict"] = checkpoint["raw_state_dict"]
        if self.trainer.state.fn == "fit":
            fit_to_processes(checkpoint, self.trainer)
        saved.check_shapes(self.state_dict(), checkpoint["state_dict"])

    @classmethod
    def from_checkpoint(cls, path: str | Path) -> Self:
        """The trained model, ready to predict, from the file alone: no config, no data, on the CPU.

        Where weights were averaged in training (`ema`), the averaged ones are taken.

        Args:
            path: a `.ckpt` file of a run.

        Raises:
            ValueError: not a checkpoint of such an experiment, or one that holds objects.
            FileNotFoundError: no such file.
        """
        return saved.rebuild_model(cls, saved.read(path), str(path)).eval()
