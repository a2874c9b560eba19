"""What the README and the pages in docs/ name exists. The README's tables and some of docs/results.md are those of the
files, and the laptop commands run, with tiny settings."""
import glob
import json
import math
import os
import re
import shlex

import pytest
import torch

from conftest import ROOT, TINY, script
from model import BlockDiffusionLM
from checkpoint import config_from_file
from paper import MODELS, PARAMS, RESULTS, SAMPLE, TRAIN
from parallel import has_fast

PAGES = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
         for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), ROOT / "tests" / "README.md")}
README = PAGES["README.md"]
LAPTOP = README[:README.index("\n## How it works")]
EVERYTHING = "\n".join(path.read_text(encoding="utf-8")
                       for folder in (".", "fast", "tools") for path in (ROOT / folder).glob("*.py"))


def commands(text):
    """The commands in the shell blocks of a text, one by one and without comments."""
    lines = "\n".join(re.findall(r"```sh\n(.*?)```", text, re.S)).replace("\\\n", "").splitlines()
    return [part.strip() for line in lines for part in line.split("#")[0].split("&&") if part.strip()]


@pytest.mark.parametrize("page", PAGES)
def test_files_that_a_page_names_exist(page):
    text, folder = PAGES[page], os.path.dirname(os.path.join(ROOT, page))
    paths = re.findall(r"\b(?:assets|config|docs|fast|tests|tools)/[\w/*.-]*\.(?:json|jsonl|md|png|svg|py)\b", text)
    paths += re.findall(r"(?<![\w/.*])(\w+\.py)\b", text) + re.findall(r"\]\((?!http)([^)#]+)", text)
    for path in paths:
        if path.startswith("fast/") and not has_fast():
            continue                                    # the folder may be removed, and the pages stay
        assert any(glob.glob(os.path.join(where, path)) for where in (ROOT, folder, os.path.join(ROOT, "*"))), path
    assert not [tool for tool in re.findall(r"-m tools\.([a-z]\w+)", text) if not (ROOT / f"tools/{tool}.py").exists()]


def test_the_table_from_the_papers_labels_names_functions_that_exist():
    rows = PAGES["docs/differences.md"].partition("\n## Where the paper's")[2].splitlines()
    names = re.findall(r"`(?:\w+\.)*(\w+)`", " ".join(rows))
    assert len(rows) > 4 and len(names) > 15
    assert not [name for name in names if not re.search(rf"\b{name}\b", EVERYTHING)]


def test_the_pages_name_every_tool_and_every_operation_that_may_be_replaced():
    operations = re.findall(r"@(?:ops\.)?replaceable\n *def (\w+)", EVERYTHING)
    assert len(operations) >= 8 and all(f"{name}`" in PAGES["docs/kernels.md"] for name in operations)
    assert not [path.stem for path in ROOT.glob("tools/[a-z]*.py") if path.stem not in README]


def test_the_models_of_config_are_those_of_the_readme_and_have_the_papers_parameter_counts():
    def millions(name):
        with torch.device("meta"):
            return BlockDiffusionLM(config_from_file(name)).n_params / 1e6
    for name in PARAMS:
        c = config_from_file(name)
        assert c.block_len == (256 if name.startswith(("bdlm_attention", "mamba_h")) else 8192)
        assert c.attn_every == (6 if "mamba" in name else 1)
    assert {name: f"{millions(name):.2f}" for name in PARAMS} == {name: f"{count:.2f}" for name, count in PARAMS.items()}
    assert "| blocks of 256 |" in README and "every sixth layer attention" in README
    assert f"A model of {millions('storyteller'):.1f}M parameters" in README


def test_the_results_are_those_of_the_json_files_and_of_the_paper():
    def rows(name):
        return next(v for k, v in json.loads((ROOT / f"assets/{name}.json").read_text()).items() if k in ("runs", "rows"))

    def table(head):
        lines = README.partition(f"\n{head}")[2].partition("\n\n")[0].splitlines()[2:]
        return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    quality = table("| | 10M")
    assert [row[1] for row in quality] == [f"{sum(run['texts']['data/web_bytes']['bpb'] for run in two) / 2:.3f}"
                                           for two in zip(rows("bytes")[:5], rows("bytes")[5:], strict=True)]
    def perplexities(runs, kind):
        both = ([run["texts"][text]["ppl"] for run in runs if run["base"] == f"{kind}_87m"]
                for text in ("data/web_held", "data/novels"))
        return [f"{(a + b) / 2:.2f} ± {abs(a - b) / 2:.2f}" for a, b in both]
    for (name, _, *cells), kind in zip(quality, MODELS):                # the fifth row: blocks of 1
        paper = f"{RESULTS[f'{kind}_87m']['c4'][0]:.0f}"
        assert [name, *cells] == [MODELS[kind][0], perplexities(rows("web_87m"), kind)[0], paper]
    without = json.loads((ROOT / "assets/web_87m.json").read_text())["without_short_sequences"]["runs"]
    two = [perplexities(without, kind) for kind in ("bdlm_attention", "mamba_h")]
    assert all(f"| {web} | {novels} |" in PAGES["docs/results.md"] for web, novels in two)
    assert f"({two[0][0]}, {two[1][0]})" in re.sub(r"\s+", " ", README)
    for noise in ("t from 0.001 to 1", "t from 0.3 to 0.7, in strata"):        # rows of the 0.3M table
        runs = [run for run in rows("laptop_noise") if run["noise"] == noise]  # of each model three seeds
        # NELBO and the price from left to right, of the same 64 windows, in bits per byte.
        for nats in ([run["nats"][::8] for run in runs], [run["left_to_right"]["nats"] for run in runs]):
            cells = (f"{sum(sum(nats[i:i + 3], [])) / (3 * 64 * 256 * math.log(2)):.2f}" for i in range(0, 12, 3))
            assert f" | {' | '.join(cells)} |" in PAGES["docs/results.md"]
    *four, tuned = (f"{run['texts']['data/web']['ppl']:.0f}" for run in rows("paper_rates_87m"))
    assert re.search(",\\s".join(four) + rf"\.[^.]*\d\.\d+;[^;]*\sit\shas\s{tuned}\.", PAGES["docs/results.md"])
    for cells, (kind, (name, _)) in zip(table("| | training"), MODELS.items(), strict=True):
        speed, = (r["tok_per_s"] for r in rows("train") if r["config"] == f"{kind}_350m")
        assert cells[:2] == [name, f"{speed:,.0f} ({TRAIN[kind] / 8:,.0f})"]
        speeds = {r["length"]: r["tok_per_s"] for r in rows(f"sample_{kind}")}
        for cell, length in zip(cells[2:], (1024, 8192, 65_536, 262_144), strict=True):
            paper = SAMPLE[kind].get(length)
            ours = f"{speeds[length]:,.0f} ({f'{paper:,}' if paper else '-'})" if length in speeds else "-"
            assert cell == ours


def test_the_laptop_commands_run(corpus, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    ours = [c for c in commands(LAPTOP) if c.startswith("python ")]
    assert commands(LAPTOP)[:4] == ["pip install -r requirements.txt", ours[0], "pip install -r requirements.txt", ours[1]]
    assert [c.split()[1] for c in ours[:3]] == ["sample.py", "train.py", "sample.py"] and len(ours) >= 7
    tiny = {"train.py": [*TINY, "--max_iters=2", f"--data={corpus}", f"--out_dir={tmp_path}"], "sample.py":
            [f"--checkpoint={tmp_path}", "--device=cpu"], "eval.py": [f"--checkpoint={tmp_path}", "--sequences=2"]}
    for i, command in enumerate(ours):
        _, name, *flags = shlex.split(command)
        after = [f"--out_dir={tmp_path}/{i}"] * any(f.startswith("--out_dir") for f in flags)
        flags = [f.replace("--init_from=out", f"--init_from={tmp_path}") for f in flags
                 if not f.startswith(("--out_dir", "--max_iters"))]
        status, _, error = script(name, *tiny[name], *flags, *after, *["--length=20"] * (name == "sample.py"))
        assert status == 0, (command, error)
