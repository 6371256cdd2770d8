"""Vocabularies: the same numbers everywhere, the same text back, and what is unknown."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.translation import tokens
from experiments.translation.text import read_lines
from experiments.translation.tokens import BOS, EOS, PAD, SPECIAL, UNK, Kind, Vocabulary

SENTENCES = ["The dog isn't here.", "the  dogs, here", "A ▁ <eos> naïve 1984 (12.5 %)", "Ḧẅ 東京は\u3000夏"]


@pytest.mark.parametrize("name", ["clean", "crlf", "no_final_newline"])
@pytest.mark.parametrize(("side", "words"), [("src", 47), ("tgt", 50)])
def test_t07_words_do_not_depend_on_line_ends(cases: Path, name: str, side: str, words: int) -> None:
    """T07: 47 source and 50 target words, none with a carriage return, the same vocabulary."""
    made = Vocabulary.train(read_lines(cases / f"{name}.{side}"), kind="words", size=6000)
    assert made.size == words + len(SPECIAL)
    assert not any("\r" in word for word in made.pieces(range(made.size)))
    clean = Vocabulary.train(read_lines(cases / f"clean.{side}"), kind="words", size=6000)
    assert made.to_json() == clean.to_json()


ALPHABET = sorted({character for text in SENTENCES for character in text if not character.isspace()} | {" "})


@given(st.text(st.sampled_from(ALPHABET)))
def test_bpe_gives_the_very_text_back(text: str) -> None:
    assert BPE.decode(BPE.encode([text])[0]) == " ".join(text.split())


BPE = Vocabulary.train(SENTENCES * 3, kind="bpe", size=90)


def test_white_space_is_what_bpe_makes_one_of() -> None:
    (ids,) = BPE.encode([" the\u00a0dogs,\t\n here\u3000"])
    assert BPE.decode(ids) == "the dogs, here"


def test_bpe_keeps_case_and_joins_what_is_frequent() -> None:
    made = Vocabulary.train(["low lower lowest Low"] * 5, kind="bpe", size=60)
    (ids,) = made.encode(["low Low lowest"])
    assert made.pieces(ids) == ["low", "Low", "lowest"]


def test_letters_of_special_tokens_are_letters() -> None:
    """Text that holds <eos> does not end there."""
    (ids,) = BPE.encode(["here <eos> here"])
    assert not {PAD, BOS, EOS} & set(ids)
    again = Vocabulary.from_json(BPE.to_json())
    assert again.encode(["here <eos> here"]) == [ids]


def test_words_like_special_tokens_are_unknown() -> None:
    made = Vocabulary.train(["a <eos> <unk> b", "<pad>"], kind="words", size=10)
    assert made.pieces(range(made.size)) == [*SPECIAL, "a", "b"]
    assert made.encode(["<bos> a <eos> b <pad> <unk>", "x<eos>"]) == [[UNK, 4, UNK, 5, UNK, UNK], [UNK]]


def test_decoding_stops_at_the_end_and_leaves_marks_out() -> None:
    made = Vocabulary.train(["a b"], kind="words", size=10)
    ((a, b),) = made.encode(["a b"])
    assert made.decode([BOS, a, PAD, b, EOS, a, a]) == "a b"
    assert made.decode([EOS]) == made.decode([]) == ""
    assert made.pieces([BOS, a, UNK, EOS]) == ["<bos>", "a", "<unk>", "<eos>"]


def test_t11_unknown_words_are_the_unknown_symbol_and_counted(cases: Path) -> None:
    """T11: the share is what counting by hand gives."""
    texts = read_lines(cases / "unknown_words.src")
    known = {word for line in read_lines(cases / "clean.src") for word in line.split()}
    words = [word for line in texts for word in line.split()]
    share = sum(word not in known for word in words) / len(words)
    made = Vocabulary.train(read_lines(cases / "clean.src"), kind="words", size=6000)
    assert 0.4 < share < 0.5
    assert made.unknown_share(texts) == share
    rows = made.encode(texts)
    assert [len(row) for row in rows] == [len(line.split()) for line in texts]
    assert made.unknown_share(read_lines(cases / "clean.src")) == made.unknown_share([""]) == 0


def test_unknown_characters_are_counted_one_by_one() -> None:
    (ids,) = BPE.encode(["dog☃☃ ☃"])
    assert ids.count(UNK) == 3
    assert BPE.decode(ids) == "dog<unk><unk> <unk>"


def test_rare_words_are_left_out_where_the_vocabulary_is_full() -> None:
    made = Vocabulary.train(["b b b", "a a", "c"], kind="words", size=6)
    assert made.pieces(range(made.size)) == [*SPECIAL, "b", "a"]
    assert made.encode(["a b c"]) == [[5, 4, UNK]]


def test_characters_are_single_and_come_back() -> None:
    made = Vocabulary.train(["3. März 1990"], kind="characters", size=100)
    (ids,) = made.encode(["9. März"])
    assert made.pieces(ids) == ["9", ".", "␣", "M", "ä", "r", "z"]
    assert made.decode(ids) == "9. März"


PRINT = """
import runpy, sys
Vocabulary = runpy.run_path(sys.argv[1])["Vocabulary"]
texts = sys.stdin.buffer.read().decode().split("\\n")
for kind in ("bpe", "words", "characters"):
    print(Vocabulary.train(texts, kind=kind, size=150).fingerprint)
"""


def test_vocabularies_follow_from_the_texts_alone(cases: Path) -> None:
    """Trained again, from texts in another order, and by another process with another hash seed."""
    texts = SENTENCES * 2 + read_lines(cases / "clean.src") + read_lines(cases / "clean.tgt")
    kinds: tuple[Kind, ...] = ("bpe", "words", "characters")
    ours = [Vocabulary.train(texts, kind=kind, size=150).fingerprint for kind in kinds]
    assert [Vocabulary.train(texts[::-1], kind=kind, size=150).fingerprint for kind in kinds] == ours
    for seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", PRINT, str(Path(tokens.__file__))],
            input="\n".join(texts).encode(),
            capture_output=True,
            env={**os.environ, "PYTHONHASHSEED": seed},
            check=True,
            timeout=120,
        )
        assert done.stdout.decode().split() == ours


def test_fingerprints_tell_other_orders() -> None:
    """T09: the sizes agree, the numbers do not."""
    made = Vocabulary.train(["a a b"], kind="words", size=10)
    other = Vocabulary.train(["b b a"], kind="words", size=10)
    assert made.size == other.size
    assert made.fingerprint != other.fingerprint
    assert Vocabulary.from_json(made.to_json()).fingerprint == made.fingerprint
    assert len(made.fingerprint) == 16
    assert int(made.fingerprint, 16) >= 0


def test_sizes_that_cannot_be_kept_are_refused() -> None:
    with pytest.raises(ValueError, match=r"--data\.vocabulary_size is 4; expected more than 4"):
        Vocabulary.train(["a"], kind="words", size=4)
    with pytest.raises(ValueError, match=r"--data\.vocabulary_size is 6, fewer than the 8 different characters"):
        Vocabulary.train(["abc"], kind="bpe", size=6)


def test_files_of_others_are_checked() -> None:
    made = json.loads(Vocabulary.train(["a b"], kind="words", size=10).to_json())
    with pytest.raises(ValueError, match="cannot be read as a file of the library tokenizers"):
        Vocabulary.from_json("{}")
    silent = json.loads(json.dumps(made))
    silent["model"]["unk_token"] = "a"
    with pytest.raises(ValueError, match="its token for unknown text is 'a'; expected '<unk>'"):
        Vocabulary.from_json(json.dumps(silent))
    swapped = json.dumps(made).replace("<bos>", "<x>")
    with pytest.raises(ValueError, match=r"its tokens 0 to 3 are .*<x>.*; expected <pad>, <bos>, <eos>, <unk>"):
        Vocabulary.from_json(swapped)
