"""Runs on a page: the facts in their run directories, drawn as HTML and SVG."""
