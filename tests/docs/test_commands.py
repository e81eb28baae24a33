"""Every `cutslots` command in the documentation parses."""

import pytest

from .pages import TEXTS, commands, page_id, parse


def test_commands_are_found():
    text = (
        "Say `cutslots track` or `cutslots train\nPRESET --seed S`.\n\n    .venv/bin/cutslots info  # why\n\n```bash\n"
    )
    text += "torchrun -m cutslots train tiny \\\n    --max-steps 2\n```\n\n```python\nfrom cutslots import load\n```\n"
    expected = [["train", "tiny", "--seed", "0"], ["info"], ["train", "tiny", "--max-steps", "2"]]
    assert list(commands(text)) == expected


@pytest.mark.parametrize(
    "words", [["train", "tiny", "--sead", "0"], ["train", "tiny", "--encoder.depth", "1"], ["predict", "tiny-64"]]
)
def test_wrong_commands_fail(words):
    with pytest.raises(AssertionError):
        parse(words)


@pytest.mark.parametrize("path", TEXTS, ids=page_id)
def test_commands_parse(path, folder):
    for words in commands(path.read_text()):
        parse(words)


def test_help_of_other_slot_modules():
    assert "--slots.num-iterations" in parse(["train", "tiny", "--slots", "slot-attention", "--help"])
