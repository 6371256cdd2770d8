"""Vocabularies: text to numbers and back, by the library `tokenizers`.

All kinds first bring text into one form: NFC, one space for each run of white space, none at the edges. Then

- `bpe` learns byte-pair encoding (Sennrich et al. 2016, arXiv:1508.07909) of characters inside words, numbers and
  runs of punctuation. A space belongs to what follows it, so that decoding gives back the very text;
- `words` takes what stands between white space, and knows no word that is written like a special token;
- `characters` takes single characters, spaces too.

Nothing is lower-cased. The numbers depend on the texts and the options alone, never on the process.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Literal, Self

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

PAD, BOS, EOS, UNK = range(4)
"""Padding, start, end and unknown: the first numbers of every vocabulary."""

SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>")
"""What they are called."""

Kind = Literal["bpe", "words", "characters"]

_PIECES = Regex(r" ?[\p{L}\p{M}]+| ?\p{N}+| ?[^\s\p{L}\p{M}\p{N}]+")
_ANY_CHARACTER = Regex(".")
_LIKE_SPECIAL = re.compile(rf"(?<!\S)(?:{'|'.join(SPECIAL)})(?!\S)")


class Vocabulary:
    """Tokens by number, and the rules by which a text is cut into them.

    Args:
        tokenizer: of the library `tokenizers`, with `SPECIAL` as its first four tokens.

    Raises:
        ValueError: for other first tokens, or where unknown text does not become `<unk>`.

    Example:
        >>> vocabulary = Vocabulary.train(["a b a", "a c"], kind="words", size=6)
        >>> vocabulary.encode(["b a c"])
        [[5, 4, 3]]
        >>> vocabulary.decode([5, 4, 3, 2])
        'b a <unk>'
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        first = [tokenizer.id_to_token(number) for number in range(len(SPECIAL))]
        if first != list(SPECIAL):
            raise ValueError(f"its tokens 0 to 3 are {first}; expected {', '.join(SPECIAL)} in this order.")
        model = json.loads(tokenizer.to_str())["model"]
        if model.get("unk_token") != SPECIAL[UNK] and model.get("unk_id") != UNK:
            raise ValueError(f"its token for unknown text is {model.get('unk_token')!r}; expected {SPECIAL[UNK]!r}.")
        tokenizer.no_padding()
        tokenizer.no_truncation()
        # Else a text that holds the letters "<eos>" would be given the end symbol.
        tokenizer.encode_special_tokens = True
        self._tokenizer = tokenizer

    @classmethod
    def train(cls, texts: Iterable[str], *, kind: Kind, size: int) -> Self:
        """Make the vocabulary of some texts.

        Args:
            texts: what to learn from; their order does not matter.
            kind: bpe, words or characters.
            size: how many tokens at most, the four special ones included. Rarer words are left out.

        Raises:
            ValueError: `size` is less than one token, or for bpe less than the different characters.
        """
        if size <= len(SPECIAL):
            raise ValueError(
                f"--data.vocabulary_size is {size}; expected more than {len(SPECIAL)}, which {', '.join(SPECIAL)} take."
            )
        one_form = [normalizers.NFC(), normalizers.Replace(Regex(r"\s+"), " "), normalizers.Strip()]
        options = {"vocab_size": size, "special_tokens": list(SPECIAL), "show_progress": False}
        if kind == "bpe":
            tokenizer = Tokenizer(models.BPE(unk_token=SPECIAL[UNK]))
            # The first word gets its space too: it is the same token as inside a sentence.
            one_form.append(normalizers.Prepend(" "))
            tokenizer.pre_tokenizer = pre_tokenizers.Split(_PIECES, "isolated")
            trainer = trainers.BpeTrainer(**options)
        else:
            tokenizer = Tokenizer(models.WordLevel(unk_token=SPECIAL[UNK]))
            by_character = pre_tokenizers.Split(_ANY_CHARACTER, "isolated")
            tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit() if kind == "words" else by_character
            trainer = trainers.WordLevelTrainer(**options)
            # The trainer would give such a word a second number, and take the first from it.
            texts = (_LIKE_SPECIAL.sub(" ", text) for text in texts) if kind == "words" else texts
        tokenizer.normalizer = normalizers.Sequence(one_form)
        if kind != "words":
            tokenizer.decoder = decoders.Fuse()
        tokenizer.train_from_iterator(texts, trainer)
        if tokenizer.get_vocab_size() > size:
            raise ValueError(
                f"--data.vocabulary_size is {size}, fewer than the {tokenizer.get_vocab_size()} different characters "
                "of the training texts; raise it, or use --data.tokens=words."
            )
        return cls(tokenizer)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The vocabulary that `to_json` has written, or any file of the library `tokenizers`.

        Raises:
            ValueError: it is not such a text, or not fit for translation.
        """
        try:
            tokenizer = Tokenizer.from_str(text)
        except Exception as error:  # the library raises nothing more special
            raise ValueError(f"it cannot be read as a file of the library tokenizers: {error}.") from error
        return cls(tokenizer)

    def to_json(self) -> str:
        """Everything, as text."""
        return str(self._tokenizer.to_str())

    @property
    def size(self) -> int:
        """How many tokens there are, special ones included."""
        return int(self._tokenizer.get_vocab_size())

    @cached_property
    def fingerprint(self) -> str:
        """16 hexadecimal digits; others where a token, a number or a rule differs."""
        return hashlib.blake2b(self.to_json().encode(), digest_size=8).hexdigest()

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """The numbers of each text, without start and end; `UNK` stands for what is not known."""
        encoded = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        rows = (item.ids for item in encoded)
        # A word that is written like a mark is not that mark.
        return [[max(number, UNK) for number in row] if min(row, default=UNK) < UNK else row for row in rows]

    def decode(self, ids: Sequence[int]) -> str:
        """Plain text. What follows the first `EOS` is not looked at; `BOS` and `PAD` are left out.

        Of a text whose tokens are known it gives back the very text, white space as said above.
        """
        numbers = list(ids)
        numbers = numbers[: numbers.index(EOS)] if EOS in numbers else numbers
        numbers = [number for number in numbers if number not in (PAD, BOS)]
        return str(self._tokenizer.decode(numbers, skip_special_tokens=False)).strip()

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """A label for each number, as a picture writes it on an axis: no marks of spaces, a lone space as ␣."""
        tokens = [self._tokenizer.id_to_token(number) for number in ids]
        return [token.lstrip(" ▁Ġ") or token.strip() or "␣" for token in tokens]

    def unknown_share(self, texts: Sequence[str]) -> float:
        """Share of the tokens of some texts that are unknown, from 0 to 1; 0 where there are no tokens."""
        ids = self.encode(texts)
        count = sum(map(len, ids))
        return sum(row.count(UNK) for row in ids) / count if count else 0.0
