"""Two processes of one thread against one of one thread: how much more is done in the same time.

Both processes live in one launch. In turn the first one trains by itself, with the second asleep at a barrier, and both
train with the same batch each, their gradients summed by DDP over gloo: the ratio of the times is the efficiency. What
is sent and kept is counted beside it, and held against the formulas of docs/scaling.md.
"""

# No annotations as text here: DDP reads those of its hook.
import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from attnzoo import EncoderBlock
from benchmarks.machine import machine
from benchmarks.timing import spread
from experiments.training.tables import show_table

MODELS = {"2M": (128, 10), "20M": (512, 6)}
"""Name -> width and blocks; a block has about 12 times the square of the width."""
TOKENS, ROWS = 64, 8


class Blocks(nn.Module):
    """A stack of encoder blocks: [B, T, E] -> a loss."""

    def __init__(self, dim: int, depth: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(EncoderBlock(dim, 8) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x, _ = block(x)
        return x.square().mean()


def measure(folder: Path, arguments: list[str]) -> int:
    """Measures both models, prints and keeps what was found."""
    parser = argparse.ArgumentParser(prog="make reproduce FIGURE=scaling")
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args(arguments).rounds
    folder.mkdir(parents=True, exist_ok=True)
    table = Table("model", "parameters", "efficiency of two", "quartiles", "ms alone", "MiB sent a step", "MiB kept")
    result: dict[str, Any] = {"machine": machine(), "models": {}}
    for name in MODELS:
        found = result["models"][name] = _launch(folder, name, rounds)
        ratio, count = spread(found["efficiency"]), found["parameters"]
        table.add_row(
            name, f"{count:,}", f"{ratio['median']:.2f}", f"{ratio['q1']:.2f} to {ratio['q3']:.2f}",
            f"{1000 * statistics.median(found['alone']):.0f}",
            f"{found['sent'] / 2**20:.1f} (formula {4 * count / 2**20:.1f})",
            f"DDP {found['kept_ddp'] / 2**20:.1f} (formula {16 * count / 2**20:.1f}), "
            f"FSDP2 {found['kept_fsdp2'] / 2**20:.1f} (formula {8 * count / 2**20:.1f})",
        )  # fmt: skip
    (folder / "result.json").write_text(json.dumps(result, indent=2) + "\n")
    show_table(table)
    return 0


def _launch(folder: Path, name: str, rounds: int) -> dict[str, Any]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    base = os.environ | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": "2",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "benchmarks.scaling", str(folder.resolve()), name, str(rounds)]
    started = [subprocess.Popen(command, env=base | {"RANK": str(rank)}) for rank in range(2)]
    assert [process.wait() for process in started] == [0, 0]
    found: dict[str, Any] = json.loads((folder / f"{name}.json").read_text())
    return found


def _kept(network: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Bytes of weights, gradients and the optimiser's averages in this process."""
    tensors = [x for p in network.parameters() for x in (p, p.grad, *optimizer.state[p].values()) if x is not None]
    own = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    return sum(tensor.numel() * tensor.element_size() for tensor in own if tensor.dim())


def _worker(folder: Path, name: str, rounds: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, (dim, depth) = dist.get_rank(), MODELS[name]
    torch.manual_seed(0)
    alone = Blocks(dim, depth)
    both = DistributedDataParallel(Blocks(dim, depth))
    sent: list[int] = []

    def count(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        sent.append(bucket.buffer().numel() * bucket.buffer().element_size())
        work = dist.all_reduce(bucket.buffer() / 2, async_op=True).get_future()
        return work.then(lambda done: done.value()[0])

    both.register_comm_hook(None, count)
    spread_network = Blocks(dim, depth)
    for block in spread_network.blocks:
        fully_shard(block)
    fully_shard(spread_network)
    optimizers = {id(n): torch.optim.AdamW(n.parameters()) for n in (alone, both, spread_network)}
    x = torch.randn(ROWS, TOKENS, dim)

    def step(network: nn.Module) -> float:
        begin = time.perf_counter()
        optimizers[id(network)].zero_grad()
        network(x).backward()
        optimizers[id(network)].step()
        return time.perf_counter() - begin

    times: dict[str, list[float]] = {"alone": [], "both": []}
    for number in range(rounds + 1):
        dist.barrier()
        first = step(alone) if rank == 0 else 0.0
        dist.barrier()
        sent.clear()
        second = step(both)
        if number:  # the first one warms up
            times["alone"].append(first)
            times["both"].append(second)
    step(spread_network)
    if rank == 0:
        found = {
            **times,
            "efficiency": [one / two for one, two in zip(times["alone"], times["both"], strict=True)],
            "parameters": sum(p.numel() for p in alone.parameters()),
            # By a ring each of two processes sends half of what is to be summed, and half of the sums.
            "sent": sum(sent),
            "kept_ddp": _kept(both, optimizers[id(both)]),
            "kept_fsdp2": _kept(spread_network, optimizers[id(spread_network)]),
        }
        (folder / f"{name}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    _worker(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
