"""
Records how a model unmasks a text and draws it as an animated SVG. The animation repeats and follows the viewer's light
or dark mode.

    python -m tools.unmasking --checkpoint=assets/novelist --decoder=confidence --prompt="The old house " --length=200
"""
import codecs
import math
import re
from xml.sax.saxutils import escape

import torch

from checkpoint import open_checkpoint
from configurator import check, configure, script, write_file
from decoders import Sampler
from paper import kind_of
from parallel import pick_device, pick_dtype, select_kernels
from sample import generate, open_engine

# ----------------------------------------------------------------------------------------------
# Settings
checkpoint = "auto"                     # file, folder (out_dir) or hf://owner/name; auto: out, else the one that ships
prompt = ""                             # a text to continue
length = 0                              # new tokens; 0: the rest of the block and one more, or of the window
decoder = "random"                      # see sample.py
tokens_per_step = 0                     # revealed per denoising step; 0: as in sample.py
seed = 1337                             # of all draws
shown = 400                             # characters of the prompt to draw, the last ones
columns = 88                            # characters per line
seconds = 8.0                           # from the first step to the last; the finished text then stays half as long
out = "out/unmasking.svg"               # the picture
device = "auto"                         # auto, cpu or cuda

WIDE, HIGH, MARGIN = 7.8, 17, 12        # width of a character, height of a line, margin: in SVG units


def record():
    """Generates. Returns a dict: `prompt`, `tokens` (the bytes of the new tokens), `steps` (the step that revealed
    each), and the settings."""
    dev = torch.device(pick_device(device))
    select_kernels("auto", dev, training=False)
    model, tokenizer, *_ = open_checkpoint(checkpoint, dev)
    c, ids = model.config, tokenizer.encode_ordinary(prompt) or [tokenizer.eot_token]
    l = c.block_len
    count = length or (1 if c.full_sequence else 2) * l - len(ids) % l         # a block model: at least one whole block
    sampler = Sampler([seed], decoder, tokens_per_step or math.ceil(c.block_of(count) / 16), mask_id=c.mask_id)
    model, new_engine = open_engine("auto", model, pick_dtype("auto", dev))
    masks = []                                          # after every step: which positions of the block are masked
    done = generate(model, [torch.tensor(ids)], count, sampler, new_engine,
                    on_step=lambda xt: masks.append((xt[0] == c.mask_id).cpu()))
    steps, before = {}, torch.zeros(1)
    begin = (0 if c.full_sequence else len(ids) // l * l) - len(masks[0])
    for step, masked in enumerate(masks):
        if not before.any():                            # a new block begins: all that is not prompt is masked
            begin += len(masked)
            before = begin + torch.arange(len(masked)) >= len(ids)
        steps |= {begin + i: step for i in (before & ~masked).nonzero().flatten().tolist()}
        before = masked
    new = done.tokens[0].tolist()[len(ids):]
    return dict(prompt=prompt, tokens=[tokenizer.decode_bytes([token]) for token in new],
                steps=[steps[len(ids) + i] for i in range(len(new))], model=kind_of(c.hybrid, c.full_sequence),
                decoder=decoder, seed=seed, tokens_per_step=sampler.tokens_per_step)


def characters(tokens, steps):
    """Yields (text, step) of the characters of tokens, given as bytes. One of several tokens appears with the last."""
    utf8, last = codecs.getincrementaldecoder("utf-8")("replace"), 0
    for token, step in zip(tokens, steps):
        last = max(last, step)
        if text := utf8.decode(token):
            yield text, last
            last = 0
    yield utf8.decode(b"", final=True), last


def placed(pieces):
    """Lays out pieces [(text, what)]: yields (line, column, text, what), wrapped at `columns` and at line ends."""
    line = column = 0
    for text, what in pieces:
        for i, part in enumerate(text.expandtabs(4).split("\n")):
            part = "".join(c if c.isprintable() else "\ufffd" for c in part)       # XML forbids control characters
            if i:
                line, column = line + 1, 0
            if column and column + len(part) > columns:
                line, column, part = line + 1, 0, part.lstrip(" ")
            if part:
                yield line, column, part, what
                column += len(part)


def svg(found):
    """The picture as text. Each token has an animation of the full duration, in which it appears at its step."""
    last = max(found["steps"])
    whole = 1.5 * seconds
    prompt_words = re.findall(r"\s*\S+|\s+", found["prompt"][max(len(found["prompt"]) - shown, 0):])
    pieces = [*((word, None) for word in prompt_words), *characters(found["tokens"], found["steps"])]
    places, styles = list(placed(pieces)), []
    for step in sorted(set(found["steps"])):
        at = 100 * (0.05 + 0.6 * step / max(last, 1))
        styles.append(f".s{step}{{animation:k{step} {whole:g}s infinite}}"
                      f".m{step}{{animation:h{step} {whole:g}s infinite}}"
                      f"@keyframes k{step}{{0%,{at:.2f}%{{opacity:0}}{at + 1.5:.2f}%,100%{{opacity:1}}}}"
                      f"@keyframes h{step}{{0%,{at:.2f}%{{opacity:.35}}{at + 1.5:.2f}%,100%{{opacity:0}}}}")
    rows = []
    for line, column, text, step in places:
        x, y = MARGIN + column * WIDE, MARGIN + (line + 1) * HIGH
        width = len(text) * WIDE
        if step is not None:
            bare = len(text) - len(text.lstrip(" "))    # leading spaces stay uncovered
            left, covered = x + bare * WIDE + 1, max(width - bare * WIDE - 2, 2)
            rows.append(f'<rect x="{left:.1f}" y="{y - 11}" width="{covered:.1f}" height="12" rx="2" class="m{step}"/>')
        name = "p" if step is None else f"t s{step}"
        rows.append(f'<text x="{x:.1f}" y="{y}" textLength="{width:.1f}" class="{name}">{escape(text)}</text>')
    size = 2 * MARGIN + columns * WIDE, 2 * MARGIN + (max(place[0] for place in places) + 1) * HIGH
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size[0]:.0f} {size[1]}" xml:space="preserve">'
            f"<style>text{{font:13px ui-monospace,Menlo,Consolas,monospace;white-space:pre}}"
            f".p{{fill:#777}}.t{{fill:#111}}rect{{fill:#b2182b;opacity:0}}"
            f"@media(prefers-color-scheme:dark){{.p{{fill:#999}}.t{{fill:#eee}}rect{{fill:#e0605f}}}}"
            f"{''.join(styles)}</style>{''.join(rows)}</svg>\n")


def main():
    check(globals(), least=dict(length=0, tokens_per_step=0, shown=0, columns=20, seed=0), above=dict(seconds=0),
          endings=dict(out=".svg"))
    found = record()
    write_file(out, svg(found))
    print(f"wrote {out}: {len(found['tokens'])} tokens in {max(found['steps']) + 1} steps")


if __name__ == "__main__":
    with script("unmasking.py"):
        configure(globals())
        main()
