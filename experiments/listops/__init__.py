"""ListOps: the value of a nested expression, one token a symbol, up to 512 of them."""

from experiments.listops.data import ListOpsData
from experiments.listops.module import ListOpsClassifier

__all__ = ["ListOpsClassifier", "ListOpsData"]
