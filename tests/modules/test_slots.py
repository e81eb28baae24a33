import dataclasses

import pytest
import torch

from cutslots.modules.partition import (
    CutPartitionConfig,
    PartitionModule,
    SoftmaxPartition,
    SoftmaxPartitionConfig,
    SpacetimePartitionConfig,
)
from cutslots.modules.position import FULL_IMAGE, mask_positions
from cutslots.modules.slot_attention import SlotAttention
from cutslots.modules.slots import SLOTS, CutSlots, CutSlotsConfig, SlotModule, SlotsConfig, pool_projected
from tests.conftest import DEVICES


def softmax_slots(*args, **options):
    return CutSlots(*args, partition=SoftmaxPartitionConfig(), **options)


KINDS = [CutSlots, softmax_slots, SlotAttention]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [(16, 16), (7, 12), (1, 5)])
def test_shapes_and_masks(device, kind, size):
    module = kind(in_channels=8, num_slots=5, size=size, slot_dim=24).to(device)
    x = torch.randn(3, 8, *size, device=device, requires_grad=True)
    slots, masks = module(x)
    assert slots.shape == (3, 5, 24) and masks.shape == (3, 5, *size)
    assert (module.num_slots, module.slot_dim, module.position_dim) == (5, 24, 0)
    torch.testing.assert_close(masks.sum(1), torch.ones(3, *size, device=device))
    (slots.square().sum() + masks.square().sum()).backward()
    assert torch.isfinite(x.grad).all() and all(p.grad is not None for p in module.parameters())


@pytest.mark.parametrize("pool", ["image_mean", "mask_mean"])
def test_algorithm_2_written_out(pool):
    """`CutSlots` pools before the last layer of the pixel MLP. Pooling after it gives the same slots."""
    module = CutSlots(8, 4, (6, 9), slot_dim=10, pool=pool).double()
    x = torch.randn(2, 8, 6, 9, dtype=torch.double)
    slots, masks = module(x)
    embedded = x + module.position.linear(module.position.grid).permute(2, 0, 1)
    norm, linear = module.pixel_mlp[:2]
    features = module.projection(linear(norm(embedded.permute(0, 2, 3, 1))).clamp(min=0)).permute(0, 3, 1, 2)
    masked = masks[:, :, None] * features[:, None]  # r_i of algorithm 1
    share = 1.0 if pool == "image_mean" else masks.mean((2, 3))[..., None]
    r = masked.mean((3, 4)) / share
    torch.testing.assert_close(slots, module.slot_mlp(r), rtol=1e-4, atol=1e-4 if pool == "mask_mean" else 1e-9)


def test_bad_arguments():
    with pytest.raises(ValueError, match=r"^pool is 'max'; expected 'image_mean' or 'mask_mean'$"):
        CutSlots(8, 3, (8, 8), pool="max")
    for kind in KINDS:
        with pytest.raises(ValueError, match=r"features have shape \(2, 8, 8, 7\); expected \(B, 8, 8, 8\)"):
            kind(8, 3, (8, 8))(torch.randn(2, 8, 8, 7))
        with pytest.raises(ValueError, match=r"^slot_dim is 3; expected more than 3 with relative_positions$"):
            kind(8, 3, (8, 8), slot_dim=3, relative_positions=True)
        with pytest.raises(ValueError, match=r"^slot_dim is 0; expected more than 0$"):
            kind(8, 3, (8, 8), slot_dim=0)


def test_defaults_are_the_paper_s():
    """The paper has 11 slots of dimension 64, and the mean over the image."""
    common = {"num_slots": 11, "slot_dim": 64, "relative_positions": False}
    assert dataclasses.asdict(SlotsConfig()) == common
    config = CutSlotsConfig()
    of_cuts = {"feature_dim": 64, "mlp_dim": 128, "pool": "image_mean", "partition": CutPartitionConfig()}
    assert {field.name: getattr(config, field.name) for field in dataclasses.fields(config)} == common | of_cuts
    assert config.relative_positions is False


def test_a_module_without_options_is_that_of_the_default_config():
    plain = CutSlots(8, 11, (6, 9))
    built = SLOTS.build(CutSlotsConfig(), in_channels=8, size=(6, 9))
    built.load_state_dict(plain.state_dict())
    x = torch.randn(2, 8, 6, 9)
    assert torch.equal(plain(x).slots, built(x).slots)
    assert (plain.slot_dim, plain.pixel_mlp[1].out_features, plain.slot_mlp[-1].in_features) == (64, 64, 128)


def test_messages_name_the_kind_of_part():
    with pytest.raises(ValueError, match=r"^slot module is 'kmeans'; expected one of cut-slots, "):
        SLOTS["kmeans"]


@pytest.mark.parametrize("option", ["num_slots", "slot_dim", "feature_dim", "mlp_dim"])
def test_dimensions_are_positive(option):
    assert getattr(CutSlotsConfig(**{option: 1}), option) == 1
    with pytest.raises(ValueError, match=rf"^{option} is 0; expected .*from 1 to "):
        CutSlotsConfig(**{option: 0})


def test_bad_pool_in_a_config():
    assert CutSlotsConfig(pool="mask_mean").pool == "mask_mean"
    with pytest.raises(ValueError, match=r"^pool is 'max'; expected one of image_mean, mask_mean$"):
        CutSlotsConfig(pool="max")


def test_a_slot_module_of_a_plugin_has_neither_background_nor_positions_unless_it_says_so():
    module = SlotModule(3, 4)
    assert module.has_background is False and module.spacetime is False and module.content_dim == 4
    slots = torch.randn(2, 3, 4)
    assert module.with_positions(slots, torch.rand(2, 3, 6, 9)) is slots


def test_one_learned_component_is_enough():
    assert SlotModule(3, 1).content_dim == 1 and SlotModule(3, 4, relative_positions=True).content_dim == 1


def test_pooling_takes_half_precision_features_and_float32_weights():
    features, weights = torch.randn(2, 54, 8).bfloat16(), torch.rand(2, 3, 54) / 54
    projection = torch.nn.Linear(8, 5)
    pooled = pool_projected(features, weights, projection.bfloat16())
    assert pooled.dtype == torch.bfloat16
    projection.float()
    expected = weights @ projection(features.float())
    torch.testing.assert_close(pooled.float(), expected, rtol=0.02, atol=0.01)


def test_slots_of_empty_masks_are_finite():
    """The sum of a mask is offset by 1e-6, so that a mask of that size gives half of the mean."""
    module = CutSlots(8, 2, (2, 2), slot_dim=4, pool="mask_mean").double()
    module.slot_mlp = torch.nn.Identity()
    x = torch.randn(1, 8, 2, 2, dtype=torch.double)
    mask = torch.tensor([0.0, 0.25e-6], dtype=torch.double)[None, :, None, None].expand(1, 2, 2, 2)
    empty, small = module.pooled(x, mask)[0]
    mean = module.projection(module.pixel_mlp(x.flatten(2).mT)).mean(1)[0]
    assert not empty.any()
    torch.testing.assert_close(small, mean / 2)


# ----------------------------------------------------------------------------------------------------------- partitions


def test_a_partition_is_a_config_or_a_module():
    config = SoftmaxPartitionConfig(edge_net_channels=4, background="none")
    from_config = CutSlots(8, 3, (6, 9), partition=config)
    assert isinstance(from_config.partition, SoftmaxPartition) and not from_config.has_background
    assert from_config.partition.edge_net[0].out_channels == 4
    partition = SoftmaxPartition(8, 3, (6, 9))
    from_module = CutSlots(8, 3, (6, 9), partition=partition)
    assert from_module.partition is partition and from_module.has_background


def test_a_partition_of_ones_own():
    class Halves(PartitionModule):
        has_background = True

        def masks(self, x):
            left = (torch.arange(x.shape[-1]) < x.shape[-1] // 2).float().expand(len(x), 1, *x.shape[2:])
            return torch.cat([left, 1 - left], 1)

    module = CutSlots(8, 2, (4, 6), slot_dim=5, partition=Halves())
    x = torch.randn(2, 8, 4, 6)
    slots, masks = module(x)
    assert module.has_background and masks[0, 0, 0].tolist() == [1, 1, 1, 0, 0, 0]
    changed = x.clone()
    changed[..., 5] += 1
    assert torch.equal(module(changed).slots[:, 0], slots[:, 0]), "slot 0 depends on the left half only"
    assert not torch.equal(module(changed).slots[:, 1], slots[:, 1])


def test_parameter_groups_include_those_of_the_partition():
    module = CutSlots(8, 3, (6, 9))
    (group,) = module.parameter_groups()
    assert [id(p) for p in group["params"]] == [id(p) for p in module.parameters()] and group["lr_scale"] == 1.0
    module.partition.requires_grad_(False)
    (group,) = module.parameter_groups()
    frozen = {id(p) for p in module.partition.parameters()}
    assert frozen and not frozen & {id(p) for p in group["params"]}


def test_slots_of_clips_pool_each_frame():
    module = CutSlots(8, 3, (6, 9), 16, partition=SpacetimePartitionConfig())
    x = torch.randn(2, 4, 8, 6, 9)
    slots, masks = module(x)
    assert module.spacetime and slots.shape == (2, 4, 3, 16) and masks.shape == (2, 4, 3, 6, 9)
    for t in range(4):
        torch.testing.assert_close(slots[:, t], module.pooled(module.position(x[:, t]), masks[:, t]))


# --------------------------------------------------------------------------------------------------- relative positions

PARTITIONS = {
    "cuts": CutPartitionConfig(),
    "no background": CutPartitionConfig(background="none"),
    "softmax": SoftmaxPartitionConfig(),
    "softmax without background": SoftmaxPartitionConfig(background="none"),
}
RELATIVE = [
    (CutSlots, {"partition": "cuts"}),
    (CutSlots, {"partition": "cuts", "pool": "mask_mean"}),
    (CutSlots, {"partition": "no background"}),
    (CutSlots, {"partition": "softmax"}),
    (CutSlots, {"partition": "softmax without background"}),
    (SlotAttention, {}),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind, options", RELATIVE)
@pytest.mark.parametrize("size", [(16, 16), (7, 12)])
def test_slots_end_with_the_positions_of_their_masks(device, kind, options, size):
    options = options | {name: PARTITIONS[options[name]] for name in ("partition",) if name in options}
    module: SlotModule = kind(8, 5, size, slot_dim=24, relative_positions=True, **options).to(device)
    slots, masks = module(torch.randn(3, 8, *size, device=device))
    assert slots.shape == (3, 5, 24) and masks.shape == (3, 5, *size) and module.position_dim == 3
    expected = mask_positions(masks)
    assert module.has_background == (kind is CutSlots and options["partition"].background != "none")
    if module.has_background:
        full_image = slots.new_tensor(FULL_IMAGE)
        assert (slots[:, 0, -3:] == full_image).all(), "the position of the background is the image"
        assert not torch.allclose(expected[:, 0], full_image, atol=1e-6), "not that of its mask"
        slots, expected = slots[:, 1:], expected[:, 1:]
    assert torch.equal(slots[..., -3:], expected)


@pytest.mark.parametrize("kind", KINDS)
def test_other_components_are_those_of_a_shorter_slot_without_a_position(kind):
    relative, plain = kind(8, 4, (6, 6), slot_dim=11, relative_positions=True), kind(8, 4, (6, 6), slot_dim=8)
    plain.load_state_dict(relative.state_dict())
    x, outputs = torch.randn(2, 8, 6, 6), []
    for module in (relative, plain):
        torch.manual_seed(0)
        outputs.append(module(x))
    one, other = outputs
    assert torch.equal(one.masks, other.masks) and torch.equal(one.slots[..., :-3], other.slots)


@pytest.mark.parametrize("kind", [CutSlots, softmax_slots])
def test_positions_alone_train_the_edge_net(kind):
    module, x = kind(8, 4, (8, 8), slot_dim=12, relative_positions=True), torch.randn(2, 8, 8, 8)
    net = dict(module.partition.edge_net.named_parameters())
    position = module(x).slots[..., -3:]
    background = torch.autograd.grad(position[:, 0].sum(), list(net.values()), retain_graph=True)
    assert not any(gradient.any() for gradient in background), "that of the background does not depend on its mask"
    for k in range(1, 4):
        gradients = torch.autograd.grad(position[:, k].square().sum(), list(net.values()), retain_graph=True)
        for name, gradient in zip(net, gradients, strict=True):
            assert gradient.isfinite().all() and gradient.any(), (k, name)


@pytest.mark.parametrize("kind", KINDS)
def test_positions_are_float32_under_autocast(kind):
    module, x = kind(8, 4, (16, 16), slot_dim=16, relative_positions=True), torch.randn(2, 8, 16, 16)
    with torch.autocast("cpu", torch.bfloat16):
        slots, masks = module(x)
    assert slots.dtype == torch.float32 and torch.equal(slots[:, 1:, -3:], mask_positions(masks)[:, 1:])
    center = (mask_positions(masks)[:, 1:, :2] * 256).frac()
    assert center.any(), "not rounded to 8 bits"


def test_slots_of_clips_have_positions_in_every_frame():
    partition = SpacetimePartitionConfig()
    module = CutSlots(8, 4, (6, 9), slot_dim=12, relative_positions=True, partition=partition)
    slots, masks = module(torch.randn(2, 3, 8, 6, 9))
    assert slots.shape == (2, 3, 4, 12) and (slots[:, :, 0, -3:] == torch.tensor(FULL_IMAGE)).all()
    for t in range(3):
        torch.testing.assert_close(slots[:, t, 1:, -3:], mask_positions(masks[:, t])[:, 1:])
