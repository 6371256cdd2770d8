"""Multi30k: both networks, both directions, in an hour and longer, on every test set. A resumable job.

ATTNZOO_DATA names the folder that holds `translation/multi30k`.
"""

from __future__ import annotations

import json
from pathlib import Path

from rich.table import Table

from benchmarks import runs
from benchmarks.machine import machine
from experiments.training.tables import show_table

TO_GERMAN = ["--data.source_language=en", "--data.target_language=de"]
LONG = ["--trainer.max_epochs=120", "--trainer.check_val_every_n_epoch=5", "--model.dropout=0.3"]

RUNS: dict[str, tuple[str, list[str]]] = {
    "transformer-de-en": ("translator-multi30k", []),
    "bahdanau-de-en": ("translator-bahdanau-multi30k", []),
    "transformer-de-en-long": ("translator-multi30k", LONG),
    "bahdanau-de-en-long": ("translator-bahdanau-multi30k", LONG),
    "transformer-en-de-long": ("translator-multi30k", [*TO_GERMAN, *LONG]),
}
"""Name -> (preset, further options)."""

TESTS = {"test2016": "test_2016_flickr", "test2017": "test_2017_flickr", "MSCOCO": "test_2017_mscoco"}


def measure(folder: Path, arguments: list[str]) -> int:
    """Trains what is not done yet, for at most --minutes, and prints what is done."""
    names, minutes_left = runs.asked("multi30k", __doc__, RUNS, arguments)
    for name in names:
        preset, further = RUNS[name]
        piece = folder / name / "tested.json"
        if piece.is_file():
            continue
        done = runs.train(preset, folder / name, further, minutes=minutes_left())
        if done is None:
            break
        place = Path(done["folder"])
        languages = [word for word in further if "language" in word]
        tested = {
            title: runs.test(place, [f"--config={preset}", f"--data.test={part}", *languages])
            for title, part in TESTS.items()
        }
        piece.write_text(json.dumps({"run": done, "tested": tested, "machine": machine()}, indent=2) + "\n")
    table = Table("run", "parameters", "epochs", "steps", "minutes", "test set", "BLEU 13a", "BLEU lc tok", "chrF")
    pieces = {name: folder / name / "tested.json" for name in RUNS}
    for name, piece in pieces.items():
        if piece.is_file():
            content = json.loads(piece.read_text())
            run = content["run"]
            first = [name, f"{run['parameters']:,}", str(run["epochs"]), str(run["steps"]), f"{run['wall'] / 60:.0f}"]
            for title in TESTS:
                scores = (f"{content['tested'][title][f'test/{key}']:.2f}" for key in ("bleu", "bleu_lc_tok", "chrf"))
                table.add_row(*first, title, *scores)
                first = [""] * len(first)
    show_table(table)
    print(f"{sum(piece.is_file() for piece in pieces.values())} of {len(RUNS)} runs are done")
    return 0
