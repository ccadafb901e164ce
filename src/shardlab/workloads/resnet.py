"""ResNet: the published architecture, with the stem that suits images of 32 x 32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from shardlab.config import DataConfig
from shardlab.errors import UsageError, unknown
from shardlab.workloads import images
from shardlab.workloads.base import Workload, classification_loss, classify
from shardlab.workloads.batchnorm import SyncBatchNorm2d

SHAPE, CLASSES = (3, 32, 32), 10
DEPTHS = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3)}  # blocks in each of four stages
STEMS = ("cifar", "imagenet")
SIZES = {"tiny": 8, "standard": 64}  # the first stage's channels: for a CPU, and as published

Norm = Callable[[int], nn.Module]


class Basic(nn.Module):
    """Two 3x3 convolutions beside a shortcut (ResNet-18, 34)."""

    EXPANSION = 1

    def __init__(self, inputs: int, width: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, width, 3, stride, padding=1, bias=False)
        self.bn1 = norm(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = norm(width)
        self.downsample = _shortcut(inputs, width, stride, norm)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        return F.relu(y + self.downsample(x))


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1, four times as many channels at the end (ResNet-50)."""

    EXPANSION = 4

    def __init__(self, inputs: int, width: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.bn1 = norm(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.bn2 = norm(width)
        self.conv3 = nn.Conv2d(width, 4 * width, 1, bias=False)
        self.bn3 = norm(4 * width)
        self.downsample = _shortcut(inputs, 4 * width, stride, norm)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        y = F.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        return F.relu(y + self.downsample(x))


def _shortcut(inputs: int, outputs: int, stride: int, norm: Norm) -> nn.Module:
    if stride == 1 and inputs == outputs:
        return nn.Identity()
    return nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), norm(outputs))


class ResNet(nn.Module):
    """Names and initialisation are torchvision's, so that its weights load."""

    def __init__(
        self,
        depth: int = 18,
        width: int = 64,
        classes: int = CLASSES,
        stem: str = "cifar",
        norm: Norm = nn.BatchNorm2d,
    ) -> None:
        super().__init__()
        kind: Any = Bottleneck if depth >= 50 else Basic
        if stem == "cifar":  # images of 32 x 32 have no pixels to throw away
            self.conv1 = nn.Conv2d(3, width, 3, padding=1, bias=False)
            self.maxpool: nn.Module = nn.Identity()
        else:
            self.conv1 = nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False)
            self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        self.bn1 = norm(width)
        inputs = width
        for stage, blocks in enumerate(DEPTHS[depth]):
            channels = width * 2**stage
            layers = []
            for block in range(blocks):
                stride = 2 if stage > 0 and block == 0 else 1
                layers.append(kind(inputs, channels, stride, norm))
                inputs = channels * kind.EXPANSION
            setattr(self, f"layer{stage + 1}", nn.Sequential(*layers))
        self.fc = nn.Linear(inputs, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:  # (batch, 3, height, width)
        x = self.maxpool(F.relu(self.bn1(self.conv1(x))))
        for stage in range(1, 5):
            x = self.get_submodule(f"layer{stage}")(x)
        logits: Tensor = self.fc(x.mean((2, 3)))  # (batch, classes)
        return logits


def resnet_cifar10(
    data: DataConfig,
    *,
    size: str = "standard",
    depth: int = 18,
    width: int | None = None,
    stem: str = "cifar",
    sync_batchnorm: bool = False,
    dataset: str | None = None,
    augment: bool | None = None,
) -> Workload:
    """ResNet-18, 34 or 50 on CIFAR-10; BatchNorm for each rank, or with sync_batchnorm for all."""
    if depth not in DEPTHS:
        raise UsageError(f"resnet_cifar10's depth is 18, 34 or 50, got {depth}")
    if size not in SIZES:
        raise unknown("resnet_cifar10 size", size, SIZES)
    width = SIZES[size] if width is None else width
    if width < 1:
        raise UsageError(f"resnet_cifar10's width must be at least 1, got {width}")
    if stem not in STEMS:
        raise unknown("resnet_cifar10 stem", stem, STEMS)

    def augments(name: str, is_synthetic: bool) -> bool:
        return (name == "cifar10" and not is_synthetic) if augment is None else augment

    found = images.datasets("resnet_cifar10", "cifar10", dataset, data, SHAPE, augments)
    norm: Norm = SyncBatchNorm2d if sync_batchnorm else nn.BatchNorm2d
    stages = enumerate(DEPTHS[depth], start=1)
    return Workload(
        name=f"resnet{depth}{'' if width == 64 else f'w{width}'}-{found.name}",
        make_model=lambda: ResNet(depth, width, stem=stem, norm=norm),
        loss=classification_loss,
        dataset=found.train,
        blocks=tuple(f"layer{stage}.{i}" for stage, blocks in stages for i in range(blocks)),
        held_out=found.test,
        evaluate=classify,
        flops_per_sample=images.flops(ResNet, SHAPE, depth, width, CLASSES, stem),
        couples_ranks="sync_batchnorm" if sync_batchnorm else None,
        data=found.about,
        chosen=found.chosen,
    )
