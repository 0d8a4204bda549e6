"""Hands the notebooks out to a class, and counts the exercises that each student has done.

usage: python tools/teach.py class FOLDER
       python tools/teach.py grade FOLDER [--number 03] [--csv FILE] [--minutes 10]

`class` writes copies without solutions. `grade` reads FOLDER/STUDENT/NN_*.ipynb, runs what the
exercises need, each notebook in a process of its own, and writes nothing into FOLDER. It trusts
the code as much as running it by hand does: docs/teaching.md.
"""

import argparse
import ast
import csv
import hashlib
import os
import re
import symtable
import sys
import tempfile
import time
from pathlib import Path
from unittest import mock

import nbformat
from IPython.core.inputtransformer2 import TransformerManager
from nbclient import NotebookClient
from nbclient.exceptions import CellTimeoutError, DeadKernelError
from nbformat import NotebookNode

from course_lib.lessons import check, done

FOLDER = Path(__file__).resolve().parent.parent / "notebooks"
SOLUTION = re.compile(r"<details>.*?</details>\s*", re.S)
CHECK = re.compile(r"\bcheck\.(\w+)\(")
HEADINGS = ("student", "notebook", "done", "of", "exercises done", "note")
PLAIN = ast.FunctionDef | ast.ClassDef | ast.Import | ast.ImportFrom | ast.Assign


def hand_out(folder: Path) -> None:
    """Writes a copy of each notebook, without solutions, into a new or an empty folder."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        sys.exit(f"FOLDER={folder} must be new or empty: nothing was written")
    folder.mkdir(parents=True, exist_ok=True)
    for path in sorted(FOLDER.glob("*.ipynb")):
        book = nbformat.read(path, 4)
        book.metadata["course"] = digest(book)
        for cell in book.cells:
            if cell.cell_type == "markdown":
                cell.source = SOLUTION.sub("", cell.source)
        book.cells = [cell for cell in book.cells if cell.source.strip()]
        nbformat.write(book, folder / path.name)
    print(f"Without solutions: {folder}")


def digest(book: NotebookNode) -> str:
    """Returns a short hash of a notebook's text, which says from which release a copy is."""
    text = "\n".join(cell.source for cell in book.cells)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def exercises(book: NotebookNode) -> list[str]:
    """Returns the exercises that a notebook's cells check, each once, in their order."""
    code = "\n".join(cell.source for cell in book.cells if cell.cell_type == "code")
    return list(dict.fromkeys(CHECK.findall(code)))


def grade(path: Path, minutes: float = 10) -> tuple[int, int, str, str]:
    """Runs a student's notebook; returns how many exercises are right, and of how many, their
    names, and what else a teacher should know.
    """
    originals = {one.name[:2]: one for one in FOLDER.glob("*.ipynb")}
    if path.name[:2] not in originals:
        return 0, 0, "", "No notebook of the course has this number."
    original = nbformat.read(originals[path.name[:2]], 4)
    asked = exercises(original)
    try:
        book = nbformat.read(path, 4)
        nbformat.validate(book)
    except Exception as error:  # of many kinds, by what is broken
        reason = (str(error).splitlines() or [""])[0][:80]
        return 0, len(asked), "", f"This is no notebook that can be read: {reason}"
    lacks = [name for name in asked if name not in exercises(book)]
    others = [name for name in exercises(book) if name not in check.modules()]
    note = ""
    if lacks or others or book.metadata.get("course", digest(original)) != digest(original):
        note = "Made from another release"
        note += f"; lacks {', '.join(lacks)}" if lacks else ""
        note += f"; has {', '.join(others)}" if others else ""
        note += ". "
    setup = next(cell for cell in original.cells if cell.cell_type == "code")
    # The notebooks import `check` in the first exercise's cell, which may fail.
    cells = [setup.source, "from course_lib.lessons import check", *needed(book)]
    answered, why = run(cells, minutes)
    right = [name for name in asked if name in answered]
    return len(right), len(asked), " ".join(right), (note + why).strip()


def run(cells: list[str], minutes: float) -> tuple[list[str], str]:
    """Runs cells in a new kernel, past those that fail; returns the exercises that were right,
    and why the run ended early.
    """
    end, why = time.monotonic() + 60 * minutes, ""
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    with tempfile.TemporaryDirectory() as folder:
        board = {"COURSE_SCOREBOARD": os.path.join(folder, "game.json")}
        client = NotebookClient(
            book,
            timeout_func=lambda cell: max(1, int(end - time.monotonic())),
            allow_errors=True,
            kernel_name="python3",
            extra_arguments=["--log-level=CRITICAL"],
            resources={"metadata": {"path": folder}},
        )
        with mock.patch.dict(os.environ, board):
            try:
                client.execute()
            except CellTimeoutError:
                why = f"Stopped after {minutes:g} minutes."
            except DeadKernelError:
                why = "Its process died."
            return done.exercises(), why


def needed(book: NotebookNode) -> list[str]:
    """Returns the cells with a check as they are, and of all others the statements that define
    a name which is needed below.
    """
    cells: list[str] = []
    names: set[str] = set()  # that are needed below
    for cell in reversed([cell for cell in book.cells if cell.cell_type == "code"]):
        asks, kept = CHECK.search(cell.source), []
        try:
            body = ast.parse(TransformerManager().transform_cell(cell.source)).body
        except (SyntaxError, ValueError):
            body = []  # the kernel will say so
        for node in reversed(body):
            made, read = names_of(node)
            if asks or made & names:
                names -= made if isinstance(node, PLAIN) else set()
                names |= read
                kept.append(ast.unparse(node))
        if asks or kept:
            cells.append(cell.source if asks else "\n".join(reversed(kept)))
    return cells[::-1]


def names_of(node: ast.stmt) -> tuple[set[str], set[str]]:
    """Returns the names that a statement defines or changes in place, and those it reads."""

    def read(table: symtable.SymbolTable) -> set[str]:
        own = {s.get_name() for s in table.get_symbols() if s.is_referenced() and s.is_global()}
        return own.union(*map(read, table.get_children()))

    top = symtable.symtable(ast.unparse(node), "", "exec")
    made = {s.get_name() for s in top.get_symbols() if s.is_assigned() or s.is_imported()}
    places = [] if isinstance(node, ast.FunctionDef | ast.ClassDef) else ast.walk(node)
    for one in places:  # `a.b[c] = d` changes a
        if isinstance(getattr(one, "ctx", None), ast.Store):
            while isinstance(one, ast.Attribute | ast.Subscript):
                one = one.value
            made |= {one.id} if isinstance(one, ast.Name) else set()
    return made, read(top)


def main() -> None:
    """Does what the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["class", "grade"])
    parser.add_argument("folder", metavar="FOLDER")
    parser.add_argument("--number", default="", help="only this notebook, as in 03")
    parser.add_argument("--csv", help="a new file, for the table")
    parser.add_argument("--minutes", type=float, default=10, help="per notebook (default: 10)")
    options = parser.parse_args()
    if not options.folder:
        sys.exit(f"FOLDER is empty: name a folder, as in make {options.what} FOLDER=../class")
    folder, number = Path(options.folder).expanduser(), options.number
    try:
        if options.what == "class":
            return hand_out(folder)
        if not (paths := sorted(folder.glob(f"[!.]*/{number}*.ipynb"))):
            sys.exit(f"FOLDER={folder} must hold STUDENT/{number or 'NN'}_name.ipynb")
        place, mode = (options.csv, "x") if options.csv else (os.devnull, "w")
        table = open(place, mode, newline="", encoding="utf-8")
    except FileExistsError:
        sys.exit(f"CSV={options.csv} is there already: name a new file")
    except OSError as error:
        sys.exit(f"{error.filename} cannot be written: {error.strerror}")
    with table:
        csv.writer(table).writerow(HEADINGS)
        for path in paths:
            right, of, names, note = grade(path, options.minutes)
            student, name = path.parent.name, path.name
            print(f"{student:24} {name:32} {right:2d} of {of}  {note}".rstrip(), flush=True)
            csv.writer(table).writerow([student, name, right, of, names, note])
            table.flush()


if __name__ == "__main__":
    main()
