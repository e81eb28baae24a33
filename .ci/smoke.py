"""Try the installed package outside of the checkout: python smoke.py FOLDER."""

import subprocess
import sys
from pathlib import Path

import torch

import cutslots


def run(*words: str) -> None:
    print("cutslots", *words, flush=True)
    subprocess.run([str(Path(sys.executable).with_name("cutslots")), *words], check=True)


folder = Path(sys.argv[1])
assert "site-packages" in cutslots.__file__, f"{cutslots.__file__} is not the installed package"
p = cutslots.GridCut((16, 16))(torch.randn(2, 6, 16, 16))
assert p.shape == (2, 16, 16) and p.isfinite().all()
output = cutslots.Discovery.from_pretrained("tiny-64")(torch.rand(1, 3, 64, 64))
assert torch.allclose(output.masks.sum(1), torch.ones(1, 64, 64), atol=1e-5)
run("--version")
run("info")
run("parts")
run("generate", "plain", "--count", "4", "--image-size", "64", "64", "--out", str(folder / "scenes"))
run("predict", "tiny-64", str(folder / "scenes"), "--out", str(folder / "predictions"))
run("evaluate", "tiny-64", "--data", "plain:2-5", "--num-images", "4", "--out", str(folder / "evaluation"))
short = ("--max-steps", "2", "--num-images", "16", "--batch-size", "4", "--num-eval-images", "4")
run("train", "tiny", *short, "--out", str(folder / "run"))
assert (folder / "run" / "model.safetensors").is_file() and (folder / "evaluation" / "report.html").is_file()
print(f"cutslots {cutslots.__version__} works from {Path(cutslots.__file__).parent}")
