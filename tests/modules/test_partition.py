import copy
import dataclasses
import warnings

import pytest
import torch

from cutslots import GridCut, MinCut
from cutslots.modules.partition import (
    PARTITIONS,
    CutPartitionConfig,
    KPartition,
    MinCutPartition,
    MinCutPartitionConfig,
    PartitionModule,
    SoftmaxPartition,
    SoftmaxPartitionConfig,
    SpacetimePartition,
    SpacetimePartitionConfig,
)
from tests.conftest import DEVICES
from tests.programs.literal import literal_cut

X = torch.randn(2, 8, 6, 9)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("background", ["cuts", "none"])
@pytest.mark.parametrize("combined_temperature", [None, 0.1])
def test_masks_sum_to_one(device, background, combined_temperature):
    options = {"background": background, "combined_temperature": combined_temperature}
    partition = KPartition(8, 5, (6, 9), **options).to(device)
    masks = partition.masks(X.to(device))
    assert masks.shape == (2, 5, 6, 9) and masks.dtype == torch.float32 and (masks >= 0).all()
    torch.testing.assert_close(masks.sum(1), torch.ones(2, 6, 9, device=device))
    assert partition.has_background == (background != "none") and not partition.spacetime


@pytest.mark.parametrize("anchor, background_anchor", [(0.0, None), (0.0, 0.0), (0.0, 1.0), (0.5, 0.2)])
def test_algorithm_1_written_out(anchor, background_anchor):
    """Edge weights by the network, cuts one by one, softmax at each temperature, foreground times objects."""
    anchors = {"anchor": anchor, "background_anchor": background_anchor}
    temperatures = {"temperature": 0.5, "background_temperature": 0.3, "combined_temperature": 0.2}
    partition = KPartition(8, 4, (6, 9), **temperatures, **anchors)
    parts, masks = partition(X)
    w = partition.edge_net(X).reshape(2, 5, 6, 6, 9)
    by_cut = [anchor if background_anchor is None else background_anchor] * 2 + [anchor] * 3
    p = [GridCut((6, 9), gamma=0.5, anchor=each)(w[:, i]) for i, each in enumerate(by_cut)]
    background, foreground = torch.softmax(torch.stack(p[:2]) / 0.3, 0)
    objects = torch.softmax(torch.stack(p[2:]) / 0.5, 0)
    expected = torch.softmax(torch.stack([background, *(foreground * mask for mask in objects)]) / 0.2, 0)
    torch.testing.assert_close(masks, expected.movedim(0, 1))
    for i in range(4):
        torch.testing.assert_close(parts[:, i], X * expected[i][:, None])
    torch.testing.assert_close(parts.sum(1), X, msg="the parts sum to the features")


@pytest.mark.parametrize("background", ["cuts", "none"])
def test_combined_temperature_is_of_another_softmax(background):
    """Without a background nothing is combined, and the softmax over cuts is the only one."""
    plain = KPartition(8, 4, (6, 9), background=background, combined_temperature=None)
    combined = KPartition(8, 4, (6, 9), background=background, combined_temperature=0.3)
    combined.load_state_dict(plain.state_dict())
    masks = plain.masks(X)
    expected = torch.softmax(masks / 0.3, 1) if background == "cuts" else masks
    torch.testing.assert_close(combined.masks(X), expected)


def test_softmax_partition_is_the_softmax_of_the_network():
    partition = SoftmaxPartition(8, 3, (6, 9), background="none", temperature=2.0)
    torch.testing.assert_close(partition.masks(X), torch.softmax(partition.edge_net(X) / 2, 1))


def test_softmax_partition_with_a_background():
    partition = SoftmaxPartition(8, 3, (6, 9))
    logits = partition.edge_net(X)
    pair, objects = torch.softmax(logits[:, :2] / 0.5, 1), torch.softmax(logits[:, 2:] / 0.5, 1)
    combined = torch.cat([pair[:, :1], pair[:, 1:] * objects], 1)
    torch.testing.assert_close(partition.masks(X), torch.softmax(combined / 0.1, 1))


def test_no_slot_can_win_everywhere():
    """Free terminals keep the mean of a cut near zero for any weights. The softmax partition has no such balance."""
    x = torch.randn(2, 8, 16, 16)
    cuts, softmax = (kind(8, 4, (16, 16), background="none") for kind in (KPartition, SoftmaxPartition))
    for module in (cuts, softmax):
        with torch.no_grad():
            module.edge_net[-1].bias[: module.weights_per_cut] += (
                100 * torch.tensor([0.0, 0, 0, 0, 1, 0])[-module.weights_per_cut :] + 50
            )
    assert cuts.vertices(cuts.edge_weights(x)).mean((2, 3)).abs().max() < 1.0
    assert (softmax.masks(x).argmax(1) == 0).all()


@pytest.mark.parametrize(
    "change, message",
    [
        ({"background": "sky"}, "background is 'sky'; expected one of cuts, none"),
        ({"num_slots": 1}, "num_slots is 1; expected at least 2"),
        ({"size": (6,)}, r"size is \(6,\); expected \(H, W\)"),
        ({"edge_net_kernel_sizes": (2,)}, r"edge_net_kernel_sizes is \(2,\); expected an odd integer"),
        (
            {"edge_net_kernel_sizes": ()},
            r"edge_net_kernel_sizes is \(\); expected an odd integer for each of at least 1 layers$",
        ),
        ({"temperature": 0.0}, "temperature is 0.0; expected a number from 1e-06 to 1,000,000"),
        ({"background_temperature": -1.0}, "background_temperature is -1.0; expected a number from 1e-06 to 1,000,000"),
        ({"combined_temperature": 0.0}, "combined_temperature is 0.0; expected a number from 1e-06 to 1,000,000"),
        ({"background_anchor": 1.5}, "background_anchor is 1.5; expected a number from 0 to 1, or None"),
    ],
)
def test_bad_arguments(change, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        KPartition(**({"in_channels": 8, "num_slots": 3, "size": (6, 9)} | change))


def test_bad_features():
    partition = KPartition(8, 3, (6, 9))
    with pytest.raises(ValueError, match=r"features have shape \(2, 8, 9, 6\); expected \(B, 8, 6, 9\)"):
        partition(X.mT)
    with pytest.raises(TypeError, match=r"features have dtype torch\.int64; expected a floating-point type"):
        partition(X.long())


SOFTMAX_DEFAULTS = {
    "edge_net_channels": 32,
    "edge_net_kernel_sizes": (3, 3, 1),
    "temperature": 0.5,
    "background": "cuts",
    "background_temperature": 0.5,
    "combined_temperature": 0.1,
}
CUT_DEFAULTS = SOFTMAX_DEFAULTS | {
    "signed_weights": True,
    "gamma": 0.5,
    "reach": None,
    "anchor": 0.0,
    "background_anchor": None,
}
MIN_CUT_DEFAULTS = SOFTMAX_DEFAULTS | {
    "gamma": 1.0,
    "initial_capacity": 1e-3,
    "capacity_ramp_steps": 0,
    "straight_through": False,
    "tolerance": 1e-3,
    "max_iterations": 100,
}


@pytest.mark.parametrize(
    "config, expected",
    [
        (SoftmaxPartitionConfig, SOFTMAX_DEFAULTS),
        (CutPartitionConfig, CUT_DEFAULTS),
        (SpacetimePartitionConfig, CUT_DEFAULTS),
        (MinCutPartitionConfig, MIN_CUT_DEFAULTS),
    ],
)
def test_defaults_are_the_paper_s(config, expected):
    """The paper has gamma 0.5, the temperatures 0.5, 0.5 and 0.1, and free terminals."""
    found = dataclasses.asdict(config())
    assert found == expected and found.get("signed_weights", True) is True


def test_classes_have_the_defaults_of_their_configs():
    """A partition without options has the network and the cuts of one that is built from the default config."""
    plain, built = (
        KPartition(8, 3, (6, 9)),
        PARTITIONS.build(CutPartitionConfig(), in_channels=8, num_slots=3, size=(6, 9)),
    )
    assert [layer.weight.shape for layer in plain.edge_net[::2]] == [(32, 8, 3, 3), (32, 32, 3, 3), (24, 32, 1, 1)]
    built.load_state_dict(plain.state_dict())
    assert torch.equal(plain.masks(X), built.masks(X))


@pytest.mark.parametrize(
    "option, value, expected",
    [
        ("background", "sky", "one of cuts, none"),
        ("background", "CUTS", "one of cuts, none"),
        ("anchor", -0.1, "from 0 to 1"),
        ("anchor", 1.1, "from 0 to 1"),
        ("background_anchor", 1.1, "from 0 to 1"),
    ],
)
def test_bad_options(option, value, expected):
    with pytest.raises(ValueError, match=rf"^{option} is {value!r}; expected .*{expected}"):
        CutPartitionConfig(**{option: value})


@pytest.mark.parametrize("option, value", [("background", "none"), ("anchor", 1.0), ("anchor", 0.0)])
def test_ends_of_ranges_are_allowed(option, value):
    assert getattr(CutPartitionConfig(**{option: value}), option) == value


def test_messages_name_the_kind_of_part():
    with pytest.raises(
        ValueError, match=r"^partition is 'watershed'; expected one of cut, softmax, spacetime-cut, min-cut"
    ):
        PARTITIONS["watershed"]


def test_a_partition_of_a_plugin_has_no_background_unless_it_says_so():
    module = PartitionModule()
    assert module.has_background is False and module.spacetime is False


@pytest.mark.parametrize("kind", [KPartition, SpacetimePartition])
def test_reach_is_that_of_the_cuts(kind):
    """Also for the cuts of the background, and for the cuts of clips."""
    partition = kind(8, 3, (6, 9), reach=3.0, background_anchor=1.0)
    w = torch.randn(1, 3, 6, 6, 9) if kind is KPartition else torch.randn(1, 3, 8, 2, 6, 9)
    for background, anchor in ((False, 0.0), (True, 1.0)):
        assert partition.cut_for(w, background).reach == 3.0
        expected = GridCut(w.shape[3:], reach=3.0, anchor=anchor)(w)
        torch.testing.assert_close(partition.vertices(w, background), expected)
    assert partition.cut_for(w) is partition.cut_for(w, background=False)


def test_two_slots_are_enough():
    """Background and one object: the object is the foreground."""
    partition = KPartition(8, 2, (6, 9), combined_temperature=None)
    masks = partition.masks(X)
    p = partition.vertices(partition.edge_weights(X))
    torch.testing.assert_close(masks, torch.softmax(p[:, :2] / 0.5, 1))


@pytest.mark.parametrize("signed_weights", [True, False])
def test_unsigned_weights_pass_a_relu(signed_weights):
    partition = KPartition(8, 3, (6, 9), signed_weights=signed_weights)
    w, raw = partition.edge_weights(X), partition.edge_net(X)
    assert (raw < 0).any()
    assert torch.equal(w.flatten(1, 2), raw if signed_weights else raw.clamp(min=0))


@pytest.mark.parametrize("kernel_sizes", [(1,), (5,), (7, 5, 1)])
def test_edge_net_keeps_the_size(kernel_sizes):
    partition = KPartition(8, 3, (6, 9), edge_net_kernel_sizes=kernel_sizes)
    assert [layer.kernel_size[0] for layer in partition.edge_net[::2]] == list(kernel_sizes)
    assert partition.masks(X).shape == (2, 3, 6, 9)


# ------------------------------------------------------------------------------------------ cuts through space and time


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("background", ["cuts", "none"])
@pytest.mark.parametrize("length", [1, 2, 4])
def test_masks_of_clips_sum_to_one(device, background, length):
    """Clips may have any length, whether it was prepared or not."""
    partition = SpacetimePartition(8, 5, (6, 9), background=background).to(device)
    partition.prepare(2)
    x = torch.randn(2, length, 8, 6, 9, device=device)
    parts, masks = partition(x)
    assert masks.shape == (2, length, 5, 6, 9) and masks.dtype == torch.float32 and (masks >= 0).all()
    torch.testing.assert_close(masks.sum(2), torch.ones(2, length, 6, 9, device=device))
    torch.testing.assert_close(parts.sum(2), x, msg="the parts sum to the features")
    assert partition.spacetime


@pytest.mark.parametrize("background_anchor", [None, 1.0])
@pytest.mark.parametrize("length", [1, 2, 3])
def test_algorithm_1_through_time(length, background_anchor):
    """The network on each frame alone, cuts of the clip one by one, softmax at each temperature."""
    options = {"temperature": 0.5, "background_temperature": 0.1, "background_anchor": background_anchor}
    partition = SpacetimePartition(8, 4, (6, 9), **options)
    x = torch.randn(2, length, 8, 6, 9)
    w = torch.stack([partition.edge_net(frame).reshape(2, 5, 8, 6, 9) for frame in x.unbind(1)], 3)
    anchors = [background_anchor or 0.0] * 2 + [0.0] * 3
    p = [GridCut((length, 6, 9), gamma=0.5, anchor=anchor)(w[:, i]) for i, anchor in enumerate(anchors)]
    pair = torch.softmax(torch.stack(p[:2], 2) / 0.1, 2)
    objects = torch.softmax(torch.stack(p[2:], 2) / 0.5, 2)
    masks = torch.softmax(torch.cat([pair[:, :, :1], pair[:, :, 1:] * objects], 2) / 0.1, 2)
    torch.testing.assert_close(partition.masks(x), masks)
    torch.testing.assert_close(partition(x).parts, masks[:, :, :, None] * x[:, :, None])


@pytest.mark.parametrize("no_temporal_weights", [False, True])
@pytest.mark.parametrize("length", [1, 2, 3])
def test_vertices_are_those_of_the_literal_qp(length, no_temporal_weights):
    """The QP connects frames even where the weights between them are zero."""
    partition, w = SpacetimePartition(8, 3, (4, 5)), torch.randn(2, 3, 8, length, 4, 5)
    if no_temporal_weights:
        w[:, :, :2] = 0
    expected = torch.from_numpy(literal_cut((length, 4, 5), w.double())[0]).unflatten(-1, (length, 4, 5))
    p = partition.vertices(w)
    torch.testing.assert_close(p.double(), expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(p, GridCut((length, 4, 5))(w))
    if no_temporal_weights and length > 1:
        frames = GridCut((4, 5))(w[:, :, 2:].movedim(3, 0)).movedim(0, 2)
        assert (p - frames).abs().max() > 0.01


@pytest.mark.parametrize("background", ["cuts", "none"])
def test_masks_of_a_frame_depend_on_every_frame(background):
    partition = SpacetimePartition(8, 4, (6, 9), background=background)
    x = torch.randn(2, 3, 8, 6, 9, requires_grad=True)
    for t in range(3):
        (grad,) = torch.autograd.grad(partition.masks(x)[:, t].square().sum(), x)
        assert grad.flatten(2).any(-1).all()


def test_clip_lengths_change_neither_state_nor_results():
    partition, x = SpacetimePartition(8, 3, (6, 9)), torch.randn(2, 5, 8, 6, 9)
    partition.prepare(2)
    before, names = partition.masks(x[:, :2]), list(partition.state_dict())
    partition.masks(x)
    assert torch.equal(partition.masks(x[:, :2]), before) and list(partition.state_dict()) == names
    twin = SpacetimePartition(8, 3, (6, 9))
    twin.prepare(5)
    twin.load_state_dict(partition.state_dict())
    assert torch.equal(twin.masks(x), partition.masks(x)), "the length that was prepared does not matter"


def test_layers_are_made_once_for_each_length():
    partition = SpacetimePartition(8, 3, (6, 9))
    assert partition.prepare(2) is partition.prepare(2, background=True) is partition.prepare(2)
    anchored = SpacetimePartition(8, 3, (6, 9), background_anchor=1.0)
    assert anchored.prepare(2).anchor == 0 and anchored.prepare(2, background=True).anchor == 1
    for module in (partition, anchored):
        made = len(module.clip_cuts)
        module.masks(torch.randn(1, 2, 8, 6, 9))
        assert len(module.clip_cuts) == made


def test_layers_for_clips_have_the_dtype_of_the_partition():
    partition = SpacetimePartition(8, 3, (6, 9))
    partition.prepare(2)
    partition.double()
    assert partition.masks(torch.randn(1, 2, 8, 6, 9).double()).dtype == torch.float64
    assert partition.masks(torch.randn(1, 3, 8, 6, 9).double()).dtype == torch.float64


def test_layers_for_clips_are_on_the_device_of_the_partition():
    partition = SpacetimePartition(8, 3, (6, 9)).to("meta")
    assert partition.prepare(2).device.type == "meta"


def test_bad_features_of_clips():
    partition = SpacetimePartition(8, 3, (6, 9))
    with pytest.raises(ValueError, match=r"^features have shape \(2, 8, 6, 9\); expected \(B, T, C, H, W\)$"):
        partition(torch.randn(2, 8, 6, 9))
    with pytest.raises(ValueError, match=r"^features have shape \(4, 8, 9, 6\); expected \(B, 8, 6, 9\)$"):
        partition(torch.randn(2, 2, 8, 9, 6))


# --------------------------------------------------------------------------------------------------------- minimum cuts

EXACT = {"tolerance": 1e-9, "max_iterations": 10_000}


def min_cuts(size=(6, 9), num_slots=4, **options):
    return MinCutPartition(8, num_slots, size, **({"initial_capacity": 0.03} | options))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("background", ["cuts", "none"])
@pytest.mark.parametrize("straight_through", [False, True])
def test_masks_of_minimum_cuts_sum_to_one(device, background, straight_through):
    partition = min_cuts(num_slots=5, background=background, straight_through=straight_through).to(device)
    x = X.to(device)
    parts, masks = partition(x)
    assert masks.shape == (2, 5, 6, 9) and masks.dtype == torch.float32 and (masks >= 0).all()
    torch.testing.assert_close(masks.sum(1), torch.ones(2, 6, 9, device=device))
    torch.testing.assert_close(parts, masks[:, :, None] * x[:, None])
    assert partition.has_background == (background != "none") and not partition.spacetime


@pytest.mark.parametrize("ramp", [None, 0.25])
def test_minimum_cuts_written_out(ramp):
    """Softplus capacities, a signed unary, cuts one by one, softmax at each temperature, foreground times objects."""
    temperatures = {"temperature": 0.5, "background_temperature": 0.3, "combined_temperature": 0.2}
    partition = min_cuts(gamma=2.0, **temperatures, **EXACT, capacity_ramp_steps=8 if ramp else 0).double().eval()
    if ramp:
        partition.steps.fill_(int(8 * ramp))
    x = X.double()
    raw = partition.edge_net(x).reshape(2, 5, 5, 6, 9)
    shift = torch.tensor(0.03, dtype=torch.float64).expm1().log()  # of which the softplus is 0.03
    capacity = torch.log1p(torch.exp(raw[:, :, :4] + shift)) * (ramp or 1.0)
    w = torch.cat([capacity, raw[:, :, 4:], torch.zeros_like(raw[:, :, 4:])], 2)
    cut = MinCut((6, 9), gamma=2.0, tolerance=1e-9).double()
    p = [torch.stack([cut(w[b, i]) for b in range(2)]) for i in range(5)]
    background, foreground = torch.softmax(torch.stack(p[:2]) / 0.3, 0)
    objects = torch.softmax(torch.stack(p[2:]) / 0.5, 0)
    expected = torch.softmax(torch.stack([background, *(foreground * mask for mask in objects)]) / 0.2, 0)
    torch.testing.assert_close(partition.masks(x), expected.movedim(0, 1), rtol=0, atol=1e-6)
    assert (partition.vertices(partition.edge_weights(x)).diff(dim=-1) == 0).any(), "neighbours are held together"


@pytest.mark.parametrize("background", ["cuts", "none"])
def test_without_capacities_they_are_the_softmax_partition(background):
    """At the start of the ramp bit for bit, and nearly so at the default initial capacity."""
    partition = MinCutPartition(8, 4, (6, 9), background=background, capacity_ramp_steps=10).eval()
    softmax = SoftmaxPartition(8, 4, (6, 9), background=background)
    state = {k: v for k, v in partition.state_dict().items() if k != "steps"}
    last = f"edge_net.{len(softmax.edge_net) - 1}."
    softmax.load_state_dict({k: v[4::5] if k.startswith(last) else v for k, v in state.items()})
    torch.testing.assert_close(partition.masks(X), softmax.masks(X), rtol=0, atol=1e-7)
    partition.steps.fill_(10)
    distance = (partition.masks(X) - softmax.masks(X)).abs()
    assert 0 < distance.max() < 0.05


def test_an_output_of_zero_means_the_initial_capacity():
    partition = MinCutPartition(8, 3, (6, 9), initial_capacity=0.7)
    torch.nn.init.zeros_(partition.edge_net[-1].weight)
    torch.nn.init.zeros_(partition.edge_net[-1].bias)
    w = partition.edge_weights(X)
    assert w.shape == (2, 4, 6, 6, 9)
    torch.testing.assert_close(w[:, :, :4], torch.full_like(w[:, :, :4], 0.7))
    assert not w[:, :, 4:].any()


def test_gradients_of_minimum_cuts():
    partition = min_cuts(size=(3, 4), num_slots=3, edge_net_channels=3, **EXACT).double()
    names = [name for name, _ in partition.named_parameters()]
    x = torch.randn(1, 8, 3, 4, dtype=torch.float64, requires_grad=True)

    def masks(x, *values):
        return torch.func.functional_call(partition, dict(zip(names, values, strict=True)), (x,)).masks

    assert torch.autograd.gradcheck(masks, (x, *partition.parameters()), fast_mode=True)


def test_every_capacity_and_unary_is_trained():
    partition = min_cuts(size=(12, 12))
    partition.masks(torch.randn(4, 8, 12, 12)).square().sum().backward()
    assert partition.edge_net[-1].bias.grad.view(5, 5).abs().min() > 0


@pytest.mark.parametrize("background", ["cuts", "none"])
def test_straight_through(background):
    """Masks are the largest of the soft ones, gradients those of the soft ones."""
    hard = min_cuts(background=background, straight_through=True)
    soft = copy.deepcopy(hard)
    soft.straight_through = False
    masks, weight = soft.masks(X), torch.randn(2, 4, 6, 9)
    expected = torch.zeros_like(masks).scatter(1, masks.argmax(1, keepdim=True), 1.0)
    found = hard.masks(X)
    torch.testing.assert_close(found, expected)
    assert (found[expected == 0] == 0).all()
    for one, other in zip(
        torch.autograd.grad((found * weight).sum(), list(hard.parameters())),
        torch.autograd.grad((masks * weight).sum(), list(soft.parameters())),
        strict=True,
    ):
        torch.testing.assert_close(one, other)


def test_capacities_grow_with_the_steps_of_training():
    partition = min_cuts(capacity_ramp_steps=4)
    full = min_cuts()
    full.load_state_dict({k: v for k, v in partition.state_dict().items() if k != "steps"})
    capacities = full.edge_weights(X)[:, :, :4]
    for step in range(6):
        torch.testing.assert_close(partition.edge_weights(X)[:, :, :4], min(1, step / 4) * capacities)
        partition.eval().masks(X)
        assert partition.steps == step, "evaluation does not count"
        partition.train().masks(X)
    assert "steps" not in full.state_dict()


def test_the_ramp_resumes_from_the_state():
    one = min_cuts(capacity_ramp_steps=10)
    for _ in range(3):
        one(X)
    other = min_cuts(capacity_ramp_steps=10)
    other.load_state_dict(one.state_dict())
    assert other.steps == 3 and copy.deepcopy(other).half().steps.dtype == torch.int64
    for _ in range(2):
        assert torch.equal(one.masks(X), other.masks(X))
    assert other.steps == one.steps == 5


def test_compiled_training_counts_too():
    partition = min_cuts(capacity_ramp_steps=10)
    compiled = torch.compile(copy.deepcopy(partition), backend="aot_eager", fullgraph=True)
    for step in range(3):
        torch.testing.assert_close(compiled(X).masks, partition(X).masks)
        assert compiled.steps == partition.steps == step + 1


def test_few_iterations_are_no_warning():
    partition = min_cuts(initial_capacity=50.0, max_iterations=1)
    with warnings.catch_warnings(action="error"):
        assert partition.masks(X).isfinite().all()


@pytest.mark.parametrize(
    "change, message",
    [
        ({"initial_capacity": 0.0}, "initial_capacity is 0.0; expected a number from 1e-06"),
        ({"capacity_ramp_steps": -1}, "capacity_ramp_steps is -1; expected at least 0"),
        ({"tolerance": 0.0}, "tolerance is 0.0; expected a number between 0 and 1"),
        ({"max_iterations": 0}, "max_iterations is 0; expected an integer from 1"),
        ({"gamma": 0.0}, "gamma is 0.0; expected a number from 1e-06"),
        ({"background": "sky"}, "background is 'sky'; expected one of cuts, none"),
    ],
)
def test_bad_arguments_of_minimum_cuts(change, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        min_cuts(**change)
