"""Filters in the basis of the orthonormal cosine transform (DCT-II), on grids of two or three axes.

`filter(q, spectrum)` transforms a grid, multiplies every cosine mode by its entry of `spectrum`, and transforms back:

    IDCT( spectrum * DCT(q) )

Two classes compute it. They agree up to rounding and differ in cost for n values along an axis:

    MatmulDCT   a product with the n x n matrix of cosines per axis; faster up to MAX_DCT_MATMUL_SIZE
    FFTDCT      one real FFT over all axes, with the samples reordered (Makhoul 1980); faster beyond it

Tables are computed in float64 on the CPU and then rounded to `dtype`. They are buffers outside the state dict.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor, nn

from cutslots.programs.graph import Shape, grid_axes

MAX_DCT_MATMUL_SIZE = {"cpu": 384, "cuda": 192}  # about the side at which both classes are equally fast


class DCT(Protocol):
    """A cosine transform of grids of one shape."""

    def filter(self, q: Tensor, spectrum: Tensor) -> Tensor:
        """Multiply the cosine modes of q (..., *shape) by `spectrum` (*shape)."""
        ...


class MatmulDCT(nn.Module):
    """The cosine transform as one matrix product per axis."""

    def __init__(self, shape: Shape, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.shape = shape
        self.axes = grid_axes(shape)
        for axis in self.axes:
            self.register_buffer(f"matrix{-axis}", dct_matrix(shape[axis]).to(device, dtype), persistent=False)

    def matrix(self, axis: int) -> Tensor:
        """Return the transform (modes, positions) along a negative axis."""
        return self.get_buffer(f"matrix{-axis}")

    def filter(self, q: Tensor, spectrum: Tensor) -> Tensor:
        matrices = {axis: self.matrix(axis) for axis in self.axes}
        for axis, C in matrices.items():
            q = _matmul_along(C, q, axis)
        q = q.mul_(spectrum)
        for axis, C in matrices.items():
            q = _matmul_along(C.T, q, axis)
        return q

    def extra_repr(self) -> str:
        return f"{self.shape}"


class FFTDCT(nn.Module):
    """The cosine transform as a real FFT of reordered samples."""

    def __init__(self, shape: Shape, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.shape = shape
        self.axes = range(-len(shape), 0)
        for axis in self.axes:  # real pairs: a complex buffer would lose its imaginary part in `.to(dtype)`
            phases = torch.view_as_real(dct_phases(shape[axis]))
            self.register_buffer(f"phases{-axis}", phases.to(device, dtype), persistent=False)

    def phases(self, axis: int) -> Tensor:
        """Return the complex phases (modes,) along a negative axis."""
        return torch.view_as_complex(self.get_buffer(f"phases{-axis}"))

    def filter(self, q: Tensor, spectrum: Tensor) -> Tensor:
        if not q.numel():  # FFT libraries reject empty batches
            return q
        for axis in self.axes:
            q = reorder(q, axis)
        V = self.scale_modes(torch.fft.rfftn(q, dim=list(self.axes)), spectrum)
        q = torch.fft.irfftn(V, s=self.shape, dim=list(self.axes))
        for axis in self.axes:
            q = restore_order(q, axis)
        return q

    def scale_modes(self, V: Tensor, spectrum: Tensor) -> Tensor:
        """Multiply cosine modes by `spectrum`, given and returned as the real FFT V of the reordered samples.

        Along the last axis DCT[k] = Re(phase_k V_k) and DCT[n - k] = -Im(phase_k V_k): one complex number carries two
        modes. Along the others, where the values are complex, DCT[k] = (phase_k V_k + conj(phase_k) V_-k) / 2.
        """
        other_axes = self.axes[:-1]
        last = self.phases(-1)[: V.shape[-1]]
        V = V * last
        for axis in other_axes:
            phases = _broadcast_along(self.phases(axis), axis)
            V = (phases * V).addcmul_(phases.conj(), _mirror(V, axis)).mul_(0.5)
        two_modes = torch.stack([spectrum, _mirror(spectrum, -1)], -1)[..., : V.shape[-1], :]
        V = torch.view_as_complex(torch.view_as_real(V) * two_modes)
        for axis in other_axes:
            phases = _broadcast_along(self.phases(axis), axis).conj()
            mirrored = -1j * phases
            mirrored.select(axis, 0).zero_()  # there is no mode n - 0
            V = (phases * V).addcmul_(mirrored, _mirror(V, axis))
        return V * last.conj()

    def extra_repr(self) -> str:
        return f"{self.shape}"


def use_fft(shape: Shape, device: torch.device) -> bool:
    """Return whether `FFTDCT` is faster than `MatmulDCT` for a grid of this shape on this device."""
    return max(shape) > MAX_DCT_MATMUL_SIZE.get(device.type, MAX_DCT_MATMUL_SIZE["cuda"])


def dct_matrix(n: int) -> Tensor:
    """Return the orthonormal DCT-II of n samples as a matrix (modes, positions) in float64."""
    k = torch.arange(n, dtype=torch.float64, device="cpu")
    C = torch.cos(math.pi / n * k[:, None] * (k + 0.5)) * math.sqrt(2 / n)
    C[0] /= math.sqrt(2)
    return C


def dct_phases(n: int) -> Tensor:
    """Return exp(-i pi k / 2n), the phases between an FFT of n reordered samples and their DCT-II (Makhoul 1980)."""
    k = torch.arange(n, dtype=torch.float64, device="cpu")
    return torch.polar(torch.ones_like(k), -math.pi / (2 * n) * k)


def reorder(x: Tensor, axis: int) -> Tensor:
    """Return x with the even samples of an axis first and the odd ones behind them in reverse."""
    x = x.movedim(axis, -1)
    return torch.cat([x[..., ::2], x[..., 1::2].flip(-1)], -1).movedim(-1, axis)


def restore_order(x: Tensor, axis: int) -> Tensor:
    """Invert `reorder`."""
    n = x.shape[axis]
    out = torch.empty_like(x)
    even, odd = x.narrow(axis, 0, (n + 1) // 2), x.narrow(axis, (n + 1) // 2, n // 2)
    out.movedim(axis, -1)[..., ::2] = even.movedim(axis, -1)
    out.movedim(axis, -1)[..., 1::2] = odd.flip(axis).movedim(axis, -1)
    return out


def _matmul_along(matrix: Tensor, x: Tensor, axis: int) -> Tensor:
    """Apply a matrix along one axis of x."""
    if axis == -1:
        return x @ matrix.T
    return (matrix @ x.flatten(axis + 1)).reshape(x.shape) if axis < -2 else matrix @ x


def _broadcast_along(x: Tensor, axis: int) -> Tensor:
    """Shape a vector so that it broadcasts along one axis."""
    return x.reshape(-1, *[1] * (-axis - 1))


def _mirror(x: Tensor, axis: int) -> Tensor:
    """Return x at -k modulo n."""
    return x.flip(axis).roll(1, axis)
