"""The folder of a run: `<root>/<preset>/<number>-<words>/`, and what is found again in it."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import re
import resource
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.training.writing import write_whole

log = logging.getLogger("experiments")

_NUMBER = re.compile(r"(\d+)-")
_LOCK = ".lock"
_SUMS = ("seconds", "peak_memory_mib")
"""Figures of `results.json` that a run which is taken up again goes on with."""


@dataclass(frozen=True)
class RunOptions:
    """Where a run is kept, and what it takes from a checkpoint.

    Args:
        root: folder of all runs.
        preset: folder inside it; the name of the config file where not given.
        name: words after the number; the mechanism and the seed where not given.
        wandb: log to Weights & Biases as well: offline, unless you are logged in.
        samples: how many validation samples to show what the model says of; 0 for none.
        override_ckpt: with --ckpt_path, let the options given now win over those of the checkpoint.
    """

    root: str = "runs"
    preset: str | None = None
    name: str | None = None
    wandb: bool = True
    samples: int = 8
    override_ckpt: bool = False

    def __post_init__(self) -> None:
        if self.samples < 0:
            raise ValueError(f"--run.samples is {self.samples}; expected 0 (none) or more.")
        object.__setattr__(self, "root", str(Path(self.root).expanduser()))
        for option in ("preset", "name"):
            value = getattr(self, option)
            if value is not None and not re.fullmatch(r"[\w][\w.-]*", value):
                raise ValueError(f"--run.{option} is {value!r}; use letters, digits, '-', '_' and '.' alone.")


class RunFolder:
    """One folder on disk.

    Args:
        path: the folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._held: int | None = None

    @classmethod
    def create(cls, options: RunOptions, words: str) -> RunFolder:
        """A new folder with the next free number; never one that exists, also when two runs start at once."""
        parent = Path(options.root) / (options.preset or "run")
        try:
            parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=parent):
                pass
        except OSError as error:
            reason = os.strerror(error.errno) if error.errno else str(error)
            raise OSError(
                f"Nothing can be written to {parent}: {reason}. Choose another folder by --run.root."
            ) from error
        number = 1 + max((n for n in map(run_number, parent.iterdir()) if n is not None), default=0)
        while True:
            # The number alone is claimed first, for two runs may have other words; then it is ours to check.
            claim = parent / f".{number:04d}"
            try:
                claim.mkdir()
            except FileExistsError:
                number += 1
                continue
            try:
                if not any(run_number(path) == number for path in parent.iterdir()):
                    path = parent / f"{number:04d}-{words}"
                    path.mkdir()
                    return cls(path)
            finally:
                claim.rmdir()
            number += 1

    @classmethod
    def of_checkpoint(cls, checkpoint: Path) -> RunFolder | None:
        """The run that `checkpoint` is the newest state of, or None: then a new run begins from it."""
        path, here = checkpoint.resolve().parent.parent, Path.cwd()
        # As short as in a run that is new, for it is printed.
        path = path.relative_to(here) if path.is_relative_to(here) else path
        if checkpoint.name == "last.ckpt" and (path / "config.yaml").is_file():
            return cls(path)
        return None

    def hold(self) -> None:
        """Let no other process train in this folder, until `let_go` or the end of this one.

        Raises:
            ValueError: another one does.
        """
        self._held = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT)
        if not _lock(self.path, self._held):
            raise ValueError(
                f"The run in {self.path} is being trained by another process. Wait for it, stop it, or leave "
                "--ckpt_path out to start a run of its own."
            )

    def let_go(self) -> None:
        """Let others train in it again."""
        if self._held is not None:
            os.close(self._held)
            self._held = None

    @property
    def config(self) -> Path:
        """All options; the run can be repeated from it alone."""
        return self.path / "config.yaml"

    @property
    def metrics(self) -> Path:
        """Rows of figures, one for each step."""
        return self.path / "metrics.csv"

    @property
    def results(self) -> Path:
        """Summary for comparing."""
        return self.path / "results.json"

    @property
    def checkpoints(self) -> Path:
        """`best.ckpt` and `last.ckpt`."""
        return self.path / "checkpoints"

    @property
    def figures(self) -> Path:
        """Pictures."""
        return self.path / "figures"

    def write_results(self, results: dict[str, Any]) -> None:
        """Write `results.json`, whole or not at all."""
        write_whole(self.results, (json.dumps(results, indent=2, allow_nan=False) + "\n").encode(), "--run.root")

    def read_results(self) -> dict[str, Any]:
        """Content of `results.json`, empty where there is none, or none that can be read."""
        return read_results(self.path) or {}


def read_results(folder: Path) -> dict[str, Any] | None:
    """Content of `results.json` in a folder of a run.

    Empty where there is none yet. None, after a warning that names the file, where it is empty, cut off, or not of a
    run: whoever looks through many folders passes this one over.
    """
    path = folder / "results.json"
    if not path.exists():
        return {}
    try:
        content: Any = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict) or not all(isinstance(content.get(key), str) for key in ("task", "status")):
            raise ValueError("it has no task and status, so no run has written it")
        metrics = content.get("metrics", {})
        if not isinstance(metrics, dict):
            raise ValueError(f"metrics should be names with numbers, got {metrics!r}")
        measured = {name: value for name, value in metrics.items() if value is not None}
        for name, value in (measured | {key: content[key] for key in _SUMS if key in content}).items():
            if not isinstance(value, int | float):
                raise ValueError(f"{name} should be a number, got {value!r}")
    except (OSError, ValueError, RecursionError) as error:
        log.warning("%s is passed over: %s.", path, error)
        return None
    return content


def run_number(path: Path) -> int | None:
    """Number of a run folder, None for anything else."""
    match = _NUMBER.match(path.name)
    return int(match[1]) if match and path.is_dir() else None


def newest_last(root: str, preset: str | None) -> Path:
    """`last.ckpt` of the run that wrote one last: of the preset, or of any where none is named.

    Raises:
        ValueError: there is none.
    """
    found = [
        path
        for path in Path(root).expanduser().glob(f"{preset or '*'}/*/checkpoints/last.ckpt")
        if run_number(path.parent.parent) is not None
    ]
    if not found:
        raise ValueError(
            f"--ckpt_path=last: no run under {Path(root, preset or '')} has a last.ckpt; leave the option out to "
            "start one, or give the path of a checkpoint."
        )
    return max(found, key=lambda path: path.stat().st_mtime)


def newest_unfinished(root: str, preset: str | None, name: str | None) -> Path | None:
    """`last.ckpt` of the newest run that can go on and has not finished, None where there is none.

    Args:
        root: folder of all runs.
        preset: of which preset; of any where None.
        name: with these words after the number; any where None.
    """
    found = Path(root).expanduser().glob(f"{preset or '*'}/*/checkpoints/last.ckpt")
    for path in sorted(found, key=lambda path: path.stat().st_mtime, reverse=True):
        folder = path.parent.parent
        if run_number(folder) is None or (name is not None and folder.name.partition("-")[2] != name):
            continue
        results = read_results(folder)
        if results is None or results.get("status") == "finished":
            continue
        if not being_trained(folder):
            return path
        log.info("The run in %s is being trained by another process.", folder)
    return None


def being_trained(folder: Path) -> bool:
    """Whether another process trains in a folder of a run."""
    if not (folder / _LOCK).is_file():
        return False
    file = os.open(folder / _LOCK, os.O_RDWR)
    free = _lock(folder, file)
    os.close(file)
    return not free


def whole_lines(path: Path) -> str:
    """Text of a table to which rows are added, without half a line that a killed process has left at its end."""
    content = path.read_bytes()
    return content[: content.rfind(b"\n") + 1].decode()


def _lock(folder: Path, file: int) -> bool:
    """Lock an open file for this process; False where another one has it. The system lets go when the process ends."""
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            return False
        log.warning("%s cannot be locked (%s): see to it that no two runs train there.", folder, error)
    return True


def commit() -> str | None:
    """Commit of the code, with `+` where files were changed since; None outside a repository."""
    here = Path(__file__).parent
    try:
        out = subprocess.run(
            ["git", "describe", "--always", "--dirty=+", "--abbrev=12", "--exclude=*"],
            cwd=here, capture_output=True, text=True, timeout=10, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    return out.stdout.strip() or None


def peak_memory_mib() -> float:
    """Largest resident memory of this process so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return round(peak / (2**20 if sys.platform == "darwin" else 2**10), 1)
