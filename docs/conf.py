"""How Sphinx builds these pages: `tools/docs`, without a network, warnings as errors."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

from streamkern import __version__

project = "streamkern"
author = "The streamkern maintainers"
project_copyright = author
release = version = __version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "our_docstrings",
    "generated_parts",
]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build"]
myst_heading_anchors = 3
myst_enable_extensions = ["deflist"]
smartquotes = False  # quotes are those of settings

# Names in backticks are links where they are names of ours, and code where not.
default_role = "py:obj"
nitpicky = True
nitpick_ignore_regex = [("py:.*", ".*")]

autodoc_typehints = "none"  # the descriptions say what is taken
autodoc_member_order = "bysource"
autodoc_class_signature = "mixed"
autodoc_preserve_defaults = True
add_module_names = False
napoleon_use_ivar = True
napoleon_attr_annotations = False
napoleon_use_rtype = False

html_theme = "furo"
html_title = f"streamkern {release}"
html_static_path = ["_static"]
html_css_files = ["tables.css"]
html_show_copyright = False
html_copy_source = False
