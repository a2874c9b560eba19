# BDLM Mamba-H on bytes, trained on TinyStories: the model of assets/storyteller. Simple language is what six million
# parameters can hold.
#     python data.py text train.jsonl.zst --val validation.jsonl.zst --tokenizer bytes --out data/stories
#     torchrun --nproc_per_node=2 train.py config/storyteller.py --init_from=assets/novelist   # of 0ba3aa2
# The model that ships went on from this on one GPU:
#     python train.py config/storyteller.py --init_from=assets/storyteller --out_dir=out/storyteller2 --max_iters=6200 \
#         --warmup_iters=200 --learning_rate=3e-3 --eval_interval=775 --micro_batch_size=128    # of 9db064d

out_dir = "out/storyteller"
data = "data/stories"
tokenizer = "bytes"             # 256 bytes, end-of-text and the mask

attn_every = 2                  # attention at layers 0, 2, 4 and 6, Mamba-2 at all others
seq_len = 1024
block_len = 64
n_layer = 8
n_head = 3                      # head dimension 64
d_model = 192
d_state = 32                    # 6 Mamba-2 heads of 64

t_min, t_max = 0.3, 0.7         # noise of the middle: docs/results.md
stratified = True
batch_size = 256                # 2 GPUs x 128 sequences
max_iters = 7000                # 256 x 1024 x 7000 = 1.8B bytes, 127 passes over the text
warmup_iters = 300
learning_rate = 4e-3
init_std = 0.05
embed_std = 1.0
eval_interval = 1000
eval_sequences = 256
eval_samples = 2
log_interval = 50
