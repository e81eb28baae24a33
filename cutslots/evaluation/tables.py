"""Tables of metrics: a row for every dataset and kind of masks, followed by published results.

A result is a dictionary of one dataset: "num_images", and the mean of every metric, such as "refined_ari_fg". ARI and
mIoU are fractions in results and percentages in tables.
"""

from __future__ import annotations

import html
from collections.abc import Iterable
from typing import Any, NamedTuple

from cutslots.evaluation.labels import EVALUATED_MASKS
from cutslots.evaluation.objects import GROUPS
from cutslots.evaluation.published import is_imitation, published_results
from cutslots.viz.html import definitions, scroll_box, section

METRIC_LABELS = {
    "ari_fg": "ARI-FG",
    "ari": "ARI",
    "frame_ari_fg": "ARI-FG per frame",
    "frame_ari": "ARI per frame",
    "miou": "mIoU",
    "miou_fg": "mIoU-FG",
    "miou_gt": "mIoU-GT",
    "mbo_i": "mBO-i",
    "mbo_c": "mBO-c",
    "frame_mbo_i": "mBO-i per frame",
    "corloc": "CorLoc",
    "found": "found",
    "hota": "HOTA",
    "deta": "DetA",
    "assa": "AssA",
    "idf1": "IDF1",
    "mse": "MSE",
    "feature_mse": "feature MSE",
    "id_switches": "ID switches",
}
METRIC_DESCRIPTIONS = {
    "ari_fg": "Adjusted Rand index over pixels of true objects.",
    "ari": "Adjusted Rand index over all pixels.",
    "frame_ari_fg": "ARI-FG of single frames, averaged.",
    "frame_ari": "ARI of single frames, averaged.",
    "miou": "Mean IoU of matched true and predicted masks, the background included, as CLEVRTEX's evaluator has it.",
    "miou_fg": "mIoU without the pair of the background, as CLEVRTEX's evaluator has it.",
    "miou_gt": "mIoU averaged over true masks: extra predicted masks do not count.",
    "mbo_i": "Mean over true objects of the largest IoU with a predicted mask; of videos, over all frames at once.",
    "mbo_c": "The same over true classes instead of objects.",
    "frame_mbo_i": "mBO-i of single frames, averaged.",
    "corloc": "Share of images in which some object has an IoU above 0.5 with a predicted mask.",
    "found": "Share of all true objects that have an IoU above 0.5 with a predicted mask. Such pairs are one to one.",
    "hota": "Higher-order tracking accuracy: the geometric mean of DetA and AssA, over thresholds of IoU.",
    "deta": "Detection accuracy: the share of matched masks among all true and predicted masks of frames.",
    "assa": "Association accuracy: how long matched objects and tracks stay together.",
    "idf1": "Share of true and predicted masks of frames that belong to matched objects and tracks.",
    "mse": "Squared error of the reconstruction, summed over pixels and channels in [0, 1].",
    "feature_mse": "Squared error of reconstructed features, averaged over channels and positions.",
    "id_switches": "How often objects change their track, per video.",
}
NOT_PERCENT = ("mse", "feature_mse", "id_switches")


class Row(NamedTuple):
    """A row of a table, metrics as they are shown."""

    dataset: str
    method: str
    metrics: dict[str, float]
    published: bool = False


def table_rows(results: dict[str, Any]) -> list[Row]:
    """Return the rows of results by dataset: one for every kind of masks, then the published ones."""
    rows = []
    for name, means in results.items():
        for kind, (prefix, _) in EVALUATED_MASKS.items():
            metrics = {m: _as_shown(m, means[prefix + m]) for m in METRIC_LABELS if prefix + m in means}
            if metrics:
                rows.append(Row(f"{name} ({means['num_images']} {sample_noun(means)})", f"{kind} masks", metrics))
    published = published_results(results)
    return rows + [Row(f"published on {dataset}", method, metrics, True) for dataset, method, metrics in published]


def sample_noun(means: dict[str, Any]) -> str:
    """Return what "num_images" of a result counts: images or videos."""
    noun = "video" if "id_switches" in means else "image"
    return noun if means["num_images"] == 1 else f"{noun}s"


def table_text(results: dict[str, Any]) -> str:
    """Return the table for a terminal."""
    shown = _shown_metrics(results)
    lines = [["dataset", "", *(METRIC_LABELS[m] for m in shown)]]
    lines += [[row.dataset, row.method, *_cells(row, shown)] for row in table_rows(results)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(_pad(line, widths)) for line in lines)


def table_html(results: dict[str, Any]) -> str:
    """Return the table for a page, in a box that scrolls sideways."""
    shown = _shown_metrics(results)
    labels = ("dataset", "method", *(METRIC_LABELS[m] for m in shown))
    head = "".join(f'<th scope="col">{label}</th>' for label in labels)
    body = "".join(_row_html(row, shown) for row in table_rows(results))
    return scroll_box("metrics", f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>")


def metrics_section(results: dict[str, Any]) -> str:
    """Return the section of a page with the table, a note on what it shows, and definitions."""
    terms = {METRIC_LABELS[m]: METRIC_DESCRIPTIONS[m] for m in _shown_metrics(results)}
    methods = {row.method for row in table_rows(results)}
    terms |= {f"{kind} masks": info.description for kind, info in EVALUATED_MASKS.items() if f"{kind} masks" in methods}
    return section("Metrics", table_html(results), definitions(terms), note=_note(results))


def found_text(results: dict[str, Any]) -> str:
    """Return the table of objects found by size and by occlusion for a terminal, with the number of objects in each."""
    lines = [["objects found", "", *_found_heads(results)]]
    for name, means in results.items():
        lines += [[name, f"{kind} masks", *cells] for kind, cells in _found_rows(means, results)]
        lines.append([name, "true objects", *_object_numbers(means, results)])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(_pad(line, widths)) for line in lines)


def found_section(results: dict[str, Any]) -> str:
    """Return the section of a page with the objects found by size and by occlusion; "" without such results."""
    groups = _shown_groups(results)
    if not groups:
        return ""
    rows = []
    for name, means in results.items():
        rows += [_cells_html((name, f"{kind} masks"), cells) for kind, cells in _found_rows(means, results)]
        rows.append(_cells_html((name, "true objects"), _object_numbers(means, results), "counts"))
    head = "".join(f'<th scope="col">{label}</th>' for label in ("dataset", "method", *_found_heads(results)))
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    terms = {_group_label(group): GROUPS[group] for group in groups}
    note = "Percent of the true objects of each group that have an IoU above 0.5 with a predicted mask."
    return section("Objects found", scroll_box("objects found", table), definitions(terms), note=note)


def _shown_groups(results: dict[str, Any]) -> list[str]:
    return [group for group in GROUPS if any(f"num_{group}" in means for means in results.values())]


def _found_heads(results: dict[str, Any]) -> list[str]:
    return ["all", *map(_group_label, _shown_groups(results))]


def _group_label(group: str) -> str:
    return group.replace("_", " ")


def _found_rows(means: dict[str, Any], results: dict[str, Any]) -> list[tuple[str, list[str]]]:
    """Return the cells of each kind of masks. A group without objects has no value."""
    names = ["found", *(f"found_{group}" for group in _shown_groups(results))]
    kinds = [(kind, info.prefix) for kind, info in EVALUATED_MASKS.items() if f"{info.prefix}found" in means]
    return [(k, [f"{100 * means[p + n]:.1f}" if p + n in means else "" for n in names]) for k, p in kinds]


def _object_numbers(means: dict[str, Any], results: dict[str, Any]) -> list[str]:
    """Return the number of objects of every group in a dataset; results have means over images."""
    names = ["num_objects", *(f"num_{group}" for group in _shown_groups(results))]
    return [f"{round(means[n] * means['num_images']):,}" if n in means else "" for n in names]


def _note(results: dict[str, Any]) -> str:
    others = [METRIC_LABELS[m] for m in _shown_metrics(results) if m in NOT_PERCENT]
    note = f"In percent, except {' and '.join(others)}." if others else "In percent."
    if published_results(results):
        note += " Gray rows are published results."
    imitations = [name for name in results if is_imitation(name)]
    if imitations:
        datasets = ", ".join(dict.fromkeys(result.dataset for result in published_results(imitations)))
        note += f" They were measured on {datasets}, not on these built-in scenes: do not compare them directly."
    return note


def _shown_metrics(results: dict[str, Any]) -> list[str]:
    return [m for m in METRIC_LABELS if any(m in means for means in results.values())]


def _as_shown(metric: str, value: float) -> float:
    return value if metric in NOT_PERCENT else 100 * value


def _cells(row: Row, shown: Iterable[str]) -> list[str]:
    return [f"{row.metrics[m]:.{3 if m == 'feature_mse' else 1}f}" if m in row.metrics else "" for m in shown]


def _pad(cells: list[str], widths: list[int]) -> list[str]:
    """Align the first two cells left, the others right."""
    pairs = enumerate(zip(cells, widths, strict=True))
    return [cell.ljust(width) if i < 2 else cell.rjust(width) for i, (cell, width) in pairs]


def _row_html(row: Row, shown: Iterable[str]) -> str:
    return _cells_html((row.dataset, row.method), _cells(row, shown), "published" if row.published else "")


def _cells_html(names: Iterable[str], values: Iterable[str], kind: str = "") -> str:
    heads = "".join(f'<th scope="row">{html.escape(text)}</th>' for text in names)
    cells = "".join(f"<td>{cell}</td>" for cell in values)
    return f'<tr class="{kind}">{heads}{cells}</tr>' if kind else f"<tr>{heads}{cells}</tr>"
