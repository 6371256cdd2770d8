"""The commands `fit` and `test`."""

from __future__ import annotations

import logging
import math
import shlex
import shutil
import signal
import sys
import time
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from lightning.pytorch.utilities.exceptions import MisconfigurationException, SIGTERMException

from experiments.training import console, costs, pictures, runs, samples, saved
from experiments.training.cli import ExperimentCLI
from experiments.training.module import Experiment
from experiments.training.processes import end_with_the_first, started_by_another
from experiments.training.sharding import Sharded, load_whole
from experiments.training.signals import Signals, Stopped, requeue
from experiments.training.starting import explained
from experiments.training.usage import python
from experiments.training.wandb_rows import WandbRows

log = logging.getLogger("experiments")


def fit(argv: list[str]) -> int:
    """Train, test the best checkpoint, print the figures and what comes next.

    Args:
        argv: options, such as `--config=vit --model.attention=Local`.

    Returns:
        Exit status; 128 + n after signal n.
    """
    console.quieten()
    console.speak()
    if started_by_another():
        end_with_the_first()
    cli = ExperimentCLI(argv, resume=True)
    started = time.monotonic()
    wandb = next((logger for logger in cli.trainer.loggers if isinstance(logger, WandbRows)), None)
    status, ended = "failed", 0
    signals = Signals()
    signals.listen(training=False)
    try:
        _train(cli)
        if cli.trainer.global_step == 0:
            raise ValueError(
                "No step was trained: --trainer.max_epochs, max_steps, max_time or limit_train_batches leaves nothing."
            )
        if cli.checkpoint is not None and cli.trainer.global_step == cli.content["global_step"]:
            console.say(
                f"Nothing was left to train in {cli.checkpoint.parent.parent} after step "
                f"{cli.trainer.global_step}; raise --trainer.max_epochs (or max_steps) to train longer."
            )
        tested = _test_best(cli)
        status = "finished"
    except Stopped as stop:
        status, ended = "stopped", stop.number
        what = f"go on with: {python()} -m experiments fit --ckpt_path={cli.keeper.last_path}"
        if stop.step is None:
            what = "the checkpoints that were written stand"
            if isinstance(cli.trainer.strategy.launcher, _SubprocessScriptLauncher):
                # They may be far from where they would wait for this one.
                cli.trainer.strategy.launcher.kill(stop.number)
        if cli.trainer.is_global_zero:
            print(f"{stop}; {what}", file=sys.stderr)
    except SystemExit as stop:  # how Lightning ends at a signal, before training has begun to listen
        status, ended = "stopped", signal.SIGTERM if isinstance(stop, SIGTERMException) else signal.SIGINT
        print(f"stopped by {ended.name}; the checkpoints that were written stand", file=sys.stderr)
    except (RuntimeError, MemoryError) as error:
        said = explained(error, cli.trainer, cli.datamodule, cli.keeper.last_path)
        if said is None:
            raise
        raise ValueError(said) from error
    finally:
        seconds = time.monotonic() - started
        refused = status == "failed" and cli.checkpoint is None and cli.trainer.global_step == 0
        if refused and cli.folder is not None and cli.trainer.is_global_zero:
            # Nothing was trained, so there is nothing to keep, and no number to use up.
            shutil.rmtree(cli.folder.path)
        elif status != "finished":
            _record(cli, status, seconds, {})
        if wandb is not None and status != "finished":
            wandb.finish(exit_code=1)
        if cli.held is not None and status != "finished":
            cli.held.let_go()
        signals.release()
    if ended:
        if cli.trainer.is_global_zero:
            requeue(ended)
        # Lightning kills all processes at once where one that it has started ends with another status.
        return 0 if started_by_another() else 128 + ended
    results = _record(cli, status, seconds, tested)
    if not cli.trainer.is_global_zero:
        return 0
    assert cli.folder is not None
    # Said first: the run is finished, and stays so whatever happens to its costs and pictures.
    console.say(console.results({**tested, "seconds": results["seconds"]}, _next_commands(cli, wandb)))
    try:
        model = _alone(cli)
        cli.folder.write_results(results | costs.measure(model, cli.datamodule, cli.mechanism))
        files = pictures.save_pictures(model, cli.datamodule, cli.folder.figures)
        table = samples.save_samples(model, cli.datamodule, cli.options.samples, cli.folder.path)
        if wandb is not None:
            wandb.log_figures(files, cli.trainer.global_step)
            if table is not None:
                wandb.log_samples(table, cli.trainer.global_step)
            if cli.keeper.best_path is not None:
                wandb.keep_checkpoint(cli.keeper.best_path, cli.keeper.best_score)
            wandb.summarise({"best/score": cli.keeper.best_score, "best/step": cli.keeper.best_step, **tested})
    finally:
        if wandb is not None:
            wandb.finish(exit_code=0)
        # Not before: `sync` sends no log to which something may come.
        if cli.held is not None:
            cli.held.let_go()
    return 0


def test(argv: list[str]) -> int:
    """Test a checkpoint, on its own data or on that given by --data.path.

    Args:
        argv: `--ckpt_path=PATH` and options.

    Returns:
        Exit status.
    """
    console.quieten()
    console.speak()
    cli = ExperimentCLI(argv, resume=False)
    if cli.checkpoint is None:
        raise ValueError("test needs --ckpt_path=PATH, such as runs/<preset>/<run>/checkpoints/best.ckpt.")
    model = saved.rebuild_model(Experiment, cli.content, str(cli.checkpoint))
    values = _test(cli.trainer, model, cli.datamodule)
    console.say(console.results(values, []))
    return 0


def _train(cli: ExperimentCLI) -> None:
    try:
        cli.trainer.fit(cli.model, datamodule=cli.datamodule, ckpt_path=cli.checkpoint)
    except MisconfigurationException as error:
        raise ValueError(str(error)) from error
    except Exception as error:
        # A signal to all of a terminal also ends the compiler of --compile, of which torch then complains.
        if cli.keeper.signals.own:
            raise Stopped(cli.keeper.signals.own) from error
        raise


def _test_best(cli: ExperimentCLI) -> dict[str, float]:
    """Load the best weights, or the last ones where no validation took place, and test them."""
    best = cli.keeper.best_path or cli.keeper.last_path
    if cli.keeper.best_path is None:
        log.warning("No validation took place, so no best weights were kept: the last ones are tested.")
    if best is not None and best.is_file():
        load_whole(cli.model, saved.read(best)["state_dict"])
    return _test(cli.trainer, cli.model, cli.datamodule)


def _alone(cli: ExperimentCLI) -> Experiment:
    """The tested model; where its weights are spread over processes, another one that this process can use alone."""
    best = cli.keeper.best_path or cli.keeper.last_path
    if best is None or not isinstance(cli.trainer.strategy, Sharded):
        return cli.model
    return saved.rebuild_model(Experiment, saved.read(best)).eval()


def _test(trainer: pl.Trainer, model: Experiment, data: pl.LightningDataModule) -> dict[str, float]:
    trainer.test(model, datamodule=data, verbose=False)
    for logger in trainer.loggers:
        logger.save()
    model.eval()
    return {name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("test/")}


def _record(cli: ExperimentCLI, status: str, seconds: float, tested: dict[str, float]) -> dict[str, Any]:
    assert cli.folder is not None
    before = cli.folder.read_results()
    network = cli.model.network
    began = 0 if cli.checkpoint is None else int(cli.content["global_step"])
    # A run that is only tested again costs nothing more.
    seconds = seconds if cli.trainer.global_step > began or not before else 0.0
    speed = f"{cli.model.unit}_per_second"
    results = {
        "preset": cli.options.preset,
        "task": cli.model.task,
        "mechanism": cli.mechanism,
        "seed": cli.config["seed_everything"],
        "status": status,
        # A run that was taken up again has cost the sum of its parts.
        "seconds": round(seconds + before.get("seconds", 0.0), 2),
        "steps": cli.trainer.global_step,
        # `current_epoch` is one behind after a checkpoint of the end of an epoch is loaded.
        "epochs": cli.trainer.fit_loop.epoch_progress.current.processed,
        "parameters": None if network is None else console.parameter_count(network),
        "peak_memory_mib": max(runs.peak_memory_mib(), before.get("peak_memory_mib", 0.0)),
        speed: before.get(speed) if cli.throughput.per_second is None else cli.throughput.per_second,
        "step_ms": before.get("step_ms") if cli.throughput.step_ms is None else cli.throughput.step_ms,
        "best_step": cli.keeper.best_step,
        "best_val_primary": cli.keeper.best_score,
        "versions": saved.versions(),
        "commit": runs.commit(),
        "remarks": cli.model.remarks,
        # JSON knows no NaN.
        "metrics": {name: value if math.isfinite(value) else None for name, value in tested.items()},
    }
    if cli.trainer.is_global_zero:
        cli.folder.write_results(results)
    return results


def _next_commands(cli: ExperimentCLI, wandb: WandbRows | None) -> list[str]:
    best = cli.keeper.best_path or cli.keeper.last_path
    path = shlex.quote(str(best))
    commands = [f"{python()} -m experiments test --ckpt_path={path}", *cli.model.next_commands(path)]
    if wandb is not None and wandb.offline_folder is not None:
        # A run that was taken up again has several, which make one run there.
        commands.append(f"{python()} -m wandb sync {shlex.quote(str(wandb.offline_folder.parent))}/offline-run-*")
    return commands
