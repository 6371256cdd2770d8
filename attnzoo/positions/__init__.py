"""Position encodings, and where each of them acts.

| name         | class              | acts on                     | any length | learned |
|--------------|--------------------|-----------------------------|------------|---------|
| sinusoidal   | Sinusoidal         | added to the embeddings     | yes        | no      |
| learned      | Learned            | added to the embeddings     | max_len    | yes     |
| rope         | Rotary             | q and k, neighbour pairs    | yes        | no      |
| rope_halves  | Rotary             | q and k, pairs half a width apart | yes  | no      |
| alibi        | Alibi              | the scores, by offset       | yes        | no      |
| t5           | T5Bias             | the scores, by offset       | yes        | yes     |
| offset       | RelativeBias       | the scores, by offset       | yes        | yes     |
| shaw         | Shaw               | keys and values, by offset  | yes        | yes     |
| sincos_2d    | Sinusoidal2D       | added to the embeddings     | yes        | no      |
| learned_2d   | Learned2D          | added to the embeddings     | resized()  | yes     |
| rope_2d      | Rotary2D           | q and k, rows and columns   | yes        | no      |
| swin         | SwinBias           | the scores, by row and column | the grid | yes     |

``added`` and ``inside`` make those of the first eight names.

A place is counted among the real tokens of a row (``Mask.positions``), so padding on either side changes
nothing; what acts by offset counts slots, which is the same unless padding stands between real tokens. Angles and
penalties are made in float32 whatever the model's precision, on the fly: nothing computed is saved.

An encoding of one's own acts inside the attention if it is a ``Turning`` (of q and k), a ``Relative`` (a number for
each head and offset) or another kind of ``ScoreTerms``.
"""

from attnzoo.positions.absolute import Learned, Learned2D, Sinusoidal, Sinusoidal2D, sinusoids
from attnzoo.positions.grid import SwinBias
from attnzoo.positions.inside import ScoreTerms, Turning, check_places
from attnzoo.positions.names import PositionName, added, inside
from attnzoo.positions.relative import Alibi, Relative, RelativeBias, T5Bias
from attnzoo.positions.rotary import Rotary, Rotary2D, halves_to_neighbours
from attnzoo.positions.shaw import Shaw

__all__ = [
    "Alibi",
    "Learned",
    "Learned2D",
    "PositionName",
    "Relative",
    "RelativeBias",
    "Rotary",
    "Rotary2D",
    "ScoreTerms",
    "Shaw",
    "Sinusoidal",
    "Sinusoidal2D",
    "SwinBias",
    "T5Bias",
    "Turning",
    "added",
    "check_places",
    "halves_to_neighbours",
    "inside",
    "sinusoids",
]
