import math

import numpy as np
import pytest
import torch

from cutslots.modules.slot_attention import SlotAttention, gru_cell

# ------------------------------------------------------------------------------------- the reference, restated in NumPy


def keras_weights(module):
    """Return the weights in the layout of Keras: kernels (in, out), the gates of a GRU in the order z, r, h."""
    w = {name: value.detach().double().numpy() for name, value in module.state_dict().items()}
    gates = {}
    for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
        r, z, h = np.split(w[f"gru.{name}"], 3)
        gates[name] = np.concatenate([z, r, h]).T

    def dense(name):
        return w[f"{name}.weight"].T, w.get(f"{name}.bias", 0.0)

    def norm(name):
        return w[f"{name}.weight"], w[f"{name}.bias"]

    k, v = np.split(w["key_value.weight"].T, 2, axis=1)
    return {
        "position": dense("position.linear"),
        "layer_norm": norm("features.0"),
        "feedforward": (dense("features.1"), dense("features.3")),
        "norm_inputs": norm("norm_inputs"),
        "norm_slots": norm("norm_slots"),
        "norm_mlp": norm("mlp.0"),
        "mlp": (dense("mlp.1"), dense("mlp.3")),
        "q": w["query.weight"].T,
        "k": k,
        "v": v,
        "mu": w["mean"],
        "log_sigma": w["log_scale"],
        "gru": (gates["weight_ih"], gates["weight_hh"], np.stack([gates["bias_ih"], gates["bias_hh"]])),
    }


def layer_norm(x, gamma, beta):
    """Keras' LayerNormalization with its default epsilon."""
    mean, variance = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    return gamma * (x - mean) / np.sqrt(variance + 1e-3) + beta


def feedforward(x, first, second):
    (w1, b1), (w2, b2) = first, second
    return np.maximum(x @ w1 + b1, 0) @ w2 + b2


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def gru(x, state, kernel, recurrent_kernel, bias):
    """Keras' GRU cell with reset_after, the default of TensorFlow 2."""
    x_z, x_r, x_h = np.split(x @ kernel + bias[0], 3, axis=-1)
    s_z, s_r, s_h = np.split(state @ recurrent_kernel + bias[1], 3, axis=-1)
    z, r = sigmoid(x_z + s_z), sigmoid(x_r + s_r)
    return z * state + (1 - z) * np.tanh(x_h + r * s_h)


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def embed_positions(image, kernel, bias):
    """Add a linear function of the position to features (B, H, W, C). The reference's grid is float32."""
    y, x = np.meshgrid(*(np.linspace(0, 1, n, dtype=np.float32) for n in image.shape[1:3]), indexing="ij")
    return image + np.stack([y, x, 1 - y, 1 - x], -1) @ kernel + bias


def slot_attention(inputs, noise, w, num_iterations):
    """Return slots (B, K, D) and the last attention (B, N, K) for inputs (B, N, C)."""
    inputs = layer_norm(inputs, *w["norm_inputs"])
    k, v = inputs @ w["k"], inputs @ w["v"]
    slots = w["mu"] + np.exp(w["log_sigma"]) * noise
    for _ in range(num_iterations):
        q = layer_norm(slots, *w["norm_slots"]) @ w["q"] / math.sqrt(slots.shape[-1])
        attention = softmax(k @ q.swapaxes(1, 2))
        weights = attention + 1e-8
        weights = weights / weights.sum(1, keepdims=True)
        slots = gru(weights.swapaxes(1, 2) @ v, slots, *w["gru"])
        slots = slots + feedforward(layer_norm(slots, *w["norm_mlp"]), *w["mlp"])
    return slots, attention


def reference(module, x, noise):
    """Return slots (B, K, D) and masks (B, K, H, W) for features (B, C, H, W), from the weights of a module."""
    w = keras_weights(module)
    image = embed_positions(x.double().numpy().transpose(0, 2, 3, 1), *w["position"])
    inputs = layer_norm(image.reshape(len(x), -1, x.shape[1]), *w["layer_norm"])
    inputs = feedforward(inputs, *w["feedforward"])
    slots, attention = slot_attention(inputs, noise.double().numpy(), w, module.num_iterations)
    return slots, attention.swapaxes(1, 2).reshape(len(x), -1, *x.shape[2:])


def perturb(module):
    """Add noise to all parameters: initial biases are zero, so they would show no difference between gates."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    return module


@pytest.mark.parametrize("relative_positions", [False, True])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.float64, 1e-12)])
def test_slots_and_masks_are_those_of_the_reference(dtype, tolerance, relative_positions):
    """With the same weights and the same noise. A position, which the reference does not have, follows the slot."""
    torch.manual_seed(0)
    kwargs = {"slot_dim": 12, "mlp_dim": 20, "relative_positions": relative_positions}
    module, x = perturb(SlotAttention(8, 4, (5, 6), **kwargs)).to(dtype), torch.randn(2, 8, 5, 6, dtype=dtype)
    torch.manual_seed(3)
    with torch.no_grad():
        slots, masks = module(x)
    torch.manual_seed(3)
    expected_slots, expected_masks = reference(module, x, torch.randn(2, 4, module.content_dim))
    assert slots.dtype == masks.dtype == dtype and slots.shape == (2, 4, 12)
    np.testing.assert_allclose(slots[..., : module.content_dim], expected_slots, rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(masks, expected_masks, rtol=tolerance, atol=tolerance)


# ------------------------------------------------------------------------------------------------------ initial weights

IN, DIM, HIDDEN, DRAWS = 24, 16, 40, 400
KERNELS = {  # the shapes of Glorot-uniform weights in Keras, all with different fans
    "position.linear.weight": (4, IN),
    "features.1.weight": (IN, IN),
    "features.3.weight": (IN, IN),
    "mean": (1, 1, DIM),
    "log_scale": (1, 1, DIM),
    "query.weight": (DIM, DIM),
    "key": (IN, DIM),
    "value": (IN, DIM),
    "gru.weight_ih": (DIM, 3 * DIM),
    "mlp.1.weight": (DIM, HIDDEN),
    "mlp.3.weight": (HIDDEN, DIM),
}


@pytest.fixture(scope="module")
def draws():
    """Every parameter by name, of many modules."""
    torch.manual_seed(0)
    states = [SlotAttention(IN, 3, (2, 2), DIM, mlp_dim=HIDDEN).state_dict() for _ in range(DRAWS)]
    stacked = {name: torch.stack([state[name] for state in states]) for name in states[0]}
    key, value = stacked.pop("key_value.weight").split(DIM, 1)
    return stacked | {"key": key, "value": value}


def glorot_bound(shape):
    """Keras' bound: a kernel has shape (*window, in, out), and the window counts in both fans."""
    window = math.prod(shape[:-2])
    return math.sqrt(6 / (window * shape[-2] + window * shape[-1]))


@pytest.mark.parametrize("name, shape", KERNELS.items())
def test_initial_weights_are_glorot_uniform(draws, name, shape):
    """The standard deviation of 6,400 values or more is known to 0.6 percent, their bound much better."""
    values, bound = draws[name], glorot_bound(shape)
    assert values[0].numel() == math.prod(shape)
    assert values.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.02)
    assert 0.995 * bound < values.abs().max() <= bound * (1 + 1e-6)
    assert abs(values.mean().item()) < 0.05 * bound


def test_initial_recurrent_kernel_is_orthogonal_as_one_matrix(draws):
    """Its 3D columns have D orthonormal rows. The gates alone are not orthogonal."""
    kernel = draws["gru.weight_hh"].mT
    assert kernel.shape == (DRAWS, DIM, 3 * DIM)
    torch.testing.assert_close(kernel @ kernel.mT, torch.eye(DIM).expand(DRAWS, -1, -1), rtol=0, atol=1e-5)
    assert kernel.std().item() == pytest.approx((3 * DIM) ** -0.5, rel=0.01)
    gate = kernel[..., :DIM]
    assert (gate @ gate.mT - torch.eye(DIM)).abs().amax((1, 2)).min() > 0.3
    assert kernel.mean(0).abs().max() < 6 * (3 * DIM * DRAWS) ** -0.5, "every entry has mean zero"


def test_other_initial_weights_are_zero_and_one(draws):
    norms = {"features.0", "norm_inputs", "norm_slots", "mlp.0"}
    others = draws.keys() - KERNELS.keys() - {"gru.weight_hh"}
    assert {name.removesuffix(".weight") for name in others if name.endswith("weight")} == norms
    for name in others:
        assert (draws[name] == (0 if "bias" in name else 1)).all(), name


# ------------------------------------------------------------------------------------------------------------ behaviour


def test_num_iterations():
    torch.manual_seed(1)
    once = SlotAttention(8, 4, (5, 6), slot_dim=12, num_iterations=1)
    often = SlotAttention(8, 4, (5, 6), slot_dim=12, num_iterations=4)
    often.load_state_dict(once.state_dict())
    x, calls = torch.randn(2, 8, 5, 6), []
    for module in (once, often):
        module.query.register_forward_hook(lambda *_: calls.append(1))
        module(x)
        assert len(calls) == module.num_iterations
        calls.clear()


def test_initial_slots_are_sampled_from_the_generator_of_torch():
    module, x = SlotAttention(8, 4, (5, 6)), torch.randn(2, 8, 5, 6)
    one, other = module(x).slots, module(x).slots
    assert not torch.equal(one, other)
    torch.manual_seed(0)
    first = module(x).slots
    torch.manual_seed(0)
    assert torch.equal(first, module(x).slots)


def test_slot_attention_has_no_background():
    module = SlotAttention(8, 4, (5, 6))
    assert not module.has_background and not module.spacetime


def test_positions_alone_train_slot_attention():
    module = SlotAttention(8, 4, (8, 8), slot_dim=12, relative_positions=True)
    module(torch.randn(2, 8, 8, 8)).slots[..., -3:].square().sum().backward()
    for layer in (module.query, module.key_value, module.position.linear):
        assert layer.weight.grad.isfinite().all() and layer.weight.grad.any()


def test_gru_cell_is_that_of_torch():
    cell = torch.nn.GRUCell(6, 6).double()
    x, h = torch.randn(2, 3, 4, 6, dtype=torch.float64)
    expected = cell(x.flatten(0, 1), h.flatten(0, 1)).view_as(h)
    torch.testing.assert_close(gru_cell(cell, x, h), expected, atol=1e-14, rtol=0)
