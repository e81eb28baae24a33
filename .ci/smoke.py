"""What an installed package must do, away from the checkout: python smoke.py FOLDER."""

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
found = cutslots.Discovery.from_pretrained("tiny")(torch.rand(1, 3, 64, 64))
assert torch.allclose(found.masks.sum(1), torch.ones(1, 64, 64), atol=1e-5)
run("--version")
run("info")
run("generate", "plain", "--count", "4", "--size", "64", "--out", str(folder / "scenes"))
run("predict", "tiny", str(folder / "scenes"), "--out", str(folder / "found"))
run("evaluate", "tiny", "--data", "plain:2-5", "--images", "4", "--out", str(folder / "judged"))
tiny = ("--steps", "2", "--images", "16", "--batch", "4", "--eval-images", "4")
run("train", "tiny", *tiny, "--out", str(folder / "run"))
assert (folder / "run" / "model.safetensors").is_file() and (folder / "judged" / "report.html").is_file()
print(f"cutslots {cutslots.__version__} works from {Path(cutslots.__file__).parent}")
