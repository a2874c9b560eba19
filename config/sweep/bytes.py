# The four models on bytes, where there is no plateau, and their autoregressive twin, attention in blocks of one byte:
# 328M bytes of web text, noise of the middle (docs/results.md), two seeds, evaluated on held-out web text and novels.
#     python data.py text web/*.jsonl.zst --val web_held_out.jsonl.zst --tokenizer bytes --out data/web_bytes
#     python data.py text --val novels_held_out.jsonl.zst --tokenizer bytes --out data/novels_bytes
#     python -m tools.sweep config/sweep/bytes.py
out_dir = "out/sweep_bytes"
_models = [("attention", "attn_every=1 block_len=2048"), ("diffumamba_h", "attn_every=4 block_len=2048"),
           ("bdlm_attention", "attn_every=1 block_len=64"), ("mamba_h", "attn_every=4 block_len=64"),
           ("attention", "attn_every=1 block_len=1 learning_rate=2e-3")]
runs = [f"config/small_{name}.py {model} seed={seed}" for seed in (1, 2) for name, model in _models]
train_settings = ("data=data/web_bytes tokenizer=bytes seq_len=2048 n_layer=8 d_model=256 n_head=4 d_state=64 "
                  "batch_size=32 max_iters=5000 warmup_iters=400 learning_rate=4e-3 init_std=0.05 embed_std=1.0 "
                  "eval_interval=1000 t_min=0.3 t_max=0.7 stratified=true")
eval_settings = "data=data/web_bytes,data/novels_bytes sequences=512 mc=2 stratified=true"
runs_per_gpu = 2
