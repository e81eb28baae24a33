"""The cells of the table that are not "yes", with the reason. Tests check that each is still a gap."""

from __future__ import annotations

from tests.contracts.layers import LAYERS

NO_OPS = "The layer has no custom op. It consists of torch's own operations."
FIRST_DERIVATIVES = (
    "The fused functions have first derivatives only. A decoder calls them on CUDA in half precision. In float32, and "
    "under `torch.func`, it runs layer by layer and has derivatives of any order."
)
NO_TRAINING = (
    "An exported program has the outputs of the fused functions, but not their gradients. Export a decoder in float32."
)
RANDOM = (
    "Slot Attention, which the `Discovery` of this table contains, samples its slots. torch's older vmap, which this "
    'function uses, does not run random operations. Use `torch.func.jacfwd(f, randomness="same")`.'
)

WITH_OPS = [
    "GraphCut, Cholesky",
    "GraphCut, CG",
    "EqualityQP, sparse",
    "GraphOCLPartition",
    "GraphOCLSlots",
    "FusedDecoderHead",
]

GAPS: dict[tuple[str, str], str] = {
    ("FusedDecoderHead", "gradgradcheck"): FIRST_DERIVATIVES,
    ("FusedDecoderHead", "torch.export"): NO_TRAINING,
    ("SlotAttention", "batched forward mode"): RANDOM,
    ("Discovery", "batched forward mode"): RANDOM,
} | {(name, "torch.library.opcheck"): NO_OPS for name in LAYERS if name not in WITH_OPS}

# To compile or export a layer takes seconds. These layers are compiled and exported as a part of another one.
WITHIN = {
    "GridCut, clip": "SpacetimeDiscovery",
    "SoftPositionEmbedding": "PairDiscovery",
    "CNNEncoder": "PairDiscovery",
    "ResNetEncoder": "Discovery",
    "KPartition": "PairDiscovery",
    "SpacetimePartition": "SpacetimeDiscovery",
    "GraphOCLPartition": "GraphOCLSlots",
    "CutSlots": "PairDiscovery",
    "SlotAttention": "Discovery",
    "SpatialBroadcastDecoder": "PairDiscovery",
    "PixelShuffleDecoder": "Discovery",
    "GraphOCLDecoder": "SpacetimeDiscovery",
}
SLOW = ("torch.compile", "torch.export")
