"""The published datasets that `cutslots prepare` reads, by name."""

from __future__ import annotations

from cutslots.data.clevr import CLEVR
from cutslots.data.clevrtex import (
    CLEVRTEX,
    CLEVRTEX_CAMO,
    CLEVRTEX_GRASSBG,
    CLEVRTEX_OOD,
    CLEVRTEX_PBG,
    CLEVRTEX_VBG,
)
from cutslots.data.coco import COCO
from cutslots.data.davis import DAVIS
from cutslots.data.movi import MOVI_A, MOVI_C, MOVI_E
from cutslots.data.voc import VOC
from cutslots.data.ytvis import YTVIS

PUBLISHED = {
    "clevr": CLEVR,
    "clevrtex": CLEVRTEX,
    "clevrtex-ood": CLEVRTEX_OOD,
    "clevrtex-camo": CLEVRTEX_CAMO,
    "clevrtex-pbg": CLEVRTEX_PBG,
    "clevrtex-vbg": CLEVRTEX_VBG,
    "clevrtex-grassbg": CLEVRTEX_GRASSBG,
    "movi-a": MOVI_A,
    "movi-c": MOVI_C,
    "movi-e": MOVI_E,
    "coco": COCO,
    "voc": VOC,
    "davis": DAVIS,
    "ytvis": YTVIS,
}
