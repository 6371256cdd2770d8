"""The command line of `fit` and `test`: options from presets, the types of the classes, and what makes a run.

LightningCLI with these changes: abbreviations are off; errors are three lines; model and data are chosen by
the config and their options are checked against their signatures; checkpoint and EMA are options by name, so
that a config laid over another changes one key and keeps the rest; each run has a folder of its own; a
checkpoint whose options differ from those given is refused.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import yaml
from jsonargparse import ArgumentError
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.utilities import rank_zero_only
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from experiments.training import processes, saved, specs
from experiments.training.checkpoints import BestAndLast
from experiments.training.complaints import complain, refuse_bases
from experiments.training.console import Report, parameter_count
from experiments.training.ema import Ema, EmaWeights
from experiments.training.guarding import Guard, StepGuard
from experiments.training.head_monitor import HeadMonitor, Monitoring
from experiments.training.head_reinit import HeadReinit, Reinit
from experiments.training.loggers import CsvRows
from experiments.training.manual import FIT, TEST, Parser
from experiments.training.messages import innermost
from experiments.training.module import Experiment
from experiments.training.ramp import DiversityRamp
from experiments.training.resuming import config_of_run, refuse_differences, refuse_other_model, refuse_other_training
from experiments.training.runs import RunFolder, RunOptions, commit
from experiments.training.speeding import Blocks
from experiments.training.starting import settle
from experiments.training.throughput import Throughput
from experiments.training.usage import UsageError
from experiments.training.wandb_rows import WandbRows
from experiments.training.words import help_of_config, refuse_empty, resolve_checkpoint, resolve_configs, value_of

DECIDED = (
    "logger", "default_root_dir", "enable_model_summary", "enable_autolog_hparams", "enable_checkpointing",
    "use_distributed_sampler", "reload_dataloaders_every_n_epochs", "fast_dev_run", "overfit_batches",
    "barebones", "model_registry", "enable_progress_bar",
)  # fmt: skip
"""Options of the Trainer that are settled here, or that would bypass run folder, loggers or loader."""


PLACES = ("--ckpt_path", "--data.path", "--data.test_path", "--run.root", "--model.init_from")
"""Options that hold a file or a folder."""


class ExperimentCLI(LightningCLI):
    """Parses and makes model, data, trainer and run folder; the commands do the rest.

    Args:
        words: the command line after the command.
        resume: whether --ckpt_path means going on with a run (`fit`) or using its weights (`test`).
    """

    def __init__(self, words: list[str], *, resume: bool) -> None:
        words, preset = resolve_checkpoint(*resolve_configs(words))
        self.words = help_of_config(words)
        self.resume = resume
        self.default_preset = preset
        self.folder: RunFolder | None = None
        self.held: RunFolder | None = None
        self.checkpoint: Path | None = None
        self.ema: EmaWeights | None = None
        super().__init__(
            Experiment,
            pl.LightningDataModule,
            save_config_callback=None,
            parser_kwargs={
                "allow_abbrev": False,
                "exit_on_error": False,
                "prog": f"python -m experiments {'fit' if resume else 'test'}",
                "usage": "%(prog)s --config=PRESET [--option=value ...]",
                "description": FIT if resume else TEST,
            },
            parser_class=Parser,
            subclass_mode_model=True,
            subclass_mode_data=True,
            args=[],
            run=False,
            auto_configure_optimizers=False,
            load_from_checkpoint_support=False,
        )

    def add_default_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """The seed."""
        parser.add_argument(
            "--seed_everything", type=int, default=0, help="all that is drawn follows from it, 0 or more"
        )

    def add_core_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Options of trainer, model and data; what the run folder decides is no option."""
        parser.add_class_arguments(pl.Trainer, "trainer", instantiate=False, sub_configs=True, skip=set(DECIDED))
        parser.set_defaults({"trainer.log_every_n_steps": 1, "trainer.num_sanity_val_steps": 0})
        parser.add_lightning_class_args(Experiment, "model", subclass_mode=True, required=False)
        parser.add_lightning_class_args(pl.LightningDataModule, "data", subclass_mode=True, required=False)

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Options beside model, data and trainer."""
        parser.add_argument(
            "--ckpt_path", type=str | None, default=None,
            help="checkpoint to go on from (fit) or to test: a path, or `last` for that of the newest run",
        )  # fmt: skip
        parser.add_argument(
            "--resume", type=Literal["auto"] | None, default=None,
            help="go on with the newest run of the preset (and of --run.name) that has not finished; else begin one",
        )  # fmt: skip
        for name, does in (
            ("activation_checkpointing", "run blocks again in the backward pass rather than keep what is inside them"),
            ("compile", "compile blocks by torch.compile"),
        ):
            parser.add_argument(f"--{name}", type=bool, default=False, help=does)
        parser.add_argument("--guard", type=Guard, default=Guard(), help="steps that cannot be right")
        parser.add_class_arguments(RunOptions, "run")
        parser.add_lightning_class_args(BestAndLast, "checkpoint")
        parser.add_argument("--ema", type=Ema | None, default=None, help="averaging of weights, off by default")
        parser.add_argument("--head_monitor", type=Monitoring | None, default=None, help="watching the heads")
        parser.add_argument("--head_reinit", type=Reinit | None, default=None, help="beginning dead heads anew")

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Parse the words; with --ckpt_path and no --config, over the options of that run."""
        refuse_empty(self.words, PLACES)
        path = value_of(self.words, "--ckpt_path")
        given = value_of(self.words, "--config") or value_of(self.words, "-c")
        alone = path not in (None, "null") and given is None
        try:
            words, start = self.words, None
            file = config_of_run(Path(str(path))) if alone and self.resume else None
            if file is not None:
                words = [f"--config={file}", *words]
            elif alone:
                start = parser.parse_object(saved.options(saved.origin(saved.read(str(path)))))
            self.config = parser.parse_args(words, namespace=start)
        except ArgumentError as error:
            raise complain(str(error), parser, self.words) from error
        for key in ("model", "data"):
            if self.config.get(key) is None:
                raise UsageError(f"There is no {key}. Choose a preset by --config=NAME, or give --ckpt_path=PATH.")
        if self.config["resume"] is not None:
            raise UsageError("--resume=auto has no effect in a config file; give it on the command line.")
        if not 0 <= self.config["seed_everything"] < 2**32:
            raise UsageError(f"--seed_everything is {self.config['seed_everything']}; expected 0 to {2**32 - 1}.")
        run = self.config["run"]
        run["preset"] = run["preset"] or self.default_preset

    def instantiate_classes(self) -> None:
        """Make model and data, find the checkpoint and the folder, make the trainer."""
        try:
            self.config_init = self.parser.instantiate(self.config)
        except ValueError as error:
            # jsonargparse wraps what a class has said into a list of types that did not fit.
            raise ValueError(innermost(str(error))) from error
        self.model, self.datamodule = self.config_init["model"], self.config_init["data"]
        self.options: RunOptions = self.config_init["run"]
        refuse_bases(self.model)
        workers = getattr(self.datamodule, "num_workers", 0)
        if workers < 0:
            raise ValueError(f"--data.num_workers is {workers}; expected 0 (none beside the main process) or more.")
        if hasattr(self.datamodule, "order_seed"):
            self.datamodule.order_seed = self.config["seed_everything"]
        wanted = self.config["ckpt_path"]
        if wanted is not None:
            self.checkpoint = Path(wanted)
            self.content = saved.read(self.checkpoint)
            refuse_other_model(self.checkpoint, self.content, self.model, self.default_preset)
            if not self.options.override_ckpt:
                refuse_differences(self.checkpoint, self.content, self.model, self.datamodule, self.resume)
        self.trainer = self.instantiate_trainer()

    def instantiate_trainer(self, **kwargs: Any) -> pl.Trainer:
        """A trainer that writes to the run folder."""
        config = settle({**self.config_init["trainer"], **kwargs})
        given = config.pop("callbacks", None) or []
        callbacks = [*(given if isinstance(given, list) else [given])]
        loggers: list[Any] = []
        root = Path(self.options.root)
        if self.resume:
            self.folder, done = self._open_folder()
            root = self.folder.path
            self.keeper: BestAndLast = self.config_init["checkpoint"]
            self.keeper.folder = self.folder.checkpoints
            self.throughput = Throughput()
            report = Report(self.options.preset or "run", str(root))
            guard = StepGuard(self.config_init["guard"], self.keeper)
            callbacks += [guard, DiversityRamp(), self.throughput, report, self.keeper]
            if self.config_init["head_monitor"] is not None:
                callbacks.append(HeadMonitor(self.config_init["head_monitor"], self.folder.figures))
            if self.config_init["head_reinit"] is not None:  # before the average, which takes up what it leaves
                callbacks.append(HeadReinit(self.config_init["head_reinit"], int(self.config["seed_everything"] or 0)))
            if self.config_init["ema"] is not None:
                callbacks.append(EmaWeights(self.config_init["ema"]))
            recompute, compiled = self.config["activation_checkpointing"], self.config["compile"]
            if recompute or compiled:
                callbacks.append(Blocks(recompute=recompute, compiled=compiled))
            if rank_zero_only.rank == 0:
                loggers.append(CsvRows(self.folder.metrics, done))
                if self.options.wandb:
                    loggers.append(self._wandb())
        config |= {
            "callbacks": callbacks,
            "logger": loggers,
            "default_root_dir": str(root),
            "enable_model_summary": False,
            "enable_autolog_hparams": False,
            "use_distributed_sampler": False,
        }
        if not self.resume:
            config["enable_progress_bar"] = False
        try:
            return pl.Trainer(**config)
        except (TypeError, ValueError, MisconfigurationException) as error:
            of_devices = "devices" in str(error)
            if isinstance(error, TypeError) and not of_devices:
                raise
            if self.folder is not None and self.checkpoint is None and rank_zero_only.rank == 0:
                shutil.rmtree(self.folder.path)
            place = f"--trainer.devices={config['devices']}: " if of_devices else ""
            raise ValueError(f"{place}{error}") from error

    @property
    def mechanism(self) -> str:
        """Name of the mechanism chosen by --model.attention, `none` where a task has no such option."""
        spec = specs.describe(self.model)["init_args"].get("attention")
        return "none" if spec is None else str(spec["class_path"]).rpartition(".")[2]

    def _open_folder(self) -> tuple[RunFolder, int]:
        """The folder that the first process has found or made, and the steps that its logs go on behind."""
        done = 0

        def find() -> str:
            nonlocal done
            self.held, done = self._find_folder(0 if self.checkpoint is None else int(self.content["global_step"]))
            self.held.hold()
            return str(self.held.path)

        return RunFolder(Path(processes.decide("folder", find))), done

    def _find_folder(self, step: int) -> tuple[RunFolder, int]:
        if self.checkpoint is not None:
            folder = RunFolder.of_checkpoint(self.checkpoint)
            if folder is not None:
                self._keep_config(folder, step)
                return folder, step
        words = f"{self.mechanism.lower()}-seed{self.config['seed_everything']}"
        folder = RunFolder.create(self.options, self.options.name or words)
        folder.config.write_text(self.dump(), encoding="utf-8")
        return folder, 0

    def _keep_config(self, folder: RunFolder, step: int) -> None:
        """Where options have changed, let `config.yaml` tell those of now, and keep the others beside it."""
        now = self.dump()
        if not self.options.override_ckpt:
            refuse_other_training(folder.path, yaml.safe_load(now))
        if now != folder.config.read_text(encoding="utf-8"):
            folder.config.rename(folder.path / f"config-to-step-{step}.yaml")
            folder.config.write_text(now, encoding="utf-8")

    def dump(self) -> str:
        """All options as YAML, from which the run can be repeated."""
        config = self.config.clone()
        config["ckpt_path"] = None
        config.pop("config", None)
        return self.parser.dump(config, skip_unset=False)

    def _wandb(self) -> WandbRows:
        assert self.folder is not None
        preset, seed = self.options.preset or "run", self.config["seed_everything"]
        return WandbRows(
            self.folder.path,
            name=f"{preset}-{self.mechanism.lower()}-s{seed}-{self.folder.path.name[:4]}",
            group=f"{preset} {type(self.datamodule).__name__}",
            tags=[self.model.task, self.mechanism],
            config=lambda: twin(self.model, self.datamodule, preset, self.mechanism, seed),
        )


def twin(model: Experiment, data: pl.LightningDataModule, preset: str, mechanism: str, seed: int) -> dict[str, Any]:
    """Short flat options for comparing runs; names of at most three parts."""
    flat: dict[str, Any] = {
        "task": model.task, "preset": preset, "data": type(data).__name__, "attention": mechanism,
        "seed": seed, "git/commit": commit(),
    }  # fmt: skip
    if model.network is not None:
        flat["params/total"] = parameter_count(model.network)
    for name, value in specs.describe(model)["init_args"].items():
        if name in ("optim", "experts") and value is not None:
            flat |= {f"{name}/{key}": item for key, item in value.items()}
        elif name == "attention" and value is not None:
            flat |= {f"attention/{key}": item for key, item in value["init_args"].items()}
        else:
            flat[f"model/{name}"] = value
    return flat | {f"data/{name}": value for name, value in specs.describe(data)["init_args"].items()}
