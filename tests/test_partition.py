import pytest
import torch

from cutslots import GridCut
from cutslots.partition import KPartition, SoftmaxPartition
from tests.conftest import DEVICES

X = torch.randn(2, 8, 6, 9)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("background", ["cuts", "terminals", "none"])
@pytest.mark.parametrize("sharpen", [None, 0.1])
def test_masks_sum_to_one(device, background, sharpen):
    partition = KPartition(8, 5, (6, 9), background=background, sharpen=sharpen).to(device)
    masks = partition.masks(X.to(device))
    assert masks.shape == (2, 5, 6, 9) and masks.dtype == torch.float32 and (masks >= 0).all()
    torch.testing.assert_close(masks.sum(1), torch.ones(2, 6, 9, device=device))


@pytest.mark.parametrize("anchor, background_anchor", [(0.0, None), (0.0, 0.0), (0.0, 1.0), (0.5, 0.2)])
def test_algorithm_1_written_out(anchor, background_anchor):
    """Weights by the network, cuts one by one, softmax at each temperature, foreground times objects."""
    own = {"anchor": anchor, "background_anchor": background_anchor}
    partition = KPartition(8, 4, (6, 9), temperature=0.5, background_temperature=0.1, **own)
    parts, masks = partition(X)
    w = partition.net(X).reshape(2, 5, 6, 6, 9)
    ties = [anchor if background_anchor is None else background_anchor] * 2 + [anchor] * 3
    p = [GridCut((6, 9), gamma=0.5, anchor=tie)(w[:, i]) for i, tie in enumerate(ties)]
    ground = torch.softmax(torch.stack(p[:2]) / 0.1, 0)
    objects = torch.softmax(torch.stack(p[2:]) / 0.5, 0)
    expected = [ground[0], *(ground[1] * mask for mask in objects)]
    torch.testing.assert_close(masks, torch.stack(expected, 1))
    for i in range(4):
        torch.testing.assert_close(parts[:, i], X * expected[i][:, None])
    torch.testing.assert_close(parts.sum(1), X, msg="a partition loses nothing")


@pytest.mark.parametrize("tie", [None, 0.7])
def test_terminals_of_one_more_cut_make_the_background(tie):
    options = {"background": "terminals", "background_temperature": 1.0, "background_anchor": tie}
    partition = KPartition(8, 3, (6, 9), signed=False, **options)
    w = partition.net(X).relu().reshape(2, 3, 6, 6, 9)
    assert partition.cuts == 3
    d = GridCut((6, 9), anchor=tie or 0.0).solve(w[:, 0]).d
    ground = torch.softmax(d[:, 4:6], 1)
    objects = torch.softmax(torch.stack([partition.cut(w[:, i]) for i in (1, 2)], 1) / 0.5, 1)
    torch.testing.assert_close(partition.masks(X), torch.cat([ground[:, :1], ground[:, 1:] * objects], 1))


def test_control_is_the_softmax_of_the_network():
    control = SoftmaxPartition(8, 3, (6, 9), background="none", temperature=2.0)
    torch.testing.assert_close(control.masks(X), torch.softmax(control.net(X) / 2, 1))
    with pytest.raises(ValueError, match="without the program there are none"):
        SoftmaxPartition(8, 3, (6, 9), background="terminals").masks(X)


def test_gradient():
    partition = KPartition(3, 3, (4, 5), hidden=4).double()
    x = torch.randn(1, 3, 4, 5, dtype=torch.double, requires_grad=True)
    assert torch.autograd.gradcheck(partition.masks, x)


def test_no_slot_can_win_everywhere():
    """Free terminals keep the mean of a cut near zero whatever the weights; the control has no such balance."""
    x = torch.randn(2, 8, 16, 16)
    partition, control = (kind(8, 4, (16, 16), background="none") for kind in (KPartition, SoftmaxPartition))
    for module in (partition, control):
        with torch.no_grad():
            module.net[-1].bias[: module.weights_per_cut] += (
                100 * torch.tensor([0.0, 0, 0, 0, 1, 0])[-module.weights_per_cut :] + 50
            )
    assert partition.vertices(partition.weights(x)).mean((2, 3)).abs().max() < 1.0
    assert (control.masks(x).argmax(1) == 0).all()


@pytest.mark.parametrize(
    "change, message",
    [
        ({"background": "sky"}, "background is 'sky'; expected one of cuts, terminals, none"),
        ({"parts": 1}, "parts is 1; expected at least 2"),
        ({"size": (6,)}, r"size is \(6,\); expected \(H, W\)"),
        ({"kernels": (2,)}, r"kernels is \(2,\); expected an odd side"),
        ({"temperature": 0.0}, "temperature is 0.0; expected a positive number"),
        ({"background_anchor": 1.5}, "background_anchor is 1.5; expected a number from 0 to 1 or None"),
    ],
)
def test_bad_arguments(change, message):
    with pytest.raises(ValueError, match=message):
        KPartition(**({"in_channels": 8, "parts": 3, "size": (6, 9)} | change))


def test_bad_features():
    partition = KPartition(8, 3, (6, 9))
    with pytest.raises(ValueError, match=r"features have shape \(2, 8, 9, 6\); expected \(B, 8, 6, 9\)"):
        partition(X.mT)
    with pytest.raises(TypeError, match=r"features are of type torch\.int64"):
        partition(X.long())
