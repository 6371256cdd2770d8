"""Using a trained translator: on a line, on a file, as a filter."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import BinaryIO

from rich.console import Console
from rich.progress import track

from experiments.training.console import speak
from experiments.training.finding import newest_finished
from experiments.training.options import call
from experiments.training.writing import PICTURES, write_figure, write_whole
from experiments.translation.alignment import align, blind
from experiments.translation.drawing import alignment_figure
from experiments.translation.filtering import blocks_of
from experiments.translation.search import MOST_BEAM, Translation
from experiments.translation.text import read_lines
from experiments.translation.tokens import UNK
from experiments.translation.translator import Translator

log = logging.getLogger("experiments")

BLOCK = 512
"""Lines translated between two writes: enough to sort by length, few enough for a filter to keep answering."""

PANELS = 8
"""Most pairs of one alignment picture."""


def translate(argv: list[str]) -> int:
    """Translates a text, a file or what comes in. Arguments: see ``_translate``."""
    return call(_translate, argv, "python -m experiments translate")


def _translate(
    text: str = "",
    input: str | None = None,
    output: str | None = None,
    ckpt: str | None = None,
    beam: int | None = None,
    n_best: int = 1,
    alignment: str | None = None,
    encoding: str = "utf-8",
) -> int:
    """Translate a line, a file, or standard input: one line in, one line out, empty lines kept.

    Args:
        text: one line to translate. Without text and input, lines come from standard input, and are answered as they
            come.
        input: file of lines, plain or .gz.
        output: file to write; standard output if null. It appears when it is complete.
        ckpt: checkpoint; the best one of the newest finished translation run if null.
        beam: hypotheses followed at once, up to 1000; as the model was tested if null, 1 is greedy and fastest.
        n_best: more than 1 gives that many lines for each, "line TAB score TAB translation", the score being the
            log probability divided by a power of the length.
        alignment: file of the soft alignment: a picture (.png, .pdf, .svg, .jpg) of the first 8 lines, or all weights
            as .json.
        encoding: of the input.
    """
    if text and input is not None:
        raise ValueError("--text and --input were both given; give one of them")
    if alignment is not None and Path(alignment).suffix.lower() not in (*PICTURES, ".json"):
        raise ValueError(f"--alignment={alignment}: it is written as one of {', '.join((*PICTURES, '.json'))}")
    if alignment is not None:
        _check_place(Path(alignment))  # before hours of translating
    speak(Console(stderr=True, highlight=False))
    path = Path(ckpt) if ckpt else newest_finished(["translation"])
    model = Translator.from_checkpoint(path)
    if alignment is not None and (why := blind(model)):
        raise ValueError(f"--alignment={alignment}: {why}")
    _check_width(model, beam, n_best)
    blocks = _blocks(text, input, encoding)
    pairs: list[tuple[str, Translation]] = []
    # So that a file that is half written is taken away; without this the process would just be gone.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    with _target(output, input) as file:
        for number, line, found in _translated(model, blocks, beam, n_best, path):
            for one in found or [Translation("", [], 0.0, True)]:
                shown = one.text if n_best == 1 else f"{number}\t{one.score:.4f}\t{one.text}"
                file.write(shown.encode() + b"\n")
            if output is None:
                file.flush()
            if alignment is not None and found:
                pairs.append((line, found[0]))
            if found and not found[0].finished:
                log.warning("line %d: its translation was cut at the greatest length.", number)
    if alignment is not None:
        _write_alignment(model, pairs, Path(alignment))
    return 0


def _check_place(path: Path) -> None:
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ValueError(f"--alignment={path}: a file cannot be written there; give another place")


def _check_width(model: Translator, beam: int | None, n_best: int) -> None:
    width = model.decoding.beam if beam is None else beam
    if not 1 <= width <= MOST_BEAM or not 1 <= n_best <= width:
        raise ValueError(
            f"--n_best={n_best} of --beam={width}: give n_best from 1 to beam, and a beam from 1 to {MOST_BEAM}"
        )


def _blocks(text: str, file: str | None, encoding: str) -> Iterable[list[str]]:
    if text:
        return [[" ".join(text.split("\n"))]]
    if file is not None:
        if Path(file).is_dir():
            raise ValueError(f"--input={file} is a folder; give a file of lines, plain or .gz")
        if not Path(file).exists():
            raise ValueError(f"--input={file}: there is no such file; give a file of lines, plain or .gz")
        lines = read_lines(Path(file), encoding=encoding, option="--encoding")
        return [lines[first : first + BLOCK] for first in range(0, len(lines), BLOCK)]
    if sys.stdin is None:
        raise ValueError("there is no standard input; give --text or --input")
    if sys.stdin.isatty():
        Console(stderr=True).print("translating lines from the keyboard; end with Ctrl-D (--help says what else)")
    return blocks_of(sys.stdin.buffer, encoding, BLOCK)


def _translated(
    model: Translator, blocks: Iterable[list[str]], beam: int | None, n_best: int, path: Path
) -> Iterator[tuple[int, str, list[Translation]]]:
    """Number, line and translations of each line, in order."""
    first, unknown, tokens = 1, 0, 0
    bar = Console(stderr=True)
    if isinstance(blocks, list) and len(blocks) > 1 and bar.is_terminal:
        blocks = track(blocks, f"translating by {path}", console=bar, transient=True)
    for block in blocks:
        found = model.translate(block, beam=beam, n_best=n_best, first_line=first)
        rows = model.source_vocabulary.encode(block)
        unknown, tokens = unknown + sum(row.count(UNK) for row in rows), tokens + sum(map(len, rows))
        yield from zip(range(first, first + len(block)), block, found, strict=True)
        first += len(block)
    if unknown:
        log.warning("%d of %d tokens (%.1f %%) are unknown to the model.", unknown, tokens, 100 * unknown / tokens)


def _target(output: str | None, source: str | None) -> AbstractContextManager[BinaryIO]:
    if output is None:
        if sys.stdout is None:
            raise ValueError("there is no standard output; give --output")
        return nullcontext(sys.stdout.buffer)
    path = Path(output).resolve()  # where a link leads to
    if not output or path.is_dir():
        raise ValueError(f"--output={output}: this is a folder; give a file")
    if source is not None and path.exists() and path.samefile(source):
        raise ValueError(f"--output={output} is the input itself, which would be lost; give another file")
    # A device or a pipe is written to, and not put another file in the place of.
    return path.open("wb") if path.exists() and not path.is_file() else _Whole(path)


class _Whole(AbstractContextManager[BinaryIO]):
    """A file that gets its name when it is complete."""

    def __init__(self, path: Path) -> None:
        self.path, self.part = path, path.with_name(f"{path.name}.part")

    def __enter__(self) -> BinaryIO:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.file = self.part.open("wb")
        return self.file

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.file.close()
        if kind is None:
            self.part.replace(self.path)
        else:
            self.part.unlink()


def _write_alignment(model: Translator, pairs: list[tuple[str, Translation]], path: Path) -> None:
    if not pairs:
        raise ValueError(f"--alignment={path}: there was no line to align")
    picture = path.suffix.lower() in PICTURES
    shown = pairs[:PANELS] if picture else pairs
    sources = model.coded([line for line, _ in shown])
    found = align(model, sources, [translation.tokens for _, translation in shown])
    if picture:
        write_figure(path, alignment_figure(found), "--alignment")
    else:
        content = [
            {
                "source": a.source,
                "target": a.target,
                "weights": [[round(x, 6) for x in row] for row in a.weights.tolist()],
            }
            for a in found
        ]
        write_whole(path, (json.dumps(content, ensure_ascii=False, indent=1) + "\n").encode(), "--alignment")
    more = f" of the first {PANELS} of {len(pairs)} lines" if len(shown) < len(pairs) else ""
    Console(stderr=True, soft_wrap=True).print(f"alignment{more}: {path}", markup=False)
