"""Training batches whose order, and whose random numbers, follow from (seed, epoch, batch) alone.

Nothing of a random generator has to be saved: a run that is stopped anywhere and taken up again sees the same
samples and draws the same numbers as one that was never stopped, whatever was prefetched and however many
workers there are.
"""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler


def seed_all(*parts: object) -> None:
    """Seed Python, NumPy and torch from a hash of `parts`: `seed_all(seed, epoch, batch, rank)`."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    seed = int.from_bytes(digest, "little")
    random.seed(seed)
    np.random.seed(seed % 2**32)
    # `torch.manual_seed` would queue a call, with a traceback, for each device that is not in use yet: 1 ms a batch.
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)
    if torch.mps.is_available():
        torch.mps.manual_seed(seed)


class Indices(list[int]):
    """The sample numbers of one batch, with the seed that its random numbers start from."""

    key: tuple[object, ...] = ()


class ResumableBatches(Sampler[list[int]]):
    """Batch sampler that shuffles: batch `i` of epoch `e` is a pure function of (seed, e, i).

    With several processes each gets its share of every step, and all get the same number of batches, so that
    none waits for another. No sample is left out or used twice: a remainder too small to give each process
    two samples is taken into the last full step, whose batches are then larger by two at most. Batch norms cannot
    train on a single sample; where that is the size that was asked for, the remainder may be one as well.

    Subclasses that form batches in another way override `plan`.

    Args:
        num_samples: size of the data set.
        batch_size: samples in a batch of one process.
        seed: the order follows from it.
        drop_last: leave out the samples of an epoch that do not fill a batch on every process.
        rank: number of this process, from 0.
        world_size: how many processes share the data.

    Raises:
        ValueError: no samples, a batch size below 1, or too few samples for every process to get one.

    Example:
        >>> batches = ResumableBatches(8, 3, seed=0)
        >>> [len(batch) for batch in batches]
        [3, 3, 2]
    """

    def __init__(
        self,
        num_samples: int,
        batch_size: int,
        *,
        seed: int,
        drop_last: bool = False,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"--data.batch_size is {batch_size}; it must be at least 1.")
        least = batch_size * world_size if drop_last else world_size
        if num_samples < least:
            raise ValueError(
                f"{num_samples} training samples are too few: {world_size} process(es) need {least}. "
                "Use more data, a smaller --data.batch_size or fewer --trainer.devices."
            )
        self.num_samples = num_samples
        self.batch_size = batch_size
        self.seed = seed
        self.drop_last = drop_last
        self.rank = rank
        self.world_size = world_size
        self.epoch = 0
        self._resume: tuple[int, int] | None = None

    def plan(self, epoch: int) -> list[list[int]]:
        """Batches of this process in epoch `epoch`, each a list of sample numbers."""
        generator = torch.Generator().manual_seed(_hash(self.seed, epoch))
        order = torch.randperm(self.num_samples, generator=generator)
        starts = [step * self.batch_size * self.world_size for step in range(len(self))]
        steps = [order[a:b] for a, b in zip(starts, [*starts[1:], self._used], strict=True)]
        return [step.tensor_split(self.world_size)[self.rank].tolist() for step in steps]

    @property
    def sampler(self) -> ResumableBatches:
        """Where Lightning looks for `set_epoch`."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that the next iteration gives. Lightning calls this."""
        self.epoch = epoch

    def resume_at(self, epoch: int, position: int) -> None:
        """Let the next iteration, if it is of `epoch`, begin at batch `position`."""
        self._resume = (epoch, position)

    def first_batch(self) -> int:
        """Number of the batch that the next iteration begins with."""
        epoch, position = self._resume or (self.epoch, 0)
        return position if epoch == self.epoch else 0

    def __iter__(self) -> Iterator[list[int]]:
        first, self._resume = self.first_batch(), None
        epoch = self.epoch
        for position, batch in enumerate(self.plan(epoch)):
            if position >= first:
                indices = Indices(batch)
                indices.key = self.key(epoch, position)
                yield indices

    def __len__(self) -> int:
        full, rest = divmod(self.num_samples, self.batch_size * self.world_size)
        least = self.world_size * min(self.batch_size, 2)
        return full + int(full == 0 or (rest >= least and not self.drop_last))

    def key(self, epoch: int, position: int) -> tuple[object, ...]:
        """What the random numbers of a batch are seeded with."""
        return (self.seed, epoch, position, self.rank)

    @property
    def _used(self) -> int:
        per_step = self.batch_size * self.world_size
        return self.num_samples // per_step * per_step if self.drop_last else self.num_samples


def in_turn(num_samples: int, batch_size: int, *, rank: int = 0, world_size: int = 1) -> list[list[int]]:
    """Batches for evaluation, in order: every sample once over all processes, each with equally many batches.

    Fewer samples than processes are given to each process whole. Metrics are ratios of sums, which that leaves as
    they are, and no process is without a batch, for which the others would wait.

    Args:
        num_samples: size of the data set.
        batch_size: samples in a batch of one process; in the last ones of several processes at most one more.
        rank: number of this process, from 0.
        world_size: how many processes share the data.

    Example:
        >>> in_turn(5, 2), in_turn(5, 2, rank=1, world_size=2)
        ([[0, 1], [2, 3], [4]], [[3, 4]])
    """
    if num_samples < world_size:
        rank, world_size = 0, 1
    starts = _starts(num_samples, batch_size, world_size)
    steps = itertools.pairwise([*starts, num_samples])
    return [torch.arange(a, b).tensor_split(world_size)[rank].tolist() for a, b in steps]


def share_of(trainer: pl.Trainer | None) -> dict[str, int]:
    """The `rank` and `world_size` of this process, as batch samplers take them."""
    return {"rank": 0, "world_size": 1} if trainer is None else {
        "rank": trainer.global_rank, "world_size": trainer.world_size
    }  # fmt: skip


def _starts(num_samples: int, batch_size: int, world_size: int) -> list[int]:
    """Where the steps begin; a remainder too small to give each process one sample goes with the step before."""
    per_step = batch_size * world_size
    full, rest = divmod(num_samples, per_step)
    return [step * per_step for step in range(full + int(full == 0 or rest >= world_size))]


class ResumableLoader(DataLoader[Any]):
    """DataLoader over `ResumableBatches` that Lightning can stop and take up again in the middle of an epoch.

    Before samples are read, and again before a batch is handed out, the generators of Python, NumPy and torch
    are seeded from (seed, epoch, batch, rank). So what a data set draws for a sample does not depend on the
    worker that reads it, and what a training step draws (dropout, augmentation) does not depend on the steps
    before.

    Args:
        dataset: a map-style data set.
        batch_sampler: gives the batches.
        **options: as for `DataLoader`. `persistent_workers` is on whenever there are workers.

    Example:
        >>> loader = ResumableLoader(range(4), batch_sampler=ResumableBatches(4, 2, seed=0))
        >>> sorted(int(x) for batch in loader for x in batch)
        [0, 1, 2, 3]
    """

    def __init__(self, dataset: Any, *, batch_sampler: ResumableBatches, num_workers: int = 0, **options: Any) -> None:
        options.setdefault("persistent_workers", num_workers > 0)
        super().__init__(_Seeded(dataset), batch_sampler=batch_sampler, num_workers=num_workers, **options)
        self._batches = batch_sampler
        self._position = 0

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        # A generator on purpose: Lightning asks for the iterator before it has settled which epoch comes
        # next.
        epoch, self._position = self._batches.epoch, self._batches.first_batch()
        for batch in super().__iter__():
            key = self._batches.key(epoch, self._position)
            self._position += 1
            seed_all("step", *key)
            yield batch

    def state_dict(self) -> dict[str, int]:
        """Epoch, how many of its batches were handed out, how many it has, and for how many processes."""
        return {
            "epoch": self._batches.epoch,
            "position": self._position,
            "batches": len(self._batches),
            "processes": self._batches.world_size,
        }

    def again(self, epoch: int, position: int) -> tuple[list[int], Any]:
        """Numbers of the samples of a batch of this process, and the batch as it was: read and seeded anew."""
        indices = Indices(self._batches.plan(epoch)[position])
        indices.key = self._batches.key(epoch, position)
        batch = self.collate_fn(self.dataset.__getitems__(indices))
        seed_all("step", *indices.key)
        return list(indices), batch

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on where `state` was taken.

        Raises:
            ValueError: it was taken inside an epoch of another number of batches.
        """
        if 0 < state["position"] < state["batches"] != len(self._batches):
            raise ValueError(
                f"The checkpoint was taken after {state['position']} of {state['batches']} batches of an epoch, "
                f"and here an epoch has {len(self._batches)}; use the data and --data.batch_size (or "
                "batch_tokens) of then, or the best.ckpt of that run."
            )
        self._position = state["position"]
        self._batches.resume_at(state["epoch"], state["position"])


class _Seeded(Dataset[Any]):
    """A data set that seeds the generators of the process that reads it, batch by batch.

    Where the data set can read a whole batch at once (`__getitems__`, as torch has it), it does.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]

    def __getitems__(self, indices: Indices) -> Any:
        seed_all("samples", *indices.key)
        if hasattr(self.dataset, "__getitems__"):
            return self.dataset.__getitems__(indices)
        return [self.dataset[index] for index in indices]


def _hash(*parts: object) -> int:
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=7).digest(), "little")
