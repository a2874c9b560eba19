# The paper's four models at 87M on the same web text, each at its best learning rate in the paper's grid
# (tab:validation-87m-full), evaluated on held-out web text and on novels.
#     python data.py text web/*.jsonl.zst --val web_held_out.jsonl.zst --out data/web
#     python data.py text --val novels_held_out.jsonl.zst --out data/novels
#     python -m tools.sweep config/sweep/web_87m.py
# A step has 16 x 8192 tokens: 2,500 steps are 327.7M tokens. The learning rate rises by 8e-6 a step and falls by a cosine
# to the last step. Two GPUs train two models side by side, one GPU one after the other.
out_dir = "out/sweep_web"
_rates = dict(attention=8e-3, diffumamba_h=4e-3, bdlm_attention=4e-3, mamba_h=8e-3)
runs = [f"config/{model}_87m.py learning_rate={rate} warmup_iters={round(rate / 8e-6)}"
        for model, rate in _rates.items()]
# The paper's grid is for 5B tokens. One more run of Mamba-H, with a rate and an initial embedding for a short run:
runs += ["config/mamba_h_87m.py learning_rate=0.002 warmup_iters=250 embed_std=1.0"]
train_settings = ("data=data/web batch_size=16 micro_batch_size=8 max_iters=2500 eval_interval=125 eval_sequences=64 "
                  "eval_samples=2")
eval_settings = "data=data/web,data/novels sequences=0 mc=8 stratified=true"    # sequences=0: every window of 8192
plateau = 7.0                           # nats per token: little more than the frequencies of tokens is known there
