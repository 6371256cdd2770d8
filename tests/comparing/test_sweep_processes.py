"""`make sweep`: what its processes are given, and what becomes of them at a signal."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from lightning.fabric.strategies.launchers.subprocess_script import _basic_subprocess_cmd
from rich.console import Console

from experiments.comparing import sweep
from experiments.training import commands
from experiments.training.runs import being_trained

SWEEP = """
import sys
from pathlib import Path
from experiments.comparing import processes

if __name__ == "__main__":
    context = processes.server(["slow"])
    print("begun", flush=True)
    folder = Path(sys.argv[1])
    sys.exit(processes.run(context, "slow:work", folder / "log", folder / "failed", ()))
"""
SLOW = """
import time
from pathlib import Path

time.sleep(1.5)

def work():
    Path(__file__).with_name("worked").touch()
    time.sleep(60)
"""
HOLDS = """
import fcntl, sys
file = open(sys.argv[1], "w")
fcntl.lockf(file, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
"""


def holder(folder: Path) -> subprocess.Popen[str]:
    """A process that trains in `folder`, as far as its lock says."""
    words = [sys.executable, "-c", HOLDS, str(folder / ".lock")]
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("when", ["imports", "works"])
def test_a_signal_to_all_of_a_terminal_ends_it_without_a_traceback(tmp_path: Path, number: int, when: str) -> None:
    (tmp_path / "sweeping.py").write_text(SWEEP)
    (tmp_path / "slow.py").write_text(SLOW)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    made = subprocess.Popen(
        [sys.executable, str(tmp_path / "sweeping.py"), str(tmp_path)], stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, start_new_session=True, env=environment,
    )  # fmt: skip
    assert made.stdout is not None
    assert made.stdout.readline() == "begun\n"
    time.sleep(0.5)
    deadline = time.monotonic() + 30
    while when == "works" and time.monotonic() < deadline and not (tmp_path / "worked").exists():
        time.sleep(0.05)
    # SIGTERM comes to the sweep alone, Ctrl-C to its group.
    (os.killpg if number == signal.SIGINT else os.kill)(made.pid, number)
    _, said = made.communicate(timeout=30)
    assert made.returncode == 128 + number
    assert "Traceback" not in said


def test_further_processes_of_a_run_are_started_with_its_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the sweep would begin a sweep in each of them."""
    main = sys.modules["__main__"]
    monkeypatch.setattr(main, "__spec__", main.__spec__)
    monkeypatch.setattr(sys, "argv", ["sweep", "--config=vit"])
    command: list[Any] = []
    monkeypatch.setattr(commands, "fit", lambda words: command.extend(_basic_subprocess_cmd()) or 3)
    assert sweep.train(["--config=vit", "--trainer.devices=2"]) == 3
    words = ["-m", "experiments.__main__", "fit", "--config=vit", "--trainer.devices=2"]
    assert command == [sys.executable, *words]


def test_a_run_goes_on_with_its_own_lists_and_without_its_configs(tmp_path: Path) -> None:
    """What `+=` has put into a list stands in the options of the run, and would be put there twice."""
    words = ["--config=vit", "-c", "mine.yaml", "--trainer.callbacks+=A", "--model.dim=16"]
    folder = tmp_path / "0001-a-seed0-1"
    (folder / "checkpoints").mkdir(parents=True)
    assert sweep._going_on(tmp_path, "a-seed0-1", words) == words
    assert not folder.exists()
    (folder / "checkpoints").mkdir(parents=True)
    last = folder / "checkpoints" / "last.ckpt"
    last.touch()
    assert sweep._going_on(tmp_path, "a-seed0-1", words) == [*words, f"--ckpt_path={last}"]
    (folder / "config.yaml").touch()
    assert sweep._going_on(tmp_path, "a-seed0-1", words) == ["--model.dim=16", f"--ckpt_path={last}"]


def test_a_run_that_another_process_trains_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A sweep that was killed leaves one behind, which takes a step or a validation to end."""
    folder = tmp_path / "0001-a-seed0-1"
    folder.mkdir()
    sweep._wait(tmp_path, "a-seed0-1", Console())
    assert not capsys.readouterr().out
    process = holder(folder)
    waited: list[bool] = []

    def sleep(seconds: float) -> None:
        waited.append(being_trained(folder))
        process.communicate()

    monkeypatch.setattr(sweep.time, "sleep", sleep)
    sweep._wait(tmp_path, "a-seed0-1", Console())
    assert waited == [True]
    assert "is being trained by another process" in capsys.readouterr().out
    assert not being_trained(folder)
