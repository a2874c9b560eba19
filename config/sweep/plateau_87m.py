# When an 87M model leaves its first plateau: full-sequence attention and BDLM Mamba-H with noise of the middle, with
# short sequences first, with both and with neither; then all four models and two seeds with both. The learning rate
# rises by 8e-6 a step.
#     python data.py text web/*.jsonl.zst --val web_held_out.jsonl.zst --out data/web
#     python -m tools.sweep config/sweep/plateau_87m.py
# A step has 16 x 8192 tokens. Each of the 14 runs takes two to three minutes on one H100.
out_dir = "out/sweep_plateau"
_noise, _short = "t_min=0.3 t_max=0.7 stratified=true", "short_len=512 short_iters=250"
_embed = dict(attention="", bdlm_attention="", diffumamba_h="embed_std=1.0", mamba_h="embed_std=1.0")
runs = [f"config/{model}_87m.py {recipe} {_embed[model]} max_iters=400 learning_rate=3.192e-3 warmup_iters=399"
        for recipe in ("", _noise, _short, f"{_noise} {_short}") for model in ("attention", "mamba_h")]
runs += [f"config/{model}_87m.py {_noise} {_short} {_embed[model]} max_iters=300 learning_rate=2.392e-3 "
         f"warmup_iters=299 seed={seed}" for seed in (1337, 2) for model in _embed
         if seed == 2 or model in ("bdlm_attention", "diffumamba_h")]
train_settings = "data=data/web batch_size=16 micro_batch_size=8 eval_interval=200 eval_sequences=32 eval_samples=1"
eval_settings = "data=data/web sequences=0 mc=4 stratified=true"
plateau = 7.0                           # nats per token: little more than the frequencies of tokens is known there
