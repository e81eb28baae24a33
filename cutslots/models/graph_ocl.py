"""The authors' weights (github.com/alpz/graph-ocl) in the preset `graph-ocl`: `convert_graph_ocl`.

Two kinds of tensors change besides their names:

- The last layer of an edge net has six output channels for every cut: source, sink, down, right, up, left in their
  code; right, left, down, up, source, sink in ours.
- Convolutions at full resolution are transposed ones in their decoder. With stride 1 a transposed convolution is a
  convolution with the kernel flipped, input and output channels exchanged.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

EDGE_ORDER = (3, 5, 2, 4, 0, 1)  # our channels right, left, down, up, source, sink among theirs
BUFFERS = ("slot_cut.in_pos_embedding.grid", "decoder_pos_embedding.grid")  # constants, which ours computes

NETS = {  # of the slot module, two layers each
    "weights_net": "partition.object_net",
    "weights_net_fg": "partition.foreground_net",
    "k_net2": "pixel_mlps.0",
    "k_net2_2": "pixel_mlps.1",
    "k_net2_3": "pixel_mlps.2",
    "mlp": "slot_mlps.0",
    "mlp2": "slot_mlps.1",
    "mlp3": "slot_mlps.2",
}


def _layer_names() -> dict[str, str]:
    """Return our name of every layer, by theirs."""
    names = {
        "encoder.conv1": "encoder.stem.0",
        "encoder.bn1": "encoder.stem.1",
        "encoder.layer1.0.shortcut.0": "encoder.blocks.0.skip.0",
        "encoder.layer1.0.shortcut.1": "encoder.blocks.0.skip.1",
        "slot_cut.in_pos_embedding.dense": "slots.position.linear",
        "slot_cut.norm_inputs": "slots.norm",
        "decoder_pos_embedding.dense": "decoder.position.linear",
    }
    for i in range(4):
        for layer, index in (("conv1", 0), ("bn1", 1), ("conv2", 3), ("bn2", 4)):
            names[f"encoder.layer{i + 1}.0.{layer}"] = f"encoder.blocks.{i}.residual.{index}"
        names[f"decoder.{i}.0"] = f"decoder.layers.{2 * i}"
    for i in (0, 2, 4):
        names[f"decoder.4.{i}"] = f"decoder.layers.{8 + i}"
    for theirs, ours in NETS.items():
        names |= {f"slot_cut.{theirs}.{i}": f"slots.{ours}.{i}" for i in (0, 2)}
    return names


LAYERS = _layer_names()


def convert_graph_ocl(state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights of the authors' `SlotCutModel` as the state dict of the preset `graph-ocl`.

    Names may have the prefix "model." of their Lightning module.
    """
    theirs = {name.removeprefix("model."): value for name, value in state_dict.items()}
    for layer in LAYERS:
        if f"{layer}.weight" not in theirs:
            raise ValueError(f"state_dict lacks {layer}.weight; expected the weights of graph-ocl's SlotCutModel")
    converted = {}
    for name, value in theirs.items():
        layer, _, kind = name.rpartition(".")
        if name in BUFFERS:
            continue
        if layer not in LAYERS:
            raise ValueError(f"state_dict holds {name!r:.99}; expected the weights of graph-ocl's SlotCutModel")
        converted[f"{LAYERS[layer]}.{kind}"] = _convert(layer, value)
    return converted


def _convert(layer: str, value: Tensor) -> Tensor:
    if layer in ("slot_cut.weights_net.2", "slot_cut.weights_net_fg.2"):
        return value.unflatten(0, (-1, 6))[:, list(EDGE_ORDER)].flatten(0, 1)
    if layer.startswith("decoder.4.") and value.ndim == 4:
        return value.transpose(0, 1).flip(2, 3)
    return value
