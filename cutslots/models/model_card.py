"""The model card that `save_pretrained` and `push_to_hub` write as README.md, unless the folder holds one."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, metadata

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
{{%- if repo_url %}} Code: [repository]({{{{ repo_url }}}}).{{% endif %}}
{{%- if docs_url %}} Documentation: [docs]({{{{ docs_url }}}}).{{% endif %}}
"""


def project_url(label: str) -> str | None:
    """Return a URL of the package's metadata, the [project.urls] of pyproject.toml; None if there is none.

    >>> project_url("Nowhere") is None
    True
    """
    try:
        urls = metadata("cutslots").get_all("Project-URL") or []
    except PackageNotFoundError:  # a source tree on the path
        return None
    return dict(url.split(", ", 1) for url in urls).get(label)
