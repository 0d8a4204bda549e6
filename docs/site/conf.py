"""Configures Sphinx for `make site`; docs/site/pages.py writes the sources."""

from latex2mathml.converter import convert

project = "Training large models in JAX"
author = copyright = "the course's authors"
html_title = project
extensions = ["myst_nb"]
root_doc = "index"

nb_execution_mode = "off"  # the pages show the outputs that the notebooks store
nb_merge_streams = True
myst_enable_extensions = ["dollarmath", "colon_fence"]
myst_heading_anchors = 4  # a link may name a heading, as on GitHub

html_theme = "furo"  # light and dark, as the reader's system says
html_static_path = ["style.css"]
html_css_files = ["style.css"]
html_copy_source = False
html_show_sourcelink = False
pygments_style = "friendly"
pygments_dark_style = "monokai"
maximum_signature_line_length = 60
html_math_renderer = "mathml"  # browsers draw it without a script


def formula(translator, node):
    """Writes a formula as MathML."""
    display = "inline" if node.tagname == "math" else "block"
    translator.body.append(convert(node.astext(), display=display))
    raise __import__("docutils").nodes.SkipNode


def setup(app):
    app.add_html_math_renderer("mathml", (formula, None), (formula, None))
