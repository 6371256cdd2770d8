"""One page about runs, complete in itself: it opens without a network, on a phone, in light and in dark.

Whatever comes from a run is escaped: by Jinja in the page, by `html.escape` in figures, and set as text by the script.
"""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup
from PIL import Image
from plotly.offline import get_plotlyjs

from experiments.comparing import charts
from experiments.comparing.compare import HEADS, LEGEND, notes, rows
from experiments.comparing.grouping import Group
from experiments.comparing.reading import Run, flat, left_out
from experiments.training.writing import write_whole

HERE = Path(__file__).parent
SPEED = HERE.parents[1] / "docs" / "speed.json"

PICTURES = 3 * 2**20
"""Bytes of pictures in a page; with plotly's 5 MiB it stays below 10 MB."""

WIDTH = 640
"""Pixels, to which wider pictures are scaled down."""


def write(groups: list[Group], path: Path, say: Callable[[str], None] = print) -> None:
    """Write the page about `groups` to `path`.

    Args:
        groups: what it shows.
        path: the file.
        say: told of each picture that cannot be read.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE), autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    runs = [run for group in groups for variant in group.variants for run in variant.runs.values()]
    runs += [run for group in groups for found in group.open.values() for run in found]
    pictures = _Pictures(say)
    figures: dict[str, Any] = {}
    sections = [_section(number, group, figures, pictures) for number, group in enumerate(groups)]
    costs = []
    for number, (name, (source, figure)) in enumerate(charts.cost_by_length(SPEED).items()):
        figures[f"cost-{number}"] = _plain(figure)
        costs.append({"id": f"cost-{number}", "name": name, "source": source})
    text = environment.get_template("page.html").render(
        heads=HEADS,
        legend=LEGEND,
        groups=sections,
        costs=costs,
        left_out=pictures.left_out,
        runs=[run.name for run in runs],
        # `tojson` escapes what could end the element.
        data={"figures": figures, "options": _options(runs)},
        style=Markup((HERE / "page.css").read_text(encoding="utf-8")),
        script=Markup((HERE / "page.js").read_text(encoding="utf-8")),
        plotly=Markup(get_plotlyjs()),
    )
    write_whole(path, text.encode())


def _section(number: int, group: Group, figures: dict[str, Any], pictures: _Pictures) -> dict[str, Any]:
    palette = charts.colours([variant.label for variant in group.variants])
    plots = []
    for key, title, figure in (
        ("learning", "Learning: validation", charts.learning(group, "val/primary", palette)),
        ("loss", "Learning: training loss", charts.learning(group, "train/loss", palette)),
        ("speed", "Quality against speed", charts.quality(group, lambda v: v.mean("step_ms"), "ms a step", palette)),
        ("memory", "Quality against memory",
         charts.quality(group, lambda v: v.mean("peak_memory_mib"), "MiB of the process", palette)),
        ("flops", "Quality against work", charts.quality(group, lambda v: v.flops, "FLOPs, forward", palette)),
    ):  # fmt: skip
        if figure.data:
            name = f"{key}-{number}"
            figures[name] = _plain(figure)
            plots.append({"id": name, "title": title})
    return {
        "title": group.title,
        "rows": [
            {"label": row[0].value, "cells": row, "colour": palette.get(str(row[0].value))} for row in rows(group)
        ],
        "notes": notes(group),
        "plots": plots,
        "pictures": pictures.of(group),
        "health": _health(group),
    }


def _plain(figure: Any) -> Any:
    # The template is the look of plotly.py; the page has its own, in two colours.
    return json.loads(figure.update_layout(template="none").to_json())


def _health(group: Group) -> dict[str, Any] | None:
    """The last figures about heads in `metrics.csv`, where a run has some."""
    rows: list[tuple[str, int, dict[str, str]]] = []
    names: dict[str, None] = {}
    for variant in group.variants:
        for seed, run in variant.runs.items():
            found: dict[str, str] = {}
            for row in run.rows:
                found |= {name: value for name, value in row.items() if name and name.startswith("heads/") and value}
            if found:
                names |= dict.fromkeys(found)
                rows.append((variant.label, seed, found))
    table = [
        {"label": label, "seed": seed, "values": [f"{float(found[n]):.4g}" if n in found else "" for n in names]}
        for label, seed, found in rows
    ]
    return {"names": [name.removeprefix("heads/") for name in names], "rows": table} if rows else None


def _options(runs: list[Run]) -> dict[str, Any]:
    """Options by run, those that are the same in all left out, and how many these are."""
    every = [{name: json.dumps(value) for name, value in flat(run.config).items()} for run in runs]
    names = list(dict.fromkeys(name for options in every for name in options))
    differ = [name for name in names if len({options.get(name) for options in every}) > 1]
    return {
        "names": differ,
        "values": [[options.get(name, "(not there)") for name in differ] for options in every],
        "same": len(names) - len(differ),
    }


class _Pictures:
    """Turns figures of runs into small pictures inside the page, as long as there is room."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.left_out = 0
        self._say, self._room = say, PICTURES

    def of(self, group: Group) -> dict[str, list[dict[str, Any]]]:
        """Name of a figure -> one picture for each variant that has it, of its first seed."""
        found: dict[str, list[dict[str, Any]]] = {}
        for variant in group.variants:
            seed, run = next(iter(variant.runs.items()))
            for file in self._files(run):
                try:
                    source = self._small(file)
                # What Pillow raises for pictures that are damaged, by where the damage is.
                except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
                    self._say(left_out(file, error))
                    continue
                if source is None:
                    self.left_out += 1
                else:
                    found.setdefault(file.stem, []).append({"label": variant.label, "seed": seed, "source": source})
        return found

    def _files(self, run: Run) -> Iterable[Path]:
        return sorted((run.path / "figures").glob("*.png"))

    def _small(self, file: Path) -> str | None:
        with Image.open(file) as picture:
            picture.thumbnail((WIDTH, 4 * WIDTH))
            buffer = io.BytesIO()
            picture.convert("RGB").save(buffer, "WEBP", quality=75)
        text = base64.b64encode(buffer.getbuffer()).decode()
        if len(text) > self._room:
            return None
        self._room -= len(text)
        return f"data:image/webp;base64,{text}"
