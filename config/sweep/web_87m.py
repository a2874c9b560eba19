# The comparison of the paper's four models at 87M: each at the learning rate that select_87m.py chose, 0.004 for all
# four, two seeds, 262M tokens of web text each, evaluated on held-out web text and on novels. One recipe for all but the
# initial embedding.
#     python data.py text web/*.jsonl.zst --out data/web
#     python data.py text --val web_held_out.jsonl.zst --out data/web_held
#     python data.py text --val novels_held_out.jsonl.zst --out data/novels
#     python -m tools.sweep config/sweep/web_87m.py
# A step has 16 x 8192 tokens. A run should take eight to fourteen minutes on one H200.
out_dir = "out/sweep_web"
_embed = dict(attention="", bdlm_attention="", diffumamba_h="embed_std=1.0", mamba_h="embed_std=1.0")
runs = [f"config/{model}_87m.py {_embed[model]} seed={seed}" for seed in (1337, 2)
        for model in ("bdlm_attention", "mamba_h", "attention", "diffumamba_h")]        # the slowest first
train_settings = ("data=data/web batch_size=16 micro_batch_size=16 max_iters=2000 learning_rate=4e-3 warmup_iters=500 "
                  "eval_interval=1000 eval_sequences=0 t_min=0.3 t_max=0.7 stratified=true short_len=512 short_iters=250")
eval_settings = "data=data/web_held,data/novels sequences=0 mc=8 stratified=true"
plateau = 7.0                           # nats per token: little more than the frequencies of tokens is known there
