"""RandAugment and TrivialAugment on single pictures of a batch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from loaded import images, ready
from PIL import Image
from torch import Tensor
from torchvision.transforms import v2

from experiments.vision.augment import Augment
from experiments.vision.loading import DecodedPictures
from experiments.vision.policies import PolicyName

POLICIES = ("randaugment", "trivialaugment")


def ramp(channels: int, count: int) -> Tensor:
    """The same picture over and over: brighter to the right and to the bottom."""
    one = torch.arange(16)[:, None] * 8 + torch.arange(16) * 7
    return one.to(torch.uint8).expand(count, channels, 16, 16).contiguous()


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("channels", [1, 3])
def test_each_picture_of_a_batch_has_its_own_draw(name: PolicyName, channels: int) -> None:
    samples = Augment(policy=name).on_reading(DecodedPictures(ramp(channels, 64), [k % 3 for k in range(64)]))
    batch = samples.__getitems__(list(range(64)))
    assert (batch["image"].shape, batch["image"].dtype) == ((64, channels, 16, 16), torch.uint8)
    assert batch["label"].tolist() == [k % 3 for k in range(64)]
    assert len({picture.numpy().tobytes() for picture in batch["image"]}) > 20


def test_the_operations_are_those_of_torchvision() -> None:
    samples = DecodedPictures(ramp(3, 2), [0, 1])
    made = {
        "randaugment": v2.RandAugment(3, 12, fill=[0.0]),
        "trivialaugment": v2.TrivialAugmentWide(fill=[0.0]),
    }
    for name in POLICIES:
        ours = Augment(policy=name, policy_operations=3, policy_magnitude=12).on_reading(samples)
        for seed in range(5):
            torch.manual_seed(seed)
            found = [ours[0]["image"], ours[1]["image"]]
            torch.manual_seed(seed)
            assert torch.equal(torch.stack(found), torch.stack([made[name](picture) for picture in samples.images]))


@pytest.fixture
def ramps(make_tree: Callable[..., Path]) -> Path:
    root = make_tree({"train/a": 12, "train/b": 12, "val/a": 2}, size=(16, 16))
    for path in root.rglob("*.png"):
        Image.fromarray(ramp(3, 1)[0].permute(1, 2, 0).numpy()).save(path)
    return root


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_r14_draws_follow_from_the_seed_whoever_reads_and_validation_has_none(ramps: Path) -> None:
    def epoch(workers: int, seed: int = 0) -> Tensor:
        data = ready(path=ramps, batch_size=8, num_workers=workers, augment=Augment(policy="randaugment"))
        data.order_seed = seed
        assert torch.equal(images(data.val_dataloader()), ramp(3, 2))
        return images(data.train_dataloader())

    first = epoch(0)
    assert len({picture.numpy().tobytes() for picture in first}) > 8
    assert torch.equal(epoch(0), first)
    assert torch.equal(epoch(2), first)
    assert not torch.equal(epoch(0, seed=1), first)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy": "rand"}, r"policy is 'rand'; expected one of none, randaugment, trivialaugment"),
        ({"policy_operations": 0}, "policy_operations is 0"),
        ({"policy_magnitude": 31}, "policy_magnitude 31; expected 1 or more, and 0 to 30"),
    ],
)
def test_a_policy_that_cannot_be_is_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Augment(**options)  # type: ignore[arg-type]
