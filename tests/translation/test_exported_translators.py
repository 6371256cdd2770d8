"""A translator as files for other programs: they translate as the checkpoint does."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from tokenizers import Tokenizer

from experiments.__main__ import main
from experiments.training.exporting import TOLERANCE, write_part
from experiments.translation.bahdanau import Bahdanau
from experiments.translation.embedding import Words
from experiments.translation.exporting import parts
from experiments.translation.tokens import BOS, EOS, PAD, UNK
from experiments.translation.transformer import Transformer

WORDS = Words(12, 14, joint=False)


@pytest.mark.parametrize("position", ["rope", "learned"])
@pytest.mark.slow
def test_a_transformer_is_exported_for_any_lengths(position: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    network = Transformer(WORDS, dim=16, encoder_depth=1, decoder_depth=1, num_heads=2, position=position).eval()
    encoder, decoder = parts(network, WORDS.source_size)
    assert max(write_part(encoder, tmp_path).values()) < TOLERANCE
    assert max(write_part(decoder, tmp_path).values()) < TOLERANCE
    run = {name: onnxruntime.InferenceSession(tmp_path / f"{name}.onnx").run for name in ("encoder", "decoder")}
    source = torch.tensor([[5, 6, 7, 8, 9, 10, 2], [7, 2, 0, 0, 0, 0, 0]])
    (context,) = run["encoder"](None, {"source": source.numpy()})
    for length in (1, 2, 9):
        target = torch.randint(4, 14, (2, length)).index_fill(1, torch.tensor([0]), BOS)
        given = {"target": target.numpy(), "source": source.numpy(), "context": context}
        (found,) = run["decoder"](None, given)
        right = network(target, source)[0].log_softmax(-1)
        np.testing.assert_allclose(found, right.detach().numpy(), atol=1e-5)


@pytest.mark.slow
def test_bahdanau_is_exported_as_steps(tmp_path: Path) -> None:
    torch.manual_seed(0)
    network = Bahdanau(WORDS, dim=8, hidden_dim=8, max_len=9).eval()
    for part in parts(network, WORDS.source_size):
        assert max(write_part(part, tmp_path).values()) < TOLERANCE
    run = {name: onnxruntime.InferenceSession(tmp_path / f"{name}.onnx").run for name in ("encoder", "decoder")}
    source = torch.tensor([[5, 6, 2, 0, 0, 0, 0, 0, 0]])
    annotations, state = run["encoder"](None, {"source": source.numpy()})
    target = torch.tensor([[BOS, 5, 6, 7]])
    right = network(target, source)[0].log_softmax(-1).detach()
    for place in range(target.shape[1]):
        given = {"target": target[:, place : place + 1].numpy(), "source": source.numpy(), "annotations": annotations}
        found, state = run["decoder"](None, {**given, "state": state})
        np.testing.assert_allclose(found, right[:, place].numpy(), atol=1e-5)


@pytest.mark.slow
def test_the_command_writes_all_that_a_translation_needs(cases: Path, tmp_path: Path) -> None:
    """Greedy decoding by the files alone gives what the checkpoint gives."""
    import experiments

    sets = [f"--data.{part}=[{cases / 'clean'}.src,{cases / 'clean'}.tgt]" for part in ("train", "val", "test")]
    network = ["--model.dim=16", "--model.encoder_depth=1", "--model.decoder_depth=1", "--trainer.max_epochs=3"]
    options = [*sets, *network, "--data.tokens=words", "--data.cache=null", "--run.wandb=false", "--run.samples=0"]
    assert main(["fit", "--config=translator", *options, f"--run.root={tmp_path}", "--trainer.accelerator=cpu"]) == 0
    (checkpoint,) = tmp_path.glob("*/*/checkpoints/best.ckpt")
    folder = tmp_path / "out"
    assert main(["export", f"--ckpt={checkpoint}", f"--out={folder}"]) == 0
    run = {name: onnxruntime.InferenceSession(folder / f"{name}.onnx").run for name in ("encoder", "decoder")}
    words = {side: Tokenizer.from_file(str(folder / f"{side}_vocabulary.json")) for side in ("source", "target")}
    line = "the red house is small ."
    source = np.array([[*words["source"].encode(line).ids, EOS]])
    (context,) = run["encoder"](None, {"source": source})
    right = experiments.load(checkpoint).translate([line], beam=1)[0][0].tokens
    assert right
    target = [BOS]
    for _ in right:
        given = {"target": np.array([target]), "source": source, "context": context}
        words_only = run["decoder"](None, given)[0][0, -1]
        words_only[[PAD, BOS, UNK]] = -np.inf
        target.append(int(words_only.argmax()))
    assert target[1:] == right
    assert "<bos>" in (folder / "README.txt").read_text()
