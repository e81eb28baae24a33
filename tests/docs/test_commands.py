"""Every `cutslots` command in the documentation parses."""

import itertools

import pytest

from cutslots.training.run_folder import MAY_CHANGE

from .pages import PARSERS, ROOT, TEXTS, commands, page_id, parse


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


def request(words):
    """Return what a command asks for, without what may change when it is repeated with the same output folder."""
    if words[0] not in PARSERS:
        return words
    values = PARSERS[words[0]](words[1:]).to_dict()
    return {name: value for name, value in values.items() if name not in MAY_CHANGE}


def output_folders(text):
    """Yield the output folder of each command that names one, and its request. OUT stands for any."""
    for words in commands(text):
        for flag, value in itertools.pairwise(words):
            if flag in ("--out", "-o") and not value.isupper():
                yield value.rstrip("/"), request(words)


def test_no_two_commands_write_to_one_folder(folder):
    """Neither of the pages nor of `make demo`, which a newcomer runs first."""
    recipes = (ROOT / "Makefile").read_text().replace("\t$(BIN)/", "    ").replace("$(SEED)", "0")
    first = {}
    for name, text in [("Makefile", recipes), *((page_id(path), path.read_text()) for path in TEXTS)]:
        for out, asked in output_folders(text):
            page, other = first.setdefault(out, (name, asked))
            assert asked == other, f"{name} and {page} write different things to {out}"
    assert {"out/plain", "out/textured", "out/demo-0"} <= set(first) and len(first) > 10


def test_help_of_other_slot_modules():
    assert "--slots.num-iterations" in parse(["train", "tiny", "--slots", "slot-attention", "--help"])
