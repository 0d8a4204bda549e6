"""What the web pages are made from. `make site`, which .github/workflows/site.yml runs, builds
them with warnings as errors, and then looks for pictures without a text and for dead links.
"""

import json
import re
import runpy
import tomllib
import types
from pathlib import Path

import pytest
import sync_environment
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import course_lib

ROOT = Path(__file__).parent.parent
SITE = types.SimpleNamespace(**runpy.run_path(str(ROOT / "docs" / "site" / "pages.py")))
NAMES = sorted(path.stem for path in (ROOT / "notebooks").glob("*.ipynb"))
GLOSSARY = (ROOT / "docs" / "site" / "glossary.md").read_text()


def test_each_notebook_and_page_is_listed_once_and_in_the_readmes_order():
    listed = [page for pages in SITE.contents().values() for page in pages]
    notebooks = [page for page in listed if page.startswith("notebooks/")]
    readme = (ROOT / "README.md").read_text()
    assert notebooks == re.findall(r"\((notebooks/\w+)\.ipynb\)", readme)
    docs = {str(path.relative_to(ROOT))[:-3] for path in (ROOT / "docs").rglob("*.md")}
    assert sorted(x for x in listed if x.startswith("docs/")) == sorted(docs)


def test_the_start_page_is_the_readme_with_the_contents():
    assert SITE.start().startswith(SITE.read("README.md"))


def test_each_picture_has_a_text_and_each_attachment_is_on_its_page():
    pictures = 0
    for name in NAMES:
        text = SITE.notebook(name)
        assert "](attachment:" not in text and "![](" not in text, name
        for cell in json.loads(text)["cells"]:
            if any("image/png" in out.get("data", {}) for out in cell.get("outputs", ())):
                alt = cell["metadata"]["mystnb"]["image"]["alt"]
                assert len(alt) > 10 and "{" not in alt, f"{name}: {alt!r}"
                pictures += 1
    assert pictures > 50


def test_the_reference_has_functions_with_shapes_and_nothing_that_is_private():
    pages = SITE.reference()
    assert "{py:function} memory(step: Any)" in pages["measure"]
    assert "Float[Array, 'B L D']" in pages["models"]
    assert not re.search(r"\{py:\w+\} [\w.]*\b_", "".join(pages.values()))


def test_the_glossary_is_in_order_and_each_entry_is_a_sentence_and_a_notebook():
    letters, terms = (re.findall("^- .*", x, re.M) for x in GLOSSARY.split("## ")[1:])
    sentence, link = (
        r"[^.]+(?:\.\d[^.]*)*\.",
        r"\[Notebook (\d+)\]\(../../notebooks/(\w+)\.ipynb\)",
    )
    for line in letters + terms:
        found = re.fullmatch(rf"- \*\*.+\*\*: {sentence} {link}", line)
        assert found and NAMES[int(found[1]) - 1] == found[2], line
    assert terms == sorted(terms, key=str.lower)
    design = SITE.read("docs/design.md").partition("## Shapes")[2].partition("Most array")[0]
    wanted = set(re.findall(r"\b[A-Za-z]\b(?= \w)", design)) - {"a"}
    assert wanted <= set(re.findall(r"^- \*\*`(\w)`", GLOSSARY, re.M))


def test_a_picture_without_a_text_a_link_to_nowhere_and_an_unread_directive_are_refused(
    tmp_path,
):
    (tmp_path / "a.html").write_text(
        '<h1 id="top"><img alt="b" src="b.png?v=1"><a href="b.html#c">'
    )
    (tmp_path / "b.html").write_text('<p id="c"><a href="a.html#top"><a href="https://x.y/z">')
    (tmp_path / "b.png").touch()
    SITE.check(tmp_path)
    wrong = '<img alt=" " src="b.png"><a href="a.html#d"><a href="e">::::{py:function}'
    (tmp_path / "b.html").write_text(wrong)
    with pytest.raises(SystemExit) as refused:
        SITE.check(tmp_path)
    wanted = ["b.html#c", "without alt", "a.html#d", "nowhere: e", "directive"]
    assert [x for x in wanted if x not in str(refused.value)] == []


def test_the_changelog_has_the_packages_version_and_its_newest_is_the_one_to_cite():
    versions = re.findall(r"^## (\S+)", SITE.read("CHANGELOG.md"), re.M)
    assert course_lib.__version__ in versions
    assert yaml.safe_load(SITE.read("CITATION.cff"))["version"] == versions[0]


def test_the_sites_exact_versions_lie_in_the_ranges():
    project = tomllib.loads(SITE.read("pyproject.toml"))["project"]
    pins = sync_environment.pins(ROOT / "requirements" / "site.txt")
    for requirement in map(Requirement, project["optional-dependencies"]["site"]):
        (exact,) = pins[canonicalize_name(requirement.name)].specifier
        assert exact.version in requirement.specifier, requirement


def test_the_workflow_builds_what_make_builds_and_publishes_main_alone():
    jobs = yaml.safe_load(SITE.read(".github/workflows/site.yml"))["jobs"]
    assert [step["run"] for step in jobs["build"]["steps"] if "run" in step] == ["make site"]
    assert "refs/heads/main" in jobs["publish"]["if"] and "pages" not in str(
        jobs["build"]["steps"][:3]
    )
