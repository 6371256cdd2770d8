"""What a run prints: what it is going to do, how it goes, what came out and what to do next."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence
from typing import Any, cast

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.utilities import rank_zero_only
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from torch import nn

from attnzoo import Mechanism, record
from experiments.training.module import Experiment
from experiments.training.precision import warn_of_emulation

console = Console(highlight=False)


def say(text: str) -> None:
    """Print a text as it is; long lines stay whole, so that a command can be copied."""
    console.print(text, markup=False, soft_wrap=True)


class _ToConsole(logging.Handler):
    """Prints what the experiments have to say, above the progress bar."""

    def __init__(self, to: Console) -> None:
        super().__init__()
        self.to = to

    def emit(self, record: logging.LogRecord) -> None:
        self.to.print(self.format(record), markup=False, soft_wrap=True)


def speak(to: Console = console) -> None:
    """Let messages of the logger `experiments` be seen: those of the first process, for all come to the same.

    Args:
        to: another console than standard output, where that is for results.
    """
    log = logging.getLogger("experiments")
    log.setLevel(logging.INFO if rank_zero_only.rank == 0 else logging.ERROR)
    log.handlers = [*(handler for handler in log.handlers if not isinstance(handler, _ToConsole)), _ToConsole(to)]


def quieten() -> None:
    """Silence messages of Lightning whose content is printed here, or that tell of no fault."""
    # "GPU available", "Tip: ...", "Restoring states", "Trainer.fit stopped": facts that the header and the
    # table show.
    for name in ("lightning.pytorch.utilities.rank_zero", "lightning.fabric.utilities.seed"):
        logging.getLogger(name).setLevel(logging.WARNING)
    for message in (
        # Workers cost more than they give where the data is in memory; each preset chooses.
        r"The '\w+' does not have many workers",
        r"Consider setting `persistent_workers=True`",
        # Rows are written by `Experiment.write`, at the interval and at the end of each epoch.
        r"The number of training batches \(\d+\) is smaller than the logging interval",
        r"`isinstance\(treespec, LeafSpec\)` is deprecated",
    ):
        warnings.filterwarnings("ignore", message=message)


def sites(model: Experiment, data: pl.LightningDataModule) -> list[str]:
    """Each kind of attention in the network: how many, where, which mechanism, and the code that will run.

    Found out by sending one validation batch through, for the back end depends on shapes and masks.
    """
    assert model.network is not None
    if not any(isinstance(module, Mechanism) for module in model.network.modules()):
        return []
    batch = model.receive(next(iter(data.val_dataloader())), data)
    model.eval()
    try:
        # In the precision that will be trained in, for the kernel depends on it.
        with (
            model.trainer.precision_plugin.forward_context(),
            torch.no_grad(),
            record(model.network) as calls,
        ):
            model.step(batch, "val")
    finally:
        model.train()
    found: dict[str, int] = {}
    for name, heard in calls.items():
        # Layers are numbered: `blocks.3.attention` is the site `attention`.
        site = next((word for word in reversed(name.split(".")) if not word.isdigit()), name)
        if heard:
            call = heard[0]
            mechanism = call.mechanism
            how = mechanism.explain(call.q, call.k, call.v, call.mask, call.bias)
        else:
            mechanism = cast(Mechanism, model.network.get_submodule(name).mechanism)
            how = "not called in a validation step"
        text = f"{site}: {type(mechanism).__name__}({mechanism.extra_repr()}), {how}"
        found[text] = found.get(text, 0) + 1
    return [f"{count} x {text}" for text, count in found.items()]


def parameter_count(network: nn.Module) -> int:
    """Trained numbers."""
    return sum(parameter.numel() for parameter in network.parameters() if parameter.requires_grad)


class Report(ProgressBar):
    """The head of a run, and a bar with loss and metric; one plain line an epoch where output is no terminal.

    Args:
        preset: name of the preset.
        folder: the run folder, to be shown.
    """

    def __init__(self, preset: str, folder: str) -> None:
        super().__init__()
        self.preset, self.folder = preset, folder
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._enabled = True

    def disable(self) -> None:
        """Lightning calls this on all processes but the first."""
        self._enabled = False

    def enable(self) -> None:
        """The opposite."""
        self._enabled = True

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print above the bar."""
        if self._enabled:
            say(" ".join(map(str, args)))

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Say what is about to run."""
        assert isinstance(pl_module, Experiment)
        warn_of_emulation(trainer)
        self.print(head(self.preset, trainer, pl_module, self.folder))
        if self._enabled and console.is_terminal:
            columns = (
                TextColumn("{task.description}"), BarColumn(bar_width=10), TextColumn("{task.fields[figures]}"),
            )  # fmt: skip
            self._bar = Progress(*columns, console=console, transient=True)
            self._task = self._bar.add_task("training", figures="", total=None)
            self._bar.start()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Move the bar."""
        if self._bar is not None and self._task is not None:
            self._bar.update(
                self._task,
                description=_epoch(trainer),
                completed=batch_idx + 1,
                total=trainer.num_training_batches,
                figures=figures(trainer),
            )

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """One line, where there is no bar."""
        measured = figures(trainer)
        # None where a run goes on at the end of an epoch, which Lightning ends once more.
        if self._bar is None and measured:
            self.print(f"{_epoch(trainer)}  step {trainer.global_step}  {measured}")

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Take the bar away."""
        self._stop()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Take the bar away."""
        self._stop()

    def _stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def head(preset: str, trainer: pl.Trainer, model: Experiment, folder: str) -> str:
    """What a run is going to do: data, model, sites, device."""
    assert model.network is not None
    data = type(trainer.datamodule).__name__  # type: ignore[attr-defined]
    threads = f", {torch.get_num_threads()} threads" if model.device.type == "cpu" else ""
    processes = f", {trainer.world_size} processes" if trainer.world_size > 1 else ""
    rows = [
        ("run", f"{preset}, in {folder}"),
        ("data", f"{data}: {trainer.num_training_batches} batches an epoch{_facts(model)}"),
        ("model", f"{type(model.network).__name__}, {parameter_count(model.network):,} parameters"),
        *(("attention", text) for text in sites(model, trainer.datamodule)),  # type: ignore[attr-defined]
        ("device", f"{model.device}{threads}{processes}, precision {trainer.precision}"),
    ]
    if trainer.global_step:
        epoch = trainer.fit_loop.epoch_progress.current.processed
        rows.append(("goes on", f"after step {trainer.global_step}, in epoch {epoch + 1}"))
    return _aligned(rows)


def results(values: dict[str, float], next_commands: Sequence[str]) -> str:
    """Test figures, and the commands that come next."""
    rows = [(name, f"{value:.4f}") for name, value in sorted(values.items())]
    return _aligned([*rows, *(("next", command) for command in next_commands)])


def _aligned(rows: Sequence[tuple[str, str]]) -> str:
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {text}" for name, text in rows)


def figures(trainer: pl.Trainer) -> str:
    """Loss and metric as they stand."""
    shown = ("train/loss", "val/loss", "val/primary")
    measured = trainer.callback_metrics
    return "  ".join(f"{name} {float(measured[name]):.4f}" for name in shown if name in measured)


def _epoch(trainer: pl.Trainer) -> str:
    total = trainer.max_epochs if trainer.max_epochs and trainer.max_epochs > 0 else "?"
    return f"epoch {trainer.current_epoch + 1}/{total}"


def _facts(model: Experiment) -> str:
    parts = []
    for key, value in (model.facts or {}).items():
        if isinstance(value, bool | int) or (isinstance(value, str) and len(value) <= 40):
            parts.append(f"{key} {value}")
        elif isinstance(value, list) and value and all(isinstance(item, int) for item in value):
            parts.append(f"{key} {'x'.join(map(str, value))}")
        elif isinstance(value, list) and all(isinstance(item, str) for item in value):
            parts.append(f"{len(value)} {key}")
    return ", " + ", ".join(parts) if parts else ""
