"""What `fit` and `test` tell of themselves: their descriptions, and the form of their help."""

from __future__ import annotations

import argparse
import re
from typing import Any

from jsonargparse import DefaultHelpFormatter
from lightning.pytorch.cli import LightningArgumentParser

FIT = """Trains, tests the best checkpoint, prints the figures and what comes next.

  --config=vit                       a preset, or a file; a second one is laid over the first
  --model.attention=Local            another mechanism; --model.attention.help=Local is its manual
  --model.attention.window=9         its options
  --model.optim.lr=3e-4              --config=vit --model.help lists the options of the model,
  --data.batch_size=32               --config=vit --data.help those of the data
  --trainer.max_epochs=3
  --ckpt_path=last                   goes on with the newest run
  --resume=auto                      goes on with the newest unfinished run of the preset, or begins one
"""
TEST = """Tests a checkpoint: --ckpt_path=PATH, on its own data or on that given by --data.path."""


class Formatter(DefaultHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Help that leaves the description as it is written, and calls None by the name that it has among options."""

    def _get_help_string(self, action: argparse.Action) -> str:
        return re.sub(r"\bNone\b", "null", super()._get_help_string(action))


class Parser(LightningArgumentParser):
    """The parser of a command, and of the help of a single class, which jsonargparse makes without a name."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"prog": "python -m experiments", "formatter_class": Formatter, **options})
