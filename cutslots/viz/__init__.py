"""Visualization: colors of masks, images and grids of images, contact sheets, HTML.

Reading order: `palette` (the color of each label), `images` (conversions, overlays, grids, PNG), `contact_sheet` (the
first images of a dataset), `html` (elements of the HTML reports), `curves` (training curves).
"""
