"""How much the loss changes when a degenerate head of a trained model begins anew: the preset `vit`, on the digits.

Each head of the trained network is in turn made dead, uniform, or a copy of its neighbour. Where the test of
degeneration flags it on the validation part, it begins anew, and the loss of both parts is measured before and after.
"""

from __future__ import annotations

import argparse
import copy
import json
from pathlib import Path
from typing import Any

import torch

from attnzoo.heads.degenerate import Limits, Watch
from attnzoo.heads.figures import Head
from attnzoo.heads.parts import inputs, output, tensor_of
from attnzoo.heads.reinit import reinit_heads
from attnzoo.heads.sites import Site, find_sites
from benchmarks.machine import machine
from benchmarks.runs import train
from experiments.training import console
from experiments.training.heads import probe_set
from experiments.training.probing import ProbeSet

KINDS = ("dead", "uniform", "copy")


def measure(folder: Path, arguments: list[str]) -> int:
    """Trains the preset if need be, measures, and writes `result.json`."""
    parser = argparse.ArgumentParser(prog="make reproduce FIGURE=head-events", description=__doc__)
    parser.add_argument("--ckpt", help="a checkpoint of the preset; it is trained if left out")
    options = parser.parse_args(arguments)
    console.quieten()
    torch.set_num_threads(1)
    if options.ckpt is None:
        done = train("vit", folder, ["--run.wandb=false"])
        assert done is not None
        options.ckpt = str(Path(done["folder"]) / "checkpoints" / "best.ckpt")
    probes = probe_set(Path(options.ckpt))
    events = []
    for name, site in find_sites(probes.network).items():
        for number in range(site.num_heads):
            events += [found for kind in KINDS if (found := _event(probes, Head(name, number), kind)) is not None]
    result = {
        "loss": probes.mean_loss(),
        "cases": sum(site.num_heads for site in find_sites(probes.network).values()) * len(KINDS),
        "flagged": {kind: sum(event["kind"] == kind for event in events) for kind in KINDS},
        # A head that was put in the place of another does harm, and the loss falls when it goes.
        "largest_relative_rise": max((event["change"] for event in events), default=None),
        "largest_of_dead_heads": max(
            (abs(event["change"]) for event in events if event["kind"] == "dead"), default=None
        ),
        "events": events,
        "machine": machine(),
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "result.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=2))
    return 0


def _event(probes: ProbeSet, head: Head, kind: str) -> dict[str, Any] | None:
    """What happens when this head is planted and flagged; None where it is of use. The network is left as it was."""
    network = probes.network
    before = copy.deepcopy(network.state_dict())
    try:
        _plant(find_sites(network)[head.site], head.number, kind)
        health = probes.health()
        watch = Watch(Limits(checks=1))
        health, flagged = watch.check(health, lambda heads: probes.ablation(heads, health))
        chosen = [one for one in flagged if one.head.site == head.site][:1]
        if not chosen:
            return None
        loss = probes.mean_loss()
        reinit_heads(network, [chosen[0].head], health.means, step=0)
        change = (probes.mean_loss() - loss) / loss
        return {"head": list(head), "kind": kind, "causes": list(chosen[0].causes), "loss": loss, "change": change}
    finally:
        network.load_state_dict(before)


@torch.no_grad()
def _plant(site: Site, number: int, kind: str) -> None:
    shell, rows = site.shell, slice(number * site.value_dim, (number + 1) * site.value_dim)
    if kind == "dead":
        for tensor in (shell.v_proj.weight, shell.v_proj.bias):
            tensor[rows] *= 1e-3
    elif kind == "uniform":
        shell.q_proj.weight[rows] = shell.q_proj.bias[rows] = 0
    else:
        for part in (*inputs(site), output(site)):
            tensor = tensor_of(shell, part).data
            part.block(tensor, number).copy_(part.block(tensor, (number + 1) % site.num_heads))
