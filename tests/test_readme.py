"""The README's laptop commands run as printed, with tiny settings after them."""
import glob
import os
import re
import shlex
import subprocess
import sys

import pytest
from test_train import ROOT, TINY, corpus  # noqa: F401  (a fixture)

README = open(os.path.join(ROOT, "README.md"), encoding="utf-8").read()
COMMANDS = [line.split("#")[0].strip() for block in re.findall(r"```sh\n(.*?)```", README, re.S)
            for line in block.splitlines()]


def test_the_first_screen_holds_the_two_commands():
    screen = README[:README.index("## On a laptop")]
    assert "pip install -r requirements.txt && python train.py && python sample.py\n" in screen
    assert "pip install -r requirements.txt && pytest\n" in screen


def test_files_and_functions_that_the_readme_names_exist():
    listed = " ".join(re.findall(r"^\| ((?:\w+\.py(?:, )?)+)", README, re.M)).replace(",", " ").split()
    assert len(listed) > 12
    for path in re.findall(r"\b(?:assets|config)/[\w/*]+\.(?:json|jsonl|png|py)\b", README) + listed:
        assert glob.glob(os.path.join(ROOT, path)), path
    source = "".join(open(os.path.join(ROOT, f)).read() for f in os.listdir(ROOT) if f.endswith(".py"))
    table = README[README.index("| the paper (labels"):README.index("Training runs two streams")]
    for name in re.findall(r"`(?:\w+\.)?(\w+)`", table):
        assert re.search(rf"(def|class) {name}\b|\b{name} =|\b{name}:|def \w*{name}", source), name


@pytest.mark.filterwarnings("ignore")
def test_the_laptop_commands_run(corpus, tmp_path):  # noqa: F811
    laptop = README[README.index("## On a laptop"):README.index("## On one GPU")]
    ours = [c for c in COMMANDS if c.startswith("python ") and c in laptop]
    assert len(ours) >= 5
    tiny = {"train.py": [*TINY, "--max_iters=2", f"--data={corpus}", f"--out_dir={tmp_path}"],
            "sample.py": ["--length=20", f"--out_dir={tmp_path}", "--device=cpu"],
            "eval.py": [f"--checkpoint={tmp_path}/ckpt.pt", "--sequences=2"], "model.py": []}
    for command in ["python train.py", *ours]:
        _, script, *flags = shlex.split(command)
        elsewhere = [f"--out_dir={tmp_path}/other"] * any(f.startswith("--out_dir") for f in flags)
        flags = [f for f in flags if not f.startswith(("--out_dir", "--max_iters"))]
        done = subprocess.run([sys.executable, script, *flags, *tiny[script], *elsewhere], cwd=ROOT, text=True,
                              capture_output=True, timeout=120)
        assert done.returncode == 0, (command, done.stderr[-2000:])
