"""The model card that `save_pretrained` and `push_to_hub` write as README.md, unless the folder holds one."""

from __future__ import annotations

PAPER_URL = "https://openreview.net/forum?id=1J-ZTr7aypY"
ARXIV_URL = "https://arxiv.org/abs/2210.02159"
PIPELINE_TAG = "image-segmentation"
TAGS = ("object-discovery", "object-centric-learning", "unsupervised", "slots")

TEMPLATE = f"""---
{{{{ card_data }}}}
---

A model that discovers objects in images without labels. `config.json` names its parts.

```python
from cutslots import Discovery

model = Discovery.from_pretrained("OWNER/NAME")
```

**Training data.** [what the model was trained on]

**Training.** [preset, seed, steps]

**Metrics.** [the output of `cutslots evaluate`]

**Limitations.** [what the model was not trained on]

**Links.** Paper:
[Differentiable Mathematical Programming for Object-Centric Representation Learning]({{{{ paper_url }}}})
(ICLR 2023, [arXiv:2210.02159]({ARXIV_URL})).
"""
