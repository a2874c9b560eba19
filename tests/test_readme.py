"""What the README and the pages in docs/ name exists, and the README's laptop commands run, with tiny settings."""
import glob
import os
import re
import shlex

import pytest

from conftest import ROOT, TINY, script
from parallel import has_fast

PAGES = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
         for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), ROOT / "tests" / "README.md")}
README = PAGES["README.md"]
SCREEN = README[:README.index("\n## ")]                                         # what stands before the first section
LAPTOP = README[:re.search(r"^## .*GPU", README, re.M).start()]                 # and before the first that wants a GPU
SOURCES = {path.parent.name if path.stem == "__init__" else path.stem: path.read_text(encoding="utf-8")
           for folder in (".", "fast", "tools") for path in (ROOT / folder).glob("*.py")}


def commands(text):
    """The commands in the shell blocks of a text, one by one and without comments."""
    lines = "\n".join(re.findall(r"```sh\n(.*?)```", text, re.S)).splitlines()
    return [part.strip() for line in lines for part in line.split("#")[0].split("&&") if part.strip()]


def test_the_first_screen_holds_the_two_commands():
    assert "pip install -r requirements.txt && python train.py && python sample.py\n" in SCREEN
    assert "pip install -r requirements.txt && pytest\n" in SCREEN


def test_the_pages_keep_their_length():
    assert len(README.splitlines()) <= 200
    assert sum(len(text.splitlines()) for text in PAGES.values()) <= 900


@pytest.mark.parametrize("page", PAGES)
def test_files_that_a_page_names_exist(page):
    text, folder = PAGES[page], os.path.dirname(os.path.join(ROOT, page))
    ours = re.findall(r"\b(?:assets|config|docs|fast|tests|tools)/[\w/*.-]*\.(?:json|jsonl|md|png|py)\b", text)
    scripts = re.findall(r"(?<![\w/.*])(\w+\.py)\b", text)
    assert len(set(scripts)) > 10 or page != "README.md"
    for path in ours + scripts:
        if path.startswith("fast/") and not has_fast():
            continue                                    # the folder may be removed, and the pages stay
        assert glob.glob(os.path.join(ROOT, path)) or glob.glob(os.path.join(ROOT, "*", path)), path
    for tool in re.findall(r"-m (tools\.[a-z]\w+)", text):
        assert os.path.exists(os.path.join(ROOT, *tool.split(".")) + ".py"), tool
    for link in re.findall(r"\]\((?!http)([^)#]+)", text):
        assert os.path.exists(os.path.join(folder, link)), link


@pytest.mark.parametrize("page", PAGES)
def test_functions_and_settings_that_a_page_names_exist(page):
    text, everything = PAGES[page], "\n".join(SOURCES.values())
    named = [pair for pair in re.findall(r"`(?:\w+\.)*(\w+)\.(\w+)", text)
             if pair[1] != "py" and (pair[0] in SOURCES or re.search(rf"^class {pair[0]}\b", everything, re.M))]
    for owner, name in named:
        if owner == "tools" and name in SOURCES:
            continue
        assert re.search(rf"(def|class) {name}\b|^ *{name}\b.* = |^ *{name}: ", SOURCES.get(owner, everything), re.M), \
            f"{owner}.{name}"
    if page == "README.md":
        rows = [line for line in text.splitlines() if line.startswith("|") and re.search(r"\b(eq\.|tab:)", line)]
        assert len(set(named)) > 4 and len(rows) > 4    # the table from the paper's labels to the code
        for name in re.findall(r"`(\w+)`", " ".join(rows)):
            assert re.search(rf"\b{name}\b", everything), name


def test_the_laptop_commands_run(corpus, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    ours = [c for c in commands(LAPTOP) if c.startswith("python ")]
    assert len(ours) >= 7 and ours[:2] == ["python train.py", "python sample.py"]
    tiny = {"train.py": [*TINY, "--max_iters=2", f"--data={corpus}", f"--out_dir={tmp_path}"],
            "sample.py": ["--length=20", f"--out_dir={tmp_path}", "--device=cpu"],
            "eval.py": [f"--checkpoint={tmp_path}/ckpt.pt", "--sequences=2"], "model.py": []}
    for i, command in enumerate(ours):
        _, name, *flags = shlex.split(command)
        elsewhere = [f"--out_dir={tmp_path}/{i}"] * any(f.startswith("--out_dir") for f in flags)
        flags = [f.replace("--init_from=out", f"--init_from={tmp_path}") for f in flags
                 if not f.startswith(("--out_dir", "--max_iters"))]
        status, _, error = script(name, *flags, *tiny[name], *elsewhere)
        assert status == 0, (command, error)
