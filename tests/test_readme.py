"""The names of files, functions and settings in the README exist, and its laptop commands run, with tiny settings."""
import glob
import os
import re
import shlex
import subprocess
import sys

import pytest
from test_train import ROOT, TINY, corpus  # noqa: F401  (a fixture)

README = open(os.path.join(ROOT, "README.md"), encoding="utf-8").read()
SCREEN = README[:README.index("\n## ")]                                         # what stands before the first section
LAPTOP = README[:re.search(r"^## .*GPU", README, re.M).start()]                 # and before the first that wants a GPU
SOURCES = {os.path.basename(path)[:-3]: open(path, encoding="utf-8").read()
           for folder in ("", "fast", "tools") for path in glob.glob(os.path.join(ROOT, folder, "*.py"))}


def commands(text):
    """The commands in the shell blocks of a text, one by one and without comments."""
    lines = "\n".join(re.findall(r"```sh\n(.*?)```", text, re.S)).splitlines()
    return [part.strip() for line in lines for part in line.split("#")[0].split("&&") if part.strip()]


def test_the_first_screen_holds_the_two_commands():
    assert "pip install -r requirements.txt && python train.py && python sample.py\n" in SCREEN
    assert "pip install -r requirements.txt && pytest\n" in SCREEN


def test_files_that_the_readme_names_exist():
    ours = re.findall(r"\b(?:assets|config|docs|fast|tests|tools)/[\w/*.-]*\.(?:json|jsonl|md|png|py)\b", README)
    scripts = re.findall(r"(?<![\w/.*])(\w+\.py)\b", README)
    assert len(set(scripts)) > 10
    for path in ours + scripts:
        assert glob.glob(os.path.join(ROOT, path)) or glob.glob(os.path.join(ROOT, "*", path)), path
    for tool in re.findall(r"python -m (tools\.\w+)", README):
        assert os.path.exists(os.path.join(ROOT, *tool.split(".")) + ".py"), tool


def test_functions_and_settings_that_the_readme_names_exist():
    everything = "\n".join(SOURCES.values())
    named = [pair for pair in re.findall(r"`(?:\w+\.)*(\w+)\.(\w+)", README)
             if pair[1] != "py" and (pair[0] in SOURCES or re.search(rf"^class {pair[0]}\b", everything, re.M))]
    assert len(set(named)) > 4
    for owner, name in named:
        assert re.search(rf"(def|class) {name}\b|^ *{name}\b.* = |^ *{name}: ", SOURCES.get(owner, everything), re.M), \
            f"{owner}.{name}"
    rows = [line for line in README.splitlines() if line.startswith("|") and re.search(r"\b(eq\.|tab:)", line)]
    assert len(rows) > 4                                # the table from the paper's labels to the code
    for name in re.findall(r"`(\w+)`", " ".join(rows)):
        assert re.search(rf"\b{name}\b", everything), name


@pytest.mark.filterwarnings("ignore")
def test_the_laptop_commands_run(corpus, tmp_path):  # noqa: F811
    ours = [c for c in commands(LAPTOP) if c.startswith("python ")]
    assert len(ours) >= 7 and ours[:2] == ["python train.py", "python sample.py"]
    tiny = {"train.py": [*TINY, "--max_iters=2", f"--data={corpus}", f"--out_dir={tmp_path}"],
            "sample.py": ["--length=20", f"--out_dir={tmp_path}", "--device=cpu"],
            "eval.py": [f"--checkpoint={tmp_path}/ckpt.pt", "--sequences=2"], "model.py": []}
    for command in ours:
        _, script, *flags = shlex.split(command)
        elsewhere = [f"--out_dir={tmp_path}/other"] * any(f.startswith("--out_dir") for f in flags)
        flags = [f for f in flags if not f.startswith(("--out_dir", "--max_iters"))]
        done = subprocess.run([sys.executable, script, *flags, *tiny[script], *elsewhere], cwd=ROOT, text=True,
                              capture_output=True, timeout=120)
        assert done.returncode == 0, (command, done.stderr[-2000:])
