"""`make compare`: the page, read by a parser; what it does in a browser stands in test_page_in_a_browser.py."""

from __future__ import annotations

import json
import re
import struct
import zlib
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from made_runs import fifty, make_run

from experiments.comparing import page
from experiments.comparing.charts import POINTS, colours
from experiments.comparing.compare import compare
from experiments.comparing.grouping import groups
from experiments.comparing.reading import find

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"


class Seen(HTMLParser):
    """Tags with their attributes, the text of cells, and the data."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(text)
        start = text.index('id="data">') + len('id="data">')
        self.data: dict[str, Any] = json.loads(text[start : text.index("</script>", start)])

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.texts.append(data.strip())


def written(root: Path) -> str:
    out = root / "compare.html"
    page.write(groups(find(str(root))), out)
    return out.read_text(encoding="utf-8")


def test_a_page_of_fifty_runs_is_light_and_asks_for_nothing(tmp_path: Path) -> None:
    fifty(tmp_path)
    text = written(tmp_path)
    assert len(text.encode()) < 10_000_000
    seen = Seen(text)
    for tag, attributes in seen.tags:
        for name in ("src", "href", "action", "data", "poster"):
            assert (attributes.get(name) or "data:").startswith("data:"), (tag, attributes)
    (policy,) = [a["content"] for t, a in seen.tags if t == "meta" and a.get("http-equiv") == "Content-Security-Policy"]
    assert policy is not None
    assert policy.startswith("default-src 'none'")
    assert "http" not in policy
    # Ten mechanisms with a picture each, shown once.
    assert sum(tag == "img" for tag, _ in seen.tags) == 10
    curves = seen.data["figures"]["loss-1"]["data"]
    assert len(curves) == 40
    assert max(len(curve["x"]) for curve in curves) <= POINTS
    assert {"dead"} <= set(seen.texts)


def test_names_and_options_of_strangers_stay_text(tmp_path: Path) -> None:
    """In a folder's name, an option, a mechanism, a preset, a column and a status."""
    folder = make_run(tmp_path, score=0.5, model={"label": EVIL}, columns={f"heads/{EVIL}": 1.0})
    make_run(tmp_path, score=0.6, model={"label": "plain"}, results={"mechanism": EVIL})
    make_run(tmp_path, status=EVIL)
    folder.rename(folder.with_name("0001-<img src=y onerror=alert(3)>"))
    text = written(tmp_path)
    seen = Seen(text)
    assert not [attributes for tag, attributes in seen.tags if tag == "img"]
    assert sum(tag == "script" for tag, _ in seen.tags) == 3
    assert any(EVIL in each for each in seen.texts)
    # Plotly reads marks in its texts.
    traces = [trace for figure in seen.data["figures"].values() for trace in figure["data"]]
    named = [trace["name"] for trace in traces if "script" in trace["name"]]
    assert named
    assert all("<" not in name for name in named)
    assert f'"label": {json.dumps(EVIL)}' not in text


def test_the_options_of_runs_are_told_apart(tmp_path: Path) -> None:
    make_run(tmp_path, seed=3)
    make_run(tmp_path, "Local", seed=3, attention={"window": 5}, model={"hidden_dim": 131})
    options = Seen(written(tmp_path)).data["options"]
    assert options["names"] == ["model.attention", "model.hidden_dim", "model.attention.window"]
    assert options["values"][0] == ['"attnzoo.Softmax"', "null", "(not there)"] or options["values"][1] == [
        '"attnzoo.Softmax"', "null", "(not there)",
    ]  # fmt: skip
    assert options["same"] == 10


def test_pictures_are_left_out_where_there_is_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_run(tmp_path, picture=True)
    make_run(tmp_path, "Local", picture=True)
    whole = written(tmp_path)
    (one, _) = re.findall(r"data:image/webp;base64,[^\"]*", whole)
    monkeypatch.setattr(page, "PICTURES", int(1.5 * len(one)))
    text = written(tmp_path)
    assert len(re.findall(r"data:image/webp", text)) == 1
    assert "1 more pictures are left out" in text


@pytest.mark.parametrize("damage", ["no picture", "cut off", "broken chunk", "bomb"])
def test_a_damaged_picture_costs_a_line_and_no_other_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    make_run(tmp_path, picture=True)
    picture = make_run(tmp_path, "Local", picture=True) / "figures" / "attention.png"
    content = picture.read_bytes()
    # A chunk is length, type, data and checksum; the first one is IHDR.
    damaged = {
        "no picture": b"x", "cut off": content[:300], "broken chunk": content[:12] + b"\0HDR" + content[16:],
        "bomb": content[:16] + struct.pack(">II", 60_000, 60_000) + content[24:29]
        + struct.pack(">I", zlib.crc32(content[12:16] + struct.pack(">II", 60_000, 60_000) + content[24:29]))
        + content[33:],
    }  # fmt: skip
    picture.write_bytes(damaged[damage])
    out = tmp_path / "page.html"
    monkeypatch.setenv("COLUMNS", "60")
    assert compare([f"--runs={tmp_path}", f"--out={out}"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "left out" in line]
    assert line.startswith(f"left out, for it cannot be read: {picture}: ") and not line.endswith(": ")
    assert out.read_text(encoding="utf-8").count("data:image/webp") == 1


def test_colours_of_neighbours_differ() -> None:
    found = colours([f"m{number}" for number in range(20)])
    assert len(set(found.values())) == 20


def test_the_command_prints_the_table_and_writes_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path, score=0.5)
    make_run(tmp_path, "Local", 0.75)
    (tmp_path / "vit" / "0003-broken").mkdir()
    (tmp_path / "vit" / "0003-broken" / "results.json").write_text("{")
    out = tmp_path / "page.html"
    assert compare([f"--runs={tmp_path}/vit/*", f"--out={out}"]) == 0
    said = capsys.readouterr().out
    assert "+0.2500" in said
    assert "left out, for it cannot be read" in said and "3-broken" in "".join(said.split())
    assert out.is_file()
