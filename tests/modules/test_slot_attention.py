import torch

from cutslots.modules.slot_attention import SlotAttention


def test_slot_attention_written_out():
    """The published algorithm, step by step, with the same noise."""
    module = SlotAttention(8, 4, (5, 6), slot_dim=12).double()
    x = torch.randn(2, 8, 5, 6, dtype=torch.double)
    torch.manual_seed(3)
    with torch.no_grad():
        slots, masks = module(x)
    torch.manual_seed(3)
    noise = torch.randn(2, 4, 12)
    embedded = x + module.position.linear(module.position.grid).permute(2, 0, 1)
    inputs = module.norm_inputs(module.features(embedded.flatten(2).transpose(1, 2)))
    k, v = module.key_value(inputs).split(12, dim=-1)
    s = module.mean + module.log_scale.exp() * noise
    for _ in range(3):
        before = s
        q = module.query(module.norm_slots(s))
        attention = torch.softmax(torch.einsum("bkd,bnd->bnk", q, k) / 12**0.5, dim=-1)
        weights = (attention + 1e-8) / (attention + 1e-8).sum(1, keepdim=True)
        update = torch.einsum("bnk,bnd->bkd", weights, v)
        s = torch.stack([module.gru(update[:, i], before[:, i]) for i in range(4)], 1)
        s = s + module.mlp(s)
    torch.testing.assert_close(slots, s, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(masks.flatten(2), attention.mT.float(), rtol=1e-5, atol=1e-5, check_dtype=False)


def test_num_iterations():
    torch.manual_seed(1)
    once = SlotAttention(8, 4, (5, 6), slot_dim=12, num_iterations=1)
    often = SlotAttention(8, 4, (5, 6), slot_dim=12, num_iterations=4)
    often.load_state_dict(once.state_dict())
    x, calls = torch.randn(2, 8, 5, 6), []
    for module in (once, often):
        module.gru.register_forward_hook(lambda *_: calls.append(1))
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
