"""Results that the paper reports (Pervez et al., 2023, tables 1 and 3), to show next to ours.

The paper evaluates on CLEVR, CLEVRTEX and MOVi-A. The built-in scenes imitate these datasets but differ from them, so
next to results on built-in scenes the published ones are a reference, not a comparison.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

PAPER = "Pervez et al. (2023)"
SLOT_ATTENTION = "Slot Attention"


class PublishedResult(NamedTuple):
    """A row of the paper's tables. ARI and mIoU are in percent."""

    dataset: str
    method: str
    metrics: dict[str, float]


PUBLISHED: dict[str, list[PublishedResult]] = {  # by the name of the dataset in --data
    "clevr": [
        PublishedResult("CLEVR", SLOT_ATTENTION, {"miou": 36.61, "ari_fg": 95.89, "mse": 23}),
        PublishedResult("CLEVR", PAPER, {"miou": 49.04, "ari_fg": 95.40, "mse": 14}),
    ],
    "clevrtex": [
        PublishedResult("CLEVRTEX", SLOT_ATTENTION, {"miou": 22.58, "ari_fg": 62.40, "mse": 254}),
        PublishedResult("CLEVRTEX", PAPER, {"miou": 42.4, "ari_fg": 80.2, "mse": 207}),
    ],
    "clevrtex-ood": [
        PublishedResult("CLEVRTEX-OOD", SLOT_ATTENTION, {"miou": 20.98, "ari_fg": 58.45, "mse": 487}),
        PublishedResult("CLEVRTEX-OOD", PAPER, {"miou": 38.0, "ari_fg": 72.6, "mse": 577}),
    ],
    "clevrtex-camo": [
        PublishedResult("CLEVRTEX-CAMO", SLOT_ATTENTION, {"miou": 19.83, "ari_fg": 57.54, "mse": 215}),
        PublishedResult("CLEVRTEX-CAMO", PAPER, {"miou": 38.9, "ari_fg": 75.5, "mse": 189}),
    ],
    "movi-a": [
        PublishedResult("MOVi-A", f"{SLOT_ATTENTION} + Hungarian", {"ari_fg": 4.2, "ari": 0.3}),
        PublishedResult("MOVi-A", PAPER, {"ari_fg": 65.6, "ari": 77.7}),
    ],
}
# The published dataset that each family of built-in scenes imitates.
IMITATED = {
    "plain": "clevr",
    "textured": "clevrtex",
    "ood": "clevrtex-ood",
    "camo": "clevrtex-camo",
    "moving": "movi-a",
}


def published_results(names: Iterable[str]) -> list[PublishedResult]:
    """Return the published results for datasets named as in --data: plain:2-5, clevrtex:DIR, ..."""
    families = (name.partition(":")[0] for name in names)
    keys = dict.fromkeys(IMITATED.get(family, family) for family in families)
    return [result for key in keys for result in PUBLISHED.get(key, [])]


def is_imitation(name: str) -> bool:
    """Tell whether a dataset named as in --data is built-in scenes, which differ from the published dataset."""
    return name.partition(":")[0] in IMITATED
