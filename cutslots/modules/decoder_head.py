"""The last layers of a `SpatialBroadcastDecoder`, fused for CUDA: `FusedDecoderHead`.

A training step spends most of its time in these layers: a transposed 5x5 convolution of stride 2, further 5x5
convolutions, and a 3x3 convolution to 4 channels, with activations between them. `FusedDecoderHead` computes the same
function in shapes that suit tensor cores and in fewer passes over memory.

It holds an image in polyphase form. Even and odd rows (row phases) become channels: C channels of H x W are stored as
2 C channels of H/2 x W, ordered by phase, then channel. In this form

- the transposed convolution is a 3x3 convolution to 4 C channels, because it produces column phases too. Its channels
  are ordered by column phase, row phase, channel. In channels-last memory the columns then interleave by a reshape,
- a 5x5 convolution is a 3x5 convolution from 2 C to 2 C channels,
- the output convolution has 4 channels, too few for cuDNN to be efficient. Triton kernels compute it
  (`decoder_head_triton`). The backward kernel includes the backward pass of the activation before it. That of the other
  activations sums the gradient of the bias in the same pass.

Kernels are rearranged from the decoder's weights and padded with zeros.

Shapes: N images (all slots of a batch), C channels before the output convolution, H W the size of an image.
"""

from __future__ import annotations

import itertools
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cutslots.modules.base import downcast_half, is_transformed
from cutslots.programs.constants import ConstantLayer

try:
    from cutslots.modules import decoder_head_triton as kernels
except ImportError:  # Triton comes with the CUDA builds of torch
    kernels = None  # type: ignore[assignment]

CHANNELS = (16, 32, 64, 128, 256)  # the kernels are written for these
MIN_SIZE = 8  # of the input's sides
MAX_ELEMENTS = 2**31  # of a tensor; cuDNN's indices overflow from here on


class FusedDecoderHead(ConstantLayer):
    """Apply the last layers of a decoder, by fused kernels where `supports` allows and layer by layer elsewhere.

    `extra_layers` is the number of 5x5 convolutions after the transposed one. The layers, and with them the weights,
    stay in the decoder and are arguments of `forward`. The fused kernels have first derivatives only.
    """

    upsample_taps: Tensor
    conv_taps: Tensor

    def __init__(self, extra_layers: int) -> None:
        super().__init__()
        self.length = 2 * (1 + extra_layers) + 1  # convolutions and activations
        self.precompute()

    def precompute(self) -> None:
        taps = {"upsample_taps": _upsample_taps(5), "conv_taps": _conv_taps(5)}
        for name, value in taps.items():
            self.register_buffer(name, value.to(self.device, self.dtype), persistent=False)
        # Queried here and not in `forward`: the compiler cannot trace the query.
        self.has_kernels = kernels is not None and kernels.is_supported(self.device)

    def forward(self, x: Tensor, layers: nn.Sequential) -> Tensor:
        """Return `layers(x)` (N, 4, H, W) for x (N, channels, H/2, W/2)."""
        self.materialize(x)
        return self.forward_fused(x, layers) if self.supports(x, layers) else layers(x)

    def supports(self, x: Tensor, layers: nn.Sequential) -> bool:
        """Return whether the fused kernels run for x (N, channels, H/2, W/2).

        They need a supported GPU, half precision, a number of channels in CHANNELS, and H/2 and W/2 that are powers of
        two of at least MIN_SIZE. H and W may differ. They have no rules for forward mode and torch.func.
        """
        channels = cast(int, layers[0].out_channels)
        sizes_fit = all(n >= MIN_SIZE and n & (n - 1) == 0 for n in x.shape[2:])
        elements_fit = 4 * channels * x.numel() // x.shape[1] < MAX_ELEMENTS
        half = x.dtype in (torch.bfloat16, torch.float16)
        fits = self.has_kernels and half and channels in CHANNELS and sizes_fit and elements_fit
        return fits and not is_transformed()

    def forward_fused(self, x: Tensor, layers: nn.Sequential) -> Tensor:
        """Return `layers(x)` by the fused functions; on the CPU they run as torch operations."""
        upsample, *convs, output = (cast(nn.Conv2d, layer) for layer in layers[::2])  # type: ignore[attr-defined]
        slope = getattr(layers[1], "negative_slope", 0.0)
        taps, conv_taps = (downcast_half(taps, upsample.weight) for taps in (self.upsample_taps, self.conv_taps))
        weights = [torch.einsum("iokl,adk,cel->caoide", upsample.weight, taps, taps).flatten(0, 2)]
        for conv in convs:
            weight = torch.einsum("oikl,abdk->aobidl", conv.weight, conv_taps)
            weights.append(weight.flatten(2, 3).flatten(0, 1))
        biases = (cast(Tensor, layer.bias) for layer in (upsample, *convs, output))
        parameters = (t.to(x.dtype) for t in (*weights, output.weight, *biases))
        with torch.autocast(x.device.type, enabled=False):
            return _FusedHead.apply(x.contiguous(memory_format=torch.channels_last), slope, *parameters)


def _upsample_taps(size: int) -> Tensor:
    """Return the taps of a transposed convolution of stride 2 as a 0/1 tensor (output phase, offset, tap).

    The output of a phase at position n reads the input at n - 1, n and n + 1 (the offsets), each through one tap.
    """
    taps = torch.zeros(2, 3, size, device="cpu")
    for to_phase, offset in itertools.product(range(2), (-1, 0, 1)):
        tap = size // 2 + to_phase - 2 * offset
        if 0 <= tap < size:
            taps[to_phase, offset + 1, tap] = 1
    return taps


def _conv_taps(size: int) -> Tensor:
    """Return the taps of a convolution between phases as a 0/1 tensor (output phase, input phase, offset, tap)."""
    taps = torch.zeros(2, 2, 3, size, device="cpu")
    for to_phase, from_phase, offset in itertools.product(range(2), range(2), (-1, 0, 1)):
        tap = size // 2 + 2 * offset + from_phase - to_phase
        if 0 <= tap < size:
            taps[to_phase, from_phase, offset + 1, tap] = 1
    return taps


class _FusedHead(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, slope: float, *parameters: Tensor) -> Tensor:
        half = len(parameters) // 2
        *weights, output_weight = (w.contiguous(memory_format=torch.channels_last) for w in parameters[:half])
        *biases, output_bias = parameters[half:]
        features = [x]
        for weight, bias in zip(weights, biases, strict=True):
            y = _conv_activation(features[-1], weight, bias.repeat(len(weight) // len(bias)), slope)
            features.append(_interleave_columns(y) if len(features) == 1 else y)
        ctx.slope = slope
        ctx.save_for_backward(*features, *weights, output_weight)
        return output_conv(features[-1], output_weight, output_bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise NotImplementedError(
                "the fused decoder head has first derivatives only; run the decoder in float32 for higher ones"
            )
        saved = ctx.saved_tensors  # unpacked once: checkpointing refuses a second time
        half = len(saved) // 2
        features, (*weights, output_weight) = saved[:half], saved[half:]
        weight_grads, bias_grads = [], [gradients[0].sum((0, 2, 3))]
        g, output_weight_grad, bias_grad = output_conv_backward(gradients[0], features[-1], output_weight, ctx.slope)
        for i, weight in reversed(list(enumerate(weights))):
            g, y = (_split_columns(g), _split_columns(features[1])) if i == 0 else (g, features[i + 1])
            if i + 1 < len(weights):  # `output_conv_backward` has done the last activation and its bias
                g, bias_grad = activation_backward(g, y, ctx.slope, output_weight.shape[1])
            mask = [True, True, False]
            g, weight_grad, _ = torch.ops.aten.convolution_backward(
                g, features[i], weight, [0], [1, 1], _padding(weight), [1, 1], False, [0, 0], 1, mask
            )
            weight_grads.append(weight_grad)
            bias_grads.append(bias_grad)
        return g, None, *reversed(weight_grads), output_weight_grad, *reversed(bias_grads)


def _conv_activation(x: Tensor, weight: Tensor, bias: Tensor, slope: float) -> Tensor:
    """Return the leaky ReLU of a convolution that keeps the size."""
    if x.is_cuda and slope == 0:
        return conv_relu(x, weight, bias)
    x = F.leaky_relu(F.conv2d(x, weight, bias, padding=_padding(weight)), slope)
    return x.contiguous(memory_format=torch.channels_last)


def _padding(weight: Tensor) -> list[int]:
    """Return the padding that keeps the size."""
    return [size // 2 for size in weight.shape[2:]]


def _interleave_columns(x: Tensor) -> Tensor:
    """Return (N, (column phase, channel), H, W/2) as (N, channel, H, W)."""
    x = x.permute(0, 2, 3, 1)
    return x.reshape(*x.shape[:2], 2 * x.shape[2], x.shape[3] // 2).permute(0, 3, 1, 2)


def _split_columns(x: Tensor) -> Tensor:
    """Invert `_interleave_columns`."""
    x = x.permute(0, 2, 3, 1)
    return x.reshape(*x.shape[:2], x.shape[2] // 2, 2 * x.shape[3]).permute(0, 3, 1, 2)


def _interleave_rows(x: Tensor) -> Tensor:
    """Return (N, (row phase, channel), H/2, W) as (N, channel, H, W)."""
    return x.unflatten(1, (2, x.shape[1] // 2)).permute(0, 2, 3, 1, 4).flatten(2, 3)


def _split_rows(x: Tensor) -> Tensor:
    """Invert `_interleave_rows`."""
    return x.unflatten(2, (-1, 2)).permute(0, 3, 1, 2, 4).flatten(1, 2)


@torch.library.custom_op("cutslots::conv_relu", mutates_args=())
def conv_relu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return the ReLU of a convolution, in one pass over memory. Not differentiable."""
    return torch.cudnn_convolution_relu(x, weight, bias, [1, 1], _padding(weight), [1, 1], 1)


@conv_relu.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return _empty_channels_last(x, x.shape[0], weight.shape[0], *x.shape[2:])


@torch.library.custom_op("cutslots::output_conv_channels_last", mutates_args=())
def output_conv(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return the 3x3 convolution to 4 channels (N, 4, H, W) of x (N, 2 C, H/2, W), given in row phases."""
    if not x.is_cuda:
        out = F.conv2d(_interleave_rows(x), weight, bias, padding=1)
        return out.contiguous(memory_format=torch.channels_last)
    return kernels.output_conv(x, weight, bias)


@output_conv.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return _empty_channels_last(x, x.shape[0], 4, 2 * x.shape[2], x.shape[3])


@torch.library.custom_op("cutslots::output_conv_channels_last_backward", mutates_args=())
def output_conv_backward(g: Tensor, x: Tensor, weight: Tensor, slope: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x before its activation, of the weight, and of the bias that was added to x.

    g is the gradient of the output of `output_conv`; x is the output of a leaky ReLU with this slope.
    """
    if x.is_cuda:
        return kernels.output_conv_backward(g, x, weight, slope)
    image, ones = _interleave_rows(x), [1, 1]
    x_grad, weight_grad, _ = torch.ops.aten.convolution_backward(
        g, image, weight, [0], ones, ones, ones, False, [0, 0], 1, [True, True, False]
    )
    x_grad = torch.where(image > 0, x_grad, slope * x_grad)
    bias_grad, x_grad = x_grad.sum((0, 2, 3)), _split_rows(x_grad).contiguous(memory_format=torch.channels_last)
    return x_grad, weight_grad.contiguous(memory_format=torch.channels_last), bias_grad


@output_conv_backward.register_fake
def _(g: Tensor, x: Tensor, weight: Tensor, slope: float) -> tuple[Tensor, Tensor, Tensor]:
    return (
        _empty_channels_last(x, *x.shape),
        _empty_channels_last(weight, *weight.shape),
        x.new_empty(weight.shape[1]),
    )


@torch.library.custom_op("cutslots::activation_backward", mutates_args=())
def activation_backward(g: Tensor, y: Tensor, slope: float, channels: int) -> tuple[Tensor, Tensor]:
    """Return the gradients of the input of a leaky ReLU and of the bias (channels,) that was added to it.

    g is the gradient of its output y (N, phases * channels, H, W). The bias is the same for all phases.
    """
    if y.is_cuda:
        return kernels.activation_backward(g, y, slope, channels)
    g = torch.where(y > 0, g, slope * g).contiguous(memory_format=torch.channels_last)
    return g, g.sum((0, 2, 3)).view(-1, channels).sum(0)


@activation_backward.register_fake
def _(g: Tensor, y: Tensor, slope: float, channels: int) -> tuple[Tensor, Tensor]:
    return _empty_channels_last(y, *y.shape), y.new_empty(channels)


def _empty_channels_last(x: Tensor, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
