"""What PyTorch expects of a layer: one function for each contract, which fails where a layer breaks it.

Layers run in float64 where derivatives are compared. On CUDA they run in float32 where kernels are under test.
"""

from __future__ import annotations

import copy
import io
import pickle
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.autograd import gradcheck, gradgradcheck
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from tests.contracts.layers import SOLVERS, Layer

Outputs = tuple[Tensor, ...]
NONDETERMINISM = {"cpu": 0.0, "cuda": 1e-8}
HALF_TOLERANCE = {torch.float16: 5e-3, torch.bfloat16: 4e-2}  # 11 and 8 significant bits


class NotApplicable(Exception):
    """The contract has nothing to say about this layer."""


@dataclass(frozen=True)
class Contract:
    """A row of the table."""

    check: Callable[[Layer, str], None]
    what: str  # for the page


CONTRACTS: dict[str, Contract] = {}


def contract(name: str, what: str) -> Callable[[Callable[[Layer, str], None]], Callable[[Layer, str], None]]:
    def register(check: Callable[[Layer, str], None]) -> Callable[[Layer, str], None]:
        CONTRACTS[name] = Contract(check, what)
        return check

    return register


# -------------------------------------------------------------------------------------------------------------- helpers


def call(module: Callable[..., Any], *args: Any) -> Outputs:
    """Return the outputs as a tuple. Slot Attention samples its slots from the same seed every time."""
    torch.manual_seed(0)
    out = module(*args)
    return (out,) if isinstance(out, Tensor) else tuple(out)


def with_parameters(module: nn.Module) -> tuple[Callable[..., Outputs], list[Tensor]]:
    """Return the module as a function of its input and its parameters, and the parameters, without frozen ones."""
    parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}

    def function(x: Tensor, *values: Tensor) -> Outputs:
        return call(lambda x: functional_call(module, dict(zip(parameters, values, strict=True)), (x,)), x)

    return function, list(parameters.values())


def trained(module: nn.Module) -> list[Tensor]:
    """Return the parameters without frozen ones."""
    return [p for p in module.parameters() if p.requires_grad]


def loss(outputs: Outputs) -> Tensor:
    """Return a nonlinear function of all outputs, so that linear layers have second derivatives too."""
    return sum(((out - 0.3).square().mean() for out in outputs), torch.zeros((), device=outputs[0].device))


def gradients(module: Callable[..., Any], parameters: list[Tensor], x: Tensor) -> list[Tensor]:
    """Return outputs, then the gradients of x and of the parameters."""
    x = x if x.requires_grad else x.clone().requires_grad_()
    outputs = call(module, x)
    grads = torch.autograd.grad(loss(outputs), [x, *parameters], allow_unused=True, materialize_grads=True)
    return [*(out.detach() for out in outputs), *grads]


def assert_close(actual: Any, expected: Any, tolerance: float = 1e-9) -> None:
    actual, expected = list(actual), list(expected)
    assert len(actual) == len(expected)
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


def assert_equal(actual: Any, expected: Any) -> None:
    """Check that tensors are equal, bit for bit on the CPU. CUDA adds in any order."""
    for one, other in zip(actual, expected, strict=True):
        assert other.isfinite().all()
        assert one.device == other.device and one.dtype == other.dtype
        assert_close([one], [other], 1e-4) if one.is_cuda else torch.testing.assert_close(one, other, rtol=0, atol=0)


def kernel_dtype(device: str) -> torch.dtype:
    """Return the precision of the kernels on CUDA."""
    return torch.float32 if device == "cuda" else torch.float64


def probe(layer: Layer, device: str) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    """Return three projections of the outputs as a function of three numbers, which move input and parameters."""
    (module, parameters), x = with_parameters(layer.make(device)), layer.input(2, device=device)
    directions, *changes = (torch.randn(3, *v.shape, dtype=v.dtype).to(device) / 10 for v in (x, *parameters))
    weights = [torch.randn(3, *out.shape, dtype=out.dtype).to(device) for out in module(x, *parameters)]

    def function(t: Tensor) -> Tensor:
        values = [p.detach() + torch.tensordot(t, change, 1) for p, change in zip(parameters, changes, strict=True)]
        outputs = module(x + torch.tensordot(t, directions, 1), *values)
        return sum((w * out.square()).flatten(1).sum(1) for w, out in zip(weights, outputs, strict=True))

    return function, torch.tensor([0.1, -0.2, 0.3], dtype=x.dtype, device=device)


# ---------------------------------------------------------------------------------------------------------- derivatives


@contract("gradcheck", "first derivatives in reverse mode, of the input and of every parameter")
def check_reverse_mode(layer: Layer, device: str) -> None:
    function, parameters = with_parameters(layer.make(device))
    x = layer.input(2, device=device).requires_grad_()
    assert gradcheck(function, (x, *parameters), fast_mode=True, nondet_tol=NONDETERMINISM[device])


@contract("gradcheck, forward mode", "`torch.autograd.forward_ad`, of the input and of every parameter")
def check_forward_mode(layer: Layer, device: str) -> None:
    function, t = probe(layer, device)
    assert gradcheck(
        function, t.requires_grad_(), check_forward_ad=True, check_backward_ad=False, nondet_tol=NONDETERMINISM[device]
    )


@contract("gradgradcheck", "second derivatives, reverse over reverse and forward over reverse")
def check_second_derivatives(layer: Layer, device: str) -> None:
    function, t = probe(layer, device)
    assert gradgradcheck(
        function, t.requires_grad_(), check_fwd_over_rev=True, fast_mode=True, nondet_tol=NONDETERMINISM[device]
    )


@contract("batched gradients", "`torch.autograd.grad(is_grads_batched=True)`, `functional.jacobian(vectorize=True)`")
def check_batched_gradients(layer: Layer, device: str) -> None:
    function, t = probe(layer, device)
    one, other = (torch.autograd.functional.jacobian(function, t, vectorize=on) for on in (True, False))
    assert_close([one], [other])
    if layer.group == SOLVERS:  # the others take their second derivatives from torch
        total = lambda t: function(t).sum()
        one, other = (torch.autograd.functional.hessian(total, t, vectorize=on) for on in (True, False))
        assert_close([one], [other])


@contract("batched forward mode", '`torch.autograd.functional.jacobian(vectorize=True, strategy="forward-mode")`')
def check_batched_forward_mode(layer: Layer, device: str) -> None:
    function, t = probe(layer, device)
    jacobian = torch.autograd.functional.jacobian(function, t, vectorize=True, strategy="forward-mode")
    assert_close([jacobian], [torch.autograd.functional.jacobian(function, t)])


@contract("torch.func", "`grad`, `vjp`, `jvp`, `jacrev`, `jacfwd`, `hessian`")
def check_func(layer: Layer, device: str) -> None:
    function, t = probe(layer, device)
    jacobian = torch.autograd.functional.jacobian(function, t)
    assert_close([torch.func.jacrev(function)(t)], [jacobian])
    assert_close([torch.func.jacfwd(function, randomness="same")(t)], [jacobian])
    assert_close([torch.func.jvp(function, (t,), (t,))[1]], [jacobian @ t])
    assert_close(torch.func.vjp(function, t)[1](t), [t @ jacobian])
    total = lambda t: function(t).square().sum()
    gradient = torch.func.grad(total)
    assert_close([gradient(t)], [torch.autograd.functional.jacobian(total, t)])
    hessian = torch.func.jacfwd(torch.func.jacrev(total), randomness="same")(t)
    step = 1e-5 * torch.randn_like(t)
    numeric = (gradient(t + step) - gradient(t - step)) / 2e-5
    assert_close([hessian @ step / 1e-5], [numeric], 1e-5 * max(1.0, float(numeric.abs().max())))
    assert_close([torch.func.jacrev(torch.func.jacfwd(total, randomness="same"))(t)], [hessian])


@contract("torch.func.vmap", "equals a loop, nested too; gradients of the parameters for each sample")
def check_vmap(layer: Layer, device: str) -> None:
    module, x = layer.make(device), layer.input(2, 2, 1, device=device)
    vmap = lambda f, **options: torch.func.vmap(f, randomness="same", **options)
    nested = call(vmap(vmap(module, in_dims=-1), in_dims=-1), x.movedim((1, 0), (-2, -1)))
    for i, j in ((0, 0), (0, 1), (1, 0), (1, 1)):
        assert_close([out[i, j] for out in nested], call(module, x[i, j]))
    function, parameters = with_parameters(module)
    per_sample = vmap(torch.func.grad(lambda p, x: loss(function(x, *p))), in_dims=(None, 0))(tuple(parameters), x[0])
    expected = [gradients(module, parameters, x[0, j]) for j in range(2)]
    for value, *samples in zip(reversed(per_sample), *(reversed(e) for e in expected), strict=False):
        assert_close(value, samples)


# ----------------------------------------------------------------------------------------------------- compile, export


@contextmanager
def nothing_compiled() -> Iterator[None]:
    """Forget what was compiled: dynamo counts recompilations of a module's code over all its layers."""
    torch.compiler.reset()
    with warnings.catch_warnings(action="ignore"):
        yield
    torch.compiler.reset()


@contract("torch.compile", "`fullgraph=True`, outputs and gradients; with a dynamic batch other sizes compile nothing")
def check_compile(layer: Layer, device: str) -> None:
    dtype, tolerance = kernel_dtype(device), 1e-9 if device == "cpu" else 1e-4
    module = layer.make(device, dtype)
    parameters = trained(module)
    backend = "aot_eager" if layer.group == SOLVERS else "eager"  # others differentiate torch's own operations
    with nothing_compiled():
        compiled = torch.compile(module, backend=backend, fullgraph=True)
        for batch, stance in ((5, "default"), (3, "fail_on_recompile")):
            x = layer.input(batch, device=device, dtype=dtype).requires_grad_()
            torch._dynamo.mark_dynamic(x, 0)
            with torch.compiler.set_stance(stance):
                actual = gradients(compiled, parameters, x)
            assert_close(actual, gradients(module, parameters, x), tolerance)


@contract("torch.export", "with a dynamic batch, saved and loaded, outputs and gradients")
def check_export(layer: Layer, device: str) -> None:
    module, x = layer.make(device), layer.input(3, device=device)
    batch, saved = torch.export.Dim("batch", min=2, max=64), io.BytesIO()
    with nothing_compiled():
        torch.export.save(torch.export.export(module, (x,), dynamic_shapes=({0: batch},), strict=False), saved)
        saved.seek(0)
        loaded = torch.export.load(saved).module()
    x = layer.input(5, device=device)
    assert_close(gradients(loaded, [], x), gradients(module, [], x))


class RecordOps(TorchDispatchMode):
    """Records the calls of the custom ops of this package."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[Any, tuple[Any, ...]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "cutslots":
            self.calls.setdefault(func, tuple(a.detach().clone() if isinstance(a, Tensor) else a for a in args))
        return func(*args, **(kwargs or {}))


@contract("torch.library.opcheck", "of every custom op that traced code calls")
def check_ops(layer: Layer, device: str) -> None:
    module, x = layer.make(device), layer.input(2, device=device).requires_grad_()
    with mock.patch("torch.compiler.is_compiling", return_value=True), RecordOps() as ops:  # as in a trace
        loss(call(module, x)).backward()
    if not ops.calls:
        raise NotApplicable
    for op, args in ops.calls.items():
        differentiable = op.name() in ("cutslots::spd_solve", "cutslots::csr_matmul")
        first = args[0].requires_grad_(differentiable)
        extra = {} if differentiable else {"test_utils": ("test_schema", "test_faketensor")}
        torch.library.opcheck(op, (first, *args[1:]), **extra)


# ------------------------------------------------------------------------------------------------------ copies, devices


@contextmanager
def empty_is_nan() -> Iterator[None]:
    """Let `to_empty` fill memory with NaN. Without this it may by chance get memory that holds the right values."""
    empty_like = torch.empty_like

    def empty_like_nan(tensor: Tensor, *args: Any, **options: Any) -> Tensor:
        out = empty_like(tensor, *args, **options)
        return out.fill_(torch.nan) if out.is_floating_point() and out.device.type != "meta" else out

    with mock.patch("torch.empty_like", empty_like_nan):
        yield


def assert_twin(module: nn.Module, twin: nn.Module, x: Tensor) -> None:
    """Check that outputs and buffers are equal."""
    with torch.no_grad():
        assert_equal(call(twin.eval(), x), call(module, x))
    buffers, others = dict(module.named_buffers()), dict(twin.named_buffers())
    assert buffers.keys() == others.keys()
    for name, value in buffers.items():
        assert torch.equal(value, others[name]), name


def build_on_meta(layer: Layer) -> nn.Module:
    with torch.device("meta"):
        return layer.build()


@contract("meta device", "`to_empty`, then `load_state_dict(strict=True)`; `load_state_dict(assign=True)`")
def check_meta(layer: Layer, device: str) -> None:
    module, x = layer.make(device, torch.float32), layer.input(2, device=device, dtype=torch.float32)
    for make in (lambda: build_on_meta(layer), lambda: copy.deepcopy(build_on_meta(layer)), layer.build):
        with empty_is_nan():
            twin = make().to_empty(device=device)
        twin.load_state_dict(module.state_dict(), strict=True)
        assert_twin(module, twin, x)
    assigned = build_on_meta(layer)
    assigned.load_state_dict(module.state_dict(), strict=True, assign=True)
    with torch.no_grad():
        assert_equal(call(assigned.eval(), x), call(module, x))


@contract("deepcopy", "`copy.deepcopy` of the module: outputs and buffers are equal, on the CPU bit for bit")
def check_deepcopy(layer: Layer, device: str) -> None:
    module, x = layer.make(device, torch.float32), layer.input(2, device=device, dtype=torch.float32)
    twin = copy.deepcopy(module)
    assert_twin(module, twin, x)
    for parameter in twin.parameters():
        parameter.data.add_(1)
    assert_twin(module, layer.make(device, torch.float32), x)  # nothing is shared


@contract("pickle", "of the module; `torch.save` and `torch.load(weights_only=True)` of the state dict")
def check_pickle(layer: Layer, device: str) -> None:
    module, x = layer.make(device, torch.float32), layer.input(2, device=device, dtype=torch.float32)
    assert_twin(module, pickle.loads(pickle.dumps(module)), x)
    saved, other = io.BytesIO(), layer.build().to(device)
    torch.save(module.state_dict(), saved)
    saved.seek(0)
    other.load_state_dict(torch.load(saved, weights_only=True), strict=True)
    assert_twin(module, other, x)


def replicate(module: nn.Module, device: str) -> nn.Module:
    """Return a replica as DataParallel makes it: a shallow copy with parameters and buffers on another device."""
    replica = module._replicate_for_data_parallel()
    replica._former_parameters = {}
    for name, child in module._modules.items():
        replica._modules[name] = child and replicate(child, device)
    for name, parameter in module._parameters.items():
        if parameter is None:
            replica._parameters[name] = None
        else:
            setattr(replica, name, parameter.detach().to(device, copy=True))
            replica._former_parameters[name] = getattr(replica, name)
    for name, buffer in module._buffers.items():
        replica._buffers[name] = buffer if buffer is None else buffer.to(device)
    return replica


@contract("DataParallel", "replicas on other devices run in threads and equal the module")
def check_data_parallel(layer: Layer, device: str) -> None:
    module, x = layer.make("cpu", torch.float32), layer.input(2, device=device, dtype=torch.float32)
    whole = layer.make(device, torch.float32)
    expected, tolerance = call(whole, x), 1e-6 if device == "cpu" else 1e-3
    if device == "cuda":
        assert_close(call(nn.DataParallel(whole), x), expected, tolerance)
    seeded = threading.Lock()

    def run_replica(x: Tensor) -> Outputs:
        replica = replicate(module, device)
        with seeded:  # one generator for all threads
            return call(replica, x)

    with ThreadPoolExecutor(2) as threads:
        for outputs in threads.map(run_replica, (x, x)):
            assert_close(outputs, expected, tolerance)


# ------------------------------------------------------------------------------------------------------------ precision


@contract("half types", "`.half()` and `.bfloat16()`: outputs agree with float32, gradients are finite")
def check_half(layer: Layer, device: str) -> None:
    x = layer.input(2, device=device, dtype=torch.float32)
    expected = call(layer.make(device, torch.float32), x)
    for dtype, tolerance in HALF_TOLERANCE.items():
        module = layer.make(device, torch.float32).to(dtype)
        outputs = call(module, x.to(dtype))
        assert_close([out.float() for out in outputs], expected, tolerance)
        for gradient in gradients(module, trained(module), x.to(dtype)):
            assert gradient.isfinite().all()
        module.float().load_state_dict(layer.make(device, torch.float32).state_dict())
        assert_twin(layer.make(device, torch.float32), module, x)  # constants are not rounded on the way


@contract("autocast", "bfloat16: outputs agree with float32, gradients are finite and float32")
def check_autocast(layer: Layer, device: str) -> None:
    module, x = layer.make(device, torch.float32), layer.input(2, device=device, dtype=torch.float32)
    expected = call(module, x)
    with torch.autocast(device, torch.bfloat16):
        outputs = call(module, x)
        assert_close([out.float() for out in outputs], expected, HALF_TOLERANCE[torch.bfloat16])
        actual = gradients(module, trained(module), x)[len(outputs) :]
    for gradient in actual:
        assert gradient.isfinite().all() and gradient.dtype == torch.float32


# --------------------------------------------------------------------------------------------------------------- inputs


@contract("empty batch", "forward and backward of no samples")
def check_empty_batch(layer: Layer, device: str) -> None:
    dtype = kernel_dtype(device)
    module, x = layer.make(device, dtype), layer.input(2, device=device, dtype=dtype)
    empty = x[:0].clone().requires_grad_()
    outputs = call(module, empty)
    for out, other in zip(outputs, call(module, x), strict=True):
        assert out.shape == (0, *other.shape[1:]) and out.dtype == other.dtype
    sum(out.sum() for out in outputs).backward()
    assert empty.grad is not None and empty.grad.shape == empty.shape
    assert not any(p.grad.any() for p in module.parameters() if p.grad is not None)


@contract("strided inputs", "non-contiguous, expanded and channels-last inputs give the same outputs")
def check_strides(layer: Layer, device: str) -> None:
    dtype = kernel_dtype(device)
    module, x = layer.make(device, dtype), layer.input(2, device=device, dtype=dtype)
    tolerance = 1e-9 if device == "cpu" else 1e-4
    expected = gradients(module, trained(module), x)
    strided = torch.stack([x, x + 1], -1)[..., 0].movedim(0, -1).contiguous().movedim(-1, 0)
    assert not strided.is_contiguous()
    assert_close(gradients(module, trained(module), strided), expected, tolerance)
    assert_close(call(module, x[:1].expand_as(x)), call(module, x[[0, 0]]), tolerance)
    if x.ndim == 4:
        images = x.contiguous(memory_format=torch.channels_last)
        module = module.to(memory_format=torch.channels_last)
        assert_close(gradients(module, trained(module), images), expected, tolerance)


@contract(
    "no gradients", "`requires_grad=False`, `no_grad` and `inference_mode` keep no graph; inputs stay as they are"
)
def check_no_gradients(layer: Layer, device: str) -> None:
    dtype = kernel_dtype(device)
    module, x = layer.make(device, dtype), layer.input(2, device=device, dtype=dtype)
    before, expected = x.clone(), [out.detach() for out in call(module, x)]
    with torch.no_grad():
        assert not any(out.requires_grad for out in call(module, x))
    with torch.inference_mode():
        assert_equal(call(module, x), expected)
    assert_equal([out.detach() for out in call(module, x)], expected)
    for out in call(module.requires_grad_(False), x):
        assert not out.requires_grad and out.grad_fn is None
    assert torch.equal(x, before)


@contract("determinism", "two calls and two backward passes are equal, on the CPU bit for bit")
def check_determinism(layer: Layer, device: str) -> None:
    dtype = kernel_dtype(device)
    module, x = layer.make(device, dtype), layer.input(2, device=device, dtype=dtype)
    first, second = (gradients(module, trained(module), x) for _ in range(2))
    assert_equal(second, first)


@contract("checkpoint", "`torch.utils.checkpoint` gives the same gradients")
def check_checkpointing(layer: Layer, device: str) -> None:
    module, x = layer.make(device), layer.input(2, device=device)
    saved = lambda x: checkpoint(module, x, use_reentrant=False)
    parameters = trained(module)
    assert_close(gradients(saved, parameters, x), gradients(module, parameters, x))
