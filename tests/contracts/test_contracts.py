"""Every layer keeps every contract, or has a gap with a reason that is still true."""

import importlib
import pkgutil
from pathlib import Path

import pytest
import torch
from torch import nn

import cutslots
from cutslots.models.discovery import MODELS
from cutslots.modules.decoders import DECODERS
from cutslots.modules.encoders import ENCODERS
from cutslots.modules.partition import PARTITIONS
from cutslots.modules.slots import SLOTS
from cutslots.programs import dct
from cutslots.programs.constants import ConstantLayer
from tests.conftest import DEVICES
from tests.contracts.__main__ import page
from tests.contracts.contracts import CONTRACTS, NotApplicable
from tests.contracts.gaps import GAPS, SLOW, WITHIN
from tests.contracts.layers import LAYERS

PAGE = Path(cutslots.__file__).parents[1] / "docs" / "contracts.md"
CELLS = [
    (layer, contract)
    for contract in CONTRACTS
    for layer in LAYERS
    if (layer, contract) not in GAPS and not (contract in SLOW and layer in WITHIN)
]
# Classes that other classes derive from; they do not run by themselves.
BASES = {
    "BackboneEncoder",
    "BroadcastDecoder",
    "ConstantLayer",
    "Decoder",
    "EdgeNetPartition",
    "Encoder",
    "FeatureDecoder",
    "HalfResolutionEncoder",
    "MixtureDecoder",
    "PartModule",
    "PartitionModule",
    "PartitionSlots",
    "SlotModule",
    "SolverLayer",
    "_MinCutLayer",
}
ON_CUDA = {"FusedOperators", "OverlapOperators", "TiledOperators"}  # parts of a GridCut on a GPU


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layer, contract", CELLS, ids=[f"{contract}: {layer}" for layer, contract in CELLS])
def test_contract(layer, contract, device):
    try:
        CONTRACTS[contract].check(LAYERS[layer], device)
    except NotApplicable:
        if device == "cpu":
            raise
        pytest.skip("on CUDA this layer calls kernels where it calls a custom op on the CPU")


@pytest.mark.parametrize("layer, contract", GAPS, ids=[f"{contract}: {layer}" for layer, contract in GAPS])
def test_gap_is_still_there(layer, contract):
    """If this fails, the contract is kept: remove the gap."""
    _, error, message = GAPS[layer, contract]
    with pytest.raises(error, match=message):
        CONTRACTS[contract].check(LAYERS[layer], "cpu")


@pytest.mark.parametrize("part, whole", WITHIN.items())
def test_part_is_within_another_layer(part, whole):
    kinds = {type(m) for m in LAYERS[whole].build().modules()}
    own = [type(m) for m in LAYERS[part].build().modules() if type(m).__module__.startswith("cutslots.")]
    assert own and own[0] in kinds


def test_page_is_current():
    assert PAGE.read_text() == page(), "run python -m tests.contracts --write docs/contracts.md"


def test_every_layer_is_in_the_table():
    """All modules of the package, the parts of other plugins aside."""
    used = {type(m).__name__ for layer in LAYERS.values() for m in layer.build().modules()}
    defined = set()
    for package in ("programs", "modules", "models"):
        parent = importlib.import_module(f"cutslots.{package}")
        for info in pkgutil.iter_modules(parent.__path__, f"{parent.__name__}."):
            if info.name.endswith("_triton"):
                continue
            members = vars(importlib.import_module(info.name)).values()
            defined |= {
                c.__name__
                for c in members
                if isinstance(c, type) and issubclass(c, nn.Module) and c.__module__ == info.name
            }
    assert defined - BASES - ON_CUDA == used & defined - ON_CUDA
    assert defined >= BASES | ON_CUDA


def test_every_registered_part_is_in_the_table():
    made = {type(m) for layer in LAYERS.values() for m in layer.build().modules()}
    for registry in (ENCODERS, PARTITIONS, SLOTS, DECODERS):
        parts = {part.build for part in registry.parts.values() if part.plugin is None}
        assert parts <= made, registry.kind
    assert {name for name, part in MODELS.parts.items() if part.plugin is None} == {
        "discovery",
        "pair-discovery",
        "spacetime-discovery",
    }


@pytest.mark.parametrize("name", LAYERS)
def test_constants_outside_the_state_dict_belong_to_constant_layers(name):
    """A constant of another module would be left uninitialised by `to_empty`."""
    stack = [LAYERS[name].build()]
    while stack:
        module = stack.pop()
        if isinstance(module, ConstantLayer):
            stack += [child for child in module.children() if not isinstance(child, dct.MatmulDCT | dct.FFTDCT)]
            continue
        assert not module._non_persistent_buffers_set, type(module)
        stack += module.children()


@pytest.mark.parametrize("device", DEVICES)
def test_graph_cut_of_a_replica_follows_its_device(device):
    """`nn.DataParallel` moves buffers only. The layer computes the other constants again."""
    layer = LAYERS["GraphCut, Cholesky"]
    cut, x = layer.make(), layer.input(2)
    replica = cut._replicate_for_data_parallel()
    replica._buffers["_like"] = replica._like.to(device)
    replica._home = torch.device("meta")  # as if the original were elsewhere
    before = replica._operators
    torch.testing.assert_close(replica(x.to(device)).cpu(), cut(x))
    assert replica._operators is not before and cut._operators is before
