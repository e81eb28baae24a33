"""The kinds of masks that a model gives, listed once: their names, metric prefixes and descriptions.

The command line shows these names and descriptions, so this module does not import torch. `refinement.py` computes the
masks.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

MaskKind = Literal["refined", "high-recall", "decoder"]  # the keys of MASK_KINDS, for annotations and option values
VideoMaskKind = Literal["refined", "decoder"]  # the high-recall step is for images
DEFAULT_MASK_KIND: MaskKind = "refined"


class MaskKindInfo(NamedTuple):
    """What is known about a kind of masks."""

    prefix: str  # its metrics are called prefix + "ari", prefix + "miou", ...
    description: str


MASK_KINDS: dict[str, MaskKindInfo] = {
    "decoder": MaskKindInfo("", "Masks of the decoder, unchanged."),
    "refined": MaskKindInfo(
        "refined_",
        "Decoder masks updated with the evidence of each pixel, similar slots merged, weighed by colors, cut along "
        "edges, without fragments, with missed objects added.",
    ),
    "high-recall": MaskKindInfo(
        "high_recall_", "Refined masks with the background down-weighted: fewer objects are missed, outlines are wider."
    ),
}
