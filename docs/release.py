"""`make release TAG=v0.1.0`: versions that agree, wheel and source archive in dist/, the release notes from CHANGELOG.md."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def versions() -> dict[str, str]:
    """The version that each file states."""
    places = {
        "pyproject.toml": r'^version = "([^"]+)"',
        "src/covey/__init__.py": r'^__version__ = "([^"]+)"',
        "CITATION.cff": r"^version: (\S+)",
        "CHANGELOG.md": r"^## (\S+)",
    }
    found = {name: re.search(pattern, (ROOT / name).read_text(), re.MULTILINE) for name, pattern in places.items()}
    return {name: match[1] if match else "none" for name, match in found.items()}


def notes(changelog: str, version: str) -> str:
    """The section of a version in the changelog, without its heading. Raises SystemExit where there is none, or no date."""
    heading = re.search(rf"^## {re.escape(version)} \((.*)\)\n", changelog, re.MULTILINE)
    if heading is None:
        raise SystemExit(f"CHANGELOG.md has no section `## {version} (DATE)`.")
    if not re.fullmatch(r"\d{4}-\d\d-\d\d", heading[1]):
        raise SystemExit(f"CHANGELOG.md says `{version} ({heading[1]})`; write the date, such as 2026-12-01.")
    rest = changelog[heading.end() :]
    end = re.search(r"^## ", rest, re.MULTILINE)
    return rest[: end.start() if end else None].strip() + "\n"


def main(tag: str) -> None:
    version = tag.removeprefix("v")
    if not re.fullmatch(r"v\d+\.\d+\.\d+((a|b|rc)\d+)?", tag):
        raise SystemExit(f"TAG={tag} is no version; write TAG=v0.1.0.")
    wrong = {name: said for name, said in versions().items() if said != version}
    if wrong:
        raise SystemExit(
            f"The tag is {tag}, but " + ", ".join(f"{name} says {said}" for name, said in wrong.items()) + "."
        )
    text = notes((ROOT / "CHANGELOG.md").read_text(), version)
    dist = ROOT / "dist"
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-t", "sdist", "-d", dist], cwd=ROOT, check=True
    )
    (dist / "NOTES.md").write_text(text)
    print(f"dist/ holds the wheel, the source archive and the notes of {version}.")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "")
