"""`python -m experiments COMMAND ...`: trains, tests and uses the experiments."""

from __future__ import annotations

import importlib
import os
import signal
import sys
from collections.abc import Callable

from experiments.training.usage import UsageError, nearest, preset_lines, short
from experiments.training.words import resolve_configs

COMMANDS: dict[str, tuple[str, str]] = {
    "fit": ("experiments.training.commands:fit", "train, test the best checkpoint, say what comes next"),
    "test": ("experiments.training.commands:test", "test a checkpoint: --ckpt_path=PATH"),
    "classify": ("experiments.vision.predict:classify", "name what is in a picture: --image=FILE"),
    "translate": ("experiments.translation.predict:translate", "translate --text=TEXT, --input=FILE or standard input"),
    "forecast": ("experiments.forecasting.predict:forecast", "forecast what follows in a table: --csv=FILE"),
    "sweep": (
        "experiments.comparing.sweep:sweep",
        "train every mechanism that fits: --config=NAME [--seeds=3]",
    ),
    "compare": ("experiments.comparing.compare:compare", "a table of the runs, and runs/compare.html"),
    "heads": ("experiments.training.heads:heads", "how the heads of a checkpoint are doing: --ckpt=PATH"),
    "sync": ("experiments.training.syncing:sync", "send to W&B what was logged offline"),
    "export": ("experiments.training.exporting:export", "write a model as .pt2 and .onnx"),
}
"""Command -> ("module:function", line of help). The function takes arguments and gives the exit status."""


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns 0 for done, 1 failed, 2 not understood, 128 + n stopped by signal n.

    Args:
        argv: words after the program name; those of the process where None.
    """
    arguments = sys.argv[1:] if argv is None else argv
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(overview())
        return 0
    command, *rest = arguments
    if command not in COMMANDS:
        near = nearest(command, COMMANDS)
        return _fail(f"{command!r} is no command.{near}\nCommands: {', '.join(COMMANDS)}", 2)
    try:
        # A wrong preset is answered before anything heavy is imported.
        resolve_configs(rest)
        return _function(COMMANDS[command][0])(rest)
    except UsageError as error:
        return _fail(str(error), 2)
    except BrokenPipeError:
        raise  # to `ended`, for it is no fault
    except (ValueError, OSError) as error:
        return _fail(str(error), 1)
    except KeyboardInterrupt:
        stands = "; the last checkpoint that was written stands" if command == "fit" else ""
        return _fail(f"stopped at once{stands}", 130)


def overview() -> str:
    """Commands and presets."""
    lines = ["usage: python -m experiments COMMAND [options]", "", "commands (COMMAND --help says more):"]
    lines += [f"  {name:<12}{text}" for name, (_, text) in COMMANDS.items()]
    lines += ["", "presets (for example: fit --config=vit --model.attention=Local):"]
    lines += preset_lines()
    return "\n".join(lines)


def _function(target: str) -> Callable[[list[str]], int]:
    module, _, name = target.partition(":")
    found: Callable[[list[str]], int] = getattr(importlib.import_module(module), name)
    return found


def _fail(message: str, status: int) -> int:
    print(f"error: {short(message)}", file=sys.stderr)
    return status


def ended(run: Callable[[], int]) -> int:
    """The exit status of a program, which is no failure of its own where who reads it has enough (`| head`)."""
    try:
        status = run()
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        # Python would complain once more when it closes what nobody reads.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE


if __name__ == "__main__":
    sys.exit(ended(main))
