# The paper's comparison on a laptop: four models of train.py's default size, and BDLM Mamba-H without the reverse scan,
# three seeds, noise of the middle (docs/results.md; the paper trains on the full range). 15 runs of 3.6M bytes each,
# about 50 minutes on two cores.
#     python -m tools.sweep config/sweep/laptop.py
out_dir = "out/sweep_laptop"
_models = ("attn_every=1 block_len=256",        # full-sequence attention: one block is the whole sequence
           "block_len=256",                     # full-sequence DiffuMamba-H
           "attn_every=1",                      # BDLM attention
           "",                                  # BDLM Mamba-H, the default
           "reverse_scan=false")
runs = [f"config/laptop.py {model} seed={seed}" for seed in (1, 2, 3) for model in _models]
train_settings = "max_iters=7000 eval_sequences=256 t_min=0.3 t_max=0.7 stratified=true"
eval_settings = "mc=8 stratified=true sequences=512"
runs_per_gpu = 2                                # without a GPU: runs at a time; each has its share of the cores
