# The learning rate of each of the four 87M models for a short run, by a rule fixed beforehand: of 2e-3, 4e-3 and 8e-3 the
# one with the lowest NELBO of data/web's own validation text after 131M tokens. One recipe for all but the
# initial embedding.
#     python data.py text web/*.jsonl.zst --out data/web
#     python -m tools.sweep config/sweep/select_87m.py
# A step has 16 x 8192 tokens. The rate rises by 8e-6 a step (to 8e-3 in 600 steps) and falls by a cosine. Each run takes
# four to eight minutes on one H200.
out_dir = "out/sweep_select"
_embed = dict(attention="", bdlm_attention="", diffumamba_h="embed_std=1.0", mamba_h="embed_std=1.0")
runs = [f"config/{model}_87m.py {_embed[model]} learning_rate={rate} warmup_iters={min(round(rate / 8e-6), 600)}"
        for rate in (4e-3, 8e-3, 2e-3) for model in _embed]
train_settings = ("data=data/web batch_size=16 micro_batch_size=16 max_iters=1000 eval_interval=500 eval_sequences=0 "
                  "t_min=0.3 t_max=0.7 stratified=true short_len=512 short_iters=250")
eval_settings = "data=data/web sequences=0 mc=8 stratified=true"
plateau = 7.0                           # nats per token: little more than the frequencies of tokens is known there
