"""Fixtures and markers that several test modules share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec

import numpy as np
import pytest
import torch

from cutslots.scenes import Scenes
from cutslots.scenes.scene_batch import SceneBatch
from cutslots.viz import curves

collect_ignore = ["plugins", "mutants"]  # imported only as plugins; needs mutmut

torch.set_num_threads(1)  # the suite runs in several processes
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # threads of processes that tests start do not spin


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def float32() -> Iterator[None]:
    """Compute float32 in float32: a GPU would use TF32 in convolutions, and after a training run in products too."""
    torch.set_float32_matmul_precision("highest")
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        yield


def need(there: object, missing: str) -> None:
    """Skips a test for what is missing; where CUTSLOTS_REQUIRE_BROWSER is 1, as in .ci/run, fails it instead."""
    if not there and os.environ.get("CUTSLOTS_REQUIRE_BROWSER") == "1":
        pytest.fail(f"{missing}. CUTSLOTS_REQUIRE_BROWSER is 1, so this test may not be skipped", pytrace=False)
    if not there:
        pytest.skip(missing)


@pytest.fixture(scope="session")
def gradio() -> None:
    need(find_spec("gradio"), "there is no Gradio: pip install 'cutslots[app]'")


@pytest.fixture
def no_curves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports without drawn curves: Matplotlib takes a quarter of the time of a small run."""
    monkeypatch.setattr(curves, "svg_image", lambda figure, alt: alt)


@pytest.fixture(scope="module")
def simulate_once() -> Iterator[None]:
    """Simulate the motion of each built-in video once: it takes a second."""
    original = Scenes._sample

    def sample(self: Scenes, indices: np.ndarray, device: torch.device) -> SceneBatch:
        if self.frames == 1:
            return original(self, indices, device)
        which = self.family, self.split, self.seed, self.num_objects
        keys = {i: (*which, i) for i in indices.tolist()}
        missing = [i for i, key in keys.items() if key not in SIMULATED]
        made = original(self, np.array(missing, dtype=np.int64), torch.device("cpu"))
        SIMULATED.update((keys[i], made.select(slice(row, row + 1))) for row, i in enumerate(missing))
        if not len(indices):
            return made
        return SceneBatch.concatenate([SIMULATED[keys[int(i)]] for i in indices]).to(device)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Scenes, "_sample", sample)
        yield


SIMULATED: dict[tuple[object, ...], SceneBatch] = {}

NEEDS_CUDA = "needs a CUDA device"  # how the reason begins for which a test is skipped
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason=NEEDS_CUDA)
DEVICES = ["cpu", pytest.param("cuda", marks=needs_cuda)]


# --------------------------------------------------------------------------------------------------------- --only-cuda


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--only-cuda", action="store_true", help="run only the tests that need a CUDA device; print failures at once"
    )


def pytest_configure(config: pytest.Config) -> None:
    if not config.getoption("only_cuda"):
        return
    if not torch.cuda.is_available() and not config.getoption("collectonly"):
        raise pytest.UsageError("--only-cuda is given and there is no CUDA device here; expected one")
    if not hasattr(config, "workerinput"):  # a worker of xdist sends its reports to the main process
        config.pluginmanager.register(FailurePrinter(config))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("only_cuda"):
        config.hook.pytest_deselected(items=[item for item in items if not wants_cuda(item)])
        items[:] = [item for item in items if wants_cuda(item)]


def wants_cuda(item: pytest.Item) -> bool:
    """Return whether a test is skipped where there is no CUDA device."""
    return any(mark.kwargs.get("reason", "").startswith(NEEDS_CUDA) for mark in item.iter_markers("skipif"))


class FailurePrinter:
    """Prints each failure when it happens. A run on a rented GPU may end before pytest's summary."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            terminal = self.config.pluginmanager.get_plugin("terminalreporter")
            crash = getattr(report.longrepr, "reprcrash", None)
            text = f"\nFAILED {report.nodeid}: {str(crash or report.longrepr)[:1000]}\n"
            terminal.write(text, flush=True)  # a file would buffer it
