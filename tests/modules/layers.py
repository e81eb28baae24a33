"""What several tests of networks share: lists of their layers."""

from torch import nn

from cutslots.modules.padded_conv import PaddedConv2d


def convolutions(module):
    """Return (kind, input channels, output channels, kernel size, stride) of every convolution, in order."""
    kinds = {nn.Conv2d: "conv", PaddedConv2d: "conv", nn.ConvTranspose2d: "transposed"}
    return [
        (kinds[type(m)], m.in_channels, m.out_channels, m.kernel_size[0], m.stride[0])
        for m in module.modules()
        if type(m) in kinds
    ]


def count_modules(module, kind):
    return sum(isinstance(m, kind) for m in module.modules())
