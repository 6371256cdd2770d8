"""Our mechanisms against what others wrote: same mechanism, sizes and mask, in turn in one process, on this machine.

Forward and backward, B 1, width 512 in 8 heads, float32, no dropout. A ratio of 2 says that ours takes half the time.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.progress import track
from rich.table import Table
from torch import nn

from attnzoo import (
    LSH,
    Axial,
    Differential,
    GlobalLocal,
    Linear,
    Linformer,
    Local,
    Mask,
    MultiheadAttention,
    Nystrom,
    Performer,
    Softmax,
)
from benchmarks.machine import library, machine
from benchmarks.timing import ratio, rounds, spread
from experiments.training.tables import show_table

DIM, HEADS, WIDTH = 512, 8, 64
ROUNDS = 11

Call = Callable[[], object]


class Match(NamedTuple):
    """Ours and theirs at one length.

    Attributes:
        calls: length -> (our call, their call).
        length: T.
        efficient: whether it counts in the geometric mean over the efficient mechanisms.
    """

    calls: Callable[[int], tuple[Call, Call]]
    length: int
    efficient: bool


def _trained(module: nn.Module, *inputs: torch.Tensor, run: Callable[..., Any] | None = None) -> Call:
    """Forward and backward of a module on inputs that want gradients too."""
    call = module if run is None else run
    leaves = [x for x in (*inputs, *module.parameters()) if x.requires_grad]

    def once() -> None:
        out = call(*inputs)
        out = out[0] if isinstance(out, tuple) else out
        torch.autograd.grad(out, leaves, torch.ones_like(out), allow_unused=True)

    return once


def _tokens(length: int) -> torch.Tensor:
    return torch.randn(1, length, DIM, requires_grad=True)


def _heads(length: int, count: int = 3) -> list[torch.Tensor]:
    return [torch.randn(1, HEADS, length, WIDTH, requires_grad=True) for _ in range(count)]


def _shell(mechanism: Any = Softmax, **site: Any) -> MultiheadAttention:
    return MultiheadAttention(DIM, HEADS, mechanism, bias=False, **site)


def _torch_multihead(length: int) -> tuple[Call, Call]:
    theirs = nn.MultiheadAttention(DIM, HEADS, batch_first=True, bias=False)
    x = _tokens(length)
    return _trained(_shell(), x), _trained(theirs, x, run=lambda x: theirs(x, x, x, need_weights=False))


def _timm_attention(length: int) -> tuple[Call, Call]:
    from timm.layers import Attention

    x = _tokens(length)
    return _trained(_shell(), x), _trained(Attention(DIM, HEADS, proj_bias=False), x)


def _timm_differential(length: int) -> tuple[Call, Call]:
    from timm.layers import DiffAttention

    x = _tokens(length)
    return _trained(_shell(Differential, layer=0), x), _trained(DiffAttention(DIM, HEADS, proj_bias=False), x)


def _x_transformers(length: int) -> tuple[Call, Call]:
    from x_transformers.x_transformers import Attention

    x = _tokens(length)
    return _trained(_shell(), x), _trained(Attention(dim=DIM, dim_head=WIDTH, heads=HEADS, flash=True), x)


def _local_attention(length: int, causal: bool) -> tuple[Call, Call]:
    from local_attention import LocalAttention

    theirs = LocalAttention(window_size=256, causal=causal, exact_windowsize=True, use_rotary_pos_emb=False)
    ours = Local(HEADS, WIDTH, window=257 if causal else 513)
    heads = _heads(length)
    return _trained(ours, *heads, run=lambda q, k, v: ours(q, k, v, Mask(causal=causal))), _trained(theirs, *heads)


def _linformer(length: int) -> tuple[Call, Call]:
    from linformer import LinformerSelfAttention

    x = _tokens(length)
    ours = _shell(functools.partial(Linformer, rank=256), max_len=length)
    return _trained(ours, x), _trained(LinformerSelfAttention(DIM, seq_len=length, k=256, heads=HEADS), x)


def _performer(length: int, causal: bool) -> tuple[Call, Call]:
    from performer_pytorch.performer_pytorch import FastAttention

    theirs = FastAttention(WIDTH, causal=causal)
    ours = Performer(HEADS, WIDTH, num_features=theirs.nb_features)
    heads = _heads(length)
    return _trained(ours, *heads, run=lambda q, k, v: ours(q, k, v, Mask(causal=causal))), _trained(theirs, *heads)


def _linear_attention(length: int) -> tuple[Call, Call]:
    from linear_attention_transformer.linear_attention_transformer import causal_linear_attn

    ours = Linear(HEADS, WIDTH, feature_map="exp")
    heads = _heads(length)
    # With larger buckets theirs hides the query's own bucket; with 1 both see the same keys.
    theirs = functools.partial(causal_linear_attn, bucket_size=1)
    return _trained(ours, *heads, run=lambda q, k, v: ours(q, k, v, Mask(causal=True))), _trained(
        nn.Identity(), *heads, run=theirs
    )


def _nystrom(length: int) -> tuple[Call, Call]:
    from nystrom_attention import NystromAttention

    x = _tokens(length)
    theirs = NystromAttention(DIM, dim_head=WIDTH, heads=HEADS, num_landmarks=64, residual=False)
    return _trained(_shell(functools.partial(Nystrom, num_landmarks=64)), x), _trained(theirs, x)


def _reformer(length: int) -> tuple[Call, Call]:
    from reformer_pytorch import LSHAttention

    q, v = _heads(length, 2)
    ours = LSH(HEADS, WIDTH, bucket_size=64, num_buckets=length // 64, num_rounds=2)
    theirs = LSHAttention(bucket_size=64, n_hashes=2, attend_across_buckets=False, allow_duplicate_attention=False)

    def run(q: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return theirs(q[0], v[0])[0]

    return _trained(ours, q, v, run=lambda q, v: ours(q, q, v)), _trained(theirs, q, v, run=run)


def _axial(length: int) -> tuple[Call, Call]:
    from axial_attention import AxialAttention

    class Twice(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cat([x, x], dim=-1)

    rows = math.isqrt(length)
    theirs = AxialAttention(dim=DIM, num_dimensions=2, heads=HEADS, dim_index=-1)
    # Their axes have projections of their own, ours share them: without any on either side the work is the same.
    for axis in theirs.axial_attentions:
        axis.fn.to_q, axis.fn.to_kv, axis.fn.to_out = nn.Identity(), Twice(), nn.Identity()
    ours = Axial(HEADS, WIDTH, combine="sum", grid=(rows, rows))
    x = _tokens(length)

    def run(x: torch.Tensor) -> torch.Tensor:
        heads = x.unflatten(2, (HEADS, WIDTH)).transpose(1, 2)
        return 2 * ours(heads, heads, heads).transpose(1, 2).flatten(2)

    def grid(x: torch.Tensor) -> torch.Tensor:
        return theirs(x.unflatten(1, (rows, rows)))

    return _trained(ours, x, run=run), _trained(theirs, x, run=grid)


def _longformer(length: int) -> tuple[Call, Call]:
    from transformers import LongformerConfig
    from transformers.models.longformer.modeling_longformer import LongformerSelfAttention

    config = LongformerConfig(
        hidden_size=DIM, num_attention_heads=HEADS, attention_window=[256], attention_probs_dropout_prob=0.0
    )
    theirs = LongformerSelfAttention(config, 0)
    kind = torch.zeros(1, length)
    kind[:, 0] = 1  # the first token is global
    x = _tokens(length)

    def run(x: torch.Tensor) -> torch.Tensor:
        return theirs(
            x, attention_mask=kind, is_index_masked=kind < 0, is_index_global_attn=kind > 0, is_global_attn=True
        )[0]

    ours = _shell(functools.partial(GlobalLocal, window=257, num_global=1))
    ours.out_proj = nn.Identity()  # theirs is in another module
    return _trained(ours, x), _trained(theirs, x, run=run)


def _nystromformer(length: int) -> tuple[Call, Call]:
    from transformers import NystromformerConfig
    from transformers.models.nystromformer.modeling_nystromformer import NystromformerSelfAttention

    config = NystromformerConfig(
        hidden_size=DIM,
        num_attention_heads=HEADS,
        num_landmarks=64,
        segment_means_seq_len=length,
        conv_kernel_size=33,
        attention_probs_dropout_prob=0.0,
    )
    x = _tokens(length)
    ours = _shell(functools.partial(Nystrom, num_landmarks=64, kernel_size=33))
    ours.out_proj = nn.Identity()  # theirs is in another module
    return _trained(ours, x), _trained(NystromformerSelfAttention(config), x)


MATCHES: dict[str, Match] = {
    "MultiheadAttention, Softmax / torch nn.MultiheadAttention": Match(_torch_multihead, 1024, False),
    "MultiheadAttention, Softmax / timm Attention": Match(_timm_attention, 1024, False),
    "MultiheadAttention, Softmax / x-transformers": Match(_x_transformers, 1024, False),
    "Differential / timm DiffAttention": Match(_timm_differential, 1024, False),
    "Local / local-attention": Match(functools.partial(_local_attention, causal=False), 8192, True),
    "Local causal / local-attention": Match(functools.partial(_local_attention, causal=True), 8192, True),
    "GlobalLocal / transformers Longformer": Match(_longformer, 4096, True),
    "Linformer / linformer": Match(_linformer, 4096, True),
    "Linear causal / linear-attention-transformer": Match(_linear_attention, 2048, True),
    "Performer / performer-pytorch": Match(functools.partial(_performer, causal=False), 8192, True),
    "Performer causal / performer-pytorch": Match(functools.partial(_performer, causal=True), 2048, True),
    "Nystrom / nystrom-attention": Match(_nystrom, 8192, True),
    "Nystrom / transformers Nystromformer": Match(_nystromformer, 8192, True),
    "LSH / reformer-pytorch": Match(_reformer, 4096, True),
    "Axial / axial-attention": Match(_axial, 4096, True),
}


def measure(folder: Path, arguments: list[str]) -> int:
    """Measures what this state of the library has not measured yet, writes `result.json` and prints the table."""
    parser = argparse.ArgumentParser(prog="make reproduce FIGURE=peers", description=__doc__)
    parser.add_argument("--only", default="", help="pairs whose name has this in it; all if left out")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"pairs of runs ({ROUNDS})")
    options = parser.parse_args(arguments)
    here, now = machine(), library()
    rows = {}
    names = [name for name in MATCHES if options.only in name]
    if not names:
        parser.error(f"no pair has {options.only!r} in its name; there are: {'; '.join(MATCHES)}")
    for number, name in enumerate(track(names, "pairs")):
        path = folder / f"{list(MATCHES).index(name):02}-{options.rounds}.json"
        known = json.loads(path.read_text()) if path.is_file() else None
        if known is None or now is None or known["library"] != now or known["name"] != name:
            torch.manual_seed(number)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # what a peer says about its own code
                ours, theirs = MATCHES[name].calls(MATCHES[name].length)
            times = list(rounds({"ours": ours, "theirs": theirs}, options.rounds))
            seconds = {side: [row[side] for row in times] for side in ("ours", "theirs")}
            known = {"library": now, "name": name, "seconds": seconds}
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(known))
        seconds = known["seconds"]
        rows[name] = {
            "length": MATCHES[name].length,
            "efficient": MATCHES[name].efficient,
            **ratio(seconds["ours"], seconds["theirs"]),
            "ours": spread(seconds["ours"]),
            "theirs": spread(seconds["theirs"]),
        }
    efficient = [row["ratio"] for row in rows.values() if row["efficient"]]
    mean = math.exp(sum(map(math.log, efficient)) / len(efficient)) if efficient else None
    result = {"machine": here, "pairs": rows, "geometric_mean_of_the_efficient": mean}
    (folder / "result.json").write_text(json.dumps(result, indent=1) + "\n")
    table = Table("ours / theirs", "tokens", "ours, ms", "theirs, ms", "times faster", "95 % at least")
    for name, row in rows.items():
        middle = [f"{1000 * row[side]['median']:.1f}" for side in ("ours", "theirs")]
        table.add_row(name, str(row["length"]), *middle, f"{row['ratio']:.2f}", f"{row['lower95']:.2f}")
    show_table(table)
    if mean is not None:
        print(f"geometric mean over the efficient mechanisms: {mean:.2f}")
    return 0
