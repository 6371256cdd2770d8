"""Files from strangers run nothing; workers leave nothing behind; twenty kills."""

from __future__ import annotations

import ast
import multiprocessing
import random
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from training_toys import Toy, ToyData, trainer

ROOT = Path(__file__).parents[2]
FILES = [path for folder in ("attnzoo", "experiments", "benchmarks") for path in (ROOT / folder).rglob("*.py")]
UNPACKERS = {"tarfile", "zipfile", "shelve", "dill", "joblib", "cloudpickle"}


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_files_are_read_as_plain_values_and_none_is_unpacked(path: Path) -> None:
    """torch.load with weights_only, written out; no reader that runs code; nothing that writes where a file says."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names]
            modules = names if isinstance(node, ast.Import) else [str(node.module)]
            assert not {module.split(".")[0] for module in modules} & UNPACKERS
            assert "unpack_archive" not in names
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        called = ast.unparse(node.func)
        options = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
        assert called not in ("pickle.load", "pickle.loads", "shutil.unpack_archive", "yaml.unsafe_load")
        if called == "yaml.load":
            assert "SafeLoader" in path.read_text(encoding="utf-8"), f"line {node.lineno}"
        if called == "torch.load":
            assert options.get("weights_only") == "True", f"line {node.lineno}"
        if called in ("np.load", "numpy.load"):
            assert options.get("allow_pickle", "False") == "False", f"line {node.lineno}"


class Memory(pl.Callback):
    """Resident pages of this process and its workers, after each epoch."""

    def __init__(self) -> None:
        self.pages: list[int] = []

    def on_train_epoch_end(self, *args: Any) -> None:
        processes = ["self", *(str(child.pid) for child in multiprocessing.active_children())]
        self.pages.append(sum(int(Path(f"/proc/{p}/statm").read_text().split()[1]) for p in processes))


@pytest.mark.slow
def test_memory_stays_flat_and_workers_end(tmp_path: Path) -> None:
    """Within 2 % from the 50th to the 200th epoch, workers counted; none is left when the loaders have gone."""
    memory = Memory()
    made, model, data = trainer(tmp_path, [memory], max_epochs=200), Toy(), ToyData(num_workers=2)
    made.fit(model, datamodule=data)
    assert len(memory.pages) == 200
    assert max(memory.pages[-20:]) < 1.02 * max(memory.pages[30:50])
    made.fit_loop._combined_loader = None
    for child in multiprocessing.active_children():
        child.join(5)
    assert multiprocessing.active_children() == []


@pytest.mark.slow
def test_r07_twenty_kills(tmp_path: Path) -> None:
    """R07, 28, 29: kill -9 at random moments; every newest state loads, and the end is that of a run in one piece."""
    from benchmarks.torture import killed

    outcome = killed(tmp_path / "killed", 20, random.Random(1))
    assert (outcome.tries, outcome.well) == (20, 20)
    assert "bit for bit" in outcome.happened
