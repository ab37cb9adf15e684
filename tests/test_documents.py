"""Tests of the documents: their Python blocks run, their commands are accepted, and what they name exists.

The first line of every fenced block marks it: `python run`, `python parse` (it needs a server, or shows a contract),
`bash parse` or `text output`. A block that needs the hub or a GPU is also marked `hub` or `gpu`.
"""

from __future__ import annotations

import ast
import importlib
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from PIL import Image

import vitrail
from tests.make import make_colour_folder
from vitrail.cli import COMMANDS, command_of, main
from vitrail.recipes import RECIPES

ROOT = Path(vitrail.__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```(?P<info>.*)\n(?P<text>(?:(?!```).*\n)*)```$", re.M)
MARKS = {
    *("python run", "python parse", "python parse hub"),
    *("bash parse", "bash parse hub", "bash parse gpu"),
    *("text output", "toml output"),
}


class Block(NamedTuple):
    page: Path
    line: int
    info: str
    text: str


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [
        Block(page, text[: found.start()].count("\n") + 1, found["info"], found["text"])
        for found in FENCE.finditer(text)
    ]


BLOCKS = [block for page in PAGES for block in blocks_of(page)]


def commands_of(block: Block) -> Iterator[list[str]]:
    """Yield the words of every `vitrail` command, without comments, pipes and redirections."""
    for line in block.text.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        words: list[str] = []
        for word in [*lexer, ";"]:
            if not set(word) <= set(";|&<>()"):
                words.append(word)
                continue
            while words and "=" in words[0]:  # variables of the environment
                del words[0]
            if words[:1] == ["vitrail"] or {"-m", "vitrail"} <= {*words}:
                yield words[words.index("vitrail") + 1 :]
            words = []


COMMAND_LINES = [
    pytest.param(words, id=f"{block.page.stem}:{block.line}:{' '.join(words)[:60]}")
    for block in BLOCKS
    if block.info.startswith("bash")
    for words in commands_of(block)
]


def test_every_block_is_marked() -> None:
    assert len(BLOCKS) > 50
    assert not [f"{block.page.name}:{block.line}: {block.info!r}" for block in BLOCKS if block.info not in MARKS]
    assert all(page.read_text(encoding="utf-8").count("\n```") == 2 * len(blocks_of(page)) for page in PAGES)


@pytest.mark.parametrize("words", COMMAND_LINES)
def test_every_command_is_accepted(words: list[str]) -> None:
    words = words[1:] if words[0] == "--" else words  # of torchrun -m vitrail --
    name = " ".join(words[:2]) if " ".join(words[:2]) in COMMANDS else words[0]
    assert name in COMMANDS
    if len(words) > 1 and words[-1] in ("--help", "--help-all"):
        return
    command = command_of(name)[0]
    given = command.parse(words[len(name.split()) :])
    command.check_required(given)
    if name == "train" and (recipe := given.pop("recipe", None)) is not None:
        own = {option for option in given if command.known[option].section is not None} if given else set()
        RECIPES[recipe]().override(**{option: given[option] for option in own})


@pytest.mark.parametrize(
    "block", [block for block in BLOCKS if block.info.startswith("python")], ids=lambda b: f"{b.page.stem}:{b.line}"
)
def test_python_is_valid(block: Block) -> None:
    """Names of modules exist, also in blocks that only run with the hub or a server."""
    for node in ast.walk(ast.parse(block.text)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vitrail"):
            module = importlib.import_module(str(node.module))
            assert not [alias.name for alias in node.names if not hasattr(module, alias.name)]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the data and runs that the documents name."""
    root = tmp_path_factory.mktemp("documents")
    for name in ("flowers", "photos"):
        make_colour_folder(root / name, classes=("daisy", "rose", "tulip"))
    pixels = np.random.default_rng(0).integers(0, 255, (31, 47, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(root / "rose.jpg")
    small = ["--steps", "4", "--width", "16", "--depth", "2", "--heads", "2", "--batch-size", "8"]
    before = Path.cwd()
    os.chdir(root)
    try:
        for words in (
            ["train", "demo", *small, "--data", "flowers", "--run", "runs/flowers"],
            ["train", *small],
            ["embed", "runs/flowers", "--data", "flowers", "--out", "features"],
            ["export", "runs/flowers", "--to", "onnx", "--data", "flowers"],
        ):
            assert main(words) == 0
    finally:
        os.chdir(before)
    return root


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("page", [page for page in PAGES if page.stem != "extending"], ids=lambda page: page.stem)
def test_the_python_of_a_page_runs(page: Path, prepared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of a page run in their order in one session, as a reader would try them."""
    monkeypatch.chdir(prepared)
    monkeypatch.setenv("VITRAIL_DATA", str(prepared / "cache"))
    names: dict[str, object] = {"__name__": "__main__"}
    for block in blocks_of(page):
        if block.info == "python run":
            exec(compile(block.text, f"{page.name}:{block.line}", "exec"), names)
    if page.stem == "inside":
        assert Path("distance.svg").read_text().startswith("<svg ")
        assert Path("filters.png").read_bytes().startswith(b"\x89PNG")


SECTIONS = re.split(r"^## ", (ROOT / "docs" / "extending.md").read_text(encoding="utf-8"), flags=re.M)[1:]


@pytest.mark.slow
@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.partition("\n")[0])
def test_a_section_about_extending_is_complete(section: str, tmp_path: Path) -> None:
    """The last block of a section runs beside the modules that earlier blocks define."""
    found = [block["text"] for block in FENCE.finditer(section) if block["info"] == "python run"]
    assert found
    for number, text in enumerate(found):
        named = re.match(r"# (\w+)\.py", text)
        (tmp_path / (f"{named[1]}.py" if named else f"try_{number}.py")).write_text(text, encoding="utf-8")
    for script in sorted(tmp_path.glob("try_*.py")):
        done = subprocess.run([sys.executable, script.name], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


def test_the_files_that_pages_name_exist() -> None:
    faults = []
    for page in PAGES:
        text = FENCE.sub("", page.read_text(encoding="utf-8"))
        for target in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", text):
            if not (page.parent / target).exists():
                faults.append(f"{page.name}: {target}")
        for path in re.findall(r"`(vitrail/[\w/.]+\.py)`", text):
            if page.stem != "log" and not (ROOT / path).exists():
                faults.append(f"{page.name}: {path}")
    assert not faults


def test_the_anchors_that_pages_name_exist() -> None:
    faults = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for target, anchor in re.findall(r"\]\(([^)#:\s]*)#([^)\s]+)\)", text):
            other = (page.parent / target if target else page).read_text(encoding="utf-8")
            headings = re.findall(r"^#+ (.+)$", other, flags=re.M)
            if anchor not in {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}:
                faults.append(f"{page.name}: {target}#{anchor}")
    assert not faults


def test_the_design_names_every_module() -> None:
    design = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    for path in (ROOT / "vitrail").rglob("*.py"):
        top = path.parent == ROOT / "vitrail" and not path.name.startswith("__")
        name = path.stem if top else path.parent.name
        assert re.search(rf"\b{name}\b", design), f"docs/design.md does not name {path.relative_to(ROOT)}"
