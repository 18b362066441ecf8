"""Checks a submission to the leaderboard and makes two of its runs again; prints Markdown for its
pull request.

    .ci/check_submission.py nbs/results/bench/FILE.json

Exit code 0: the file is right and the runs agree; 1: a run does not; 2: the file is wrong.
It runs the code that the file brings.
"""
import contextlib
import json
import sys
from pathlib import Path

from altgrad.basics import InputError
from altgrad.evidence.bench import sentence
from altgrad.evidence.leaderboard import check_submission, rerun

SIDES = ("rule", "master")  # of the verdict


def fenced(lines: list[str]) -> str:
    "Lines as plain text: nothing in them is Markdown, or calls anybody."
    text = "\n".join(line.replace("`", "'") for line in lines)
    return f"```text\n{text}\n```"


def main(arguments: list[str]) -> int:
    "The exit code."
    if len(arguments) != 1:
        print(__doc__, file=sys.stderr)
        return 2
    path = Path(arguments[0])
    faults = check_submission(path)
    if faults:
        print(f"### This file is no submission\n\n{fenced(faults)}")
        return 2
    card = json.loads(path.read_bytes())
    try:
        with contextlib.redirect_stdout(sys.stderr): found = [rerun(card, role) for role in SIDES]
    except InputError as e:
        print(f"### {path.name}: its runs cannot be made again\n\n{fenced([str(e)])}")
        return 2
    agree = all(agrees for agrees, _ in found)
    head = "the file is right, and two of its runs agree" if agree else "a run does not agree"
    print(f"### {path.name}: {head}\n\n{fenced([sentence(card), *(said for _, said in found)])}")
    return 0 if agree else 1


if __name__ == "__main__": sys.exit(main(sys.argv[1:]))
