# When an 87M model leaves its first plateau: full-sequence attention and BDLM Mamba-H with noise of the middle, with
# short sequences first, with both and with neither. The learning rate rises by 8e-6 a step, as in web_87m.py, which has
# both for all four models and two seeds.
#     python data.py text web/*.jsonl.zst --out data/web
#     python -m tools.sweep config/sweep/plateau_87m.py
# A step has 16 x 8192 tokens. Each of the eight runs takes two to four minutes on one H200.
out_dir = "out/sweep_plateau"
_noise, _short = "t_min=0.3 t_max=0.7 stratified=true", "short_len=512 short_iters=250"
runs = [f"config/{model} {recipe} max_iters=400 learning_rate=3.192e-3 warmup_iters=399"
        for recipe in ("", _noise, _short, f"{_noise} {_short}")
        for model in ("attention_87m.py", "mamba_h_87m.py embed_std=1.0")]
train_settings = "data=data/web batch_size=16 micro_batch_size=8 eval_interval=200 eval_sequences=32 eval_samples=1"
eval_settings = "data=data/web sequences=0 mc=4 stratified=true"
plateau = 7.0                           # nats per token: little more than the frequencies of tokens is known there
