"""Configures Sphinx for `make site`; docs/site/pages.py writes the sources."""

from docutils.nodes import SkipNode
from latex2mathml.converter import convert

html_title = project = "Training large models in JAX"
extensions = ["myst_nb"]
root_doc = "index"
nb_execution_mode = "off"  # the pages show the outputs that the notebooks store
nb_merge_streams = True
myst_enable_extensions = ["dollarmath", "colon_fence"]
myst_heading_anchors = 4  # a link may name a heading, as on GitHub
smartquotes = False  # `--help` stays as it is
maximum_signature_line_length = 60
add_module_names = False  # the heading names the module

html_theme = "furo"  # light and dark, as the reader's system says
html_static_path = html_css_files = ["style.css"]
html_copy_source = html_show_sourcelink = html_show_copyright = False
html_show_search_summary = False  # a page that lies on a disk may not read another
pygments_style, pygments_dark_style = "friendly", "monokai"
html_math_renderer = "mathml"  # browsers draw it without a script


def formula(translator, node):
    """Writes a formula as MathML."""
    display = "inline" if node.tagname == "math" else "block"
    translator.body.append(convert(node.astext(), display=display))
    raise SkipNode


def setup(app):
    app.add_html_math_renderer("mathml", (formula, None), (formula, None))
