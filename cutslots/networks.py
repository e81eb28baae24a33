"""What surrounds the slots: encoders from image to features, decoders from slots back to images, the position code.

Shapes: B batch, K slots, D slot length, C channels, H W grid, S side of the picture.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor, nn

from cutslots.tail import Tail

START = 8  # side of the grid that a slot is broadcast to


class PositionCode(nn.Module):
    """Adds a learned linear function of (y, x, 1 - y, 1 - x) to every pixel (Slot Attention's soft position code)."""

    grid: Tensor

    def __init__(self, channels: int, size: Sequence[int]) -> None:
        super().__init__()
        yx = _coordinates(*checked_size(size))
        self.register_buffer("grid", torch.cat([yx, 1 - yx], -1), persistent=False)
        self.linear = nn.Linear(4, channels)

    def forward(self, x: Tensor, place: Tensor | None = None) -> Tensor:
        """Maps `x` (B, C, H, W); with a `place` (B, 3) for each, y and x are measured from there (see `places`)."""
        checked_map(x, self.linear.out_features, self.grid.shape[:2])
        if place is None:
            return x + self.linear(self.grid).permute(2, 0, 1)
        centre, spread = place[:, None, None, :2], place[:, None, None, 2:]
        yx = EVERYWHERE[0] + (self.grid[..., :2] - centre) * (EVERYWHERE[2] / spread)
        return x + self.linear(torch.cat([yx, 1 - yx], -1)).permute(0, 3, 1, 2)


PLACE = 3  # how many numbers say where a mask is
EVERYWHERE = (0.5, 0.5, 12**-0.5)  # where the whole picture is
NARROWEST = 0.04  # spread, for masks of a few pixels


def places(masks: Tensor) -> Tensor:
    """Where each of the masks (B, K, H, W) is: y and x of its centre and its spread (B, K, 3), in sides of the picture.

    The spread is the root mean square distance from the centre along an axis. At least in float32.
    """
    masks = masks.float() if masks.dtype in (torch.float16, torch.bfloat16) else masks
    yx = _coordinates(*masks.shape[-2:]).to(masks).flatten(0, 1)
    weight = masks.flatten(2)
    with torch.autocast(masks.device.type, enabled=False):
        weight = weight / (weight.sum(-1, keepdim=True) + 1e-6)
        centre, square = weight @ yx, weight @ yx.square()
        variance = (square - centre.square()).mean(-1, keepdim=True)
        return torch.cat([centre, variance.clamp(min=NARROWEST**2).sqrt()], -1)


def _coordinates(height: int, width: int) -> Tensor:
    axes = torch.linspace(0, 1, height), torch.linspace(0, 1, width)
    return torch.stack(torch.meshgrid(*axes, indexing="ij"), -1)


class CNNEncoder(nn.Module):
    """(B, 3, S, S) to (B, maps, S/2, S/2): convolutions with ReLU, the first of stride 2."""

    def __init__(self, maps: int = 64, kernels: Sequence[int] = (5, 5, 5, 5)) -> None:
        super().__init__()
        _checked_kernels(kernels, 1)
        layers: list[nn.Module] = []
        for i, kernel in enumerate(kernels):
            stride = 2 if i == 0 else 1
            layers += [nn.Conv2d(maps if i else 3, maps, kernel, stride, padding=kernel // 2), nn.ReLU()]
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class ResNetEncoder(nn.Module):
    """(B, 3, S, S) to (B, maps, S/2, S/2): a stem of stride 2 and one residual block for each further kernel."""

    def __init__(self, maps: int = 100, kernels: Sequence[int] = (5, 3, 3, 3, 3), norm: bool = False) -> None:
        super().__init__()
        stem, *blocks = _checked_kernels(kernels, 2)
        self.stem = nn.Sequential(*_conv(3, 64, stem, norm, stride=2), nn.ReLU())
        self.blocks = nn.Sequential(*(ResidualBlock(maps if i else 64, maps, k, norm) for i, k in enumerate(blocks)))

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(self.stem(x))


class ResidualBlock(nn.Module):
    def __init__(self, before: int, after: int, kernel: int, norm: bool) -> None:
        super().__init__()
        self.residual = nn.Sequential(
            *_conv(before, after, kernel, norm), nn.ReLU(), *_conv(after, after, kernel, norm)
        )
        self.skip = nn.Identity() if before == after else nn.Conv2d(before, after, 1)

    def forward(self, x: Tensor) -> Tensor:
        return (self.skip(x) + self.residual(x)).relu()


class Context(nn.Module):
    """Maps (B, C, H, W) with what lies further off: halved `levels` times, and brought back up level by level."""

    def __init__(self, maps: int, levels: int) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Conv2d(maps, maps, 3, stride=2, padding=1) for _ in range(levels))
        self.up = nn.ModuleList(nn.Conv2d(maps, maps, 3, padding=1) for _ in range(levels))

    def forward(self, x: Tensor) -> Tensor:
        finer = []
        for down in self.down:
            finer.append(x)
            x = down(x).relu()
        for up in self.up:
            before = finer.pop()
            x = before + up(nn.functional.interpolate(x, before.shape[-2:])).relu()
        return x


class BroadcastDecoder(nn.Module):
    """Slots (B, K, D) to colours and logits (B, K, 4, S, S): broadcast to 8x8, position code, doubled up to S.

    Slot Attention's decoder: transposed 5x5 convolutions of stride 2, `extra` 5x5 ones at full size, a 3x3 to 4 maps.
    With `placed` the last numbers of a slot are its place, which positions are measured from.
    """

    def __init__(
        self,
        slot_dim: int,
        size: int,
        maps: Sequence[int] = (64,),
        extra: int = 1,
        style: Literal["relu", "leaky"] = "relu",
        placed: bool = False,
    ) -> None:
        super().__init__()
        self.placed = placed
        slot_dim -= PLACE * placed
        self.position = PositionCode(slot_dim, (START, START))
        act = nn.ReLU if style == "relu" else nn.LeakyReLU
        widths = [slot_dim, *_widths(maps, _doublings(size))]
        layers: list[nn.Module] = []
        for before, after in pairwise(widths):
            layers += [nn.ConvTranspose2d(before, after, 5, stride=2, padding=2, output_padding=1), act()]
        for _ in range(extra):
            layers += [nn.Conv2d(widths[-1], widths[-1], 5, padding=2), act()]
        layers += [nn.Conv2d(widths[-1], 4, 3, padding=1)]
        self.layers = nn.Sequential(*layers)
        self.bounded = style == "leaky"
        self.tail = Tail(extra)

    def forward(self, slots: Tensor) -> Tensor:
        x = _broadcast(slots, self.position, self.placed)
        body = len(self.layers) - self.tail.length
        x = self.tail(self.layers[:body](x), self.layers[body:])
        x = x.unflatten(0, slots.shape[:2])
        return torch.cat([x[:, :, :3].tanh(), x[:, :, 3:]], 2) if self.bounded else x


class SubpixelDecoder(nn.Module):
    """The same, every doubling a 3x3 convolution to four times the maps, rearranged: no work at full size.

    The last doubling gives colours and logits themselves.
    """

    def __init__(self, slot_dim: int, size: int, maps: Sequence[int] = (32, 32), placed: bool = False) -> None:
        super().__init__()
        self.placed = placed
        slot_dim -= PLACE * placed
        self.position = PositionCode(slot_dim, (START, START))
        widths = [slot_dim, *_widths(maps, _doublings(size) - 1), 4]
        layers: list[nn.Module] = []
        for before, after in pairwise(widths):
            layers += [nn.Conv2d(before, 4 * after, 3, padding=1), nn.PixelShuffle(2), nn.ReLU()]
        self.layers = nn.Sequential(*layers[:-1])

    def forward(self, slots: Tensor) -> Tensor:
        return self.layers(_broadcast(slots, self.position, self.placed)).unflatten(0, slots.shape[:2])


def checked_size(size: Sequence[int]) -> tuple[int, int]:
    sides = tuple(size) if isinstance(size, Sequence) else ()
    if len(sides) != 2 or not all(isinstance(n, int) and n >= 1 for n in sides):
        raise ValueError(f"size is {size!r}; expected (H, W) with sides of at least 1")
    return sides[0], sides[1]


def checked_map(x: Tensor, channels: int, size: Sequence[int]) -> Tensor:
    if x.ndim != 4 or x.shape[1:] != (channels, *size):
        expected = ", ".join(map(str, ("B", channels, *size)))
        raise ValueError(f"features have shape {tuple(x.shape)}; expected ({expected})")
    if not x.is_floating_point():
        raise TypeError(f"features are of type {x.dtype}; expected floating point")
    return x


def _checked_kernels(kernels: Sequence[int], least: int) -> Sequence[int]:
    if len(kernels) < least or any(kernel < 1 or kernel % 2 == 0 for kernel in kernels):
        raise ValueError(f"kernels is {kernels!r}; expected an odd side for each of at least {least} layers")
    return kernels


def _conv(before: int, after: int, kernel: int, norm: bool, stride: int = 1) -> list[nn.Module]:
    conv = nn.Conv2d(before, after, kernel, stride, padding=kernel // 2, bias=not norm)
    return [conv, nn.BatchNorm2d(after)] if norm else [conv]


def _broadcast(slots: Tensor, position: PositionCode, placed: bool) -> Tensor:
    slots = slots.flatten(0, 1)
    what, where = (slots[:, :-PLACE], slots[:, -PLACE:]) if placed else (slots, None)
    x = what[:, :, None, None].expand(-1, -1, START, START)
    return position(x, where).contiguous(memory_format=torch.channels_last)


def _doublings(size: int) -> int:
    steps = math.log2(size / START) if size > 0 else 0.0
    if steps < 1 or steps != int(steps):
        raise ValueError(f"size is {size}; expected a power of two from {2 * START} on")
    return int(steps)


def _widths(maps: Sequence[int], count: int) -> list[int]:
    """The last is repeated if there are too few."""
    if not maps or any(n < 1 for n in maps):
        raise ValueError(f"maps is {maps!r}; expected at least one positive number")
    return [maps[min(i, len(maps) - 1)] for i in range(count)]
