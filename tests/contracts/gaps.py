"""The cells of the table that are not "yes", with the reason. Tests check that each is still a gap."""

from __future__ import annotations

from typing import NamedTuple

from tests.contracts.contracts import NotApplicable
from tests.contracts.layers import LAYERS


class Gap(NamedTuple):
    reason: str
    error: type[Exception]  # that the check raises
    message: str  # in that error


NO_OPS = Gap("The layer has no custom op. It consists of torch's own operations.", NotApplicable, "")
FIRST_DERIVATIVES = Gap(
    "The fused functions have first derivatives only. A decoder calls them on CUDA in half precision. In float32, and "
    "under `torch.func`, it runs layer by layer and has derivatives of any order.",
    NotImplementedError,
    "first derivatives only",
)
NO_TRAINING = Gap(
    "An exported program has the outputs of the fused functions, but not their gradients. Export a decoder in float32.",
    RuntimeError,
    "no autograd formula was registered",
)
RANDOM = Gap(
    "Slot Attention, which the `Discovery` of this table contains, samples its slots. torch's older vmap, which this "
    'function uses, does not run random operations. Use `torch.func.jacfwd(f, randomness="same")`.',
    RuntimeError,
    "random operations inside of vmap",
)

FUSED_ATTENTION = (
    "transformers calls torch's fused attention, which has first derivatives in reverse mode only. "
    '`encoder.backbone.set_attn_implementation("eager")` has all, with a softmax in float32. A frozen encoder needs '
    "derivatives only of its images."
)
NO_FORWARD_MODE = Gap(FUSED_ATTENTION, NotImplementedError, "forward AD")
NO_SECOND_DERIVATIVES = Gap(FUSED_ATTENTION, RuntimeError, "_scaled_dot_product_flash_attention_for_cpu_backward")
WITH_VIT = ["ViTEncoder, fine-tuned", "ViTEncoder, frozen", "Discovery of features"]

WITH_OPS = [
    "GraphCut, Cholesky",
    "GraphCut, CG",
    "MinCut",
    "GraphMinCut",
    "EqualityQP, sparse",
    "MinCutPartition",
    "GraphOCLPartition",
    "GraphOCLSlots",
    "FusedDecoderHead",
]

GAPS: dict[tuple[str, str], Gap] = {
    ("FusedDecoderHead", "gradgradcheck"): FIRST_DERIVATIVES,
    ("FusedDecoderHead", "torch.export"): NO_TRAINING,
    ("SlotAttention", "batched forward mode"): RANDOM,
    ("Discovery", "batched forward mode"): RANDOM,
} | {(name, "gradgradcheck"): NO_SECOND_DERIVATIVES for name in WITH_VIT}
GAPS |= {
    (name, contract): NO_FORWARD_MODE
    for name in WITH_VIT
    for contract in ("gradcheck, forward mode", "batched forward mode", "torch.func")
}
GAPS |= {(name, "torch.library.opcheck"): NO_OPS for name in LAYERS if name not in WITH_OPS}

# To compile or export a layer takes seconds. These layers are compiled and exported as a part of another one.
WITHIN = {
    "GridCut, clip": "SpacetimeDiscovery",
    "SoftPositionEmbedding": "PairDiscovery",
    "CNNEncoder": "PairDiscovery",
    "ResNetEncoder": "Discovery",
    "ViTEncoder, frozen": "Discovery of features",
    "MLPDecoder": "Discovery of features",
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
