# The paper's comparison on a laptop: four models of train.py's default size, three seeds, neighbouring learning rates,
# and three ablations of BDLM Mamba-H. 29 runs of 3.6M bytes each, an hour and a half on two cores.
#     python -m tools.sweep config/sweep/laptop.py
out_dir = "out/sweep_laptop"
_models = ("attn_every=1 block_len=256",        # full-sequence attention: one block is the whole sequence
           "block_len=256",                     # full-sequence DiffuMamba-H
           "attn_every=1",                      # BDLM attention
           "")                                  # BDLM Mamba-H, the default
_ablations = "reverse_scan=false", "detach_prefix=true", "time_conditioning=true"
runs = [f"config/laptop.py {model} seed={seed}" for seed in (1, 2, 3) for model in _models] + [
    f"config/laptop.py {change} seed={seed}" for seed in (1, 2, 3) for change in _ablations] + [
    f"config/laptop.py {model} seed=1 learning_rate={rate}" for rate in (1e-3, 4e-3) for model in _models]
train_settings = "max_iters=7000 eval_sequences=256"
eval_settings = "mc=8 stratified=true sequences=512"
runs_per_gpu = 2                                # without a GPU: runs at a time; each has its share of the cores
