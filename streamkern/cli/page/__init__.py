"""Runs on a page: what a run directory says of them, and how that is drawn as HTML and SVG."""
