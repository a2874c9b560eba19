"""
The numbers in the paper: parameters, results and throughput of its four models, and its rule for learning rates.
Labels such as tab:arch-87m are those of the paper's LaTeX source.

    python paper.py                 compares parameter counts with PARAMS
    python bench.py train           compares throughput with TRAIN; `sample` with SAMPLE
"""
import torch

from checkpoint import config_from_file
from configurator import ROOT, script
from model import BlockDiffusionLM

MODELS = {                              # prefix of the config file: (name, colour) in every figure
    "attention": ("full-sequence attention", "#7f7f7f"),
    "diffumamba_h": ("full-sequence DiffuMamba-H", "#e08214"),
    "bdlm_attention": ("BDLM attention", "#2c7fb8"),
    "mamba_h": ("BDLM Mamba-H", "#b2182b")}

PARAMS = {                              # parameters in millions: tab:arch-87m and tab:arch-350m
    "attention_87m": 89.17, "bdlm_attention_87m": 89.17, "diffumamba_h_87m": 96.98, "mamba_h_87m": 96.98,
    "attention_350m": 353.03, "bdlm_attention_350m": 353.03, "diffumamba_h_350m": 399.53, "mamba_h_350m": 350.97}

# The best runs. c4, paloma (Paloma's C4): perplexity, bits per byte, masked-token accuracy in %. mcqa: mean accuracy on
# multiple-choice questions in %. From tab:validation-87m-best (masked-token accuracy: tab:validation-87m-full) and
# tab:validation-350m.
RESULTS = {
    "attention_87m": dict(lr=8e-3, c4=(87.64, 1.41, 12.04), paloma=(83.25, 1.39, 12.43), mcqa=35.03),
    "diffumamba_h_87m": dict(lr=4e-3, c4=(83.73, 1.39, 12.08), paloma=(80.42, 1.38, 12.50), mcqa=37.32),
    "bdlm_attention_87m": dict(lr=4e-3, c4=(76.46, 1.37, 11.29), paloma=(70.81, 1.34, 11.43), mcqa=36.31),
    "mamba_h_87m": dict(lr=8e-3, c4=(61.59, 1.30, 11.92), paloma=(58.48, 1.28, 11.99), mcqa=35.58),
    "bdlm_attention_350m": dict(lr=1.23e-3, c4=(36.97, 1.14, None), paloma=(36.14, 1.13, None), mcqa=41.28),
    "mamba_h_350m": dict(lr=2.65e-3, c4=(38.24, 1.15, None), paloma=(36.81, 1.13, None), mcqa=43.29)}

# tab:training-throughput-8k: tokens/s of the 350M models on eight A100s together, in the order of MODELS.
TRAIN = dict(zip(MODELS, [229_957, 223_825, 151_976, 166_849]))

# tab:inference-throughput: tokens/s of the 700M models on one A100, for each number of generated tokens in LADDER:
# {number: its label on an axis, "" for none}. The full-sequence models were measured at fewer, shorter lengths.
LADDER = {256: "256", 512: "512", 1024: "1K", 2048: "2K", 4096: "4K", 8192: "8K", 16_384: "16K", 32_768: "32K",
          65_536: "65K", 131_072: "131K", 200_000: "", 262_144: "262K"}
SAMPLE = {kind: dict(zip(LADDER, speeds)) for kind, speeds in zip(MODELS, [
    [1035, 915, 1421, 1062, 761, 351, 122, 36],
    [470, 541, 498, 461, 387, 429, 240, 101, 35],
    [1935, 1887, 1955, 1927, 1728, 1663, 1331, 508, 263, 142, 91, 74],
    [1146, 1167, 1082, 1158, 1019, 1281, 1234, 941, 694, 450, 364, 278]])}


def kind_of(hybrid, full_sequence):
    """The key of MODELS for a model with Mamba layers or without, of one block or of several."""
    return ("diffumamba_h" if hybrid else "attention") if full_sequence else ("mamba_h" if hybrid else "bdlm_attention")


def transfer_lr(small_lr, width, depth, batch, tokens):
    """
    The learning rate of a large model from that of a small one: Complete(d)P-style transfer, eq. completedp-transfer.
    width, depth, batch and tokens are ratios large / small. The exponents are those that reproduce the paper's 1.23e-3
    and 2.65e-3.
    """
    return small_lr * width ** -1 * depth ** -0.5 * batch ** 0.5 * tokens ** -0.5


def count_parameters():
    """Prints a line for each file in config/: its shape, the number of its parameters, and what the paper says."""
    columns = "{:<24}{:>6}{:>7}{:>6}{:>6}{:>6}{:>14}{:>10}"
    print(columns.format("config", "width", "layers", "heads", "state", "block", "parameters", "paper, M"))
    for path in sorted(ROOT.glob("config/*.py")):
        c, theirs = config_from_file(str(path)), PARAMS.get(path.stem, "-")
        with torch.device("meta"):                      # no memory for the weights, and no time to draw them
            ours = f"{BlockDiffusionLM(c).n_params:,}"
        state = c.d_state if c.hybrid else "-"
        print(columns.format(path.stem, c.d_model, c.n_layer, c.n_head, state, c.block_len, ours, theirs))


if __name__ == "__main__":
    with script("paper.py"):
        count_parameters()
