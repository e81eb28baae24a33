"""Reports: one HTML file that needs nothing else, with pictures, curves, the table beside the paper's, what it took.

`Pictures` holds what there is to look at; `sheet` lays it out as one picture (for the record of a run), the report as
rows that wrap on a narrow screen.
"""

from __future__ import annotations

import base64
import datetime
import html
import importlib.metadata
import io
import json
import platform
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

import cutslots
from cutslots.data import Sample
from cutslots.disk import read_lines, write_atomically
from cutslots.metrics import contingency
from cutslots.model import Found
from cutslots.scenes.files import PALETTE, png

SCORES = {
    "ari_fg": "ARI-FG",
    "ari": "ARI",
    "frame_ari_fg": "ARI-FG by frame",
    "frame_ari": "ARI by frame",
    "miou": "mIoU",
    "miou_fg": "mIoU, no background",
    "miou_gt": "mIoU, by true masks",
    "mse": "MSE",
    "switches": "switches",
}
NOT_PER_CENT = ("mse", "switches")

# Published figures (Pervez et al., 2023, tables 1 and 3), on the datasets our families are made after: mIoU, ARI-FG and
# MSE; of videos ARI-FG and ARI.
PAPER: dict[str, tuple[str, dict[str, tuple[float, ...]]]] = {
    "plain": ("CLEVR", {"Slot Attention": (36.61, 95.89, 23), "the paper": (49.04, 95.40, 14)}),
    "textured": ("CLEVRTEX", {"Slot Attention": (22.58, 62.40, 254), "the paper": (42.4, 80.2, 207)}),
    "ood": ("OOD", {"Slot Attention": (20.98, 58.45, 487), "the paper": (38.0, 72.6, 577)}),
    "camo": ("CAMO", {"Slot Attention": (19.83, 57.54, 215), "the paper": (38.9, 75.5, 189)}),
    "moving": ("MOVi-A", {"Slot Attention, Hungarian": (4.2, 0.3), "the paper": (65.6, 77.7)}),
}
PAPER |= {"clevr": PAPER["plain"], "clevrtex": PAPER["textured"], "clevrtex-ood": PAPER["ood"]}
PAPER |= {"clevrtex-camo": PAPER["camo"], "movi-a": PAPER["moving"]}


class Pictures(NamedTuple):
    """What a model makes of images, as arrays of bytes on the CPU. Shapes: B images, K slots, S side."""

    image: np.ndarray  # (B, S, S, 3)
    truth: np.ndarray  # (B, S, S) labels
    reconstruction: np.ndarray  # (B, S, S, 3)
    decoder: np.ndarray  # (B, S, S) the slot of each pixel, by the decoder's masks
    partition: np.ndarray  # (B, S, S) the same by the partition's
    slots: np.ndarray  # (B, K, S, S, 3): each slot's picture where its mask is, white elsewhere
    joined: np.ndarray  # (B, S, S) the same as read, with slots joined
    together: bool = False  # whether a label means the same in all of them: then it has one colour

    @classmethod
    def of(cls, sample: Sample, found: Found, labels: dict[str, Tensor], together: bool = False) -> Pictures:
        masks = found.masks[:, :, None].float()
        slots = found.pictures.float() * masks + (1 - masks)
        return cls(
            as_bytes(sample.image / 255.0),
            sample.mask.cpu().numpy(),
            as_bytes(found.reconstruction.float()),
            labels["decoder"].cpu().numpy().astype(np.uint8),
            labels["partition"].cpu().numpy().astype(np.uint8),
            as_bytes(slots),
            labels.get("joined", labels["decoder"]).cpu().numpy().astype(np.uint8),
            together,
        )

    def columns(self, i: int) -> dict[str, np.ndarray]:
        """The pictures of one image by their captions, in the paper's order."""
        seen = self.truth[i].any()
        colours = [self.colours(labels, i) for labels in (self.decoder, self.partition, self.joined)]
        shown = {"image": self.image[i], "redrawn": self.reconstruction[i]}
        if seen:
            shown["true objects"] = blend(self.image[i], PALETTE[self.truth[i]])
        shown["found objects"] = blend(self.image[i], colours[0])
        shown["joined"] = blend(self.image[i], colours[2])
        shown["its partition"] = blend(self.image[i], colours[1])
        return shown | {f"slot {k + 1}": slot for k, slot in enumerate(self.slots[i])}

    def colours(self, labels: np.ndarray, i: int) -> np.ndarray:
        """Colours (S, S, 3) of one of the labels (B, S, S), after the true objects they cover."""
        truth, found = (self.truth, labels) if self.together else (self.truth[i], labels[i])
        return PALETTE[numbers(found, truth if truth.any() else None)[labels[i]]]

    def some(self, count: int) -> Pictures:
        """So many of them, evenly spaced."""
        chosen = np.linspace(0, len(self.image) - 1, min(count, len(self.image))).round().astype(int)
        return self._replace(**{name: getattr(self, name)[chosen] for name in self._fields[:-1]})


class FilmPictures(NamedTuple):
    """Films, each as the pictures of its frames, and a pair of frames far apart, where the model matches them."""

    films: list[Pictures]
    pair: Pictures | None = None


def as_bytes(x: Tensor) -> np.ndarray:
    """Values in [0, 1], channels first, as bytes with channels last."""
    return (x.clamp(0, 1) * 255).round().byte().movedim(-3, -1).cpu().numpy()


def paint(labels: np.ndarray, truth: np.ndarray | None = None) -> np.ndarray:
    """Colours (S, S, 3) of labels; with a truth, each takes the colour of the object it overlaps most, one to one."""
    return PALETTE[numbers(labels, truth)[labels]]


def numbers(labels: np.ndarray, truth: np.ndarray | None = None) -> np.ndarray:
    """The place in the palette of each label."""
    count = int(labels.max()) + 1
    colour = np.arange(1, count + 1)
    if truth is not None:
        from scipy.optimize import linear_sum_assignment  # slow to import

        table = contingency(torch.from_numpy(truth)[None], torch.from_numpy(labels)[None])[0].numpy()
        rows, cols = linear_sum_assignment(table / (table.sum(1, keepdims=True) + table.sum(0) + 1), maximize=True)
        paired = table[rows, cols] > 0
        free = np.setdiff1d(np.arange(1, len(PALETTE)), np.unique(truth))
        colour = free[np.arange(count) % len(free)]
        colour[cols[paired]] = rows[paired]
    return colour


def blend(image: np.ndarray, colours: np.ndarray) -> np.ndarray:
    """Colours laid over a picture; what is black there, the background, stays as it is but darker."""
    return (0.35 * image + 0.65 * colours).astype(np.uint8)


def sheet(pictures: Pictures) -> Image.Image:
    """All of it as one picture, a row for each image."""
    return tiled([list(pictures.columns(i).values()) for i in range(len(pictures.image))])


def tiled(rows: list[list[np.ndarray]], gap: int = 2) -> Image.Image:
    """Square pictures of one size side by side, on grey."""
    side, across = rows[0][0].shape[0] + gap, max(map(len, rows))
    page = np.full((len(rows) * side - gap, across * side - gap, 3), 205, dtype=np.uint8)  # grey between
    for y, row in enumerate(rows):
        for x, cell in enumerate(row):
            page[y * side : y * side + side - gap, x * side : x * side + side - gap] = cell
    return Image.fromarray(page)


# ---------------------------------------------------------------------------------------------------------- the tables


def paper_rows(results: dict[str, Any]) -> list[tuple[str, str, dict[str, float]]]:
    """The published rows that belong beside these results: dataset, method, scores in per cent."""
    rows = []
    for family in dict.fromkeys(name.partition(":")[0] for name in results):
        if family in PAPER:
            dataset, methods = PAPER[family]
            names = ("miou", "ari_fg", "mse") if dataset != "MOVi-A" else ("ari_fg", "ari")
            rows += [(dataset, method, dict(zip(names, v, strict=True))) for method, v in methods.items()]
    return rows


# The masks that are judged, and what the names of their scores begin with.
KINDS = {"decoder": "", "joined": "joined_", "eager": "eager_", "partition": "partition_"}


def our_rows(results: dict[str, Any]) -> list[tuple[str, str, dict[str, float]]]:
    rows = []
    for name, means in results.items():
        for kind, prefix in KINDS.items():
            scores = {s: (1 if s in NOT_PER_CENT else 100) * means[prefix + s] for s in SCORES if prefix + s in means}
            if not scores:
                continue
            what = "films" if "switches" in means else "images"
            rows.append((f"{name} ({means['images']} {what})", f"{kind} masks", scores))
    return rows


def table_text(results: dict[str, Any], paper: Iterable[tuple[str, str, dict[str, float]]] = ()) -> str:
    """The table for a terminal. Per cent, but for the scores of NOT_PER_CENT."""
    shown = _shown(results)
    lines = [["data", "", *(SCORES[s] for s in shown)]]
    for data, kind, scores in our_rows(results):
        lines.append([data, kind, *(_number(scores.get(s)) for s in shown)])
    for dataset, method, scores in paper:
        lines.append([f"published, {dataset}", method, *(_number(scores.get(s)) for s in shown)])
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return "\n".join(
        "  ".join(
            cell.ljust(w) if i < 2 else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    )


def _shown(results: dict[str, Any]) -> list[str]:
    """The scores that there are."""
    return [s for s in SCORES if any(s in means for means in results.values())]


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


# ------------------------------------------------------------------------------------------------------------ the page

STYLE = """
:root { color-scheme: light dark; --ink: #1c1c1c; --soft: #666; --line: #ddd; --page: #fff; --card: #f6f6f4; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #eee; --soft: #aaa; --line: #444; --page: #161616; --card: #222; }
}
* { box-sizing: border-box; }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--page); margin: 0 auto;
       max-width: 1320px; padding: 1.2rem; overflow-wrap: anywhere; }
:focus-visible { outline: 2px solid var(--ink); outline-offset: 2px; }
h1 { font-size: 1.5rem; margin: 0 0 .3rem; } h2 { font-size: 1.15rem; margin: 2rem 0 .6rem; } p { max-width: 46rem; }
.facts { display: flex; flex-wrap: wrap; gap: .6rem; margin: 1rem 0; padding: 0; list-style: none; }
.facts li { background: var(--card); border-radius: 8px; padding: .5rem .9rem; min-width: 7rem; }
.facts b { display: block; font-size: 1.5rem; line-height: 1.3; font-variant-numeric: tabular-nums; }
.facts span, figcaption, .soft { color: var(--soft); font-size: .8rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .8rem .3rem 0; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }
th:first-child, th:nth-child(2) { text-align: left; }
tbody th { font-weight: inherit; white-space: normal; min-width: 8.5rem; } tr.paper { color: var(--soft); }
.row { display: flex; flex-wrap: wrap; gap: 6px 18px; padding: .7rem 0; border-bottom: 1px solid var(--line); }
.row > div { display: flex; flex-wrap: wrap; gap: 6px; }
.row > div + div { flex: 1 1 300px; align-content: flex-start; }
.row figure { margin: 0; width: 120px; } .row > div + div figure { width: 74px; }
.row img { width: 100%; aspect-ratio: 1; display: block; border-radius: 4px; outline: 1px solid var(--line); }
figure.wide { margin: 0 0 1rem; } .wide img { max-width: 100%; height: auto; display: block; }
.curves { display: flex; flex-wrap: wrap; gap: .6rem; }
.curves img { max-width: 100%; height: auto; background: #fff; border-radius: 8px; }
.screen { overflow: hidden; aspect-ratio: 1; border-radius: 4px; outline: 1px solid var(--line); }
.row .screen img { width: calc(100% * var(--n)); max-width: none; aspect-ratio: auto; border-radius: 0; outline: 0;
                   transform: translateX(calc(-100% * var(--f, 0) / var(--n))); }
.player figure { width: 150px; }
.player { margin-bottom: 1.4rem; } .player .row { border: 0; padding-bottom: .3rem; }
.player button { font: inherit; width: 5rem; } .player input { width: min(24rem, 60%); vertical-align: middle; }
.film { align-items: center; gap: 6px; padding: .2rem 0; border: 0; } .film > span { width: 4.5rem; font-size: .8rem; }
.film img { width: min(128px, 20vw); }
pre { background: var(--card); padding: .8rem; border-radius: 8px; white-space: pre-wrap; font-size: .8rem; }
@media (max-width: 600px) {
  body { padding: .8rem; } .row figure { width: 108px; } .row > div + div figure { width: 56px; }
  .wide img { width: 48rem; max-width: none; }
}
"""


SCRIPT = """
for (const player of document.querySelectorAll('.player')) {
  const slider = player.querySelector('input'), button = player.querySelector('button');
  const name = button.getAttribute('aria-label').slice('play '.length);
  let timer = null;
  const say = word => { button.textContent = word; button.setAttribute('aria-label', `${word} ${name}`); };
  const show = () => player.style.setProperty('--f', slider.value);
  slider.addEventListener('input', show);
  button.addEventListener('click', () => {
    if (timer) { clearInterval(timer); timer = null; say('play'); return; }
    say('pause');
    timer = setInterval(() => { slider.value = (+slider.value + 1) % (+slider.max + 1); show(); }, 1000 / 12);
  });
}
"""


def page(title: str, lead: str, *sections: str) -> bytes:
    script = f"<script>{SCRIPT}</script>" if any('class="player"' in each for each in sections) else ""
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{STYLE}</style></head>'
        f"<body><main><h1>{html.escape(title)}</h1><p>{html.escape(lead)}</p>{''.join(sections)}</main>"
        f"{script}</body></html>"
    ).encode()


def section(heading: str, *content: str, note: str = "") -> str:
    said = f"<p>{html.escape(note)}</p>" if note else ""
    return f"<section><h2>{html.escape(heading)}</h2>{said}{''.join(content)}</section>"


def facts(values: dict[str, str]) -> str:
    items = "".join(f"<li><b>{html.escape(v)}</b><span>{html.escape(k)}</span></li>" for k, v in values.items())
    return f'<ul class="facts">{items}</ul>'


def scroller(name: str, content: str) -> str:
    """A box that scrolls sideways by itself, with the keys too: the page does not."""
    return f'<div class="scroll" tabindex="0" role="region" aria-label="{name}">{content}</div>'


def table_html(results: dict[str, Any]) -> str:
    shown = _shown(results)
    head = "".join(f'<th scope="col">{name}</th>' for name in ("data", "method", *(SCORES[s] for s in shown)))
    ours = [("", row) for row in our_rows(results)]
    theirs = [("paper", (f"published, {data}", method, scores)) for data, method, scores in paper_rows(results)]
    body = "".join(
        f'<tr class="{kind}">'
        + "".join(f'<th scope="row">{html.escape(name)}</th>' for name in (data, method))
        + "".join(f"<td>{_number(scores.get(s))}</td>" for s in shown)
        + "</tr>"
        for kind, (data, method, scores) in ours + theirs
    )
    return scroller("scores", f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>")


def rows_html(pictures: Pictures) -> str:
    """The paper's figure: for every image a row of pictures with captions."""
    rows = []
    for i in range(len(pictures.image)):
        columns = [
            (c.startswith("slot"), f"<figure>{image_html(p, c)}<figcaption>{c}</figcaption></figure>")
            for c, p in pictures.columns(i).items()
        ]
        groups = ("".join(cell for is_slot, cell in columns if is_slot == wanted) for wanted in (False, True))
        cells = "".join(f"<div>{group}</div>" for group in groups)
        rows.append(f'<div class="row" role="group" aria-label="image {i + 1}">{cells}</div>')
    return "".join(rows)


def films_html(pictures: FilmPictures, name: str) -> list[str]:
    """Films to play, the slots of the first over time, and two frames far apart that were matched."""
    films = "".join(player_html(film, f"film {i + 1}") for i, film in enumerate(pictures.films))
    note = "Colours stay with a track; where a true object is covered, the track has its colour."
    sections = [section(f"What it follows in {name}", films, note=note)]
    first = pictures.films[0].some(8)
    rows = [("image", list(first.image)), ("redrawn", list(first.reconstruction))]
    rows += [(f"slot {k + 1}", [frame[k] for frame in first.slots]) for k in range(first.slots.shape[1])]
    body = "".join(
        f'<div class="row film"><span>{name}</span><div>{"".join(image_html(p, name) for p in row)}</div></div>'
        for name, row in rows
    )
    sections.append(section("Its slots over time", body))
    if pictures.pair is not None:
        note = "One set of slots, matched between these two frames alone, redraws both."
        sections.append(section("Frames 5 and 20, matched", rows_html(pictures.pair), note=note))
    return sections


def player_html(film: Pictures, name: str) -> str:
    """A film beside what was found in it; a slider and a button play them together. Needs nothing from elsewhere."""
    columns = [film.columns(t) for t in range(len(film.image))]
    fullest = max(columns, key=len)  # a frame without objects has no picture of true ones
    shown = [caption for caption in fullest if not caption.startswith("slot")]
    strips = {caption: _strip([c.get(caption, c["image"]) for c in columns]) for caption in shown}
    screens = "".join(
        f'<figure><div class="screen">{_img("jpeg", strip, f"{name}, {caption}")}</div>'
        f"<figcaption>{caption}</figcaption></figure>"
        for caption, strip in strips.items()
    )
    last = len(film.image) - 1
    return (
        f'<div class="player" style="--n:{last + 1}"><div class="row"><div>{screens}</div></div><button type="button" '
        f'aria-label="play {name}">play</button><input type="range" min="0" max="{last}" value="0" '
        f'aria-label="frame of {name}"></div>'
    )


def _strip(frames: list[np.ndarray]) -> bytes:
    """Frames side by side, as JPEG."""
    data = io.BytesIO()
    Image.fromarray(np.concatenate(frames, 1)).save(data, "JPEG", quality=90)
    return data.getvalue()


def image_html(picture: Image.Image | np.ndarray, caption: str) -> str:
    return _img("png", png(picture), caption)


def _img(kind: str, data: bytes, caption: str) -> str:
    return f'<img alt="{html.escape(caption)}" src="data:image/{kind};base64,{base64.b64encode(data).decode()}">'


def curves_html(history: Sequence[dict[str, Any]]) -> str:
    """Loss and scores against steps, drawn by matplotlib: two pictures, one below the other on a narrow screen."""
    from matplotlib.figure import Figure

    figures = [Figure(figsize=(5, 3.2), layout="constrained") for _ in range(2)]
    left, right = (figure.subplots() for figure in figures)
    losses = [(line["step"], line["loss"]) for line in history if "loss" in line]
    left.plot(*zip(*losses, strict=True), color="#4477aa", lw=1.2) if losses else None
    left.set(xlabel="step", title="reconstruction error (mean square)", yscale="log")
    judged = [line for line in history if "ari_fg" in line.get("val", {})]
    steps = [line["step"] for line in judged]
    for name, look, colour in (("ari_fg", "o-", "#cc3311"), ("ari", "^-", "#999933"), ("miou", "s-", "#009988")):
        values = [100 * line["val"][name] for line in judged]
        right.plot(steps, values, look, ms=4, lw=1.2, color=colour, label=SCORES[name])
    right.set(xlabel="step", title="scores on validation images, per cent", ylim=(-2, 100))
    right.legend(frameon=False) if judged else None
    said = ["Curve of the reconstruction error", "Curves of the scores on validation images"]
    if losses:
        said[0] += f": {losses[-1][1]:.3g} at step {losses[-1][0]}"
    if judged:
        last = ", ".join(f"{SCORES[name]} {100 * judged[-1]['val'][name]:.1f}" for name in ("ari_fg", "ari", "miou"))
        said[1] += f", per cent: {last} at step {steps[-1]}"
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    return f'<div class="curves">{"".join(map(svg_html, figures, said))}</div>'


def svg_html(figure: Any, caption: str) -> str:
    """A figure of matplotlib as a picture, whose ids stay its own."""
    data = io.BytesIO()
    figure.savefig(data, format="svg", metadata={"Date": None})
    return _img("svg+xml", data.getvalue(), caption)


def versions(device: str = "") -> str:
    names = ("torch", "numpy", "lightning-fabric")
    found = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names)
    made = f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}"
    where = f", {device}" if device else ""
    return f"cutslots {cutslots.__version__}, Python {platform.python_version()}, {found}{where}, {made}"


def training_sections(run: Path) -> list[str]:
    """Curves, pictures over time and the configuration of a run."""
    history, sections = read_lines(run / "metrics.jsonl"), []
    if history:
        sections.append(section("Learning", curves_html(history)))
    pictures = sorted((run / "pictures").glob("step_*.png"))
    if pictures:
        chosen = sorted({round(x) for x in np.linspace(0, len(pictures) - 1, 6)})
        steps = {f"step {int(pictures[i].stem[5:])}": pictures[i] for i in chosen}
        grown = "".join(
            f'<figure class="wide">{image_html(Image.open(p), f"What it sees at {step}")}'
            f"<figcaption>{step}</figcaption></figure>"
            for step, p in steps.items()
        )
        sections.append(section("The same images, as training goes on", scroller("what it sees, by step", grown)))
    if (run / "run.json").is_file():
        text = (run / "run.json").read_text()
        sections.append(section("Configuration of the run", f"<pre>{html.escape(text)}</pre>"))
    return sections


def scores_section(results: dict[str, Any]) -> str:
    others = " and ".join(SCORES[s] for s in _shown(results) if s in NOT_PER_CENT)
    note = f"Per cent, but for {others}." if others else "Per cent."
    if paper_rows(results):
        note += (
            " Published rows are of the datasets themselves; built-in scenes are made after those, and are to be seen "
            "beside them, not against them."
        )
    return section("Scores", table_html(results), note=note)


def write_evaluation(
    path: Path, record: dict[str, Any], pictures: dict[str, Pictures | FilmPictures], run: Path | None
) -> None:
    results = record["results"]
    first = next(iter(results.values()))
    lead = (
        "Objects found without labels: a model learned to redraw images one slot at a time; each slot's mask is an "
        "object it has found. Scores compare the masks with the truth, which it never saw."
    )
    sections = [
        facts(
            {
                f"ARI-FG, {name}" + (", joined" if "joined_ari_fg" in r else ""): (
                    f"{100 * r.get('joined_ari_fg', r['ari_fg']):.1f}"
                )
                for name, r in results.items()
            }
            | {"films" if "switches" in first else "images": str(first["images"])}
        ),
        scores_section(results),
    ]
    for name, shown in pictures.items():
        seen = (
            films_html(shown, name)
            if isinstance(shown, FilmPictures)
            else [section(f"What it sees in {name}", rows_html(shown))]
        )
        sections += seen
    numbers = json.dumps(record["model"], indent=1, default=list)
    sections += training_sections(run) if run else [section("The model", f"<pre>{html.escape(numbers)}</pre>")]
    sections.append(
        section(
            "Made with", f'<p class="soft">{html.escape(versions())}; weights: {html.escape(record["weights"])}</p>'
        )
    )
    write_atomically(path, page(f"cutslots: {', '.join(results)}", lead, *sections))


def write_training(
    path: Path,
    title: str,
    run: Path,
    values: dict[str, str],
    results: dict[str, Any],
    pictures: Pictures,
    device: str,
) -> None:
    lead = "A model that learns to find objects by redrawing images, one slot at a time, without labels."
    sections = [
        facts(values),
        scores_section(results) if results else "",
        section("What it sees in validation images", rows_html(pictures)),
        *training_sections(run),
        section("Made with", f'<p class="soft">{html.escape(versions(device))}</p>'),
    ]
    write_atomically(path, page(title, lead, *sections))
