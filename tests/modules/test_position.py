import numpy as np
import pytest
import torch

from cutslots.modules.position import FULL_IMAGE, MIN_SCALE, SoftPositionEmbedding, append_positions, mask_positions

# ------------------------------------------------------------------------------------------------- position embeddings


@pytest.mark.parametrize("size", [(5, 7), (8, 8), (1, 1)])
def test_position_embedding_equals_its_formula(size):
    H, W = size
    embedding, x = SoftPositionEmbedding(6, size), torch.randn(2, 6, H, W)
    out = embedding(x)
    weight, bias = embedding.linear.weight, embedding.linear.bias
    for i in range(H):
        for j in range(W):
            v, u = i / max(H - 1, 1), j / max(W - 1, 1)
            coordinates = torch.tensor([v, u, 1 - v, 1 - u])
            torch.testing.assert_close(out[:, :, i, j], x[:, :, i, j] + weight @ coordinates + bias)
    assert set(embedding.state_dict()) == {"linear.weight", "linear.bias"}, "the grid is not saved"


def test_bad_position_embeddings():
    with pytest.raises(ValueError, match=r"size is \(5, 0\); expected \(H, W\), two integers of at least 1$"):
        SoftPositionEmbedding(4, (5, 0))
    with pytest.raises(ValueError, match=r"features have shape \(1, 4, 6, 5\); expected \(B, 4, 5, 6\)"):
        SoftPositionEmbedding(4, (5, 6))(torch.randn(1, 4, 6, 5))
    with pytest.raises(TypeError, match=r"features have dtype torch\.int64; expected a floating-point type"):
        SoftPositionEmbedding(4, (5, 6))(torch.zeros(1, 4, 5, 6, dtype=torch.int64))


@pytest.mark.parametrize("size", [(5, 7), (8, 8)])
def test_relative_to_the_full_image_is_absolute(size):
    embedding, x = SoftPositionEmbedding(6, size), torch.randn(3, 6, *size)
    torch.testing.assert_close(embedding(x, torch.tensor(FULL_IMAGE).expand(3, 3)), embedding(x), rtol=0, atol=1e-6)


def test_relative_position_embedding_equals_its_formula():
    H, W = 5, 7
    embedding, x = SoftPositionEmbedding(6, (H, W)), torch.randn(2, 6, H, W)
    position = torch.tensor([[0.2, 0.7, 0.1], [0.9, 0.4, 0.3]])
    out = embedding(x, position)
    for b, (cy, cx, scale) in enumerate(position.tolist()):
        for i in range(H):
            for j in range(W):
                v, u = 0.5 + (i / 4 - cy) * 12**-0.5 / scale, 0.5 + (j / 6 - cx) * 12**-0.5 / scale
                expected = x[b, :, i, j] + embedding.linear(torch.tensor([v, u, 1 - v, 1 - u]))
                torch.testing.assert_close(out[b, :, i, j], expected, rtol=1e-4, atol=1e-5)


def test_relative_position_embedding_moves_and_scales_with_the_position():
    embedding, x = SoftPositionEmbedding(4, (6, 9)).double(), torch.zeros(1, 4, 6, 9, dtype=torch.double)
    at = lambda y, x_, scale=0.2: embedding(x, torch.tensor([[y, x_, scale]], dtype=torch.double))
    torch.testing.assert_close(at(0.4 + 1 / 5, 0.3)[..., 1:, :], at(0.4, 0.3)[..., :-1, :])
    torch.testing.assert_close(at(0.4, 0.3 - 2 / 8)[..., :-2], at(0.4, 0.3)[..., 2:])
    large, small = (at(0.0, 0.0, scale) for scale in (0.4, 0.2))
    torch.testing.assert_close(small[..., :3, :5], large[..., ::2, ::2], msg="half the scale, twice the slope")


def test_gradient_of_relative_position_embedding():
    embedding = SoftPositionEmbedding(3, (3, 4)).double()
    x = torch.randn(2, 3, 3, 4, dtype=torch.double, requires_grad=True)
    position = torch.tensor([[0.2, 0.7, 0.1], [0.9, 0.4, 0.3]], dtype=torch.double, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, p, *_: embedding(x, p), (x, position, *embedding.parameters()))


# --------------------------------------------------------------------------------------------------- positions of masks


@pytest.mark.parametrize("size", [(9, 9), (5, 12), (1, 7)])
def test_positions_are_the_moments_of_masks(size, rng):
    masks = rng.random((2, 3, *size)) ** 4
    y, x = np.linspace(0, 1, size[0]), np.linspace(0, 1, size[1])
    expected = np.empty((2, 3, 3))
    for b, k in np.ndindex(2, 3):
        rows, columns = masks[b, k].sum(1), masks[b, k].sum(0)
        cy, cx = np.average(y, weights=rows), np.average(x, weights=columns)
        variances = np.average((y - cy) ** 2, weights=rows), np.average((x - cx) ** 2, weights=columns)
        expected[b, k] = cy, cx, np.mean(variances) ** 0.5
    np.testing.assert_allclose(mask_positions(torch.from_numpy(masks)), expected, rtol=1e-5)
    np.testing.assert_allclose(mask_positions(torch.from_numpy(masks).float()), expected, rtol=1e-4)


def test_positions_do_not_depend_on_the_sum_of_a_mask():
    masks = torch.rand(2, 3, 8, 8)
    torch.testing.assert_close(mask_positions(0.1 * masks), mask_positions(masks), rtol=1e-4, atol=1e-5)


def test_the_scale_of_a_pixel_is_the_minimum():
    masks = torch.zeros(1, 2, 9, 5)
    masks[0, 0, 2, 3] = masks[0, 1, 8, 0] = 1
    torch.testing.assert_close(mask_positions(masks), torch.tensor([[[0.25, 0.75, MIN_SCALE], [1.0, 0.0, MIN_SCALE]]]))


def test_the_position_of_a_uniform_mask_is_the_full_image():
    """Up to the grid: n points from 0 to 1 have a slightly larger standard deviation than the interval."""
    for n in (8, 32, 128):
        position = mask_positions(torch.full((1, 1, n, n), 0.3))[0, 0]
        torch.testing.assert_close(position, torch.tensor(FULL_IMAGE), rtol=1.1 / (n - 1), atol=1e-5)


def test_the_position_of_an_empty_mask_is_finite():
    masks = torch.zeros(1, 1, 6, 6, requires_grad=True)
    position = mask_positions(masks)
    position.sum().backward()
    assert position.isfinite().all() and masks.grad.isfinite().all() and position[0, 0, 2] == np.float32(MIN_SCALE)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float16, 1e-3), (torch.bfloat16, 1e-2)])
def test_positions_of_half_precision_are_float32(dtype, tolerance):
    masks = torch.rand(2, 3, 64, 64)  # half precision cannot count 4,096 pixels
    got = mask_positions(masks.to(dtype))
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, mask_positions(masks), rtol=0, atol=tolerance)
    assert mask_positions(masks.double()).dtype == torch.float64


def test_positions_are_not_autocast():
    masks = torch.rand(2, 3, 32, 32)
    with torch.autocast("cpu", torch.bfloat16):
        got = mask_positions(masks)
    assert got.dtype == torch.float32 and torch.equal(got, mask_positions(masks))


def test_gradient_of_positions():
    masks = torch.rand(2, 2, 4, 5, dtype=torch.double, requires_grad=True)
    assert torch.autograd.gradcheck(mask_positions, masks)


@pytest.mark.parametrize("has_background", [False, True])
def test_append_positions(has_background):
    slots, masks = torch.randn(2, 3, 4), torch.rand(2, 3, 6, 7)
    out = append_positions(slots, masks, has_background)
    assert torch.equal(out[..., :4], slots) and torch.equal(out[:, 1:, 4:], mask_positions(masks)[:, 1:])
    expected = torch.tensor(FULL_IMAGE).expand(2, 3) if has_background else mask_positions(masks)[:, 0]
    assert torch.equal(out[:, 0, 4:], expected)
    assert append_positions(slots.bfloat16(), masks, has_background).dtype == torch.float32
