"""`cutslots export`: a model of images as an ONNX file, for runtimes without PyTorch.

The input is `image` (B, 3, H, W), float32 in [0, 1], at the size of the model. The outputs are those of `Discovery`, by
name: slots, masks, partition_masks, reconstruction, slot_reconstructions. B is any number unless it is fixed.

Cuts are exported as the matrix products of the cosine transform at any size: ONNX has no fast one.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import cutslots
from cutslots.files import write_atomically
from cutslots.models.checkpoints import load
from cutslots.models.discovery import Discovery, DiscoveryOutput, FeatureOutput
from cutslots.programs.graph_cut import GraphCut
from cutslots.programs.grid_cut import GridCut

PACKAGES = ("onnx", "onnxscript")  # what torch.onnx needs
MAX_BATCH_SIZE = 65_536
MAX_BYTES = 2**31 - 2**20  # of a Protocol Buffers message, less some for what is not weights


def export(
    checkpoint: str,
    out: Path,
    batch_size: int | None = None,
    overwrite: bool = False,
    plugins: Iterable[str | Path] = (),
) -> None:
    """Write a model of images to an ONNX file. The batch size is free unless it is given."""
    _check_arguments(out, batch_size, overwrite)
    model = load(checkpoint, "cpu", plugins)
    _check_model(checkpoint, model)
    try:
        content = onnx_bytes(model, batch_size)
    except torch.onnx.OnnxExporterError as error:
        cause = str(error.__cause__ or error).strip().split("\n")[0]
        raise ValueError(f"checkpoint: {checkpoint} has a part that ONNX cannot express: {cause:.200}") from None
    write_atomically(out, content)
    height, width = model.image_size
    shape = f"({batch_size or 'B'}, 3, {height}, {width})"
    print(f"wrote {out} ({len(content) / 2**20:.1f} MiB): image {shape} -> {', '.join(_output_names(model))}")


def onnx_bytes(model: Discovery, batch_size: int | None = None) -> bytes:
    """Return a model of images as the content of an ONNX file. Solves its cuts by matrix products from then on."""
    for module in model.modules():
        if isinstance(module, GridCut):
            module.use_matmul()
    image = torch.zeros(batch_size or 2, 3, *model.image_size)
    dynamic = {"image": {0: torch.export.Dim("batch", min=1, max=MAX_BATCH_SIZE)}} if batch_size is None else None
    with torch.no_grad(), _quiet():
        program: Any = torch.onnx.export(
            _WithTupleOutput(model).eval(),
            (image,),
            input_names=["image"],
            output_names=_output_names(model),
            dynamic_shapes=dynamic,
            dynamo=True,
            verbose=False,
        )
    proto = program.model_proto
    proto.producer_name, proto.producer_version = "cutslots", cutslots.__version__
    return proto.SerializeToString()


def _output_names(model: Discovery) -> list[str]:
    return list((FeatureOutput if model.reconstructs_features else DiscoveryOutput)._fields)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence warnings about torch's own internals, and about torchvision, which is not needed."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.disable(before)


class _WithTupleOutput(nn.Module):
    """The exporter takes plain tuples only."""

    def __init__(self, model: Discovery) -> None:
        super().__init__()
        self.model = model

    def forward(self, image: Tensor) -> tuple[Tensor, ...]:
        return tuple(self.model(image))


def _check_arguments(out: Path, batch_size: int | None, overwrite: bool) -> None:
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(f"export needs the packages {' and '.join(PACKAGES)}: pip install 'cutslots[onnx]'")
    if batch_size is not None and not 1 <= batch_size <= MAX_BATCH_SIZE:
        raise ValueError(f"batch_size is {batch_size}; expected an integer from 1 to {MAX_BATCH_SIZE:,}")
    if out.suffix != ".onnx":
        raise ValueError(f"out is {out}; expected a file name that ends in .onnx")
    if not out.parent.is_dir():
        raise ValueError(f"out: there is no folder {out.parent}; expected one to write {out.name} to")
    if out.is_dir() or (out.exists() and not overwrite):
        raise ValueError(f"out: {out} exists; choose another name" + ("" if out.is_dir() else " or pass --overwrite"))


def _check_model(checkpoint: str, model: Discovery) -> None:
    if model.spacetime:
        raise ValueError(f"checkpoint: {checkpoint} partitions clips; expected a model of images to export")
    if any(isinstance(module, GraphCut) for module in model.modules()):
        raise ValueError(
            f"checkpoint: {checkpoint} solves cuts by a sparse factorisation (GraphCut), which ONNX has not; "
            "expected the partition cut or softmax"
        )
    size = sum(x.numel() * x.element_size() for x in model.state_dict().values())
    if size > MAX_BYTES:
        raise ValueError(f"checkpoint: {checkpoint} has {size:,} bytes of weights; expected at most {MAX_BYTES:,}")
