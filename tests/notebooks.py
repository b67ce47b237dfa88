"""Read the HTML tables that objects show in notebooks, by a strict parser."""

from __future__ import annotations

from typing import Any

import html5lib


def shown_cells(shown: Any) -> dict[str, str]:
    """Return the text of each row of an object's table, by its head."""
    head = "<!DOCTYPE html><html><head><title>t</title></head>"
    page = f"{head}<body>{shown._repr_html_()}</body></html>"
    found = html5lib.HTMLParser(strict=True, namespaceHTMLElements=False).parse(page)
    tags = {element.tag for element in found.find("body").iter()}
    assert tags == {"body", "table", "tbody", "tr", "th", "td"}
    return {row[0].text: row[1].text for row in found.iter("tr")}
