"""The published datasets that `cutslots prepare` reads, by name."""

from __future__ import annotations

from cutslots.data.clevr import CLEVR
from cutslots.data.clevrtex import CLEVRTEX, CLEVRTEX_CAMO, CLEVRTEX_OOD
from cutslots.data.movi import MOVI_A

PUBLISHED = {
    "clevr": CLEVR,
    "clevrtex": CLEVRTEX,
    "clevrtex-ood": CLEVRTEX_OOD,
    "clevrtex-camo": CLEVRTEX_CAMO,
    "movi-a": MOVI_A,
}
