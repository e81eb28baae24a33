"""Constants that move with their layer by being computed again."""

import pytest
import torch

from cutslots.programs.constants import ConstantLayer


class Thirds(ConstantLayer):
    """One constant, 1/3, and how often it was computed."""

    def __init__(self):
        super().__init__()
        self.count = 0
        self.precompute()

    def precompute(self):
        self.count += 1
        self.register_buffer("third", torch.tensor(1 / 3, dtype=torch.float64).to(self.device, self.dtype), False)


def test_a_new_layer_is_float32_on_the_cpu_and_has_no_state():
    layer = Thirds()
    assert layer.dtype == torch.float32 and layer.device == torch.device("cpu")
    assert not layer.state_dict() and layer.count == 1


def test_constants_of_a_converted_layer_are_not_rounded_twice():
    layer = Thirds()
    assert layer.double() is layer
    assert layer.dtype == torch.float64 and layer.third.item() == 1 / 3 and layer.count == 2
    assert layer.float().third.item() == torch.tensor(1 / 3).item()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_keeps_float32(dtype):
    layer = Thirds().to(dtype)
    assert layer.dtype == torch.float32 and layer.third.dtype == torch.float32


def test_a_layer_that_stays_where_it_is_computes_nothing():
    layer = Thirds()
    layer.float().to("cpu")
    torch.nn.Sequential(layer).eval()
    assert layer.count == 1


def test_layers_inside_other_modules_move_too():
    layer = Thirds()
    layer.inner = Thirds()
    torch.nn.Sequential(layer).double()
    assert layer.third.item() == layer.inner.third.item() == 1 / 3


def test_to_empty_leaves_no_constant_uninitialised():
    with torch.device("meta"):
        layer = Thirds()
    assert layer.device.type == "meta" and layer.third.is_meta
    layer.to_empty(device="cpu")
    assert layer.device.type == "cpu" and layer.third.item() == pytest.approx(1 / 3)


def test_materialize_computes_on_the_device_of_the_input():
    with torch.device("meta"):
        layer = Thirds()
    layer.double()
    count = layer.count
    layer.materialize(torch.zeros(1, device="meta"))
    assert layer.count == count and layer.third.is_meta, "an input on the meta device needs no constants"
    layer.materialize(torch.zeros(1))
    assert layer.count == count + 1 and layer.third.item() == 1 / 3, "in the precision of the layer"
    layer.materialize(torch.zeros(1))
    layer.materialize(torch.zeros(1, device="meta"))
    assert layer.count == count + 1 and layer.device.type == "cpu", "once"


def test_layers_have_to_say_what_they_compute():
    with pytest.raises(NotImplementedError):
        ConstantLayer().precompute()
