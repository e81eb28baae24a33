"""Layers, parts and models that are built on the meta device, copied or pickled compute what the original computes."""

import copy
import pickle

import numpy as np
import pytest
import torch
from scipy import sparse

from cutslots.models.discovery import MODELS, build
from cutslots.modules.decoder_head import FusedDecoderHead
from cutslots.modules.decoders import DECODERS
from cutslots.modules.encoders import ENCODERS
from cutslots.modules.partition import PARTITIONS
from cutslots.modules.position import SoftPositionEmbedding
from cutslots.modules.slots import SLOTS
from cutslots.programs import dct
from cutslots.programs.constants import ConstantLayer
from cutslots.programs.graph_cut import GraphCut
from cutslots.programs.grid_cut import GridCut
from cutslots.programs.matching import Matching
from cutslots.programs.qp import EqualityQP, SolverLayer
from tests.models.configs import CONFIGS, random_input

CYCLE = np.array([[0, 1], [1, 2], [2, 0]])
DENSE_A = np.array([[1.0, 1.0, 1.0], [1.0, -1.0, 0.0]])

LAYERS = {
    "grid cut": (lambda: GridCut((6, 5), reach=2.0, anchor=0.3), (2, 6, 6, 5)),
    "grid cut of clips": (lambda: GridCut((3, 6, 5)), (8, 3, 6, 5)),
    "graph cut": (lambda: GraphCut(CYCLE, 3), (2, 9)),
    "dense graph cut": (lambda: GraphCut(CYCLE, 3, solver="inverse"), (2, 9)),
    "dense qp": (lambda: EqualityQP(DENSE_A, [1.0, 0.0]), (2, 3)),
    "sparse qp": (lambda: EqualityQP(sparse.csr_array(DENSE_A), [1.0, 0.0]), (2, 3)),
    "matching": (lambda: Matching(3, 4), (2, 3, 4)),
    "position embedding": (lambda: SoftPositionEmbedding(4, (6, 5)), (2, 4, 6, 5)),
}


def own(registry):
    """Return the names of the parts of this package; other tests register plugins."""
    return [name for name, part in registry.parts.items() if part.plugin is None]


def make_part(registry, name):
    """Return a function that builds a part, and the shape of its input."""
    config = registry[name].config()
    if registry is ENCODERS:
        return lambda: registry.build(config), (2, 3, 12, 10)
    if registry is DECODERS:
        return lambda: registry.build(config, slot_dim=8, position_dim=3, image_size=(12, 10)), (2, 3, 8)
    given = {"in_channels": 4, "size": (6, 5)}
    if registry is SLOTS:
        return lambda: registry.build(config, **given), (2, 4, 6, 5)
    frames = (3,) if name == "spacetime-cut" else ()
    return lambda: registry.build(config, num_slots=3, **given), (2, *frames, 4, 6, 5)


PARTS = {
    f"{registry.kind} {name}": make_part(registry, name)
    for registry in (ENCODERS, SLOTS, PARTITIONS, DECODERS)
    for name in own(registry)
}
MODEL_PARTS = {name: (lambda c=config: build(c), random_input(config).shape) for name, config in CONFIGS.items()}
ALL = LAYERS | PARTS | MODEL_PARTS


def outputs(module, x):
    """Return the outputs as a list. Slot Attention samples its slots from the same seed every time."""
    torch.manual_seed(0)
    with torch.no_grad():
        out = module.eval().masks(x) if hasattr(module, "masks") else module.eval()(x)
    return [out] if isinstance(out, torch.Tensor) else list(out)


def assert_same(one, other, x):
    for a, b in zip(outputs(one, x), outputs(other, x), strict=True):
        assert a.device == b.device and a.isfinite().all() and torch.equal(a, b)
    ours, theirs = dict(one.named_buffers()), dict(other.named_buffers())
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert torch.equal(value, theirs[name]), name


@pytest.fixture(params=ALL)
def case(request):
    make, shape = ALL[request.param]
    torch.manual_seed(1)
    return make, make(), torch.rand(shape)


def on_meta(make):
    with torch.device("meta"):
        return make()


@pytest.fixture
def empty_is_nan(monkeypatch):
    """Let `to_empty` fill memory with NaN. Without this it may by chance get memory that holds the right values."""
    empty_like = torch.empty_like

    def empty_like_nan(tensor, *args, **options):
        out = empty_like(tensor, *args, **options)
        return out.fill_(torch.nan) if out.is_floating_point() and out.device.type != "meta" else out

    monkeypatch.setattr(torch, "empty_like", empty_like_nan)


def test_to_empty_then_load(case, empty_is_nan):
    make, original, x = case
    module = on_meta(make).to_empty(device="cpu")
    module.load_state_dict(original.state_dict(), strict=True)
    assert_same(original, module, x)


def test_load_by_assignment(case):
    make, original, x = case
    module = on_meta(make)
    module.load_state_dict(original.state_dict(), strict=True, assign=True)
    for a, b in zip(outputs(original, x), outputs(module, x), strict=True):
        assert torch.equal(a, b)


def test_to_empty_of_a_module_that_is_not_on_meta(case, empty_is_nan):
    make, original, x = case
    module = make().to_empty(device="cpu")
    module.load_state_dict(original.state_dict(), strict=True)
    assert_same(original, module, x)


def test_deepcopy(case):
    _, original, x = case
    assert_same(original, copy.deepcopy(original), x)


def test_deepcopy_on_meta(case):
    make, original, x = case
    module = copy.deepcopy(on_meta(make)).to_empty(device="cpu")
    module.load_state_dict(original.state_dict(), strict=True)
    assert_same(original, module, x)


def test_pickle(case):
    _, original, x = case
    assert_same(original, pickle.loads(pickle.dumps(original)), x)


def test_there_and_back(case):
    """Constants are computed again, so a detour over half precision does not round them."""
    make, original, x = case
    module = make()
    module.load_state_dict(original.state_dict())
    module.half().float().load_state_dict(original.state_dict())
    assert_same(original, module, x)


def test_layers_of_the_fft_size(monkeypatch):
    monkeypatch.setitem(dct.MAX_DCT_MATMUL_SIZE, "cpu", 4)
    make, shape = LAYERS["grid cut"]
    assert isinstance(make()._dct, dct.FFTDCT)
    module, x = on_meta(make).to_empty(device="cpu"), torch.rand(shape)
    assert_same(make(), module, x)
    assert_same(make(), pickle.loads(pickle.dumps(module)), x)


def test_fused_decoder_head():
    make = lambda: FusedDecoderHead(1)
    head, original = on_meta(make).to_empty(device="cpu"), make()
    assert torch.equal(head.upsample_taps, original.upsample_taps)
    assert torch.equal(head.conv_taps, original.conv_taps)


def test_every_registered_part_is_tested():
    used = {type(m) for make, _ in ALL.values() for m in make().modules()}
    layers = {c for c in subclasses(ConstantLayer) if c.__module__.startswith("cutslots.")} - {SolverLayer}
    assert layers <= used
    assert {type(config) for config in CONFIGS.values()} >= {MODELS[name].config for name in own(MODELS)}


def subclasses(kind):
    return {kind} - {ConstantLayer} | {each for child in kind.__subclasses__() for each in subclasses(child)}


def test_constants_outside_the_state_dict_belong_to_constant_layers():
    """A constant of another module would be left uninitialised by `to_empty`."""
    for make, _ in ALL.values():
        stack = [make()]
        while stack:
            module = stack.pop()
            if isinstance(module, ConstantLayer):
                stack += [child for child in module.children() if not isinstance(child, dct.MatmulDCT | dct.FFTDCT)]
                continue
            assert not module._non_persistent_buffers_set, type(module)
            stack += module.children()
