"""Training and judging forecasters: a branch of attention on what ridge leaves, and validation decides what stays."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torchmetrics import Metric, MetricCollection

from attnzoo import DiversityKind, Mechanism, Softmax
from attnzoo.positions import PositionName
from experiments.forecasting import exporting
from experiments.forecasting.data import SeriesData
from experiments.forecasting.drawing import attention_figure, forecast_figure
from experiments.forecasting.network import Base, Branch, ForecastNetwork, InstanceNorm
from experiments.forecasting.patches import Tokens
from experiments.forecasting.scores import MODEL, Loss, Scores, errors, pinball
from experiments.forecasting.share import BranchShare
from experiments.forecasting.windows import Scaler
from experiments.training.exporting import Part
from experiments.training.module import Experiment, Stage, Step
from experiments.training.optim import Optim
from experiments.training.samples import Samples, spread_evenly

log = logging.getLogger("experiments")

MAX_RESIDUALS = 4096
"""Training windows, evenly spread, whose residuals the quantiles start from."""


class Forecaster(Experiment):
    """Forecasts series: a closed-form base, and a branch of attention on what it leaves.

    Before training, ridge is fitted in closed form on the training windows. The branch starts at zero. At each
    validation the share of the branch (0 to 1) with the least squared error on the validation part is found, and
    kept where it gains more than one standard error (``share.py``); 0 leaves the base as it is.

    Args:
        attention: mechanism of every block: a class name, with its options behind a dot
            (--model.attention=Local --model.attention.window=9).
        attention_at: other mechanisms for single blocks, by number from 0.
        position: of the tokens: none; added: sinusoidal, learned; inside the attention: rope, rope_halves, alibi, t5,
            offset, shaw.
        tokens: patch (patches of each target by itself), mixed (patches of all columns together) or channel (each
            column is one token).
        patch_size: rows of a patch.
        stride: rows from patch to patch; null for patch_size.
        dim: width of the model.
        depth: how many blocks.
        num_heads: heads of each block; must divide dim.
        head_diversity: weight of the term that keeps heads different, such as 0.03; 0 for none. It rises over the first
            tenth of the run and is off in its last fifth.
        head_diversity_kind: how alike is measured: projected, cka, overlap, li_subspace, li_position or li_output.
        hidden_dim: width of the feed-forward; null for 2 dim.
        dropout: in the branches of the blocks and before the head.
        instance_norm: how each window is normalised: mean_std, mean, last or none.
        base: what the branch is added to: ridge, seasonal, last, or none for the branch alone.
        branch: transformer, or dlinear.
        loss: of the forecast, on scaled values: mse, mae or huber.
        quantiles: levels of quantiles to be forecast too, by pinball loss; [] for none.
        optim: optimiser and schedule.
    """

    task = "forecasting"
    unit: ClassVar[str] = "windows"

    def __init__(
        self,
        attention: Callable[[int, int], Mechanism] = Softmax,
        attention_at: dict[str, Callable[[int, int], Mechanism]] | None = None,
        position: PositionName = "learned",
        tokens: Tokens = "patch",
        patch_size: int = 16,
        stride: int | None = None,
        dim: int = 64,
        depth: int = 2,
        num_heads: int = 4,
        head_diversity: float = 0.0,
        head_diversity_kind: DiversityKind = "projected",
        hidden_dim: int | None = None,
        dropout: float = 0.0,
        instance_norm: InstanceNorm = "mean_std",
        base: Base = "ridge",
        branch: Branch = "transformer",
        loss: Loss = "mse",
        quantiles: list[float] = [0.1, 0.5, 0.9],  # noqa: B006 - read only
        optim: Optim = Optim(),  # noqa: B008 - frozen
    ) -> None:
        super().__init__(optim)
        if any(not 0 < level < 1 for level in quantiles) or sorted(set(quantiles)) != list(quantiles):
            raise ValueError(f"--model.quantiles is {quantiles}; rising levels between 0 and 1 were expected.")
        self.quantiles, self.loss, self.tokens = list(quantiles), loss, tokens
        self._chosen: float | None = None

    def build_network(self, facts: dict[str, Any]) -> ForecastNetwork:
        """The network for series with these facts."""
        named = inspect.signature(ForecastNetwork).parameters
        options = {name: value for name, value in self.hparams.items() if name in named}
        if facts["inputs"] and self.tokens == "patch":
            log.warning(
                "The columns %s are no targets, and tokens of each target by itself do not see them; "
                "--model.tokens=mixed or channel does.", ", ".join(facts["inputs"]),
            )  # fmt: skip
        return ForecastNetwork(
            lookback=facts["lookback"],
            horizon=facts["horizon"],
            columns=len(facts["targets"]) + len(facts["inputs"]),
            targets=len(facts["targets"]),
            features=2 * len(facts["calendar"]),
            season=facts["season"],
            **options,
        )

    def build_metrics(self, facts: dict[str, Any]) -> dict[str, Metric]:
        """Errors of the forecast and of the baselines, side by side."""
        return {"scores": Scores(facts["horizon"], ["ridge", "seasonal", "last"], self.quantiles)}

    def configure_model(self) -> None:
        """Build the network; validation measures what its choice needs, and no more."""
        if self.network is None:
            super().configure_model()
            self.evaluation["val"] = MetricCollection({"share": BranchShare(self._network.horizon)})

    def setup(self, stage: str) -> None:
        """Take the facts over, hand the scaler of the model to the data, and fit the baselines of a new model."""
        data: SeriesData = self.trainer.datamodule  # type: ignore[attr-defined]
        if self.facts is not None and data.calendar is None:
            data.calendar = self.facts["calendar"]  # what other rows would have by themselves does not matter
        super().setup(stage)
        assert self.facts is not None
        data.adopt(self.facts)
        if stage == "fit" and self.trainer.ckpt_path is None:
            self.configure_model()
            self.fit_baselines(data)

    def fit_baselines(self, data: SeriesData) -> None:
        """Fit the ridge in closed form, and start the quantiles at those of what the base leaves in training."""
        network = self._network
        ridge = network.baselines.ridge.fit(data)
        log.info("Ridge: validation MSE %.4f at lambda %g n.", ridge.val_mse, ridge.penalty)
        if network.spread is None:
            return
        windows = data.windows("train")
        batch = data.store.batch(windows[:: max(1, len(windows) // MAX_RESIDUALS)].tolist())
        with torch.no_grad():
            past = batch["past"][:, : network.targets]
            residual = (batch["future"] - network.base_of(past)) / network.width_of(past)
            for step in range(network.horizon):
                there = residual[:, :, step][batch["known"][:, :, step]]
                network.spread[step] = torch.from_numpy(np.quantile(there.numpy(), self.quantiles)).to(network.spread)

    @property
    def _network(self) -> ForecastNetwork:
        assert isinstance(self.network, ForecastNetwork)
        return self.network

    def step(self, batch: dict[str, Tensor], stage: Stage) -> Step:
        """Loss of the forecast, and of its quantiles; each window counts once, by the mean over its known targets."""
        network = self._network
        forecast, quantiles, base, branch, aux = network(batch["past"], batch["calendar"])
        value, known = batch["future"], batch["known"]
        loss = errors(forecast, value, self.loss)
        if quantiles is not None:
            loss = loss + pinball(quantiles, value, self.quantiles).mean(-1)
        loss = torch.where(known, loss, 0.0).sum((1, 2)) / known.sum((1, 2)).clamp(min=1)
        outputs: tuple[Any, ...] = (base, branch, batch)
        if stage == "test":
            forecasts = {MODEL: forecast, **network.baselines(batch["past"][:, : network.targets])}
            outputs = (forecasts, quantiles, batch)
        count = torch.tensor(len(value), device=value.device)
        return Step(loss.sum(), count, aux, outputs)

    def on_validation_epoch_end(self) -> None:
        """Keep the share of the branch that is best on the validation part; report its error."""
        if self._network.base != "none":
            measured = self.evaluation["val"].compute()  # type: ignore[operator]
            self._chosen = float(measured["share"])
            self._network.share.fill_(self._chosen)
        super().on_validation_epoch_end()

    def on_test_epoch_end(self) -> None:
        """Scores, and the share of the branch that they were made with."""
        super().on_test_epoch_end()
        self.log("test/share", float(self._network.share), logger=False, sync_dist=True)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add what the model was made from, and the share of the last validation.

        Where weights are averaged, the buffer has by then been put back to that of the weights in training.
        """
        super().on_save_checkpoint(checkpoint)
        for name in ("state_dict", "raw_state_dict"):
            if name in checkpoint and self._chosen is not None:
                checkpoint[name]["network.share"] = torch.tensor(self._chosen)

    def primary(self, values: dict[str, float]) -> float:
        """Minus the MSE of scaled values."""
        return -values["mse" if self.hparams["base"] != "none" or "mse_whole" not in values else "mse_whole"]

    def next_commands(self, checkpoint: str) -> list[str]:
        """Using the model that was trained."""
        return [f"make forecast CSV=FILE CKPT={checkpoint}"]

    def export_parts(self) -> list[Part]:
        """One network on scaled values."""
        assert self.facts is not None
        return exporting.parts(self._network, self.facts)

    def export_texts(self) -> dict[str, str]:
        """How values are scaled."""
        assert self.facts is not None
        return exporting.texts(self.facts, self.quantiles)

    def attention_pictures(self, batch: dict[str, Tensor]) -> dict[str, Any]:
        """The forecast of the first window of a batch, and what its tokens attended to."""
        assert self.facts is not None
        network = self._network
        first = {name: value[:1] for name, value in batch.items()}
        forecast, quantiles, *_ = network(first["past"], first["calendar"])
        figures = {"forecast": forecast_figure(first, forecast, quantiles, self.facts["targets"])}
        attention = attention_figure(network, first)
        return figures if attention is None else {**figures, "attention": attention}

    def sample_table(self, data: Any, count: int) -> Samples:
        """Forecasts of some windows, drawn, with their scaled errors."""
        assert self.facts is not None
        windows = data.windows("val")
        rows: list[list[Any]] = []
        for number in spread_evenly(len(windows), count):
            batch = self.receive(data.store.batch([int(windows[number])]), data)
            forecast, quantiles, *_ = self._network(batch["past"], batch["calendar"])
            error, known = forecast - batch["future"], batch["known"]
            means = [float(part[known].mean()) for part in (error.square(), error.abs())]
            title = f"window {number} of the validation part"
            picture = forecast_figure(batch, forecast, quantiles, self.facts["targets"], title)
            rows.append([number, *means, picture])
        return Samples(["sample", "mse", "mae", "forecast"], rows)

    def predict(self, past: Tensor, calendar: Tensor | None = None, series: int = 0) -> tuple[Tensor, Tensor | None]:
        """Forecast in the data's own units.

        Args:
            past: the last rows of all columns, targets first, in the order of ``facts["targets"] + facts["inputs"]``:
                [B, lookback, C], oldest first; finite.
            calendar: features of the stamps to come [B, horizon, F], see ``clock.calendar_features``; needed where
                the model was trained with them.
            series: number of the series in ``facts["series"]`` where each has a scale of its own.

        Returns:
            [B, horizon, K], and quantiles [B, horizon, K, Q] or None.

        Raises:
            ValueError: for another shape, or values that are not finite.
        """
        facts = self.facts
        assert facts is not None
        columns, features = len(facts["targets"]) + len(facts["inputs"]), 2 * len(facts["calendar"])
        if past.dim() != 3 or past.shape[1:] != (facts["lookback"], columns):
            raise ValueError(
                f"predict takes [B, {facts['lookback']}, {columns}] (windows, rows, columns {facts['targets']} and "
                f"{facts['inputs']}), got {list(past.shape)}"
            )
        if not bool(past.isfinite().all()):
            raise ValueError("predict takes finite values; fill missing ones first, as with --missing=fill")
        calendar = past.new_zeros(len(past), facts["horizon"], 0) if calendar is None else calendar
        if calendar.shape != (len(past), facts["horizon"], features):
            raise ValueError(
                f"predict takes calendar features [B, {facts['horizon']}, {features}] of {facts['calendar']}, "
                f"got {list(calendar.shape)}"
            )
        scaler = Scaler(*(np.array(facts[name]).reshape(-1, columns) for name in ("mean", "std")))
        scaled = torch.from_numpy(scaler.apply(past.double().cpu().numpy(), series)).float().transpose(1, 2)
        network, training = self._network, self._network.training
        network.eval()
        try:
            with torch.no_grad():
                forecast, quantiles, *_ = network(scaled.to(self.device), calendar.float().to(self.device))
        finally:
            network.train(training)
        point = _undo(scaler, forecast.transpose(1, 2), series)
        if quantiles is None:
            return point, None
        return point, torch.stack([_undo(scaler, part.transpose(1, 2), series) for part in quantiles.unbind(-1)], -1)


def _undo(scaler: Scaler, values: Tensor, series: int) -> Tensor:
    return torch.from_numpy(scaler.undo(values.double().cpu().numpy(), series))
