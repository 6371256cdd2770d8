"""Forecasting of series: a patch Transformer over the zoo beside the baselines that it must beat."""

from experiments.forecasting.data import SeriesData
from experiments.forecasting.module import Forecaster

__all__ = ["Forecaster", "SeriesData"]
