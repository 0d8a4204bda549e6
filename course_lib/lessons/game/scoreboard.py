"""The submissions so far, in a file that outlives the notebook's kernel.

The file is `$COURSE_SCOREBOARD`, or `game.json` beside the exercises that are done.
"""

import contextlib
import dataclasses
import json
import os
import pathlib

from course_lib import files
from course_lib.lessons import done
from course_lib.lessons.game.score import Score


def path() -> pathlib.Path:
    """Returns the scoreboard's file, which need not exist."""
    if named := os.environ.get("COURSE_SCOREBOARD"):
        return pathlib.Path(named).expanduser()
    return done.path("game.json")


def read() -> list[Score]:
    """Returns the submissions, the oldest first. Puts a file aside that cannot be read."""
    file = path()
    try:
        return [Score(**row) for row in json.loads(file.read_text(encoding="utf-8"))]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, TypeError) as error:
        aside = file.with_name(f"{file.name}.damaged")
        with contextlib.suppress(OSError):
            file.replace(aside)
        print(
            f"The scoreboard {file.name} cannot be read ({type(error).__name__}): it begins"
            f" anew, and the old file is now {aside.name}."
        )
        return []


def add(submission: Score) -> list[Score]:
    """Writes a submission and returns all; the same one twice in a row is one."""
    submissions = read()
    if submissions[-1:] != [submission]:
        submissions.append(submission)
        text = json.dumps([dataclasses.asdict(one) for one in submissions], indent=1)
        try:
            with files.atomic_write(path()) as file:
                file.write(text.encode())
        except OSError as error:
            print(f"The scoreboard could not be written: {files.why(error)}.")
    return submissions
