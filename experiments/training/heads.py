"""The command `heads`: how the heads of a checkpoint are doing."""

from __future__ import annotations

import logging
from pathlib import Path

import lightning.pytorch as pl

from experiments.training import console, head_figures, saved, specs
from experiments.training.exporting import beside
from experiments.training.finding import newest_finished
from experiments.training.module import Experiment
from experiments.training.options import call
from experiments.training.probing import SAMPLES, ProbeSet
from experiments.training.tables import show_table
from experiments.training.writing import PICTURES, check_writable, write_figure


def heads(argv: list[str]) -> int:
    """Prints and draws the figures of every head. Arguments: see ``_heads``."""
    return call(_heads, argv, "python -m experiments heads")


def _heads(ckpt: str | None = None, data: str | None = None, samples: int = SAMPLES, out: str | None = None) -> int:
    """Print and draw how the heads of a model are doing, on validation samples.

    A head is degenerate if the loss rises by at most a thousandth without it and a cause is seen: dead, uniform, sink
    or duplicate, of two that are alike only one. What each figure means is told in attnzoo/heads/health.py.

    Args:
        ckpt: checkpoint; the best one of the newest finished run if null.
        data: file or folder of the data, where they are no longer where the model was trained; see --data.path.
        samples: how many validation samples, at least.
        out: file of the picture (.png, .pdf, .svg, .jpg); `heads.png` in the run's figures/ if null.
    """
    if out is not None and Path(out).suffix.lower() not in PICTURES:
        raise ValueError(f"--out={out}: the picture is written as one of {', '.join(PICTURES)}")
    if samples < 1:
        raise ValueError(f"--samples is {samples}; it must be at least 1.")
    console.quieten()
    path = Path(ckpt) if ckpt else newest_finished(())
    target = Path(out) if out else beside(path, "figures") / "heads.png"
    check_writable(target, "--out")
    probes = probe_set(path, data, samples)
    health = probes.health(ablate=True)
    console.say(f"{path}: loss {health.loss:.4f} on {_count(probes)} validation samples")
    show_table(head_figures.table(health))
    console.say(head_figures.LEGEND)
    for note in head_figures.notes(health):
        console.say(note)
    figure = head_figures.picture(health, f"heads of {type(probes.network).__name__}, {_count(probes)} samples")
    write_figure(target, figure, "--out", dpi=150)
    console.say(str(target))
    return 0


def probe_set(path: Path, data: str | None = None, samples: int = SAMPLES) -> ProbeSet:
    """The model of a checkpoint and the validation samples of its run.

    Args:
        path: a checkpoint.
        data: where the data are, if no longer where they were.
        samples: how many.

    Raises:
        ValueError: where the data are gone, with what to give.
    """
    content = saved.read(path)
    model = saved.rebuild_model(Experiment, content, str(path))
    entry = saved.origin(content)["data"]
    if entry is None:
        raise ValueError(
            f"{path} does not say what data it was trained on, so there are no samples to measure heads by."
        )
    where = entry["init_args"].get("path") or "null"
    if data is not None and "path" not in entry["init_args"]:
        raise ValueError(f"--data={data}: {model.task} makes its data itself, there is no path; leave --data out.")
    if data is not None:
        entry = {**entry, "init_args": {**entry["init_args"], "path": data}}
    module = specs.rebuild(pl.LightningDataModule, entry)
    log = logging.getLogger("lightning.pytorch")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        # Sets data and model up for each other; of the validation itself nothing is wanted.
        trainer = pl.Trainer(
            accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, limit_val_batches=0, num_sanity_val_steps=0,
        )  # fmt: skip
        trainer.validate(model, datamodule=module, verbose=False)
    except (ValueError, OSError) as error:
        said = str(error) if data is None else str(error).replace("--data.path", "--data")
        raise ValueError(
            f"{said}\n{path} was trained on --data.path={where}; where these data have moved, give --data=PATH."
        ) from error
    finally:
        log.setLevel(level)
    return ProbeSet(model.eval(), module, samples)


def _count(probes: ProbeSet) -> int:
    return sum(len(next(iter(batch.values()))) for batch in probes.batches)
