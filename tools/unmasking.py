"""
Draws how decoders unmask a text as an animated SVG: side by side, with the same steps a second. A box is a masked
byte, and a frame is around the active block. It repeats, and follows the viewer's light or dark mode.

    python -m tools.unmasking --checkpoint=assets/storyteller --temperature=0.7 --prompt="Once upon a time" \\
        --length=176 --decoders=random:1,strided:2 --seed=22 --out=assets/unmasking.svg
"""
import itertools
import math
import re
from xml.sax.saxutils import escape

import torch

from checkpoint import open_checkpoint
from configurator import check, script, write_file
from decoders import VARIABLE_COUNT, sampler_of
from parallel import pick_device, select_kernels
from sample import generate, plan

# ----------------------------------------------------------------------------------------------
# Settings
checkpoint = "auto"                     # file, folder (out_dir) or hf://owner/name; auto: out, else the one that ships
prompt = ""                             # a text to continue
length = 0                              # new tokens; 0: the rest of the block and one more, or of the window
decoders = ["random:1", "strided:2"]    # a panel for each, named as for eval.py
temperature = 1.0                       # 0: the most probable token
seed = 1337                             # of all draws
columns = 32                            # bytes per line
seconds = 8.0                           # from the first step to the last; the finished text then stays half as long
out = "out/unmasking.svg"               # the picture
device = "auto"                         # auto, cpu or cuda

WIDE, HIGH, TITLE, MARGIN = 8.4, 21, 36, 12     # a byte's cell, a panel's title, margins: in SVG units
SIGNS = {"\n": "\u21b5", "\t": "\u21e5"}
STYLE = """text{font:13px ui-monospace,Menlo,Consolas,monospace;text-anchor:middle;fill:#1f2328}
.card{fill:#fff;stroke:#d1d9e0}.t.s0{fill:#59636e}.frame{fill:#b2182b18;stroke:#b2182b}.box{fill:#b2182b}
.title{text-anchor:start}.count{text-anchor:end;font-size:16px;font-weight:bold}.end{fill:#1a7f37}
@media(prefers-color-scheme:dark){text{fill:#f0f6fc}.card{fill:#0d1117;stroke:#3d444d}.t.s0{fill:#9198a1}
.frame{fill:#e0605f28;stroke:#e0605f}.box{fill:#e0605f}.end{fill:#3fb950}}
@media(prefers-reduced-motion){*{animation:none!important}}
"""


def record(model, tokenizer, decoder):
    """
    Generates. Returns a dict:
      title    the decoder in words
      data     the text with its prompt, in bytes
      shown    for each byte the step that revealed it, from 1, or 0 for the prompt
      blocks   for each block (begin, end, first, last): its bytes, and the steps before and after which it is active
      steps    how many the text took
    """
    c, ids = model.config, torch.tensor(tokenizer.encode_ordinary(prompt) or [tokenizer.eot_token])
    count = length or (1 if c.full_sequence else 2) * c.block_len - len(ids) % c.block_len      # a whole block at least
    sampler = sampler_of(decoder, seeds=[seed], temperature=temperature, mask_id=c.mask_id)
    l, (start,), _ = plan(c, [ids], count)
    blocks = [[]]                                       # for each block, which positions every step left masked
    done = generate(model, [ids], count, sampler, on_block=lambda *_: blocks.append([]),
                    on_step=lambda xt: blocks[-1].append((xt[0] == c.mask_id).tolist()))
    tokens = [tokenizer.decode_bytes([token]) for token in done.tokens[0].tolist()]
    if not prompt:
        tokens[0] = b""                                 # the end-of-text before a new document

    at = [0, *itertools.accumulate(map(len, tokens))]   # where each token begins in the bytes
    shown, spans, last = [0] * len(ids), [], 0
    for begin, steps in zip(range(start, len(tokens), l), blocks):
        shown += [last + 1 + sum(step[i] for step in steps) for i in range(len(shown) - begin, l)]
        first, last = last, last + len(steps)
        spans.append((at[begin], at[min(begin + l, len(tokens))], first, last))
    name = sampler.decoder
    how = f" {vars(sampler)[name]}" if name in VARIABLE_COUNT else f", {sampler.tokens_per_step} a step"
    return dict(title=name + how, data=b"".join(tokens), blocks=spans, steps=last,
                shown=[step for token, step in zip(tokens, shown) for _ in token])


def letters(data):
    """Yields (begin, end, letter) of the letters of UTF-8 bytes: a first byte and the one to three that continue it, or
    else one byte. What is no letter becomes \ufffd."""
    for part in re.finditer(rb"(?s)[\xc0-\xdf][\x80-\xbf]|[\xe0-\xef][\x80-\xbf]{2}|[\xf0-\xf7][\x80-\xbf]{3}|.", data):
        yield *part.span(), part[0].decode(errors="replace")


def height(found):
    """The height of a panel."""
    return TITLE + math.ceil(len(found["shown"]) / columns) * HIGH + MARGIN


def panel(found, left):
    """The elements of a panel at x = left. A class is named after a step: after it, s is seen, h is hidden, and d is no
    longer faint."""
    shown, steps, right = found["shown"], found["steps"], columns * WIDE + MARGIN

    def box(begin, end, kind, gap):
        x, y = MARGIN + begin % columns * WIDE + gap, TITLE + begin // columns * HIGH + 3 * gap
        return (f'<rect x="{x:.1f}" y="{y}" width="{(end - begin) * WIDE - 2 * gap:.1f}" height="{HIGH - 6 * gap}" '
                f'rx="2" class="{kind}"/>')

    # The count is a column of numbers behind a window of one line. Every step moves it up by a line.
    rows = [f'<g transform="translate({left:.1f} 1)">'
            f'<rect width="{right + MARGIN:.1f}" height="{height(found)}" rx="6" class="card"/>'
            f'<text x="{MARGIN}" y="24" class="title">{found["title"]}</text>'
            f'<svg width="{right:.1f}" height="{TITLE}"><g class="c{steps}">']
    rows += [f'<text x="{right:.1f}" y="{24 + TITLE * i}" class="count{" end" * (i == steps)}">{i} steps</text>'
             for i in range(steps + 1)] + ["</g></svg>"]

    for begin, end, first, last in found["blocks"]:
        breaks = [begin, *(i for i in range(begin + 1, end) if i % columns == 0), end]
        frames = [box(*line, f"frame h{last}", 0) for line in itertools.pairwise(breaks)]
        boxes = [box(i, i + 1, f"box h{shown[i]}", 1) for i in range(begin, end) if shown[i]]
        rows += [f'<g class="s{first}">', *frames, f'</g><g class="d{first}">', *boxes, "</g>"]
    for begin, end, letter in letters(found["data"]):
        x, y = MARGIN + (begin % columns + (end - begin) / 2) * WIDE, TITLE + begin // columns * HIGH + 15
        # XML forbids control characters.
        letter = SIGNS.get(letter) or "".join(c if c.isprintable() else "\ufffd" for c in letter)
        if letter != " ":
            rows += [f'<text x="{x:.1f}" y="{y}" class="t s{max(shown[begin:end])}">{escape(letter)}</text>']
    return "".join([*rows, "</g>"])


def svg(panels):
    """The picture, a text. Without animation it is that of the finished texts."""
    most, whole, width = max(found["steps"] for found in panels), 1.5 * seconds, columns * WIDE + 3 * MARGIN
    at = {n: 4 + 200 / 3 * n / most for n in range(1, most + 1)}           # when step n ends, in percent of the whole
    styles = [f".{kind}{n}{{opacity:{after};animation:{kind}{n} {whole:g}s infinite}}@keyframes {kind}{n}"
              f"{{0%,{at[n]:.2f}%{{opacity:{before}}}{at[n] + 0.5:.2f}%,100%{{opacity:{after}}}}}"
              for kind, before, after in (("s", 0, 1), ("h", 1, 0), ("d", 0.25, 1)) for n in at]
    for n in {found["steps"] for found in panels}:
        end = f"transform:translateY(-{n * TITLE}px)"
        styles += [f".c{n}{{{end};animation:c{n} {whole:g}s steps({n}) infinite}}"
                   f"@keyframes c{n}{{0%,4%{{transform:none}}{at[n]:.2f}%,100%{{{end}}}}}"]
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="-1 0 {len(panels) * width - MARGIN + 2:.0f} '
            f'{max(map(height, panels)) + 2}"><style>{STYLE}{"".join(styles)}</style>'
            f'{"".join(panel(found, i * width) for i, found in enumerate(panels))}</svg>\n')


def main():
    check(globals() | dict(decoders=len(decoders)), least=dict(decoders=1, length=0, temperature=0, columns=20, seed=0),
          most=dict(seed=2 ** 62), above=dict(seconds=0), endings=dict(out=".svg"))
    dev = torch.device(pick_device(device))
    select_kernels("auto", dev, training=False)
    model, tokenizer, *_ = open_checkpoint(checkpoint, dev)
    panels = [record(model, tokenizer, decoder) for decoder in decoders]
    write_file(out, svg(panels))
    for found in panels:
        print(f"{found['title']}, {found['steps']} steps: {found['data'].decode(errors='replace')}")


if __name__ == "__main__":
    with script("unmasking.py", globals()):
        main()
