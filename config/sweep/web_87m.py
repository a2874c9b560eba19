# The paper's four models at 87M on 131.1M tokens of your own text: three seeds, learning rates, ablations.
#     python data.py jsonl web/*.jsonl.zst --val held_out.jsonl.zst --tokenizer gpt2 --out data/web
#     python -m tools.sweep config/sweep/web_87m.py
# A step has 16 x 8192 tokens: 1,000 steps are 131.1M tokens. The learning rate, 2e-3, is in the paper's grid too; its
# neighbours are tried at the same length, and 1e-3 did about as well. On two H200s each seed takes a quarter of an
# hour, everything two hours. With more time, raise max_iters. Every model first stays on a plateau, and its result
# depends on how long: at 8e-3 none had left it by step 500. With large initial embeddings small models leave it
# sooner, but full-sequence attention never does, so it starts from 0.02 (docs/results.md, Quality at equal tokens).
out_dir = "out/sweep_web"
_models = ("attention_87m.py embed_std=0.02", "diffumamba_h_87m.py", "bdlm_attention_87m.py", "mamba_h_87m.py")
runs = [f"config/{model} seed={seed}" for seed in (1, 2, 3) for model in _models] + [
    f"config/{model} seed=1 learning_rate={rate}" for rate in (1e-3, 4e-3, 8e-3) for model in _models] + [
    f"config/{model} seed=1 learning_rate=5e-4" for model in (_models[0], _models[3])] + [
    f"config/mamba_h_87m.py seed=1 {change}" for change in (
        "reverse_scan=false", "detach_prefix=true", "time_conditioning=true")] + [
    "config/bdlm_attention_87m.py seed=1 embed_std=0.2"]
train_settings = ("data=data/web learning_rate=2e-3 embed_std=1.0 batch_size=16 micro_batch_size=8 max_iters=1000 "
                  "warmup_iters=100 eval_interval=250 eval_sequences=60 eval_samples=2")
eval_settings = "mc=8 stratified=true"  # a full-sequence model has one t per sample: strata halve its error
