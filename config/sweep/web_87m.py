# The paper's four models at 87M on 183.5M tokens of your own text: three seeds, learning rates, ablations.
#     python data.py jsonl web/*.jsonl.zst --val held_out.jsonl.zst --tokenizer gpt2 --out data/web
#     python -m tools.sweep config/sweep/web_87m.py
# A step has 16 x 8192 tokens: 1,400 steps are 183.5M tokens. The learning rate, 2e-3, is in the paper's grid too; its
# neighbours are tried at full length. On two H200s each seed takes 20 minutes, everything two hours.
# With more time, raise max_iters.
out_dir = "out/sweep_web"
runs = [f"config/{model}_87m.py seed={seed}" for seed in (1, 2, 3)
        for model in ("attention", "diffumamba_h", "bdlm_attention", "mamba_h")] + [
    f"config/{model}_87m.py seed=1 learning_rate={rate}" for rate in (1e-3, 4e-3)
        for model in ("attention", "diffumamba_h", "bdlm_attention", "mamba_h")] + [
    f"config/mamba_h_87m.py seed=1 {change}" for change in (
        "reverse_scan=false", "detach_prefix=true", "time_conditioning=true")]
settings = ("data=data/web learning_rate=2e-3 batch_size=16 micro_batch_size=8 max_iters=1400 warmup_iters=140 "
            "eval_interval=140 eval_sequences=60 eval_samples=2")
eval_settings = "mc=8"
