"""The preset graph-ocl against the network of the authors' released code (github.com/alpz/graph-ocl).

Their network is restated here from its description, as functions of weights under their names: float64, the cut as
the explicit QP of all variables. Random weights are converted and must give the same outputs and gradients.
"""

import functools

import numpy as np
import pytest
import torch
from scipy import sparse
from scipy.sparse.linalg import splu
from torch import nn
from torch.nn import functional as F

from cutslots.models.discovery import build
from cutslots.models.graph_ocl import BUFFERS, convert_graph_ocl
from cutslots.modules.graph_ocl import GraphOCLPartition
from cutslots.training.presets import PRESETS

GAMMA = 0.5


# -------------------------------------------------------------------------------------------------------- their program


@functools.cache
def their_qp(height, width):
    """Return the factored KKT system, its right-hand side for c = 0, and the number of variables that are not slacks.

    Variables: p of source, sink and pixels; d of the edges source -> pixel, pixel -> sink, then pixel -> pixel in the
    directions down, right, up, left, for every pixel; a slack for each constraint d_uv - p_u + p_v - s_uv = 0. Border
    pixels have no such constraint for their neighbours. The last row says p_source - p_sink = 10, without slack.
    """
    pixels = height * width
    inner = np.arange(pixels).reshape(height, width)[1:-1, 1:-1].ravel()
    first = 2 + pixels  # edge variable
    constraints = []  # edge, tail, head
    for direction, step in enumerate((width, 1, -width, -1)):
        constraints += [(first + (2 + direction) * pixels + v, 2 + v, 2 + v + step) for v in inner]
    constraints += [(first + v, 0, 2 + v) for v in range(pixels)]
    constraints += [(first + pixels + v, 2 + v, 1) for v in range(pixels)]
    d, tail, head = np.array(constraints).T
    rows, variables = np.arange(len(d)), 2 + 7 * pixels
    A = sparse.lil_array((len(d) + 1, variables + len(d)))
    A[rows, d], A[rows, tail], A[rows, head], A[rows, variables + rows] = 1, -1, 1, -1
    A[len(d), 0], A[len(d), 1] = 1, -1
    kkt = sparse.csc_matrix(sparse.block_array([[GAMMA * sparse.eye_array(A.shape[1]), A.T], [A, None]]))
    # An ordering for symmetric matrices keeps the factor sparse.
    symmetric = {"permc_spec": "MMD_AT_PLUS_A", "diag_pivot_thresh": 0.0, "options": {"SymmetricMode": True}}
    b = np.zeros(len(kkt.indptr) - 1)
    b[-1] = 10
    return splu(kkt, **symmetric), b, variables


class TheirCut(torch.autograd.Function):
    """Return all variables but slacks for weights (batch, 6, H, W): a symmetric linear map, plus a constant."""

    @staticmethod
    def forward(ctx, w):
        ctx.shape = w.shape
        factor, b, variables = their_qp(*w.shape[2:])
        rhs = np.tile(b, (len(w), 1))
        rhs[:, variables - w[0].numel() : variables] -= w.flatten(1).numpy()
        return torch.from_numpy(factor.solve(rhs.T)[:variables].T)

    @staticmethod
    def backward(ctx, gradient):
        factor, b, variables = their_qp(*ctx.shape[2:])
        rhs = np.zeros((len(gradient), len(b)))
        rhs[:, :variables] -= gradient.numpy()
        z = factor.solve(rhs.T)[variables - ctx.shape[1:].numel() : variables].T
        return torch.from_numpy(z).reshape(ctx.shape)


def their_masks(objects, foreground):
    """Return masks (B, K, H, W) of the weights (B, 6 (K - 1), H, W) and (B, 6, H, W), in their order of channels."""
    batch, _, *size = objects.shape
    pixels = size[0] * size[1]
    p = TheirCut.apply(objects.reshape(-1, 6, *size))[:, 2 : 2 + pixels].reshape(batch, -1, *size)
    z = TheirCut.apply(foreground)
    d_s, d_t = z[:, 2 + pixels : 2 + 2 * pixels], z[:, 2 + 2 * pixels : 2 + 3 * pixels]
    front = torch.softmax(torch.stack([d_s, d_t], 1), 1)[:, :1].reshape(batch, 1, *size)
    masks = torch.cat([1 - front, front * torch.softmax(p / 0.5, 1)], 1)
    return torch.softmax(masks / 0.1, 1)


# -------------------------------------------------------------------------------------------------------- their network


def their_weights(num_slots=12):
    """Return random weights by their names."""
    weights = {}

    def add(name, *shape, bias=True, fan=None, gain=1.0):
        weights[f"{name}.weight"] = torch.randn(shape) * gain / np.sqrt(fan or np.prod(shape[1:]))
        if bias:
            weights[f"{name}.bias"] = torch.randn(shape[0] if fan is None else shape[1]) / 4

    def add_norm(name, channels, batch_norm=True):
        weights[f"{name}.weight"], weights[f"{name}.bias"] = 1 + torch.randn(channels) / 9, torch.randn(channels) / 9
        if batch_norm:
            weights[f"{name}.running_mean"], weights[f"{name}.running_var"] = (
                torch.randn(channels),
                torch.rand(channels) + 1,
            )
            weights[f"{name}.num_batches_tracked"] = torch.tensor(7)

    add("encoder.conv1", 64, 3, 5, 5, bias=False)
    add_norm("encoder.bn1", 64)
    for i in range(4):
        for j, channels in ((1, 100 if i else 64), (2, 100)):
            add(f"encoder.layer{i + 1}.0.conv{j}", 100, channels, 3, 3, bias=False)
            add_norm(f"encoder.layer{i + 1}.0.bn{j}", 100)
    add("encoder.layer1.0.shortcut.0", 100, 64, 1, 1, bias=False)
    add_norm("encoder.layer1.0.shortcut.1", 100)
    add("slot_cut.in_pos_embedding.dense", 100, 4)
    weights["slot_cut.in_pos_embedding.grid"] = torch.zeros(1, 64, 64, 4)
    add_norm("slot_cut.norm_inputs", 100, batch_norm=False)
    for name, cuts in (("weights_net", num_slots - 1), ("weights_net_fg", 1)):
        add(f"slot_cut.{name}.0", 100, 100, 3, 3)
        add(f"slot_cut.{name}.2", 6 * cuts, 100, 3, 3)
    for name in ("k_net2", "k_net2_2", "k_net2_3"):
        add(f"slot_cut.{name}.0", 256, 100)
        add(f"slot_cut.{name}.2", 64, 256, gain=4.0)  # masks divide it by up to 12
    for name in ("mlp", "mlp2", "mlp3"):
        add(f"slot_cut.{name}.0", 128, 64)
        add(f"slot_cut.{name}.2", 64, 128)
    for i in range(4):
        add(f"decoder.{i}.0", 64, 64, 5, 5, fan=64 * 25 / 4, gain=1.4)
    for i in (0, 2):
        add(f"decoder.4.{i}", 64, 64, 5, 5, fan=64 * 25, gain=1.4)
    add("decoder.4.4", 64, 4, 3, 3, fan=64 * 9)
    add("decoder_pos_embedding.dense", 64, 4)
    weights["decoder_pos_embedding.grid"] = torch.zeros(1, 8, 8, 4)
    return weights


class Theirs:
    """Their network as a function of weights."""

    def __init__(self, weights, training=False):
        self.weights, self.training = weights, training

    def conv(self, name, x, stride=1):
        weight = self.weights[f"{name}.weight"]
        return F.conv2d(x, weight, self.weights.get(f"{name}.bias"), stride, padding=weight.shape[-1] // 2)

    def linear(self, name, x):
        return F.linear(x, self.weights[f"{name}.weight"], self.weights[f"{name}.bias"])

    def mlp(self, name, x):
        return self.linear(f"{name}.2", self.linear(f"{name}.0", x).relu())

    def batch_norm(self, name, x):
        mean, var, weight, bias = (
            self.weights[f"{name}.{each}"] for each in ("running_mean", "running_var", "weight", "bias")
        )
        return F.batch_norm(x, mean.clone(), var.clone(), weight, bias, self.training)

    def embed(self, name, x):
        """Add a linear function of (y, x, 1 - y, 1 - x)."""
        height, width = x.shape[2:]
        down = torch.linspace(0, 1, height)[:, None].expand(height, width)  # float32 in every precision
        right = torch.linspace(0, 1, width).expand(height, width)
        grid = torch.stack([down, right, 1 - down, 1 - right], -1).to(x)
        return x + self.linear(f"{name}.dense", grid).permute(2, 0, 1)

    def encode(self, x):
        x = self.batch_norm("encoder.bn1", self.conv("encoder.conv1", x, stride=2)).relu()
        for i in range(1, 5):
            block = f"encoder.layer{i}.0"
            skip = self.batch_norm(f"{block}.shortcut.1", self.conv(f"{block}.shortcut.0", x)) if i == 1 else x
            x = self.batch_norm(f"{block}.bn1", self.conv(f"{block}.conv1", x)).relu()
            x = (skip + self.batch_norm(f"{block}.bn2", self.conv(f"{block}.conv2", x))).relu()
        return x

    def slots(self, features):
        """Return slots (B, K, D) and masks."""
        x = self.embed("slot_cut.in_pos_embedding", features)
        w = [
            self.conv(f"{net}.2", F.leaky_relu(self.conv(f"{net}.0", x), 0.01)).relu()
            for net in ("slot_cut.weights_net", "slot_cut.weights_net_fg")
        ]
        masks = their_masks(*w)
        norm = self.weights["slot_cut.norm_inputs.weight"], self.weights["slot_cut.norm_inputs.bias"]
        pixels = F.layer_norm(x.permute(0, 2, 3, 1), x.shape[1:2], *norm)
        s = [
            torch.einsum("bkhw,bhwd->bkd", masks, self.mlp(f"slot_cut.{net}", pixels)) / masks[0, 0].numel()
            for net in ("k_net2", "k_net2_2", "k_net2_3")
        ]
        added = [self.mlp(f"slot_cut.{net}", each) for net, each in zip(("mlp", "mlp2", "mlp3"), s, strict=True)]
        return s[0] + sum(added), masks

    def decode(self, slots):
        """Return colors in [-1, 1] and masks."""
        x = slots.flatten(0, 1)[:, :, None, None].expand(-1, -1, 8, 8)
        x = self.embed("decoder_pos_embedding", x)
        names = [*(f"decoder.{i}.0" for i in range(4)), "decoder.4.0", "decoder.4.2", "decoder.4.4"]
        for i, name in enumerate(names):
            weight, bias = self.weights[f"{name}.weight"], self.weights[f"{name}.bias"]
            stride, padding = (2 if i < 4 else 1), weight.shape[-1] // 2
            x = F.conv_transpose2d(x, weight, bias, stride, padding, output_padding=stride - 1)
            x = F.leaky_relu(x, 0.01) if name != names[-1] else x
        x = x.unflatten(0, slots.shape[:2])
        return x[:, :, :3].tanh(), x[:, :, 3].softmax(1)


def preset(weights):
    """Return our model with their weights."""
    model = build(PRESETS["graph-ocl"].model)
    model.load_state_dict(convert_graph_ocl(weights))
    return model


# ---------------------------------------------------------------------------------------------------------------- tests


def test_the_same_weights_give_the_same_outputs():
    weights, image = their_weights(), torch.rand(1, 3, 128, 128)
    theirs, ours = Theirs(weights), preset(weights).eval()
    with torch.no_grad():
        output = ours(image)
        exact = Theirs({name: value.double() for name, value in weights.items()})
        slots, partition_masks = exact.slots(exact.encode(image.double() * 2 - 1))
        colors, masks = theirs.decode(slots.float())
    expected = {
        "slots": slots,
        "partition_masks": partition_masks,
        "masks": masks,
        "slot_reconstructions": (colors + 1) / 2,
        "reconstruction": ((colors * masks[:, :, None]).sum(1) + 1) / 2,
    }
    for name, value in expected.items():
        torch.testing.assert_close(getattr(output, name).double(), value.double(), rtol=1e-5, atol=1e-5, msg=name)
    assert partition_masks.std() > 0.05 and masks.std() > 0.01, "the masks are not trivial"


def test_gradients_convert_as_weights_do():
    """With the statistics of the batch, in float64, up to the slots."""
    weights = {name: value.double() for name, value in their_weights().items()}
    for name in weights:
        weights[name].requires_grad_(name.endswith(("weight", "bias")))
    ours, image = preset(weights).double().train(), torch.rand(1, 3, 128, 128, dtype=torch.double)
    theirs, direction = Theirs(weights, training=True), torch.randn(1, 12, 64, dtype=torch.double)
    slots, _ = theirs.slots(theirs.encode(image * 2 - 1))
    (slots * direction).sum().backward()
    same = ours.encode(image).slots
    torch.testing.assert_close(same, slots, rtol=0, atol=1e-10)
    (same * direction).sum().backward()
    gradients = convert_graph_ocl(
        {name: torch.zeros_like(v) if v.grad is None else v.grad for name, v in weights.items()}
    )
    for name, parameter in ours.named_parameters():
        if not name.startswith("decoder"):
            assert gradients[name].any(), name
            torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-8, atol=1e-10, msg=name)


def test_gradients_of_the_decoder_convert_as_weights_do():
    """Kernels are flipped and transposed, and so are their gradients. Two slots are enough."""
    weights = {name: value.double() for name, value in their_weights().items()}
    for name in weights:
        weights[name].requires_grad_(name.startswith("decoder"))
    ours, slots = preset(weights).double(), torch.randn(1, 2, 64, dtype=torch.double)
    colors, masks = Theirs(weights).decode(slots)
    reconstruction = (colors * masks[:, :, None]).sum(1) / 2 + 0.5
    direction = torch.randn_like(reconstruction)
    (reconstruction * direction).sum().backward()
    (ours.decode(slots).reconstruction * direction).sum().backward()
    gradients = convert_graph_ocl(
        {name: torch.zeros_like(v) if v.grad is None else v.grad for name, v in weights.items()}
    )
    for name, parameter in ours.decoder.named_parameters(prefix="decoder"):
        assert gradients[name].any(), name
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-8, atol=1e-10, msg=name)


@pytest.mark.parametrize("size", [(3, 3), (6, 9), (16, 16)])
def test_partition_equals_the_literal_qp(size):
    """Whatever is imposed on p_source - p_sink changes no mask."""
    partition, x = GraphOCLPartition(8, 4, size, edge_net_channels=5).double(), torch.randn(2, 8, *size).double()
    w = [net(x).relu().unflatten(1, (-1, 6)) for net in (partition.object_net, partition.foreground_net)]
    right, left, down, up, source, sink = range(6)
    in_their_order = [each[:, :, [source, sink, down, right, up, left]].flatten(1, 2) for each in w]
    torch.testing.assert_close(partition.masks(x), their_masks(*in_their_order), rtol=0, atol=1e-10)


def test_parameters_of_every_part():
    model = build(PRESETS["graph-ocl"].model)
    slots = model.slots
    parts = {
        "encoder": [model.encoder],
        "position": [slots.position],
        "edge nets": [slots.partition],
        "pixels": [slots.norm, slots.pixel_mlps],
        "slots": [slots.slot_mlps],
        "decoder": [model.decoder],
    }
    counts = {
        name: sum(p.numel() for module in modules for p in module.parameters()) for name, modules in parts.items()
    }
    expected = {"encoder": 700_728, "position": 500, "edge nets": 245_072, "pixels": 127_112, "slots": 49_728}
    assert counts == expected | {"decoder": 617_412}
    assert sum(p.numel() for p in model.parameters()) == sum(counts.values()) == 1_740_552


def test_initial_scales_are_those_of_their_layers():
    """All layers start as PyTorch's: uniform values up to a bound, which the largest of many is close to."""
    initial = {name: value for name, value in their_weights().items() if name not in BUFFERS}
    for layer in [name.removesuffix(".weight") for name, value in initial.items() if value.ndim > 1]:
        shape = initial[f"{layer}.weight"].shape
        kind = nn.Linear if len(shape) == 2 else nn.ConvTranspose2d if layer.startswith("decoder") else nn.Conv2d
        channels, bias = shape[:2] if kind is nn.ConvTranspose2d else shape[1::-1], f"{layer}.bias" in initial
        made = kind(*channels, *shape[3:], bias=bias).state_dict()
        initial |= {f"{layer}.{name}": value for name, value in made.items()}
    model, theirs = build(PRESETS["graph-ocl"].model), convert_graph_ocl(initial)
    for layer, module in model.named_modules():
        for name, value in module.named_parameters(f"{layer}", recurse=False):
            if isinstance(module, nn.Conv2d | nn.ConvTranspose2d | nn.Linear) and value.numel() > 4:
                assert value.abs().max().item() == pytest.approx(theirs[name].abs().max().item(), rel=0.2), name
    last = model.decoder.layers[-1]
    assert 1 / 24 < last.weight.abs().max() <= 1 / 6 and 1 / 24 < last.bias.abs().max() <= 1 / 6, "four times ours"


# ------------------------------------------------------------------------------------------------------------ converter


def test_names_may_have_the_prefix_of_their_lightning_module():
    weights = their_weights()
    prefixed, plain = convert_graph_ocl({f"model.{k}": v for k, v in weights.items()}), convert_graph_ocl(weights)
    assert prefixed.keys() == plain.keys() and all(torch.equal(prefixed[name], plain[name]) for name in plain)
    assert plain.keys() == build(PRESETS["graph-ocl"].model).state_dict().keys()


def test_other_weights_are_refused():
    weights = their_weights()
    with pytest.raises(ValueError, match=r"^state_dict holds 'head\.weight'; expected the weights of graph-ocl's"):
        convert_graph_ocl(weights | {"head.weight": torch.zeros(1)})
    del weights["decoder.4.4.weight"]
    with pytest.raises(
        ValueError, match=r"^state_dict lacks decoder\.4\.4\.weight; expected the weights of graph-ocl's"
    ):
        convert_graph_ocl(weights)
