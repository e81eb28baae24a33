"""The parts of the authors' released code by themselves. tests/models/test_graph_ocl.py compares them with theirs."""

import pytest
import torch
from torch import nn

from cutslots.modules.graph_ocl import (
    GraphOCLCutConfig,
    GraphOCLDecoder,
    GraphOCLPartition,
    GraphOCLSlots,
    inner_edges,
    inner_weights,
)
from cutslots.modules.partition import SoftmaxPartitionConfig
from cutslots.modules.position import FULL_IMAGE, mask_positions
from tests.conftest import DEVICES
from tests.modules.layers import convolutions, count_modules

# ----------------------------------------------------------------------------------------------------------- partition


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("size", [(8, 8), (6, 9), (3, 3), (2, 5), (1, 1)])
def test_masks_sum_to_one(device, size):
    partition, x = GraphOCLPartition(8, 5, size).to(device), torch.randn(2, 8, *size, device=device)
    masks = partition.masks(x)
    assert masks.shape == (2, 5, *size) and masks.dtype == torch.float32 and (masks > 0).all()
    torch.testing.assert_close(masks.sum(1), torch.ones(2, *size, device=device))
    assert partition.has_background and not partition.spacetime


def test_inner_edges_leave_every_pixel_that_has_four_neighbours():
    height, width = 5, 7
    edges = {(int(u), int(v)) for u, v in inner_edges((height, width))}
    steps = {(0, 1), (0, -1), (1, 0), (-1, 0)}
    inner = [(y, x) for y in range(1, height - 1) for x in range(1, width - 1)]
    assert edges == {(y * width + x, (y + dy) * width + x + dx) for y, x in inner for dy, dx in steps}


def test_inner_weights_are_in_the_order_of_inner_edges():
    """The weight of an edge holds its tail and its channel; the channels are those of `GridCut`."""
    height, width = 4, 5
    pixel = torch.arange(height * width).reshape(height, width)
    w = inner_weights(torch.stack([100 * channel + pixel for channel in range(6)]))
    steps = [1, -1, width, -width]  # right, left, down, up
    edges = inner_edges((height, width))
    assert w[: len(edges)].tolist() == [100 * steps.index(v - u) + u for u, v in edges.tolist()]
    assert torch.equal(w[len(edges) :].reshape(2, height, width), torch.stack([400 + pixel, 500 + pixel]))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"num_slots": 1}, "num_slots is 1; expected at least 2"),
        ({"size": (6,)}, r"size is \(6,\); expected \(H, W\)"),
        ({"size": (512, 513)}, r"size is \(512, 513\); expected at most 262,144 feature pixels for graph-ocl-cut"),
        ({"edge_net_kernel_sizes": (2,)}, r"edge_net_kernel_sizes is \(2,\); expected an odd integer"),
        ({"temperature": 0.0}, "temperature is 0.0; expected a number from 1e-06 to 1,000,000"),
        ({"combined_temperature": -1.0}, "combined_temperature is -1.0; expected a number from 1e-06 to 1,000,000"),
        ({"gamma": 0.0}, "gamma is 0.0; expected a number from 1e-06 to 1,000,000"),
    ],
)
def test_bad_arguments(change, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        GraphOCLPartition(**({"in_channels": 8, "num_slots": 3, "size": (6, 9)} | change))


def test_bad_features():
    with pytest.raises(ValueError, match=r"features have shape \(2, 8, 9, 6\); expected \(B, 8, 6, 9\)"):
        GraphOCLPartition(8, 3, (6, 9)).masks(torch.randn(2, 8, 9, 6))


# --------------------------------------------------------------------------------------------------------- slot module


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("size", [(16, 16), (7, 12), (1, 5)])
def test_shapes_and_gradients(device, size):
    module = GraphOCLSlots(8, 5, size, slot_dim=24).to(device)
    x = torch.randn(3, 8, *size, device=device, requires_grad=True)
    slots, masks = module(x)
    assert slots.shape == (3, 5, 24) and masks.shape == (3, 5, *size) and module.has_background
    (slots.square().sum() + masks.square().sum()).backward()
    assert torch.isfinite(x.grad).all() and all(p.grad is not None for p in module.parameters())


def test_any_partition_and_relative_positions():
    module = GraphOCLSlots(8, 5, (6, 9), 24, relative_positions=True, partition=SoftmaxPartitionConfig())
    slots, masks = module(torch.randn(2, 8, 6, 9))
    assert (slots[:, 0, -3:] == torch.tensor(FULL_IMAGE)).all()
    assert torch.equal(slots[:, 1:, -3:], mask_positions(masks)[:, 1:])


def test_masks_are_float32_under_autocast():
    module, x = GraphOCLSlots(8, 4, (8, 8)), torch.randn(2, 8, 8, 8)
    expected = module(x)
    with torch.autocast("cpu", torch.bfloat16):
        slots, masks = module(x)
    assert masks.dtype == torch.float32 and slots.isfinite().all()
    torch.testing.assert_close(masks, expected.masks, rtol=0, atol=0.05)


def test_defaults_are_those_of_the_released_code():
    module = GraphOCLSlots(100, 12, (8, 8))
    assert [net[0].out_features for net in (*module.pixel_mlps, *module.slot_mlps)] == 3 * [256] + 3 * [128]
    assert GraphOCLCutConfig() == GraphOCLCutConfig(100, (3, 3), 0.5, 0.5, 0.1)
    nets = [module.partition.object_net, module.partition.foreground_net]
    assert [convolutions(net) for net in nets] == [
        [("conv", 100, 100, 3, 1), ("conv", 100, channels, 3, 1)] for channels in (66, 6)
    ]
    assert count_modules(module.partition, nn.LeakyReLU) == 2 and count_modules(module.partition, nn.ReLU) == 0


# ------------------------------------------------------------------------------------------------------------- decoder


def test_decoder():
    net = GraphOCLDecoder(64, (128, 128))
    assert convolutions(net) == [
        *4 * [("transposed", 64, 64, 5, 2)],
        *2 * [("conv", 64, 64, 5, 1)],
        ("conv", 64, 4, 3, 1),
    ]
    assert count_modules(net, nn.LeakyReLU) == 6 and count_modules(net, nn.ReLU) == 0


def test_tanh_bounds_colors_but_not_logits():
    net = GraphOCLDecoder(8, (32, 32), channels=(8,), extra_layers=1)
    with torch.no_grad():
        net.layers[-1].bias.fill_(3.0)
        colors, logits = net.components(torch.randn(1, 2, 8)).split([3, 1], dim=2)
    assert 0.9 < colors.abs().max() <= 1 and logits.max() > 1
