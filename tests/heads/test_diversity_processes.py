"""Head diversity in two processes: the mean of what each says, every parameter used once."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from attnzoo import EncoderBlock, HeadDiversity

PROGRAM = """
import json, os, sys
from pathlib import Path
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from attnzoo import EncoderBlock, HeadDiversity

folder, rank = Path(sys.argv[1]), int(sys.argv[2])
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
torch.manual_seed(0)
block = EncoderBlock(16, 4, head_diversity=HeadDiversity(0.5))
x = torch.randn(2, 2, 6, 16, generator=torch.Generator().manual_seed(1))
spread = DistributedDataParallel(block)  # which must live until the gradients are there
y, aux = spread(x[rank])
(y.square().mean() + aux).backward()
found = {name: p.grad.tolist() for name, p in block.named_parameters()}
(folder / f"{rank}.json").write_text(json.dumps(found))
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_gradients_of_two_processes_are_the_mean_of_both(tmp_path: Path) -> None:
    """As computed here, one after the other; both end with the same."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    commands = [[sys.executable, str(program), str(tmp_path), str(rank)] for rank in range(2)]
    started = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for command in commands]
    for process in started:
        _, said = process.communicate(timeout=120)
        assert process.returncode == 0, said[-2000:]
    torch.manual_seed(0)
    block = EncoderBlock(16, 4, head_diversity=HeadDiversity(0.5))
    for x in torch.randn(2, 2, 6, 16, generator=torch.Generator().manual_seed(1)):
        y, aux = block(x)
        ((y.square().mean() + aux) / 2).backward()
    one, two = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert one == two
    for name, parameter in block.named_parameters():
        torch.testing.assert_close(torch.tensor(one[name]), parameter.grad, atol=1e-6, rtol=1e-4)
