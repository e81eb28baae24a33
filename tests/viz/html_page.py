"""A parser for tests of HTML: tags must be balanced, and inline images are decoded."""

import base64
import io
from html.parser import HTMLParser
from xml.etree import ElementTree

import numpy as np
from PIL import Image

VOID = {"meta", "img", "br", "hr", "link", "input"}


class HTMLPage(HTMLParser):
    """Tags with their attributes, text, links, inline images as arrays, and inline SVGs as elements."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.attributes, self.links, self.text = [], [], [], [], ""
        self.images, self.svgs = [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.handle_startendtag(tag, attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes.append(dict(attrs))
        for name, value in attrs:
            if name in ("src", "href", "xlink:href", "srcset", "action", "data"):
                self.links.append(value)
            if name == "src":
                self.add_image(value)

    def add_image(self, source):
        kind, data = decode(source)
        if kind == "svg+xml":
            self.svgs.append(ElementTree.fromstring(data))
        else:
            assert kind in ("png", "jpeg")
            self.images.append(np.asarray(Image.open(io.BytesIO(data))))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data

    def all(self, *tags, **wanted):
        """Return the attributes of all elements with one of these tags and with these attributes, in order."""
        pairs = zip(self.tags, self.attributes, strict=True)
        return [attrs for tag, attrs in pairs if tag in tags and wanted.items() <= attrs.items()]


def decode(source):
    """Return the kind and the bytes of an inline image."""
    head, _, data = source.partition(",")
    assert head.startswith("data:image/") and head.endswith(";base64")
    return head.removeprefix("data:image/").removesuffix(";base64"), base64.b64decode(data, validate=True)


def assert_self_contained(page, text, scripts=False):
    """Check that a page loads nothing from elsewhere."""
    assert page.links and all(link.startswith(("data:", "#")) for link in page.links)
    assert not {"iframe", "link", "object", "embed"} & set(page.tags)
    assert scripts or "script" not in page.tags
    assert "url(http" not in text and "@import" not in text
