"""Every mechanism as an exported program and as ONNX, batches of any size, with padding and without."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from attnzoo import CATALOGUE, Mask, MultiheadAttention

SLOW = [
    pytest.param(name, padded, marks=pytest.mark.slow)
    for name in CATALOGUE
    for padded in (False, True)
    if (name, padded) != ("Linear", True)
]


class Net(nn.Module):
    """Self-attention of 20 tokens, of a mechanism by its name alone."""

    def __init__(self, name: str, padded: bool) -> None:
        super().__init__()
        self.padded = padded
        self.attention = MultiheadAttention(16, 2, CATALOGUE[name], grid=(4, 5), max_len=20)

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        return self.attention(x, mask=Mask(key_keep=keep if self.padded else None))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "padded"), [("Linear", True), *SLOW])
def test_exported_programs_give_the_same(name: str, padded: bool, tmp_path: Path) -> None:
    """Traced by a batch of 3, asked with a batch of 5 whose padding is anywhere."""
    onnxruntime = pytest.importorskip("onnxruntime")
    net = Net(name, padded).eval()
    batch = {0: torch.export.Dim("batch", min=1)}
    example = torch.randn(3, 20, 16), torch.rand(3, 20) < 0.7
    program = torch.export.export(net, example, dynamic_shapes=(batch, batch))
    x, keep = torch.randn(5, 20, 16), torch.rand(5, 20) < 0.7
    right = net(x, keep)
    torch.testing.assert_close(program.module()(x, keep), right, atol=1e-6, rtol=1e-6)
    onnx = torch.onnx.export(program, dynamo=True, verbose=False, input_names=["x", "keep"], output_names=["y"])
    assert onnx is not None
    onnx.save(tmp_path / "net.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "net.onnx", providers=["CPUExecutionProvider"])
    given = {"x": x.numpy(), "keep": keep.numpy()}
    (found,) = session.run(None, {each.name: given[each.name] for each in session.get_inputs()})
    torch.testing.assert_close(torch.from_numpy(found), right, atol=1e-5, rtol=1e-5)
