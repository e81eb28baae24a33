"""Where Triton kernels run."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from cutslots import triton_support
from tests.conftest import needs_cuda


@pytest.mark.parametrize("capability, expected", [((7, 5), False), ((8, 0), True), ((9, 0), True), ((12, 0), True)])
def test_kernels_need_a_recent_gpu(capability, expected, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "hip", None)
    assert triton_support.is_supported(torch.device("cuda", 0)) is expected
    monkeypatch.setattr(torch.version, "hip", "6.0")
    assert not triton_support.is_supported(torch.device("cuda", 0))


def test_a_cpu_has_no_kernels():
    assert not triton_support.is_supported(torch.device("cpu"))
    assert isinstance(triton_support.device_of(torch.zeros(1)), nullcontext)


@needs_cuda
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs a CUDA device, and a second one")
def test_the_device_of_a_tensor_is_the_current_one():
    with triton_support.device_of(torch.zeros(1, device="cuda:1")):
        assert torch.cuda.current_device() == 1
